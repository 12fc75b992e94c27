package trainer_test

import (
	"fmt"
	"math"
	"runtime"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/trainer"
)

var exact = control.Start{Reduction: "exact"}

// However many workers and stages there are, and wherever complete gradients
// are kept, the bits are those of one worker.
func TestWorkersSameBits(t *testing.T) {
	text := writeText(t, 4000)
	job := func() trainer.Job {
		j := gptJob(t, text, 0.1)
		return j
	}
	want := trainer.RunWorkers(t, 1, 1, exact, job)[0]
	for _, c := range []struct{ workers, stages, zero int }{
		{2, 1, 2}, {2, 2, 2}, {3, 2, 2}, {4, 2, 2}, {3, 3, 2}, {5, 3, 2}, {8, 4, 2},
		{1, 1, 1}, {3, 1, 1}, {5, 2, 1}, {6, 1, 1},
	} {
		t.Run(fmt.Sprintf("%d workers, %d stages, ZeRO %d", c.workers, c.stages, c.zero), func(t *testing.T) {
			for i, got := range trainer.RunWorkers(t, c.workers, c.stages, control.Start{Reduction: "exact", Zero: c.zero}, job) {
				if !trainer.SameHistory(got, want) {
					t.Errorf("worker %d: %+v, want %+v", i, got, want)
				}
			}
		})
	}
}

// Without one gradient of one micro-batch the bits are others, so the test
// above would see it.
func TestDroppedGradientChangesTheBits(t *testing.T) {
	text := writeText(t, 4000)
	const layer, first = 1, 6
	job := func() trainer.Job { return gptJob(t, text, 0.1) }
	want := trainer.RunWorkers(t, 3, 2, exact, job)
	got := trainer.RunWorkers(t, 3, 2, exact, func() trainer.Job {
		j := job()
		j.Model.Layers[layer] = trainer.WithoutGradient{Layer: j.Model.Layers[layer], First: first}
		return j
	})
	for i := range got {
		if got[i].Done.ParamsSHA256 == want[i].Done.ParamsSHA256 || got[i].Done.StateSHA256 == want[i].Done.StateSHA256 {
			t.Errorf("worker %d: the hashes are the same without the gradient of a micro-batch", i)
		}
		if got[i].Steps[0].Loss != want[i].Steps[0].Loss || got[i].Steps[0].GradNorm == want[i].Steps[0].GradNorm {
			t.Errorf("worker %d: the gradient was not lost in step 1 alone", i)
		}
	}
}

// Fast reduction changes the results by roundings only, and all workers of a
// run still agree.
func TestFastReduction(t *testing.T) {
	text := writeText(t, 4000)
	job := func() trainer.Job { return gptJob(t, text, 0.1) }
	want := trainer.RunWorkers(t, 1, 1, exact, job)[0]
	near := func(a, b float64) bool { return math.Abs(a-b) <= 1e-4*math.Abs(b) }
	for _, c := range []struct{ workers, stages, zero int }{{1, 1, 2}, {2, 1, 2}, {3, 2, 1}, {5, 2, 2}, {8, 1, 1}} {
		t.Run(fmt.Sprintf("%d workers, %d stages, ZeRO %d", c.workers, c.stages, c.zero), func(t *testing.T) {
			all := trainer.RunWorkers(t, c.workers, c.stages, control.Start{Reduction: "fast", Zero: c.zero}, job)
			for i, got := range all {
				if !trainer.SameHistory(got, all[0]) {
					t.Errorf("worker %d disagrees with worker 0: %+v and %+v", i, got, all[0])
				}
			}
			if len(all[0].Steps) != len(want.Steps) {
				t.Fatalf("%d steps", len(all[0].Steps))
			}
			for i, s := range all[0].Steps {
				w := want.Steps[i]
				if !near(s.Loss, w.Loss) || !near(s.GradNorm, w.GradNorm) || s.LR != w.LR || s.Tokens != w.Tokens || s.ValLoss != nil && !near(*s.ValLoss, *w.ValLoss) {
					t.Errorf("step %d: %+v, want near %+v", s.Step, s, w)
				}
			}
		})
	}
}

// slowly takes a while for each sample, without sleeping.
type slowly struct{ counts }

func (d slowly) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	for began := time.Now(); time.Since(began) < time.Millisecond; {
		runtime.Gosched()
	}
	return d.counts.Sample(s, in, target)
}

// Workers tell for how long their steps have waited for samples, some of which are read ahead.
func TestReadingIsMeasured(t *testing.T) {
	job := func() trainer.Job {
		j := smallJob()
		j.Data = slowly{counts{n: 40}}
		return j
	}
	var all int64
	for _, s := range trainer.RunWorkers(t, 1, 1, exact, job)[0].Steps {
		if all += s.Reading; s.Reading < 0 || float64(s.Reading) > s.MS*1e6 {
			t.Errorf("step %d of %v ms waited for %d ns", s.Step, s.MS, s.Reading)
		}
	}
	if least := int64(job().GlobalBatch) * time.Millisecond.Nanoseconds(); all < least {
		t.Errorf("all steps waited for %d ns, want %d or more", all, least)
	}
}
