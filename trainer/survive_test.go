package trainer_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/trainer"
)

// TestSurvives kills workers at random moments: the rest continues and ends with
// the bits of an undisturbed run.
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
					Workers: c.workers, Stages: c.stages, Mirrors: 1, Start: control.Start{Reduction: "exact", Zero: c.zero, Verify: 1},
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

// TestSurvivesFlips flips a bit of some worker's memory at random moments, and
// kills others in the same step or not: the flip is found by the worker itself,
// and what is left of the run ends with the bits of an undisturbed one.
func TestSurvivesFlips(t *testing.T) {
	text := writeText(t, 4000)
	job := func() trainer.Job { return gptJob(t, text, 0.1) }
	want := trainer.RunWorkers(t, 1, 1, exact, job)[0]
	seeds := 2
	if testing.Short() {
		seeds = 1
	}
	type shape struct{ workers, stages, mirrors, zero, kills int }
	for i, c := range []shape{{2, 1, 1, 2, 0}, {3, 1, 1, 2, 0}, {4, 2, 1, 2, 0}, {4, 3, 2, 1, 0}, {3, 1, 1, 2, 1}, {4, 1, 1, 2, 1}, {5, 2, 2, 1, 1}, {6, 3, 1, 2, 2}, {4, 1, 0, 2, 0}} {
		for target := core.Own; target <= core.Moment; target++ {
			if testing.Short() && int(target-core.Own) != i%4 {
				continue
			}
			for seed := range uint64(seeds) {
				t.Run(fmt.Sprintf("%+v, %v, seed %d", c, target, seed), func(t *testing.T) {
					r := rand.New(rand.NewPCG(seed, uint64(c.workers)))
					step := 1 + r.IntN(len(want.Steps)-2)
					at := func() time.Duration { return time.Duration(r.IntN(8000)) * time.Microsecond }
					culprit, by, after := r.IntN(c.workers), r.IntN(c.workers), at()
					type kill struct {
						worker, by int
						after      time.Duration
					}
					var kills []kill
					for range c.kills {
						kills = append(kills, kill{r.IntN(c.workers), r.IntN(c.workers), at()})
					}
					flipped := false
					s := trainer.Survive(t, trainer.SurviveConfig{
						Workers: c.workers, Stages: c.stages, Mirrors: c.mirrors, Start: control.Start{Reduction: "exact", Zero: c.zero, Verify: 1},
						Flip: func(from int, m control.Message) (int, core.Target, time.Duration) {
							if st, ok := m.(control.Step); ok && st.Step == step && from == by && !flipped {
								flipped = true
								return culprit, target, after
							}
							return -1, 0, 0
						},
						Moment: func(from int, m control.Message) (int, time.Duration) {
							if st, ok := m.(control.Step); ok && st.Step == step {
								for i, k := range kills {
									if k.by == from {
										kills = append(kills[:i], kills[i+1:]...)
										return k.worker, k.after
									}
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
					// Tensors that were computed twice count in addition.
					s.Repaired = slices.DeleteFunc(s.Repaired, func(x trainer.Repaired) bool { return x.Target == core.Passed.String() })
					if len(s.Repaired) > 1 { // none if the run ended before
						t.Errorf("repairs %+v", s.Repaired)
					}
					for _, x := range s.Repaired {
						t.Logf("%+v", x)
						// A copy that differs from its owner's came from the culprit, which may be lost since.
						if x.Worker != culprit && x.Target != core.Differ.String() || x.Layer == "" {
							t.Errorf("worker %d was repaired, and a bit of worker %d was flipped", x.Worker, culprit)
						}
					}
				})
			}
		}
	}
}
