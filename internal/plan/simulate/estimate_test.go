package simulate_test

import (
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner/plannertest"
	"github.com/soliton-train/soliton/internal/plan/plantest"
	"github.com/soliton-train/soliton/internal/plan/simulate"
)

// TestEstimate holds the closed form against the simulator.
func TestEstimate(t *testing.T) {
	prof := plan.Profile{Layers: plantest.Model(12), LinkSpeed: plan.LinkSpeed{Latency: 50 * time.Microsecond, Bandwidth: 1e9}, Updates: 1e9}
	for n := 1; n <= 8; n++ {
		for stages := 1; stages <= min(n, 4); stages++ {
			for _, micros := range []int{8, 24} {
				p := plannertest.First(t, plantest.Workers(n, 4), prof, stages, micros, 1)
				s, err := simulate.Run(&p, prof)
				if err != nil {
					t.Fatal(err)
				}
				est := simulate.Estimate(&p, prof)
				if ratio := float64(s.Makespan) / float64(est); ratio < 0.85 || ratio > 1.2 {
					t.Errorf("%d workers, %d stages, %d micro-batches: %v, closed form %v\n%v", n, stages, micros, s.Makespan, est, &p)
				}
			}
		}
	}
}
