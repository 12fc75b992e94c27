package sim

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"testing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/worker/core"
)

// until lets all happen until a worker is as described, and returns it.
func (c *Cluster) until(what string, is func(w *worker) bool) *worker {
	for !c.over {
		for _, w := range c.order {
			if w.alive && w.core != nil && is(w) {
				return w
			}
		}
		c.next()
	}
	c.violated("no worker is %s", what)
	return nil
}

// TestStories tells each story with several schedules, and checks how many workers were lost and joined.
func TestStories(t *testing.T) {
	after := func(step int) func(w *worker) bool {
		return func(w *worker) bool {
			at, _ := w.core.Passed()
			return at.Step == step
		}
	}
	within := func(w *worker) bool { return after(1)(w) && len(w.passes) > 0 }
	for name, story := range map[string]struct {
		tell         func(c *Cluster)
		lost, joined int
	}{
		"undisturbed":              {func(c *Cluster) {}, 0, 0},
		"killed in a forward pass": {func(c *Cluster) { c.kill(c.until("in step 2", within)) }, 1, 0},
		"killed in the commit": {func(c *Cluster) {
			c.kill(c.until("in the commit of step 2", func(w *worker) bool {
				_, entered := w.core.Exchanging()
				return entered && after(1)(w)
			}))
		}, 1, 0},
		"killed after it has passed": {func(c *Cluster) { c.kill(c.until("past step 3", after(3))) }, 1, 0},
		"killed as others are updating": {func(c *Cluster) {
			w := c.until("updating", func(w *worker) bool { return after(2)(w) && w.updating })
			w.slow = 1000
			c.kill(c.find((w.self.ID + 1) % 4))
			c.until("under a plan of three, and updating still", func(x *worker) bool {
				return x == w && len(w.core.Plan().Workers) == 3 && w.updating && w.core.State() == core.Working
			})
			w.slow = 0
		}, 1, 0},
		"killed in a recovery": {func(c *Cluster) {
			c.kill(c.until("in step 2", within))
			c.kill(c.until("sealed", func(w *worker) bool { return w.core.State() == core.Sealed }))
		}, 2, 0},
		"frozen": {func(c *Cluster) { c.Freeze(c.until("in step 2", within).self.ID, 2*c.cfg.Detect) }, 1, 0},
		"late": {func(c *Cluster) {
			w := c.until("in step 2", within)
			c.Late(w.self.ID, 40*ms)
			c.until("relieved", func(x *worker) bool {
				step, left, _ := w.core.Backlog()
				return x == w && w.core.Plan().InStep && step == 2 && left <= 1
			})
		}, 0, 0},
		"killed as it is relieved": {func(c *Cluster) {
			w := c.until("in step 2", within)
			c.Late(w.self.ID, 40*ms)
			c.until("sealed", func(w *worker) bool { return w.core.State() == core.Sealed })
			c.kill(w)
		}, 1, 0},
		"killed after others were relieved": {func(c *Cluster) {
			w := c.until("in step 2", within)
			c.Late(w.self.ID, 40*ms)
			c.kill(c.until("relieving", func(x *worker) bool { return x != w && x.core.Plan().InStep && x.core.State() == core.Working }))
		}, 1, 0},
		"killed as the leader is lost": {func(c *Cluster) {
			c.kill(c.until("in step 2", within))
			c.Lead()
		}, 1, 0},
		"a worker joins": {func(c *Cluster) {
			c.until("past step 1", after(1))
			c.Join()
			w := c.until("in a plan", func(w *worker) bool { return w.self.ID == 4 && len(w.core.Plan().Workers) > 0 })
			if at, _ := w.core.Passed(); len(w.core.Plan().Workers) != 5 || at.Gate != id.Committed {
				c.violated("%d workers at %v", len(w.core.Plan().Workers), at)
			}
		}, 0, 1},
		"a worker joins as the run is stopped": {func(c *Cluster) {
			c.until("past step 1", after(1))
			c.Join()
			c.until("about to join", func(w *worker) bool { return len(c.agreed) > 1 })
			c.Stop()
		}, 0, -1},
		"a link breaks as workers go over to a plan between two steps": {func(c *Cluster) {
			c.until("past step 1", after(1))
			c.Join()
			w := c.until("editing for the joiner's plan", func(w *worker) bool { return len(w.core.Plan().Workers) == 4 && w.editing != nil })
			c.Cut(w.self.ID, (w.self.ID+1)%4, 5*ms)
		}, 0, 1},
		"a worker leaves": {func(c *Cluster) {
			c.Leave(c.until("past step 1", after(1)).self.ID)
			c.until("under a plan of three", func(w *worker) bool { return len(w.core.Plan().Workers) == 3 })
		}, 0, 0},
		"a link breaks, and its ends live": {func(c *Cluster) {
			w := c.until("in step 2", within)
			c.Cut(w.self.ID, (w.self.ID+1)%4, 20*ms)
		}, 0, 0},
		"a block is altered": {func(c *Cluster) {
			c.until("altered in step 2", func(w *worker) bool { return within(w) && w.flip(1) })
			c.until("in the repair", func(w *worker) bool {
				at, _ := w.core.Passed()
				return at.Repair == 1
			})
		}, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(20) {
				c := New(Config{
					Seed: seed, Workers: 4, Stages: 2, Micros: 6, Mirrors: 1, Steps: 6, Evaluate: 2, MinWorkers: 1, Layers: layers(), Detect: 300 * ms, Digests: true, Verify: 1,
				})
				if err := run(c, story.tell); err != nil {
					t.Fatal(fmt.Errorf("seed %d: %w", seed, err))
				}
				sum := c.session.Outcome().Summary
				if sum.WorkersLost != story.lost || sum.WorkersJoined != story.joined && story.joined >= 0 {
					t.Errorf("seed %d: %d workers lost and %d joined, want %d and %d", seed, sum.WorkersLost, sum.WorkersJoined, story.lost, story.joined)
				}
			}
		})
	}
}

// TestRunsHaveAll holds that random schedules have every event and duty of the core but the two events that end a worker
// with an error.
func TestRunsHaveAll(t *testing.T) {
	seen := map[string]bool{"core.Abandon": true, "core.Failed": true}
	for seed := range uint64(800) {
		c, err := try(seed, false)
		if err != nil {
			t.Fatal(err)
		}
		for x := range c.seen {
			seen[x.String()] = true
		}
	}
	for _, from := range []struct{ file, function, cases string }{
		{"core/worker.go", "func (w *Worker) Step(", `(?m)^\tcase ((?:control\.)?[A-Z]\w+):$`},
		{"engine/engine.go", "func (e *Engine) perform(", `(?m)^\tcase (?:core\.)?((?:control\.)?[A-Z]\w+):$`},
	} {
		text, err := os.ReadFile("../worker/" + from.file)
		if err != nil {
			t.Fatal(err)
		}
		_, text, _ = bytes.Cut(text, []byte(from.function))
		all := regexp.MustCompile(from.cases).FindAllStringSubmatch(string(text), -1)
		if len(all) < 20 {
			t.Errorf("%s tells %d events or duties apart", from.file, len(all))
		}
		for _, m := range all {
			if !seen[m[1]] && !seen["core."+m[1]] {
				t.Errorf("no run has a %s", m[1])
			}
		}
	}
}

// FuzzRuns draws a schedule from the input, and from a generator when that is used up.
func FuzzRuns(f *testing.F) {
	f.Add([]byte{4, 1, 2, 2, 0, 1})
	f.Add([]byte("kill, join, leave, break, alter"))
	f.Fuzz(func(t *testing.T, input []byte) {
		seed := uint64(len(input))
		c, text := schedule(rand.New(&script{input, rand.NewPCG(seed, 3)}), seed, false)
		if err := run(c, nil); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	})
}

// script is a source whose numbers begin with the bytes of an input.
type script struct {
	input []byte
	rest  rand.Source
}

func (s *script) Uint64() uint64 {
	x := s.rest.Uint64()
	if len(s.input) > 0 {
		x = x>>8 | uint64(s.input[0])<<56
		s.input = s.input[1:]
	}
	return x
}
