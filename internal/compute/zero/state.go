package zero

import (
	"fmt"
	"math"
	"sort"
	"sync"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/pages"
	"github.com/soliton-train/soliton/internal/id"
)

// Tensor is what the optimizer knows of a parameter tensor.
type Tensor struct {
	Size int // elements
	Tuning
}

// Tuning is how a rule treats a parameter tensor. The zero value is the rule itself.
type Tuning struct {
	NoDecay     bool    // exempt from weight decay
	LRScale     float32 // multiplies the learning rate; 0 means 1
	WeightDecay float32 // in place of the rule's; 0 means the rule's
}

// rate returns the learning rate.
func (t Tuning) rate(lr float32) float32 {
	if t.LRScale != 0 {
		lr *= t.LRScale
	}
	return lr
}

// decay returns the weight decay, given that of the rule.
func (t Tuning) decay(rule float32) float32 {
	switch {
	case t.NoDecay:
		return 0
	case t.WeightDecay != 0:
		return t.WeightDecay
	}
	return rule
}

// Block is the range [Lo, Hi) of a layer's flattened parameters: at most
// [kernel.Block] elements of one tensor.
type Block struct {
	Lo, Hi int
	Tuning
}

// Blocks returns the blocks of a layer, in order.
func Blocks(tensors []Tensor) []Block {
	var blocks []Block
	base := 0
	for _, t := range tensors {
		for at := 0; at < t.Size; at += kernel.Block {
			blocks = append(blocks, Block{base + at, base + min(at+kernel.Block, t.Size), t.Tuning})
		}
		base += t.Size
	}
	return blocks
}

// Shard is the optimizer state of a range.
type Shard struct {
	id.Range
	// Moments are the rule's numbers for each parameter of the range.
	Moments [][]float32

	rule   Rule
	blocks []Block // relative to Lo
}

// NewShard returns the state before the first step, of a range that begins
// and ends at borders of the layer's blocks.
func NewShard(rule Rule, r id.Range, tensors []Tensor) (*Shard, error) {
	var moments [][]float32
	for range rule.Moments() {
		moments = append(moments, pages.Make(max(0, r.Hi-r.Lo)))
	}
	return ShardOf(rule, r, tensors, moments)
}

// ShardOf returns the state of such a range, whose moments are these, Hi-Lo numbers each.
func ShardOf(rule Rule, r id.Range, tensors []Tensor, moments [][]float32) (*Shard, error) {
	all := Blocks(tensors)
	first := sort.Search(len(all), func(i int) bool { return all[i].Lo >= r.Lo })
	end := sort.Search(len(all), func(i int) bool { return all[i].Hi > r.Hi })
	if r.Lo < r.Hi && (first >= end || all[first].Lo != r.Lo || all[end-1].Hi != r.Hi) || r.Lo > r.Hi {
		return nil, fmt.Errorf("zero: shard [%d,%d) of layer %d does not lie at the borders of blocks", r.Lo, r.Hi, r.Layer)
	}
	s := &Shard{Range: r, Moments: moments, rule: rule}
	if r.Lo < r.Hi {
		for _, b := range all[first:end] {
			s.blocks = append(s.blocks, Block{b.Lo - r.Lo, b.Hi - r.Lo, b.Tuning})
		}
	}
	return s, nil
}

// Len returns the number of parameters.
func (s *Shard) Len() int { return s.Hi - s.Lo }

// blocksPerThread is the number of blocks that are worth a thread.
const blocksPerThread = 4

// Squares returns the sum of the squares of the gradient of the shard, scaled
// by 2⁻ᵉ. The error wraps [ErrNonFinite].
func (s *Shard) Squares(p *kernel.Pool, grad []float32, e int) (Fixed, error) {
	var mu sync.Mutex
	var total Fixed
	fits := true
	p.For(len(s.blocks), blocksPerThread, func(lo, hi int) {
		var part Fixed
		good := true
		for _, b := range s.blocks[lo:hi] {
			f, ok := ToFixed(math.Ldexp(kernel.SumSquares(grad[b.Lo:b.Hi]), -e))
			sum, fit := part.Add(f)
			part, good = sum, good && ok && fit
		}
		mu.Lock()
		defer mu.Unlock()
		sum, fit := total.Add(part)
		total, fits = sum, fits && good && fit
	})
	if !fits {
		return Fixed{}, fmt.Errorf("gradient of layer %d is %w", s.Layer, ErrNonFinite)
	}
	return total, nil
}

// Update applies the rule to the parameters of the shard. digests, if given, are
// those of the blocks of the parameters, then of each moment. Update compares each
// block with its digest before it writes the block, and replaces the digest. The
// result of a corrupted block matches no digest, so that it is found later.
func (s *Shard) Update(p *kernel.Pool, params, grad []float32, u Update, digests ...[]Digest) {
	apply := s.rule.prepare(u)
	p.For(len(s.blocks), blocksPerThread, func(lo, hi int) {
		moments := make([][]float32, len(s.Moments))
		for i := lo; i < hi; i++ {
			b := s.blocks[i]
			for i, m := range s.Moments {
				moments[i] = m[b.Lo:b.Hi]
			}
			bad := -1
			for j, d := range digests {
				if bad < 0 && !d[i].Fits(array(params[b.Lo:b.Hi], moments, j)) {
					bad = j
				}
			}
			apply(params[b.Lo:b.Hi], moments, grad[b.Lo:b.Hi], b.Tuning)
			for j, d := range digests {
				switch is, _ := d[i].Altered(); {
				case bad < 0:
					d[i] = DigestOf(array(params[b.Lo:b.Hi], moments, j))
				case is: // by an update before
				case bad == j:
					d[i] = altered | originBit
				default:
					d[i] = altered
				}
			}
		}
	})
}
