package trainer_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/trainer"
)

// TestReshapes tells the controller every few steps that other workers are slow: layers
// move to other stages and workers, too, while some die and others join, also with layers
// on their way. The bits are those of an undisturbed run.
func TestReshapes(t *testing.T) {
	text := writeText(t, 4000)
	job := func() trainer.Job {
		j := gptJob(t, text, 0.1)
		j.GlobalBatch, j.Steps = 18, 20
		return j
	}
	want := trainer.RunWorkers(t, 1, 1, exact, job)[0]
	seeds := 2
	if testing.Short() {
		seeds = 1
	}
	borders, places := 0, 0
	for _, c := range []struct{ workers, stages, mirrors, zero, kills, joins int }{
		{4, 2, 1, 2, 0, 0}, {5, 2, 1, 1, 0, 0}, {5, 3, 1, 2, 0, 0}, {5, 2, 1, 2, 1, 0}, {6, 2, 1, 2, 2, 0}, {6, 3, 2, 1, 2, 1}, {4, 2, 1, 2, 2, 2},
	} {
		for seed := range uint64(seeds) {
			t.Run(fmt.Sprintf("%+v, seed %d", c, seed), func(t *testing.T) {
				r := rand.New(rand.NewPCG(seed, uint64(c.workers)))
				told := 0 // step
				kills, joins := c.kills, c.joins
				s := trainer.Survive(t, trainer.SurviveConfig{
					Workers: c.workers, Stages: c.stages, Mirrors: c.mirrors, Start: control.Start{Reduction: "exact", Zero: c.zero},
					Speeds: func(_ int, m control.Message) map[int]float64 {
						st, ok := m.(control.Step)
						if !ok || st.Step < told+3 {
							return nil
						}
						told = st.Step
						speeds := make(map[int]float64)
						for w := range c.workers + c.joins {
							speeds[w] = []float64{1, 1, 0.25}[r.IntN(3)]
						}
						return speeds
					},
					Moment: func(from int, m control.Message) (int, time.Duration) {
						// A worker that has got all it was to get: the others may not have.
						_, level := m.(control.Level)
						if st, ok := m.(control.Step); kills > 0 && (level && r.IntN(3) == 0 || ok && st.Step > 4 && r.IntN(20) == 0) {
							kills--
							return r.IntN(c.workers), time.Duration(r.IntN(3000)) * time.Microsecond
						}
						return -1, 0
					},
					Act: func(from int, m control.Message) (int, int) {
						if st, ok := m.(control.Step); ok && joins > 0 && st.Step > 6 && r.IntN(10) == 0 {
							joins--
							return c.workers + joins, -1
						}
						return -1, -1
					},
				}, job)
				for id, got := range s.Left {
					if !tail(got, want) {
						t.Errorf("worker %d: %+v, want %+v\n%s", id, got, want, strings.Join(s.Notes, "\n"))
					}
				}
				if len(s.Repaired) > 0 {
					t.Errorf("blocks were taken for altered: %+v", s.Repaired)
				}
				t.Logf("%d plans moved %d borders and %d workers; %d recoveries", s.Rebalanced, s.Borders, s.Places, len(s.Recoveries))
				borders, places = borders+s.Borders, places+s.Places
			})
		}
	}
	if borders == 0 || places == 0 {
		t.Errorf("%d borders and %d workers moved", borders, places)
	}
}
