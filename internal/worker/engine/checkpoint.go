package engine

import (
	"github.com/soliton-train/soliton/internal/compute/pages"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/worker/core"
)

// capture returns what makes the checkpoint of a commit, for the computing goroutine to call after the update; nil if there is to
// be none. Nothing changes the state of a run that has been stopped, so it is not copied.
func (e *Engine) capture(d core.Update) func() {
	if !d.Save || e.c.Save == nil {
		return nil
	}
	part := checkpoint.Part{Step: d.Update.Step, Plan: e.plan.Version}
	var owned []*shard
	for _, sh := range e.inOrder() {
		if sh.owner {
			owned = append(owned, sh)
		}
	}
	return func() {
		keep := func(x []float32) []float32 { return x }
		if !d.Stopped {
			numbers := 0
			for _, sh := range owned {
				numbers += len(sh.params) * (1 + len(sh.state.Moments))
			}
			room := e.c.room(numbers)
			keep = func(x []float32) []float32 {
				is := room[:len(x):len(x)]
				room = room[len(x):]
				pages.Copy(is, x)
				return is
			}
		}
		for _, sh := range owned {
			s := checkpoint.Shard{Range: sh.Range, Params: keep(sh.params)}
			for _, m := range sh.state.Moments {
				s.Moments = append(s.Moments, keep(m))
			}
			part.Shards = append(part.Shards, s)
		}
		e.c.Save(part)
	}
}

func (c *Config) room(numbers int) []float32 {
	if c.Room == nil {
		return pages.Make(numbers)
	}
	return c.Room(numbers)
}
