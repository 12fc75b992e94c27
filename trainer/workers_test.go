package trainer_test

import (
	"fmt"
	"testing"

	"github.com/soliton-train/soliton/trainer"
)

// However many workers and stages there are, the bits are those of one.
func TestWorkersSameBits(t *testing.T) {
	text := writeText(t, 4000)
	job := func() trainer.Job {
		j := gptJob(t, text, 0.1)
		return j
	}
	want := trainer.RunWorkers(t, 1, 1, job)[0]
	for _, c := range []struct{ workers, stages int }{{2, 1}, {2, 2}, {3, 2}, {4, 2}, {3, 3}, {5, 3}, {8, 4}} {
		t.Run(fmt.Sprintf("%d workers, %d stages", c.workers, c.stages), func(t *testing.T) {
			for i, got := range trainer.RunWorkers(t, c.workers, c.stages, job) {
				if !trainer.SameHistory(got, want) {
					t.Errorf("worker %d: %+v, want %+v", i, got, want)
				}
			}
		})
	}
}
