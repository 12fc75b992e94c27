package core

import (
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
)

// until lets all happen until a worker is as described.
func (s *sim) until(what string, is func(n *node) bool) *node {
	s.t.Helper()
	for {
		if i := slices.IndexFunc(s.nodes, is); i >= 0 {
			return s.nodes[i]
		}
		if !s.tick() {
			s.stuck("no worker is " + what)
		}
	}
}

// finished checks that the run has come to its end with so many workers.
func (s *sim) finished(workers int) {
	s.t.Helper()
	s.settle()
	if s.ended || len(s.nodes) != workers {
		s.t.Fatalf("%d workers are left, want %d; ended by the controller: %v", len(s.nodes), workers, s.ended)
	}
	for _, n := range s.nodes {
		if want := (id.Point{Step: s.job.steps, Gate: id.Kept}); n.w.passed.Step != want.Step || n.w.passed.Gate != want.Gate {
			s.t.Errorf("worker %v is at %v, want %v", n.session(), n.w.passed, want)
		}
	}
}

// Each story is told with several schedules.
func TestStories(t *testing.T) {
	job := form{workers: 4, stages: 2, mirrors: 1, layers: 4, micros: 6, steps: 5, digests: true}
	for name, tell := range map[string]func(s *sim){
		"undisturbed": func(s *sim) { s.finished(4) },
		"killed in a forward pass": func(s *sim) {
			s.kill(s.until("in step 2", func(n *node) bool { return n.w.passed.Step == 1 && n.w.busy == onPass }), "killed")
			s.finished(3)
		},
		"killed in the commit": func(s *sim) {
			s.kill(s.until("in the commit of step 2", func(n *node) bool {
				_, entered := n.w.Exchanging()
				return entered && n.w.passed.Step == 1
			}), "killed")
			s.finished(3)
		},
		"killed after it has passed": func(s *sim) {
			s.kill(s.until("past step 3", func(n *node) bool { return n.w.passed.Step == 3 }), "killed")
			s.finished(3)
		},
		"killed in a recovery": func(s *sim) {
			s.kill(s.until("in step 2", func(n *node) bool { return n.w.passed.Step == 1 && n.w.busy == onPass }), "killed")
			s.kill(s.until("sealed", func(n *node) bool { return n.w.state == Sealed }), "killed, too")
			s.settle()
		},
		"a worker joins, and its state comes before its plan": func(s *sim) {
			s.until("past step 1", func(n *node) bool { return n.w.passed.Step == 1 })
			s.join(9)
			n := s.until("in a plan", func(n *node) bool { return n.self.ID == 9 && len(n.w.plan.Workers) > 0 })
			if len(n.w.plan.Workers) != 5 || n.w.passed.Gate != id.Committed {
				s.t.Errorf("%d workers at %v", len(n.w.plan.Workers), n.w.passed)
			}
			s.finished(5)
		},
		"a worker leaves": func(s *sim) {
			n := s.until("past step 1", func(n *node) bool { return n.w.passed.Step == 1 })
			s.control(controller.Leaving{Worker: n.self})
			s.until("under a plan of three", func(n *node) bool { return len(n.w.plan.Workers) == 3 })
			s.settle()
		},
		"a link breaks, and its ends live": func(s *sim) {
			n := s.until("in step 2", func(n *node) bool { return n.w.passed.Step == 1 && n.w.busy == onPass })
			i := slices.Index(s.nodes, n)
			other := s.nodes[(i+1)%len(s.nodes)]
			s.lose(n.session(), other.session())
			s.control(controller.LinkLost{From: n.self, To: other.self})
			s.settle()
		},
		"a block is altered": func(s *sim) {
			s.until("in step 2", func(n *node) bool { return n.w.passed.Step == 1 && n.w.busy == onPass }).offends = true
			s.until("in the repair", func(n *node) bool { return n.w.passed.Repair == 1 })
			s.finished(4)
		},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(20) {
				r := rand.New(rand.NewPCG(seed, 1))
				t.Run(fmt.Sprint(seed), func(t *testing.T) { tell(newSim(t, job, r.IntN)) })
			}
		})
	}
}

// random runs a job of a drawn form, with drawn faults, and lets it come to its end without further ones.
func random(t testing.TB, draw func(n int) int) *sim {
	job := form{
		workers: 1 + draw(5), mirrors: draw(3), layers: 3, micros: 4 + draw(4), steps: 3 + draw(4), digests: draw(2) == 0,
	}
	job.stages = 1 + draw(min(job.workers, 3))
	job.mirrors = min(job.mirrors, job.workers-1)
	s := newSim(t, job, draw)
	next := 10
	for range draw(12) {
		for range 1 + draw(120) {
			if s.over() || !s.tick() {
				break
			}
		}
		if s.over() {
			break
		}
		switch n := s.pick(); draw(6) {
		case 0, 1:
			s.kill(n, "killed")
		case 2:
			s.join(id.WorkerID(next))
			next++
		case 3:
			s.control(controller.Leaving{Worker: n.self})
		case 4:
			if other := s.pick(); other != n && !n.left && !other.left {
				s.lose(n.session(), other.session())
				s.control(controller.LinkLost{From: n.self, To: other.self})
			}
		case 5:
			if n.offends = job.digests; !n.offends { // its host is cut off for a while
				n.step(Hold{On: true})
			}
		}
	}
	for _, n := range slices.Clone(s.nodes) {
		n.step(Hold{})
	}
	s.settle()
	return s
}

// Random runs keep what the sim checks: one result for each point, every micro-batch counted once, no point passed while sealed, and
// progress once faults end.
func TestRandomRuns(t *testing.T) {
	runs := uint64(3000)
	if testing.Short() {
		runs = 30
	}
	for seed := range runs {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { random(t, rand.New(rand.NewPCG(seed, 2)).IntN) })
	}
}

// Runs as the fuzzer draws them have every event and duty but the two events that end a worker with an error.
func TestRandomRunsHaveAll(t *testing.T) {
	seen := map[string]int{"core.Abandon": 1, "core.Failed": 1}
	for seed := range uint64(200) {
		for what, times := range random(t, rand.New(rand.NewPCG(seed, 4)).IntN).seen {
			seen[what] += times
		}
	}
	for file, method := range map[string]string{"event.go": "event", "duty.go": "duty"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		all := regexp.MustCompile(`(?m)^func \((\w+)\) `+method+`\(\)`).FindAllStringSubmatch(string(text), -1)
		if len(all) == 0 {
			t.Errorf("%s has no type with the method %s", file, method)
		}
		for _, m := range all {
			if seen["core."+m[1]] == 0 {
				t.Errorf("no run had a %s", m[1])
			}
			t.Logf("%s: %d", m[1], seen["core."+m[1]])
		}
	}
}

// FuzzRuns draws what happens from the input, and from a generator when that is used up.
func FuzzRuns(f *testing.F) {
	f.Add([]byte{4, 1, 2, 2, 0, 1})
	f.Add([]byte("kill, join, leave, break, alter"))
	f.Fuzz(func(t *testing.T, input []byte) {
		if len(input) > 1<<12 {
			t.Skip("long")
		}
		r := rand.New(rand.NewPCG(uint64(len(input)), 3))
		random(t, func(n int) int {
			if len(input) > 0 && n <= 256 {
				x := int(input[0]) % n
				input = input[1:]
				return x
			}
			return r.IntN(n)
		})
	})
}
