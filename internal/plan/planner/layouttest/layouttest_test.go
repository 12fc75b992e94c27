package layouttest_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/plan/planner/layouttest"
	"github.com/soliton-train/soliton/internal/plan/plantest"
	"pgregory.net/rapid"
)

// TestContiguous: every worker has one range of its stage, before and after layers move, and as
// much as the others to a block.
func TestContiguous(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stages := rapid.IntRange(1, 3).Draw(t, "stages")
		n := stages * rapid.IntRange(1, 4).Draw(t, "workers in a stage")
		mirrors := rapid.IntRange(0, 2).Draw(t, "mirrors")
		prof := plan.Profile{Speed: map[id.WorkerID]float64{}}
		for range rapid.IntRange(stages, 8).Draw(t, "layers") {
			f := time.Duration(rapid.IntRange(1, 9).Draw(t, "forward")) * time.Millisecond
			size := rapid.IntRange(1, 9).Draw(t, "blocks") * kernel.Block
			prof.Layers = append(prof.Layers, plan.Layer{Tensors: []int{size, 100}, Forward: f, Backward: 2 * f})
		}
		v := plan.View{Workers: plantest.Workers(n, n)}
		p, _, err := planner.Next(plan.Plan{}, v, prof, planner.Event{Kind: planner.Start, Stages: stages, Micros: 2 * n, Mirrors: mirrors})
		if err != nil {
			t.Fatal(err)
		}
		layouttest.Contiguous(&p, nil, prof.Layers)
		check := func(p *plan.Plan) {
			if err := p.Validate(prof.Layers); err != nil {
				t.Fatalf("%v\n%v", err, p)
			}
			for _, st := range p.Stages {
				rank, owned, total := 0, make([]int, len(st.Workers)), 0
				for _, sh := range p.Shards {
					if sh.Layer < st.Lo || st.Hi <= sh.Layer {
						continue
					}
					at := slices.Index(st.Workers, sh.Owner)
					if at < rank {
						t.Fatalf("the range of rank %d goes on after that of rank %d:\n%v", at, rank, p)
					}
					rank = at
					owned[rank] += sh.Hi - sh.Lo
					total += sh.Hi - sh.Lo
				}
				for r, n := range owned {
					if off := n - total/len(owned); off > kernel.Block || off < -kernel.Block {
						t.Fatalf("rank %d owns %d of %d:\n%v", r, n, total, p)
					}
				}
			}
		}
		check(&p)
		for i := range prof.Layers {
			prof.Layers[i].Forward = time.Duration(rapid.IntRange(1, 9).Draw(t, "measured")) * time.Millisecond
			prof.Layers[i].Backward = 2 * prof.Layers[i].Forward
		}
		q, _, err := planner.Next(p, plan.View{Workers: p.Workers, Step: 1}, prof, planner.Event{Kind: planner.Rebalance})
		if errors.Is(err, planner.ErrNoGain) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		layouttest.Contiguous(&q, &p, prof.Layers)
		if err := plantest.ValidateAfter(&q, &p); err != nil {
			t.Fatal(err)
		}
		check(&q)
	})
}
