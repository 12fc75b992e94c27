package search

import (
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

// shaped returns a plan with stages of given numbers of workers, before its
// micro-batches are routed. work is the forward time of each stage.
func shaped(ranks []int, work []time.Duration) (plan.Plan, plan.Profile) {
	p := plan.Plan{Version: id.Version{Generation: 1, N: 1}, FromStep: 1}
	var prof plan.Profile
	for s, n := range ranks {
		prof.Layers = append(prof.Layers, plan.Layer{Tensors: []int{10_000}, Forward: work[s], Backward: 2 * work[s]})
		st := plan.Stage{Lo: s, Hi: s + 1}
		for range n {
			id := id.WorkerID(len(p.Workers))
			p.Workers = append(p.Workers, plan.Worker{ID: id})
			st.Workers = append(st.Workers, id)
		}
		p.Stages = append(p.Stages, st)
	}
	return p, prof
}
