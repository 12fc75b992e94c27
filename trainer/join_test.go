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

// tail compares what a worker said with the end of a whole history.
func tail(got, want trainer.History) bool {
	if n := len(want.Steps) - len(got.Steps); n > 0 {
		want.Steps = want.Steps[n:]
	}
	return trainer.SameHistory(got, want)
}

// TestJoins lets workers join at random moments, while others die or leave at
// others: the bits are those of an undisturbed run, and without a death nothing is
// computed twice.
func TestJoins(t *testing.T) {
	text := writeText(t, 4000)
	job := func() trainer.Job {
		j := gptJob(t, text, 0.1)
		j.Steps = 24
		return j
	}
	want := trainer.RunWorkers(t, 1, 1, exact, job)[0]
	seeds := 6
	if testing.Short() {
		seeds = 1
	}
	for _, c := range []struct{ workers, stages, mirrors, joins, kills, leaves int }{
		{1, 1, 1, 1, 0, 0}, {2, 1, 1, 1, 0, 0}, {2, 2, 1, 2, 0, 0}, {2, 1, 1, 2, 1, 0}, {3, 2, 1, 3, 2, 0}, {3, 1, 0, 1, 0, 1}, {4, 2, 1, 2, 1, 2}, {3, 3, 2, 3, 3, 0},
	} {
		for seed := range uint64(seeds) {
			t.Run(fmt.Sprintf("%+v, seed %d", c, seed), func(t *testing.T) {
				r := rand.New(rand.NewPCG(seed, uint64(c.workers)))
				type act struct{ worker, step, after int }
				acts := func(n, workers, last int) (all []act) {
					for range n {
						all = append(all, act{r.IntN(workers), 1 + r.IntN(last), r.IntN(4000)})
					}
					return all
				}
				kills, leaves := acts(c.kills, c.workers+c.joins, len(want.Steps)-1), acts(c.leaves, c.workers, len(want.Steps)/2)
				joins := acts(c.joins, 1, len(want.Steps)/2)
				take := func(all *[]act, step int) (a act, ok bool) {
					for i, a := range *all {
						if a.step <= step {
							*all = append((*all)[:i:i], (*all)[i+1:]...)
							return a, true
						}
					}
					return a, false
				}
				next, step := c.workers, 0
				s := trainer.Survive(t, trainer.SurviveConfig{
					Workers: c.workers, Stages: c.stages, Mirrors: c.mirrors, Start: control.Start{Reduction: "exact", Zero: 2},
					Moment: func(_ int, m control.Message) (int, time.Duration) {
						switch m := m.(type) {
						case control.Step:
							step = max(step, m.Step)
						case control.Level, control.Applied:
							// A new holder has all it needs, or a plan is live: half of them die
							// about then.
							if r.IntN(2) == 0 {
								return -1, 0
							}
						default:
							return -1, 0
						}
						if k, ok := take(&kills, step); ok {
							return k.worker, time.Duration(k.after) * time.Microsecond
						}
						return -1, 0
					},
					Act: func(_ int, m control.Message) (int, int) {
						joining, leaving := -1, -1
						if st, ok := m.(control.Step); ok {
							if _, ok := take(&joins, st.Step); ok {
								joining = next
								next++
							}
							if l, ok := take(&leaves, st.Step); ok {
								leaving = l.worker
							}
						}
						return joining, leaving
					},
				}, job)
				t.Logf("%d joined, %d recoveries", s.Joined, len(s.Recoveries))
				if all := int64(len(want.Steps) * c.stages * job().GlobalBatch / job().MicroBatch); c.kills == 0 && s.Forwards != all {
					t.Errorf("%d forward passes, want %d", s.Forwards, all)
				}
				for id, got := range s.Left {
					if !tail(got, want) {
						t.Errorf("worker %d: %+v, want %+v\n%s", id, got, want, strings.Join(s.Notes, "\n"))
					}
				}
			})
		}
	}
}
