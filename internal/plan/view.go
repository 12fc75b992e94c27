package plan

import (
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

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
