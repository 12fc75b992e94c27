package data

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

// Mix draws samples from several data sets. An epoch of the mix has as many samples as its parts together, the share of each by its
// weight. A part gives its samples in an order that follows from Seed, and none a second time before it has given all; then it begins
// its next epoch with another order, whatever the epoch of the mix.
type Mix struct {
	Seed  uint64 // of the order in each part; 0 is a seed like any other
	Parts []Part

	// Samples is the length of an epoch; 0 means that of all parts together.
	Samples int
}

// Part is a data set in a [Mix].
type Part struct {
	Data   trainer.Dataset
	Weight float64 // share of the samples, relative to the other weights; above 0
}

// Len returns 0: see [Mix.Bind].
func (m Mix) Len() int { return 0 }

// Sample fails: see [Mix.Bind].
func (m Mix) Sample(trainer.Sample, trainer.Tensor, trainer.Tensor) error { return errUnbound }

// maxSamples bounds an epoch, so that positions over many epochs fit.
const maxSamples = 1 << 48

// Bind implements [trainer.Binder].
func (m Mix) Bind(in, target trainer.Spec) (trainer.Dataset, error) {
	if len(m.Parts) == 0 {
		return nil, &trainer.DataError{Reason: "a mix has no parts"}
	}
	b := &mixed{}
	total, text := 0, make([]string, len(m.Parts))
	var weights float64
	for i, p := range m.Parts {
		if p.Data == nil || !(p.Weight > 0) || math.IsInf(p.Weight, 0) {
			return nil, &trainer.DataError{Reason: fmt.Sprintf("part %d of a mix has weight %v and data %T; give it data and a weight above 0", i, p.Weight, p.Data)}
		}
		d, err := trainer.Bind(p.Data, in, target)
		if err != nil {
			return nil, fmt.Errorf("part %d of a mix: %w", i, err)
		}
		n := d.Len()
		if n > maxSamples-total {
			return nil, &trainer.DataError{Reason: fmt.Sprintf("a mix has more than %d samples", maxSamples)}
		}
		total += n
		weights += p.Weight
		b.parts = append(b.parts, &mixedPart{data: d, n: uint64(n), seed: partSeed(m.Seed, i)})
		if listed, ok := d.(trainer.Manifest); ok {
			b.files = append(b.files, listed.Manifest()...)
		} else {
			b.files = append(b.files, recipe("part %d: %d samples", i, n))
		}
		text[i] = fmt.Sprint(p.Weight)
	}
	if m.Samples < 0 || m.Samples > maxSamples {
		return nil, &trainer.DataError{Reason: fmt.Sprintf("a mix of %d samples; it can have 0 (all) to %d", m.Samples, maxSamples)}
	}
	if m.Samples > 0 {
		total = m.Samples
	}
	b.share(m.Parts, weights, total)
	b.files = append(b.files, recipe("mix %s, %d samples, seed %d", strings.Join(text, ":"), total, m.Seed))
	return b, nil
}

// partSeed keeps the orders of parts apart, so that two of one length do not go through their samples alike.
func partSeed(seed uint64, part int) uint64 {
	s := rng.New(seed, rng.Place{Sample: uint32(part)})
	return uint64(s.Uint32())<<32 | uint64(s.Uint32())
}

// mixed is a mix for one model. The samples of an epoch are those of its first part, then those of the second, and so on: the run
// shuffles them.
type mixed struct {
	parts []*mixedPart
	ends  []int // of each part's samples in an epoch
	files []trainer.DataFile
}

type mixedPart struct {
	data  trainer.Dataset
	n     uint64 // samples that it has
	share uint64 // samples of an epoch of the mix

	seed  uint64
	perm  rng.Perm // of epoch
	epoch uint64
	ready bool
}

// share divides an epoch of n samples by weight: each part gets the whole number below its share, and those with the largest
// remainders one more.
func (b *mixed) share(parts []Part, weights float64, n int) {
	order := make([]int, len(parts))
	rest := make([]float64, len(parts))
	left := n
	for i, p := range parts {
		exact := float64(float64(n) * (p.Weight / weights)) // rounded, on every processor
		whole := min(int(exact), left)
		b.parts[i].share, rest[i], order[i] = uint64(whole), exact-float64(whole), i
		left -= whole
	}
	slices.SortStableFunc(order, func(i, k int) int {
		switch {
		case rest[i] > rest[k]:
			return -1
		case rest[i] < rest[k]:
			return 1
		}
		return 0
	})
	for k := 0; left > 0; k, left = (k+1)%len(order), left-1 {
		b.parts[order[k]].share++
	}
	end := 0
	for _, p := range b.parts {
		end += int(p.share)
		b.ends = append(b.ends, end)
	}
}

func (b *mixed) Len() int { return b.ends[len(b.ends)-1] }

func (b *mixed) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	i, _ := slices.BinarySearch(b.ends, s.Index+1)
	p := b.parts[i]
	// Positions go on through all epochs of the mix.
	at := uint64(s.Epoch)*p.share + uint64(s.Index-(b.ends[i]-int(p.share)))
	if epoch := at / p.n; !p.ready || epoch != p.epoch {
		p.epoch, p.perm, p.ready = epoch, rng.NewPerm(p.seed, epoch, p.n), true
	}
	s.Index, s.Epoch = int(p.perm.At(at%p.n)), int(p.epoch)
	return p.data.Sample(s, in, target)
}

func (b *mixed) Manifest() []trainer.DataFile { return b.files }
