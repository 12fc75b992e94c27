package plan

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// TestPassesAgree: the fast simulation of passes gives the time of the whole one, whatever
// the stages, routes, limits, speeds and links, and stops if that is too much only.
func TestPassesAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stages, micros := rapid.IntRange(1, 4).Draw(t, "stages"), rapid.IntRange(1, 80).Draw(t, "micro-batches")
		n := rapid.IntRange(1, 6).Draw(t, "workers")
		p := Plan{Workers: workers(n, n)}
		prof := Profile{Speed: map[id.WorkerID]float64{}, Links: map[Link]Pace{}}
		if rapid.Bool().Draw(t, "slow network") {
			prof.Latency, prof.Bandwidth = 300*time.Microsecond, 1e6
			if rapid.Bool().Draw(t, "links") && n > 1 {
				prof.Links[link(0, 1)] = Pace{Latency: time.Millisecond, Bandwidth: 1e5}
			}
		}
		for w := range id.WorkerID(n) {
			prof.Speed[w] = rapid.SampledFrom([]float64{1, 1, 0.5, 0.85}).Draw(t, "speed")
		}
		for s := range stages {
			f := time.Duration(rapid.IntRange(0, 5).Draw(t, "forward")) * time.Millisecond
			prof.Layers = append(prof.Layers, Layer{Tensors: []int{100}, Forward: f, Backward: 2 * f, Output: 1000})
			st := Stage{Lo: s, Hi: s + 1}
			first, count := rapid.IntRange(0, n-1).Draw(t, "first"), rapid.IntRange(1, n).Draw(t, "workers of a stage")
			for i := range count {
				w := id.WorkerID((first + i) % n)
				st.Workers = append(st.Workers, w)
				p.Limits = append(p.Limits, Limit{s, w, stages - s + rapid.IntRange(0, 4).Draw(t, "more in flight"), rapid.IntRange(0, stages-s).Draw(t, "lead")})
			}
			var route []id.WorkerID
			for range micros {
				route = append(route, rapid.SampledFrom(st.Workers).Draw(t, "route"))
			}
			p.Stages, p.Route = append(p.Stages, st), append(p.Route, route)
		}
		g, err := graph.New(p.step(&prof, false))
		if err != nil {
			t.Fatal(err)
		}
		whole, err := g.Simulate()
		if err != nil {
			t.Fatal(err)
		}
		if got := p.passTime(&prof); got != whole.Makespan {
			t.Fatalf("%v, and the whole simulation takes %v:\n%v", got, whole.Makespan, &p)
		}
		if _, ok := p.passTimeWithin(&prof, whole.Makespan); !ok {
			t.Fatalf("%v is more than %v", whole.Makespan, whole.Makespan)
		}
		if _, ok := p.passTimeWithin(&prof, whole.Makespan-1); ok {
			t.Fatalf("%v is not more than %v", whole.Makespan, whole.Makespan-1)
		}
	})
}

// TestDealtPasses: what workers took in turn gives the same step as a route.
func TestDealtPasses(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stages, micros := rapid.IntRange(1, 4).Draw(t, "stages"), rapid.IntRange(1, 80).Draw(t, "micro-batches")
		var ranks []int
		var work []time.Duration
		for range stages {
			ranks = append(ranks, rapid.IntRange(1, 5).Draw(t, "workers"))
			work = append(work, time.Duration(rapid.IntRange(1, 6).Draw(t, "forward"))*time.Millisecond)
		}
		p, prof := shaped(ranks, work)
		prof.Speed = map[id.WorkerID]float64{}
		for w := range p.Workers {
			prof.Speed[id.WorkerID(w)] = rapid.SampledFrom([]float64{1, 1, 0.5}).Draw(t, "speed")
		}
		costs := stageCosts(&prof, p.Stages)
		x := newPasses(&prof, p.Workers)
		x.set(p.Stages, micros)
		runs := runsOnly(micros, costs)
		extra := rapid.IntRange(0, 8).Draw(t, "more in flight")
		c, took, ok := x.inTurn(costs, runs, rapid.SampledFrom([]int{1, 2, 4}).Draw(t, "block"), extra, 16, math.MaxInt64)
		if !ok {
			t.Fatal("no step is that long")
		}
		again, ok := x.run(c.rankings, limits(costs, runs, needs(runs, costs), extra, noLead), math.MaxInt64)
		if !ok || again != took {
			t.Fatalf("%v, and with these routes %v", took, again)
		}
	})
}
