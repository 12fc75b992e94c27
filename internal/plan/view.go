package plan

import (
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// View is the state of the workers that a plan is made from.
type View struct {
	Workers []Worker // the live ones

	// Leaving are live workers that have been asked to leave. Boundary plans do not
	// include them; in-step plans do.
	Leaving []id.WorkerID

	// ModelHosts are the hosts that may get the model when the run ends, the most wanted first. The first that has a worker
	// in the plan becomes its ModelHost.
	ModelHosts []string

	// Step is the step that is in flight, or the next one between two steps.
	Step int

	// Works is the progress that live workers reported, for events in the middle
	// of the step. A pair without a report has not begun.
	Works []Work
	// Complete lists the holders of whole gradients of shards.
	Complete []Complete
	// Settled are pairs that need not run again, in addition to those that follow from
	// Complete: all future owners and mirrors of their stage's shards hold their gradients and,
	// for the last stage, a live worker holds their losses.
	Settled []graph.Pair
}

// Complete says that a worker has the whole gradient of a shard of the
// current plan.
type Complete struct {
	Shard  int // its index in Plan.Shards
	Worker id.WorkerID
}

// Work is the progress of a pair that is routed to a live worker.
type Work struct {
	Worker id.WorkerID
	graph.Status
}
