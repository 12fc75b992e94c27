package simulate

import (
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/plan/plantest"
	"pgregory.net/rapid"
)

// TestPassesAgree: the fast simulation of passes gives the time of the whole one, whatever
// the stages, routes, limits, speeds and links, and stops if that is too much only.
func TestPassesAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stages, micros := rapid.IntRange(1, 4).Draw(t, "stages"), rapid.IntRange(1, 80).Draw(t, "micro-batches")
		n := rapid.IntRange(1, 6).Draw(t, "workers")
		p := plan.Plan{Workers: plantest.Workers(n, n)}
		prof := plan.Profile{Speed: map[id.WorkerID]float64{}, Links: map[plan.Link]plan.LinkSpeed{}}
		if rapid.Bool().Draw(t, "slow network") {
			prof.Latency, prof.Bandwidth = 300*time.Microsecond, 1e6
			if rapid.Bool().Draw(t, "links") && n > 1 {
				prof.Links[plan.Link{A: 0, B: 1}] = plan.LinkSpeed{Latency: time.Millisecond, Bandwidth: 1e5}
			}
		}
		for w := range id.WorkerID(n) {
			prof.Speed[w] = rapid.SampledFrom([]float64{1, 1, 0.5, 0.85}).Draw(t, "speed")
		}
		for s := range stages {
			f := time.Duration(rapid.IntRange(0, 5).Draw(t, "forward")) * time.Millisecond
			prof.Layers = append(prof.Layers, plan.Layer{Tensors: []int{100}, Forward: f, Backward: 2 * f, Output: 1000})
			st := plan.Stage{Lo: s, Hi: s + 1}
			first, count := rapid.IntRange(0, n-1).Draw(t, "first"), rapid.IntRange(1, n).Draw(t, "workers of a stage")
			for i := range count {
				w := id.WorkerID((first + i) % n)
				st.Workers = append(st.Workers, w)
				p.Limits = append(p.Limits, plan.Limit{Stage: s, Worker: w, Forwards: stages - s + rapid.IntRange(0, 4).Draw(t, "more in flight"), Lead: rapid.IntRange(0, stages-s).Draw(t, "lead")})
			}
			var route []id.WorkerID
			for range micros {
				route = append(route, rapid.SampledFrom(st.Workers).Draw(t, "route"))
			}
			p.Stages, p.Route = append(p.Stages, st), append(p.Route, route)
		}
		passesOnly := p
		passesOnly.Shards = nil
		g, err := graph.New(layOut(&passesOnly, &prof))
		if err != nil {
			t.Fatal(err)
		}
		whole, err := g.Simulate()
		if err != nil {
			t.Fatal(err)
		}
		if got := PassTime(&p, &prof); got != whole.Makespan {
			t.Fatalf("%v, and the whole simulation takes %v:\n%v", got, whole.Makespan, &p)
		}
		x, rankings, limits := newPasses(&p, &prof)
		if _, ok := x.Run(rankings, limits, whole.Makespan); !ok {
			t.Fatalf("%v is more than %v", whole.Makespan, whole.Makespan)
		}
		if _, ok := x.Run(rankings, limits, whole.Makespan-1); ok {
			t.Fatalf("%v is not more than %v", whole.Makespan, whole.Makespan-1)
		}
	})
}
