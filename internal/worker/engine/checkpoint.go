package engine

import (
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/worker/core"
)

// Checkpoint is one worker's part of a checkpoint: the shards that it owned when the step was committed. The parts of all owners of
// the plan together are the state.
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

// saving returns what this worker says in the commit about checkpoints.
func (e *Engine) saving() (bits core.Saving) {
	if e.c.Saving == nil {
		return 0
	}
	wanted, busy := e.c.Saving()
	if wanted {
		bits |= core.SavingWanted
	}
	if busy {
		bits |= core.SavingBusy
	}
	return bits
}

// capture returns what makes the checkpoint of a commit, for the computing goroutine to call after the update; nil if there is to
// be none. Nothing changes the state of a run that has been stopped, so it is not copied.
func (e *Engine) capture(d core.Update) func() {
	if !d.Save || e.c.Save == nil {
		return nil
	}
	c := Checkpoint{Step: d.Update.Step, Plan: e.plan.Version}
	keep := slices.Clone[[]float32]
	if d.Stopped {
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
