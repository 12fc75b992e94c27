package engine

import (
	"slices"

	"github.com/soliton-train/soliton/internal/id"
)

// Checkpoint is what one worker has of the state of the job after a step: the
// shards that it owned as the step was committed. All owners of the plan make
// one of the same step, and all parts together are the state.
type Checkpoint struct {
	Step   int
	Plan   id.Version // under which the step was committed
	Shards []Saved    // by layer, then range
}

// Saved is the state of one shard.
type Saved struct {
	id.Range
	Params  []float32
	Moments [][]float32
}

// Bits of record.saving.
const (
	savingWanted = 1 << iota // this worker was asked for a checkpoint
	savingBusy               // and could not make one now
)

// saving returns what this worker says in the commit about checkpoints.
func (e *Engine) saving() (bits uint64) {
	if e.c.Saving == nil {
		return 0
	}
	wanted, busy := e.c.Saving()
	if wanted {
		bits |= savingWanted
	}
	if busy {
		bits |= savingBusy
	}
	return bits
}

// saves draws the conclusion from what all workers said: one that was asked is
// enough, and one that is still writing the checkpoint before puts it off. A run
// that ends before its last step is saved in any case.
func saves(records []record) bool {
	var all uint64
	stopped := false
	for _, r := range records {
		all |= r.saving
		stopped = stopped || r.stop != ""
	}
	return stopped || all == savingWanted
}

// capture returns what makes the checkpoint of a commit, for the computing
// goroutine to call after the update; nil if there is to be none. Nothing changes the
// state of a run that has been stopped, so it is not copied.
func (e *Engine) capture(r *request) func() {
	if !r.save || e.c.Save == nil {
		return nil
	}
	c := Checkpoint{Step: r.point.Step, Plan: e.plan.Version}
	keep := slices.Clone[[]float32]
	if r.result.Stop != "" {
		keep = func(x []float32) []float32 { return x }
	}
	var owned []*shard
	for _, sh := range e.inOrder() {
		if sh.owner {
			owned = append(owned, sh)
		}
	}
	return func() {
		for _, sh := range owned {
			s := Saved{Range: sh.Range, Params: keep(sh.params)}
			for _, m := range sh.state.Moments {
				s.Moments = append(s.Moments, keep(m))
			}
			c.Shards = append(c.Shards, s)
		}
		e.c.Save(c)
	}
}
