package search

import (
	"math"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan/simulate"
	"pgregory.net/rapid"
)

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
		costs := simulate.StageCosts(&prof, p.Stages)
		x := simulate.NewPasses(&prof, p.Workers)
		x.Set(p.Stages, micros)
		runs := runsOnly(micros, costs)
		extra := rapid.IntRange(0, 8).Draw(t, "more in flight")
		c, took, ok := inTurn(x, costs, runs, rapid.SampledFrom([]int{1, 2, 4}).Draw(t, "block"), extra, 16, math.MaxInt64)
		if !ok {
			t.Fatal("no step is that long")
		}
		again, ok := x.Run(c.rankings, limits(costs, runs, needs(runs, costs), extra, noLead), math.MaxInt64)
		if !ok || again != took {
			t.Fatalf("%v, and with these routes %v", took, again)
		}
	})
}
