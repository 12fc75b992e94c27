package trainer_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/control"
	"github.com/soliton-train/soliton/trainer"
)

// TestSurvives ends workers at random moments: what is left of the run goes on
// and ends with the bits of an undisturbed one.
func TestSurvives(t *testing.T) {
	text := writeText(t, 4000)
	job := func() trainer.Job { return gptJob(t, text, 0.1) }
	want := trainer.RunWorkers(t, 1, 1, exact, job)[0]
	seeds := 6
	if testing.Short() {
		seeds = 2
	}
	for _, c := range []struct{ workers, stages, zero, kills int }{
		{2, 1, 2, 1}, {2, 2, 2, 1}, {3, 1, 2, 1}, {4, 2, 2, 1}, {4, 2, 2, 3}, {3, 3, 2, 2}, {5, 3, 1, 2}, {6, 2, 2, 3},
	} {
		for seed := range uint64(seeds) {
			t.Run(fmt.Sprintf("%d workers, %d stages, ZeRO %d, %d killed, seed %d", c.workers, c.stages, c.zero, c.kills, seed), func(t *testing.T) {
				r := rand.New(rand.NewPCG(seed, uint64(c.workers)))
				type kill struct{ worker, step, by, after int }
				var kills []kill
				for range c.kills {
					kills = append(kills, kill{r.IntN(c.workers), 1 + r.IntN(len(want.Steps)-1), r.IntN(c.workers), r.IntN(8000)})
				}
				s := trainer.Survive(t, trainer.SurviveConfig{
					Workers: c.workers, Stages: c.stages, Mirrors: 1, Start: control.Start{Reduction: "exact", Zero: c.zero},
					Moment: func(from int, m control.Message) (int, time.Duration) {
						st, ok := m.(control.Step)
						if !ok {
							return -1, 0
						}
						for i, k := range kills {
							if k.by == from && k.step == st.Step {
								kills = append(kills[:i], kills[i+1:]...)
								return k.worker, time.Duration(k.after) * time.Microsecond
							}
						}
						return -1, 0
					},
				}, job)
				for id, got := range s.Left {
					if !trainer.SameHistory(got, want) {
						t.Errorf("worker %d: %+v, want %+v\n%s", id, got, want, strings.Join(s.Notes, "\n"))
					}
				}
				for _, r := range s.Recoveries {
					t.Logf("%+v", r)
				}
			})
		}
	}
}
