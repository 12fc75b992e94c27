package plan

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/id"
)

// Times is what one worker has measured of itself, smoothed over some steps. What is not
// measured yet is not listed.
type Times struct {
	Layers []LayerTime
	Links  []LinkTime
	Memory int64 // bytes there are for parameters and optimizer state; 0: no limit is known
}

// LayerTime is how long the passes of one micro-batch through a layer take on a worker.
type LayerTime struct {
	Layer             int
	Forward, Backward time.Duration
}

// LinkTime is what a worker has measured of its link to another.
type LinkTime struct {
	To        id.WorkerID
	Latency   time.Duration // of a small message
	Bandwidth float64       // bytes per second; 0: not measured
}

// Link is the connection of two workers; A < B.
type Link struct{ A, B id.WorkerID }

func link(a, b id.WorkerID) Link { return Link{min(a, b), max(a, b)} }

// LinkSpeed is what is known of a link.
type LinkSpeed struct {
	Latency   time.Duration
	Bandwidth float64 // bytes per second; 0: that of the profile
}

// Differs reports whether a plan made with one profile may be another with the other:
// a speed, or by more than a tenth a layer's time or a link's bandwidth. Both are of one model.
func (p *Profile) Differs(o *Profile) bool {
	far := func(a, b float64) bool { return math.Abs(a-b) > 0.1*max(a, b) }
	for i := range p.Layers {
		a, b := p.Layers[i], o.Layers[i]
		if far(float64(a.Forward+a.Backward), float64(b.Forward+b.Backward)) {
			return true
		}
	}
	for _, pair := range [][2]*Profile{{p, o}, {o, p}} {
		for w := range pair[0].Speed {
			if pair[0].SpeedOf(w) != pair[1].SpeedOf(w) {
				return true
			}
		}
		for l, v := range pair[0].Links {
			if far(v.Bandwidth, pair[1].Links[l].Bandwidth) {
				return true
			}
		}
		for w, m := range pair[0].Memory {
			if pair[1].Memory[w] != m {
				return true
			}
		}
	}
	return false
}

// String says in one line what is known of speeds.
func (p *Profile) String() string {
	if !p.IsMeasured() {
		return "nothing is measured"
	}
	var parts []string
	for w, v := range p.Speed {
		if v > 0 && v != 1 {
			parts = append(parts, fmt.Sprintf("worker %d at speed %.2f", w, v))
		}
	}
	if len(parts) == 0 {
		return "all workers are equally fast"
	}
	slices.SortFunc(parts, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	return strings.Join(parts, ", ")
}

// Layer describes a layer of the model as far as plans care.
type Layer struct {
	Tensors []int // elements of each parameter tensor

	// Forward and Backward are the times of a micro-batch on a worker of
	// speed 1. If they are 0 in all layers, nothing is measured yet, and
	// the work is taken to be that of a matrix product: proportional to the
	// parameters, and twice as much backward as forward.
	Forward, Backward time.Duration

	// Output is the size of what the layer hands to the next one, and of the
	// gradient that comes back, in bytes per micro-batch.
	Output int64
}

// Size returns the number of parameters.
func (l Layer) Size() int {
	n := 0
	for _, t := range l.Tensors {
		n += t
	}
	return n
}

// Profile is what is known of the model and the machines. The times in it are measured,
// see [Profile.With]; nothing is taken from what a machine says of itself.
type Profile struct {
	Layers []Layer
	Speed  map[id.WorkerID]float64 // a worker that is not in it has speed 1

	// LinkSpeed is that of a worker's link; a Bandwidth of 0 is taken as unlimited.
	LinkSpeed
	Commit  time.Duration // of the exchange of a commit, once the last worker is there
	Updates float64       // parameters a worker of speed 1 updates per second; 0: not measured, taken as unlimited

	// Links has what is known of single links; the others are as Latency and Bandwidth say.
	Links map[Link]LinkSpeed
	// Memory is the bytes a worker has for parameters and optimizer state. A worker that is not
	// in it has no limit that is known.
	Memory map[id.WorkerID]int64
	// Horizon is the number of steps within which a plan for [Rebalance] has to win back
	// the time of its transfers; 0 means 100.
	Horizon int

	// Buffers is the most sums of gradients of a layer that a worker should
	// have to keep; 0 means 20. A plan exceeds it only if contiguous runs of
	// micro-batches do, too.
	Buffers int
}

// SpeedOf returns the speed of a worker.
func (p *Profile) SpeedOf(w id.WorkerID) float64 {
	if v := p.Speed[w]; v > 0 {
		return v
	}
	return 1
}

// IsMeasured reports whether a layer has a time.
func (p *Profile) IsMeasured() bool {
	return slices.ContainsFunc(p.Layers, func(l Layer) bool { return l.Forward > 0 || l.Backward > 0 })
}

// WithDefaults returns the profile with values for what is zero: times of layers that are not measured, Horizon and Buffers.
func (p Profile) WithDefaults() Profile {
	p.Horizon, p.Buffers = cmp.Or(p.Horizon, 100), cmp.Or(p.Buffers, 20)
	if p.IsMeasured() {
		return p
	}
	layers := make([]Layer, len(p.Layers))
	for i, l := range p.Layers {
		l.Forward = time.Duration(l.Size())
		l.Backward = 2 * l.Forward
		layers[i] = l
	}
	p.Layers = layers
	return p
}

// LinkBetween returns what is known of the link of two workers.
func (p *Profile) LinkBetween(a, b id.WorkerID) LinkSpeed {
	l, ok := p.Links[link(a, b)]
	if !ok {
		l.Latency = p.Latency
	}
	l.Bandwidth = cmp.Or(l.Bandwidth, p.Bandwidth)
	return l
}

// Transfer returns how long it takes to send bytes.
func (p LinkSpeed) Transfer(bytes int64) time.Duration { return p.Latency + p.Stream(bytes) }

// Stream returns how long the link is busy with bytes.
func (p LinkSpeed) Stream(bytes int64) time.Duration {
	if p.Bandwidth <= 0 {
		return 0
	}
	return time.Duration(float64(bytes) / p.Bandwidth * float64(time.Second))
}

// BytesPerParameter is the size of a float32.
const BytesPerParameter = 4

// StateParts is how many times the size of its parameters a range has with its
// optimizer state: parameters and two moments.
const StateParts = 3
