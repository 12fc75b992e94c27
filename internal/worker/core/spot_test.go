package core

import (
	"testing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// The default rate of spot checks costs a worker less than half a percent of its passes, every pair is chosen now and then, and
// another worker repeats it if its stage has one.
func TestDrawSpot(t *testing.T) {
	const micros, verify, steps = 8, 256, 200_000
	var prof plan.Profile
	var view plan.View
	for i := range 3 {
		prof.Layers = append(prof.Layers, plan.Layer{Tensors: []int{1}})
		view.Workers = append(view.Workers, plan.Worker{ID: id.WorkerID(i)})
	}
	for _, c := range []struct{ workers, stages int }{{1, 1}, {3, 1}, {3, 2}, {3, 3}} {
		v := plan.View{Workers: view.Workers[:c.workers]}
		p, _, err := planner.Next(plan.Plan{}, v, prof, planner.Event{Kind: planner.Start, Micros: micros, Stages: c.stages})
		if err != nil {
			t.Fatal(err)
		}
		w := New(Config{Micros: micros, Layers: make([]Layer, 3), Job: rundir.Job{NoDigests: true, Verify: verify, MicroBatch: 4, Seed: 3}, Self: plan.Worker{ID: 1}})
		other := New(Config{Micros: micros, Layers: make([]Layer, 3), Job: rundir.Job{NoDigests: true, Verify: verify, MicroBatch: 4, Seed: 3}})
		w.plan, other.plan = &p, &p
		drawn, pairs := 0, make(map[graph.Pair]bool)
		for step := 1; step <= steps; step++ {
			x, y := w.drawSpot(step), other.drawSpot(step)
			if (x == nil) != (y == nil) || x != nil && *x != *y {
				t.Fatalf("step %d: workers draw %+v and %+v", step, x, y)
			}
			if x == nil {
				continue
			}
			drawn++
			pairs[x.pair] = true
			if alone := len(p.Stages[x.pair.Stage].Workers) == 1; alone != (x.runner == x.repeater) || x.runner != p.Route[x.pair.Stage][x.pair.Micro] {
				t.Fatalf("step %d: %+v", step, x)
			}
		}
		mean := float64(steps) * float64(micros*c.stages) / float64(c.workers)
		if share := float64(drawn) / mean; share > 0.005 || share < 0.003 {
			t.Errorf("%d workers, %d stages: %.4f of a worker's pairs are repeated", c.workers, c.stages, share)
		}
		if len(pairs) != micros*c.stages {
			t.Errorf("%d workers, %d stages: %d of %d pairs were chosen", c.workers, c.stages, len(pairs), micros*c.stages)
		}
		if w.drawSpot(1) == nil {
			t.Error("the first step has no spot check")
		}
		p.InStep, p.FromStep = true, 1
		if w.drawSpot(1) != nil {
			t.Error("a step in which a worker was lost has a spot check")
		}
	}
}
