package search

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan/simulate"
	"pgregory.net/rapid"
)

// TestShareAgainstDescent compares with small steps downhill.
func TestShareAgainstDescent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stages := rapid.IntRange(1, 4).Draw(t, "stages")
		n := rapid.IntRange(1, 5).Draw(t, "workers")
		speed := rapid.SliceOfN(rapid.Float64Range(0.3, 2), n, n).Draw(t, "speeds")
		costs := make([]simulate.StageCost, stages)
		for s := range costs {
			c := &costs[s]
			c.Forward = time.Duration(rapid.IntRange(1, 20).Draw(t, "work")) * time.Millisecond
			for w := range n {
				if w == s%n || rapid.Bool().Draw(t, "serves") {
					c.Workers, c.Speeds = append(c.Workers, id.WorkerID(w)), append(c.Speeds, speed[w])
				}
			}
		}
		squares := func(parts [][]float64) (sum float64) {
			load := make([]float64, n)
			for s, c := range costs {
				for r, w := range c.Workers {
					load[w] += parts[s][r] / speed[w]
				}
			}
			for w, l := range load {
				sum += l * l * speed[w]
			}
			return sum
		}
		// Work by stage and rank, from the shared speeds.
		shared := make([]simulate.StageCost, stages)
		for s, c := range costs {
			shared[s] = c
			shared[s].Speeds = slices.Clone(c.Speeds)
		}
		share(shared)
		got := make([][]float64, stages)
		for s, c := range shared {
			all := 0.0
			for _, v := range c.Speeds {
				all += v
			}
			for _, v := range c.Speeds {
				got[s] = append(got[s], c.Work()*v/all)
			}
		}
		best := make([][]float64, stages)
		for s := range got {
			best[s] = slices.Clone(got[s])
		}
		r := rand.New(rand.NewPCG(1, 2))
		for range 2000 {
			s := r.IntN(stages)
			a, b := r.IntN(len(best[s])), r.IntN(len(best[s]))
			d := best[s][a] * r.Float64() * r.Float64()
			was := squares(best)
			best[s][a] -= d
			best[s][b] += d
			if squares(best) > was {
				best[s][a] += d
				best[s][b] -= d
			}
		}
		if g, b := squares(got), squares(best); g > 1.05*b {
			t.Fatalf("squares %v, possible %v: %+v", g, b, shared)
		}
	})
}
