package search

import (
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/plantest"
	"github.com/soliton-train/soliton/internal/plan/simulate"
	"pgregory.net/rapid"
)

// TestStagesBound: no routes and limits are faster than the bound, and the floor of the planner
// is the same.
func TestStagesBound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stages, micros := rapid.IntRange(1, 4).Draw(t, "stages"), rapid.IntRange(1, 40).Draw(t, "micro-batches")
		var layers, ranks []int
		p := plan.Plan{}
		lo := 0
		var parts []part
		for range stages {
			l, w := rapid.IntRange(1, 6).Draw(t, "layers"), rapid.IntRange(1, 6).Draw(t, "workers")
			layers, ranks = append(layers, l), append(ranks, w)
			parts = append(parts, part{lo, lo + l, w})
			st := plan.Stage{Lo: lo, Hi: lo + l}
			for range w {
				id := id.WorkerID(len(p.Workers))
				p.Workers = append(p.Workers, plan.Worker{ID: id})
				st.Workers = append(st.Workers, id)
			}
			p.Stages = append(p.Stages, st)
			lo += l
		}
		prof := plantest.Uniform(lo)
		bound := time.Duration(plantest.StagesBound(layers, ranks, micros)) * time.Millisecond
		for _, st := range p.Stages {
			var route []id.WorkerID
			for m := range micros {
				route = append(route, rapid.SampledFrom([]id.WorkerID{
					st.Workers[m%len(st.Workers)], st.Workers[m*len(st.Workers)/micros],
				}).Draw(t, "route"))
			}
			p.Route = append(p.Route, route)
			more := rapid.IntRange(0, 10).Draw(t, "more in flight")
			for _, w := range st.Workers {
				p.Limits = append(p.Limits, plan.Limit{Stage: len(p.Route) - 1, Worker: w, Forwards: stages + more, Lead: rapid.IntRange(0, 3).Draw(t, "lead")})
			}
		}
		if got := simulate.PassTime(&p, &prof); got < bound {
			t.Fatalf("%v is less than %v:\n%v", got, bound, &p)
		}
		Route(&p, prof, micros)
		if got := simulate.PassTime(&p, &prof); got < bound {
			t.Fatalf("the planner's %v is less than %v:\n%v", got, bound, &p)
		}
		d := newSpreader(newShaper(&p, &prof), len(p.Workers))
		if got := d.floor(parts).Round(100 * time.Microsecond); got != bound {
			t.Fatalf("a floor of %v, and the bound is %v:\n%v", got, bound, &p)
		}
	})
}
