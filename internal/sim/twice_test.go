package sim

import (
	"fmt"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// Two workers read a sample, one after the other, pass on what comes of it, and are lost in the same step; then no worker can read it.
// What the first has passed on was compared with what the second has made, and must be compared again with what is made of the next sample.
func TestSamplesReadByTwo(t *testing.T) {
	const step, micro = 2, 3
	skipped, repaired := 0, 0
	for seed := range uint64(150) {
		bad := false
		cfg := Config{
			Seed: seed, Workers: 9, Stages: 3, Micros: maxMicros, Mirrors: 2, Steps: 4, MinWorkers: 1, Layers: layers(), Detect: 300 * ms, Digests: true,
		}
		sample := uint64(((step-1)*cfg.Micros + micro) * microBatch)
		numbers := func(i uint64, skips int) (int, bool) { return 10*int(i) + skips, !bad || i != sample || skips > 0 }
		cfg.Samples = func() Reader { return numbers }
		c := New(cfg)
		c.Watch = func(e session.Effect) {
			if e, ok := e.(session.WriteEvent); ok && e.Event.Kind == "repaired" {
				repaired++
			}
		}
		err := run(c, func(c *Cluster) {
			for range 2 {
				reader := c.until("through the sample", func(w *worker) bool { return w.reads.read[sample] })
				c.until("behind it", func(w *worker) bool {
					_, has := w.tensors[key.Tensor{Boundary: 1, Micro: micro}]
					return has && w != reader
				})
				for until := c.now.Add(c.delay(ms)); c.now.Before(until) && !c.over; {
					c.next()
				}
				c.kill(reader)
			}
			bad = true
		})
		switch {
		case err == nil:
			_, err = c.audit(func(i uint64, skips int) (int, bool) {
				number, _ := numbers(i, skips)
				return number, i != sample || skips > 0 || c.skipped(sample) == 0
			})
		case strings.Contains(err.Error(), "bad sector"): // a worker of the last stage has read it and could go on, and all others fail
			err = nil
		}
		if err != nil {
			t.Error(fmt.Errorf("seed %d: %w", seed, err))
		}
		skipped += len(c.books.skips)
	}
	if skipped < 50 || repaired < 50 {
		t.Errorf("%d samples are skipped, and workers find %d tensors that are not what is computed again", skipped, repaired)
	}
}
