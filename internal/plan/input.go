package plan

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

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

	Latency   time.Duration // of a message between two workers
	Bandwidth float64       // of a worker's link, bytes per second; 0: not measured, taken as unlimited
	Commit    time.Duration // of the exchange of a commit, once the last worker is there
	Updates   float64       // parameters a worker of speed 1 updates per second; 0: not measured, taken as unlimited

	// Links has what is known of single links; the others are as Latency and Bandwidth say.
	Links map[Link]Pace
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

const (
	defaultBuffers = 20
	defaultHorizon = 100
)

func (p *Profile) buffers() int {
	if p.Buffers == 0 {
		return defaultBuffers
	}
	return p.Buffers
}

func (p *Profile) speed(w id.WorkerID) float64 {
	if v := p.Speed[w]; v > 0 {
		return v
	}
	return 1
}

// isMeasured reports whether a layer has a time.
func (p *Profile) isMeasured() bool {
	return slices.ContainsFunc(p.Layers, func(l Layer) bool { return l.Forward > 0 || l.Backward > 0 })
}

// measured returns the profile with times in its layers.
func (p Profile) measured() Profile {
	if p.isMeasured() {
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

// View is which workers live, and what is known of them.
type View struct {
	Workers []Worker // that live

	// Leaving are those of the living that have been asked to leave. No
	// boundary plan has them; in a step they work on.
	Leaving []id.WorkerID

	// Step is the step that is in flight, or the next one between two steps.
	Step int

	// What the living said when they were asked, for events in the middle of
	// the step. A pair that nobody speaks of has not begun.
	Works []Work
	// Complete is who has the whole gradient of which shard.
	Complete []Complete
	// Settled are the pairs whose gradients are held by everyone who will own
	// or mirror a shard of their stage, and whose losses, in the last stage, are
	// with a living worker: beside those that follow from Complete.
	Settled []graph.Pair

	// Held is what background transfers have made level, for boundary plans:
	// these workers can be owners or mirrors although the current plan does
	// not list them.
	Held []Holding
}

// Complete says that a worker has the whole gradient of a shard of the
// current plan.
type Complete struct {
	Shard  int // its index in Plan.Shards
	Worker id.WorkerID
}

// Holding says that a worker has the parameters and the optimizer state of a
// range.
type Holding struct {
	id.Range
	Worker id.WorkerID
}

// Work is what a living worker says of a pair routed to it.
type Work struct {
	Worker id.WorkerID
	graph.Status
}

// EventKind is the kind of an [Event].
type EventKind uint8

// The kinds of events.
const (
	Start   EventKind = iota // the job begins: Micros, Stages and Mirrors count
	Lost                     // workers of the plan do not live any more
	Leave                    // those of View.Leaving are to leave
	Protect                  // after a loss: every shard is to have its mirrors again
	Join                     // workers of the view are not in the plan
	// Rebalance: the times have changed, or the plan is not what fits them best.
	Rebalance
)

// Event is what made a new plan necessary.
type Event struct {
	Kind  EventKind
	Cause string // such as "worker 2 exited: signal: killed"; "" says who

	// After is the newest version that was given so far, if the plan that has
	// it did not go live; the next one is greater than this and the current
	// plan's.
	After id.Version

	// Generation is that of the job; 0 means that of the current plan, or 1.
	Generation int
	Micros     int // micro-batches of a step
	Stages     int // 0 means 1
	Mirrors    int // of each shard; 0 is none
	FromStep   int // 0 means 1

	// Contiguous, for Start and Rebalance, gives every worker one range of all parameters of its
	// stage instead of a range of each layer. It is there for go run ./bench migrate to compare
	// with: a layer is with few owners then, and when one moves, what is behind it moves along.
	Contiguous bool

	// Fixed has [Rebalance] route micro-batches anew only: layers and workers stay in their
	// stages.
	Fixed bool
}

// FlagError says that a job as it was asked for is impossible.
type FlagError struct {
	Flag  string // "--stages", "--workers", ...
	Value int
	Why   string // what is wrong and what would be right
}

func (e *FlagError) Error() string { return fmt.Sprintf("%s %d: %s", e.Flag, e.Value, e.Why) }

// LostError says that a shard has no living holder, so that no plan can save
// the step: the job goes back to a checkpoint.
type LostError struct {
	Shard Shard // the first one
	Count int   // of such shards
}

func (e *LostError) Error() string {
	return fmt.Sprintf("%s without a living owner or mirror, the first is [%d,%d) of layer %d, which worker %d owned",
		count(e.Count, "shard"), e.Shard.Lo, e.Shard.Hi, e.Shard.Layer, e.Shard.Owner)
}

// ErrNoWorkers is the error of [Next] when no worker lives.
var ErrNoWorkers = errors.New("no worker lives")
