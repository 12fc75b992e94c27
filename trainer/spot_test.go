package trainer_test

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/trainer"
)

// drifting is a data set of which one sample is different each time it is read.
type drifting struct {
	counts
	mu    *sync.Mutex
	reads *int
	which int
}

func (d drifting) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.counts.Sample(s, in, target)
	if s.Index == d.which {
		*d.reads++
		in.F[1] = float32(*d.reads)
	}
	return err
}

// A layer that is not deterministic and a sample that changes end the run, and the error names them: with one worker, with two in
// a stage, and with a stage each.
func TestSpotChecksName(t *testing.T) {
	// sometimes changes a number in every third call.
	sometimes := func() func(*trainer.Context, trainer.Tensor) {
		calls := new(atomic.Int64)
		return func(_ *trainer.Context, x trainer.Tensor) {
			if calls.Add(1)%3 == 0 {
				x.F[1] += 0.25
			}
		}
	}
	const sample = 11
	for _, c := range []struct {
		name string
		job  func() func() trainer.Job
		want string
	}{
		{"forward", func() func() trainer.Job {
			f := sometimes()
			return func() trainer.Job { return withOdd(&odd{forward: f}) }
		}, `step \d+: the output of layer "odd" for micro-batch \d+ is not the same `},
		{"backward", func() func() trainer.Job {
			f := sometimes()
			return func() trainer.Job { return withOdd(&odd{backward: f}) }
		}, `step \d+: the input gradient of layer "odd" for micro-batch \d+ is not the same `},
		{"sample", func() func() trainer.Job {
			mu, reads := new(sync.Mutex), new(int)
			return func() trainer.Job {
				j := smallJob()
				j.Data = drifting{counts{n: 40}, mu, reads, sample}
				return j
			}
		}, fmt.Sprintf(`^(worker \d+: )?sample %d of the data: step \d+: .*Sample\.Rand`, sample)},
	} {
		long := func(job func() trainer.Job) func() trainer.Job {
			return func() trainer.Job {
				j := job()
				j.Steps = 200
				return j
			}
		}
		for _, n := range []struct{ workers, stages int }{{1, 1}, {2, 1}, {2, 2}, {4, 2}} {
			t.Run(fmt.Sprintf("%s, %d workers, %d stages", c.name, n.workers, n.stages), func(t *testing.T) {
				if _, err := trainer.TryWorkers(t, n.workers, n.stages, control.Start{}, c.job()); err != nil {
					t.Errorf("without checks, the run ended with %v", err)
				}
				_, err := trainer.TryWorkers(t, n.workers, n.stages, control.Start{Verify: 1}, long(c.job()))
				if err == nil || !regexp.MustCompile(c.want).MatchString(err.Error()) {
					t.Errorf("the run ended with %v", err)
				}
			})
		}
	}
}

// Spot checks are on by default: the first step has one.
func TestSpotCheckByDefault(t *testing.T) {
	calls := 0
	job := withOdd(&odd{forward: func(_ *trainer.Context, x trainer.Tensor) {
		calls++
		x.F[0] = float32(calls)
	}})
	s, err := trainer.Run(context.Background(), job)
	if err == nil || !strings.Contains(err.Error(), `step 1: the output of layer "odd"`) || !strings.Contains(err.Error(), "in two runs on worker 0") || s.Steps != 0 {
		t.Errorf("after %d steps the run ended with %v", s.Steps, err)
	}
}

// Spot checks change no bits.
func TestSpotChecksSameBits(t *testing.T) {
	text := writeText(t, 4000)
	job := func() trainer.Job { return gptJob(t, text, 0.1) }
	want := trainer.RunWorkers(t, 1, 1, exact, job)[0]
	for _, c := range []struct {
		workers, stages int
		reduction       string
	}{{1, 1, "exact"}, {3, 1, "exact"}, {3, 2, "exact"}, {5, 3, "exact"}, {4, 2, "fast"}} {
		t.Run(fmt.Sprintf("%d workers, %d stages, %s", c.workers, c.stages, c.reduction), func(t *testing.T) {
			for i, got := range trainer.RunWorkers(t, c.workers, c.stages, control.Start{Reduction: c.reduction, Verify: 1}, job) {
				if c.reduction == "exact" && !trainer.SameHistory(got, want) {
					t.Errorf("worker %d: %+v, want %+v", i, got, want)
				}
			}
		})
	}
}
