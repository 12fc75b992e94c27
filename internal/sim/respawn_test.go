package sim

import (
	"fmt"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/worker/core"
)

// TestRespawn tells stories in which lost workers are replaced: the run goes on to its end, whatever is lost at a time.
func TestRespawn(t *testing.T) {
	committed := func(c *Cluster, step int) {
		c.until(fmt.Sprintf("past step %d", step), func(w *worker) bool {
			at, _ := w.core.Passed()
			return at.Step >= step
		})
	}
	for name, story := range map[string]struct {
		tell func(c *Cluster)
		lost int // at least; 0: none is
	}{
		"all are killed": {func(c *Cluster) {
			committed(c, 3)
			c.KillAll()
		}, 4},
		"all and their replacements are killed": {func(c *Cluster) {
			for range 5 {
				committed(c, 1)
				c.KillAll()
			}
		}, 8},
		"the replacements are killed before they have a part": {func(c *Cluster) {
			committed(c, 3)
			n := 5
			c.Watch = func(e session.Effect) {
				if s, ok := e.(session.Send); ok && n > 0 {
					if q, ok := s.Message.(control.Query); ok {
						n--
						c.note("ballot %v is answered by none", q.Ballot)
						c.after(0, c.KillAll)
					}
				}
			}
			c.KillAll()
		}, 4},
		"one is killed at the start":  {func(c *Cluster) { c.Kill(2) }, 1},
		"all are killed at the start": {func(c *Cluster) { c.KillAll() }, 4},
		"all are frozen": {func(c *Cluster) {
			committed(c, 2)
			c.FreezeAll(3 * time.Second)
		}, 0},
		"all are frozen at the start": {func(c *Cluster) { c.FreezeAll(3 * time.Second) }, 0},
		"one is killed, and the others are frozen": {func(c *Cluster) {
			committed(c, 2)
			c.Kill(1)
			c.FreezeAll(3 * time.Second)
		}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(20) {
				c := New(Config{
					Seed: seed, Workers: 4, Stages: 2, Micros: 6, Mirrors: 1, Steps: 6, MinWorkers: 1, Layers: layers(), Detect: 300 * ms,
					Respawn: true, Checkpoint: time.Duration(seed%2) * 3 * ms, Digests: true,
				})
				if err := run(c, story.tell); err != nil {
					t.Fatal(fmt.Errorf("seed %d: %w", seed, err))
				}
				out := c.session.Outcome()
				if out.Err != nil {
					t.Fatalf("seed %d: %v, %+v", seed, out.Err, out.Summary)
				}
				if lost := out.Summary.WorkersLost; lost < story.lost || story.lost == 0 && lost > 0 {
					t.Errorf("seed %d: %d workers were lost", seed, lost)
				}
			}
		})
	}
}

// TestLeaveIsCancelled kills the only worker that stays after the plan without the other one is agreed. As long as the other one
// is there, the run goes on with it: with all that it has until it has left, and by a rollback after that.
func TestLeaveIsCancelled(t *testing.T) {
	stayed, left := 0, 0
	for seed := range uint64(60) {
		c := New(Config{
			Seed: seed, Workers: 2, Stages: 1 + int(seed%2), Micros: 6, Mirrors: 1, Steps: 8, MinWorkers: 1, Layers: layers(), Detect: 300 * ms, Digests: seed%4 < 2,
		})
		leaving, dismissed := c.order[1], false
		c.Watch = func(e session.Effect) {
			if s, ok := e.(session.Send); ok && s.Worker == 1 {
				_, release := s.Message.(control.Release)
				dismissed = dismissed || release
			}
		}
		err := run(c, func(c *Cluster) {
			c.until("past step 1", func(w *worker) bool {
				at, _ := w.core.Passed()
				return at.Step == 1
			})
			c.Leave(1)
			c.until("ordered to leave", func(w *worker) bool { return len(c.agreed) > 1 })
			c.until("at the commit from which on the plan is live", func(w *worker) bool {
				return w == leaving && (w.core.State() == core.Draining || w.core.State() == core.Left || c.rnd.IntN(50) == 0)
			})
			c.after(c.delay(ms/10), func() { c.Kill(0) })
		})
		out := c.session.Outcome()
		switch {
		case err != nil:
			t.Errorf("seed %d: %v", seed, err)
		case out.Err != nil && !dismissed:
			t.Errorf("seed %d: %v", seed, out.Err)
		case out.Err == nil && out.Summary.Rollbacks > 0:
			left++
		case out.Err == nil:
			stayed++
		}
	}
	if stayed < 10 || left < 3 {
		t.Errorf("the worker that was to leave stayed in %d of 60 runs, and rolled %d back", stayed, left)
	}
}

// TestJoinerJoinsAgain kills a worker as the first plan of another one goes live. If the joiner had not begun, the run goes on
// without it, and it joins again: it did nothing wrong, and was asked for.
func TestJoinerJoinsAgain(t *testing.T) {
	again := 0
	for seed := range uint64(120) {
		c := New(Config{
			Seed: seed, Workers: 4, Stages: 1 + int(seed%2), Micros: 8, Mirrors: 1, Steps: 12, MinWorkers: 1, Layers: layers(), Detect: 300 * ms, Digests: true,
		})
		fenced := false
		c.Watch = func(e session.Effect) {
			_, ok := e.(session.FenceWorker)
			fenced = fenced || ok
		}
		if err := run(c, func(c *Cluster) {
			c.until("past step 1", func(w *worker) bool {
				at, _ := w.core.Passed()
				return at.Step == 1
			})
			c.Join()
			c.until("about to get a fifth", func(w *worker) bool { return len(c.agreed) > 1 })
			for w := range id.WorkerID(4) { // what the joiner needs is late
				c.Cut(w, 4, 20*ms)
			}
			first := c.until("under the joiner's plan", func(w *worker) bool { return w.self.ID < 4 && len(w.core.Plan().Workers) == 5 })
			c.Kill((first.self.ID + id.WorkerID(seed/2%4)) % 4)
		}); err != nil {
			t.Errorf("seed %d: %v", seed, err)
			continue
		}
		switch sum := c.session.Outcome().Summary; {
		case sum.WorkersLost == 2 && (!fenced || sum.WorkersJoined != 2):
			t.Errorf("seed %d: of 2 workers lost %d have joined, fenced: %t", seed, sum.WorkersJoined, fenced)
		case fenced:
			again++
		}
	}
	if again < 3 {
		t.Errorf("%d of 120 joiners had not begun", again)
	}
}
