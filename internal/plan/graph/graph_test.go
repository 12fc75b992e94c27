package graph

import (
	"errors"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// even returns a pipeline of stages with ranks workers each, in which rank i
// has the i-th run of micro-batches.
func even(stages, ranks, micros, limit int, forward, backward time.Duration) Step {
	s := Step{Workers: stages * ranks, Micros: micros, Time: func(t Task, _ int) time.Duration {
		switch t.Kind {
		case Forward:
			return forward
		case Backward:
			return backward
		}
		return 0
	}}
	for i := range stages {
		st := Stage{Lo: i, Hi: i + 1}
		for r := range ranks {
			st.Workers = append(st.Workers, i*ranks+r)
			st.Limits = append(st.Limits, limit)
		}
		for m := range micros {
			st.Route = append(st.Route, i*ranks+m*ranks/micros)
		}
		s.Stages = append(s.Stages, st)
	}
	return s
}

func simulate(t require, s Step) (*Graph, Schedule) {
	g, err := New(s)
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	sched, err := g.Simulate()
	if err != nil {
		t.Fatalf("Simulate: %v", err)
	}
	return g, sched
}

type require interface{ Fatalf(string, ...any) }

// TestEvenPipeline: 1F1B over equal stages takes (M + S - 1)(f + b).
func TestEvenPipeline(t *testing.T) {
	for _, c := range []struct{ stages, ranks, micros int }{{1, 1, 1}, {1, 3, 6}, {2, 1, 4}, {4, 1, 8}, {3, 2, 12}, {8, 1, 32}} {
		_, s := simulate(t, even(c.stages, c.ranks, c.micros, 0, 2, 3))
		if want := time.Duration(c.micros/c.ranks+c.stages-1) * 5; s.Makespan != want {
			t.Errorf("%+v: %d, want %d", c, s.Makespan, want)
		}
		for w := range s.Busy {
			if want := time.Duration(c.micros/c.ranks) * 5; s.Busy[w] != want || s.Idle[w] != s.Makespan-want {
				t.Errorf("%+v: worker %d busy for %d, idle for %d", c, w, s.Busy[w], s.Idle[w])
			}
		}
	}
}

func TestWholeStep(t *testing.T) {
	// Two layers in two stages of one worker, one micro-batch; worker 1
	// mirrors the shard of worker 0.
	s := even(2, 1, 1, 0, 2, 3)
	s.Shards = []Shard{{Layer: 0, Owner: 0, Mirrors: []int{1}}, {Layer: 1, Owner: 1}}
	passes := s.Time
	s.Time = func(t Task, w int) time.Duration {
		switch t.Kind {
		case Reduce:
			return 10
		case Commit:
			return 1
		case Update:
			return 100
		case Gather:
			return 1000
		}
		return passes(t, w)
	}
	s.Delay = func(t Task, from, to int) time.Duration { return 20 }
	g, sched := simulate(t, s)
	// gather, F0, hop, F1, B1, hop, B0, reduce, commit, hop to worker 1 and
	// two updates there.
	if want := time.Duration(1000 + 2 + 20 + 2 + 3 + 20 + 3 + 10 + 1 + 20 + 200); sched.Makespan != want {
		t.Errorf("makespan %d, want %d", sched.Makespan, want)
	}
	var names []string
	for _, n := range sched.Critical {
		names = append(names, g.Nodes[n].Task.String())
	}
	if want := []string{"gather(0)", "F(0,0)", "F(1,0)", "B(1,0)", "B(0,0)", "reduce(0,0)", "commit", "update(0,0)", "update(1,1)"}; !slices.Equal(names, want) {
		t.Errorf("critical %v, want %v", names, want)
	}
	if _, length := criticalPath(g); length != sched.Makespan-100 {
		t.Errorf("critical path %d, want all but the wait for the other update", length)
	}
}

// TestGatherUnderForward: the parameters of a later layer may come while
// earlier ones are in use.
func TestGatherUnderForward(t *testing.T) {
	s := even(1, 1, 1, 0, 30, 0)
	s.Stages[0].Hi = 3 // three layers of 10 each
	s.Shards = []Shard{{Layer: 0}, {Layer: 1}, {Layer: 2}}
	passes := s.Time
	s.Time = func(t Task, w int) time.Duration {
		if t.Kind == Gather {
			return 8
		}
		return passes(t, w)
	}
	s.Into = func(layer, _ int) time.Duration { return time.Duration(layer) * 10 }
	if _, sched := simulate(t, s); sched.Makespan != 38 {
		t.Errorf("makespan %d, want 8 for the first layer and 30", sched.Makespan)
	}
	s.Into = nil
	if _, sched := simulate(t, s); sched.Makespan != 54 {
		t.Errorf("makespan %d, want 24 for all layers and 30", sched.Makespan)
	}
}

func TestImpossibleSteps(t *testing.T) {
	for what, spoil := range map[string]func(*Step){
		"no stage":         func(s *Step) { s.Stages = nil },
		"short route":      func(s *Step) { s.Stages[0].Route = s.Stages[0].Route[1:] },
		"foreign worker":   func(s *Step) { s.Stages[0].Route[0] = 9 },
		"negative worker":  func(s *Step) { s.Stages[0].Workers[0] = -1 },
		"limits":           func(s *Step) { s.Stages[0].Limits = nil },
		"foreign owner":    func(s *Step) { s.Shards = []Shard{{Owner: 2}} },
		"no micro-batches": func(s *Step) { s.Micros = 0 },
	} {
		s := even(2, 1, 2, 0, 1, 1)
		spoil(&s)
		if _, err := New(s); err == nil {
			t.Errorf("%s: accepted", what)
		}
	}
	g, err := New(even(1, 1, 2, 0, 1, 1))
	if err != nil {
		t.Fatal(err)
	}
	g.Edges[0].To = 0 // the first task waits for itself
	if _, err := g.Simulate(); !errors.Is(err, ErrStuck) {
		t.Errorf("error %v, want ErrStuck", err)
	}
}

// TestScheduleIsValid holds schedules of random steps against the rules.
func TestScheduleIsValid(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := Step{Micros: rapid.IntRange(1, 10).Draw(t, "micros"), Workers: rapid.IntRange(1, 6).Draw(t, "workers")}
		worker := rapid.IntRange(0, s.Workers-1)
		for i := range rapid.IntRange(1, 4).Draw(t, "stages") {
			st := Stage{Lo: i, Hi: i + 1, Workers: rapid.SliceOfNDistinct(worker, 1, s.Workers, rapid.ID).Draw(t, "of stage")}
			for range st.Workers {
				st.Limits = append(st.Limits, rapid.IntRange(0, 4).Draw(t, "limit"))
			}
			for range s.Micros {
				st.Route = append(st.Route, rapid.SampledFrom(st.Workers).Draw(t, "route"))
			}
			s.Stages = append(s.Stages, st)
			s.Shards = append(s.Shards, Shard{Layer: i, Owner: worker.Draw(t, "owner"), Mirrors: []int{}})
		}
		times := rapid.SliceOfN(rapid.IntRange(0, 5), 20, 20).Draw(t, "times")
		s.Time = func(t Task, w int) time.Duration {
			return time.Duration(times[(int(t.Kind)*7+t.Stage*5+t.Micro*3+w)%20])
		}
		s.Into = func(layer, w int) time.Duration { return time.Duration(times[(layer+w)%20]) }
		s.Delay = func(t Task, from, to int) time.Duration { return time.Duration(times[(from+to)%20]) }
		g, sched := simulate(t, s)
		if _, again := simulate(t, s); !slices.Equal(again.Begin, sched.Begin) || !slices.Equal(again.Critical, sched.Critical) {
			t.Fatalf("two simulations differ")
		}
		for _, e := range g.Edges {
			if !e.Late && sched.Begin[e.To] < sched.End[e.From]+e.Lag || sched.End[e.To] < sched.End[e.From]+e.Lag {
				t.Fatalf("%v begins at %d, before %v ends at %d + %d", g.Nodes[e.To].Task, sched.Begin[e.To], g.Nodes[e.From].Task, sched.End[e.From], e.Lag)
			}
		}
		type laneOf struct {
			worker int
			moves  bool
		}
		byLane := map[laneOf][]int{}
		for n, node := range g.Nodes {
			l := laneOf{node.Worker, node.Kind == Reduce || node.Kind == Gather}
			byLane[l] = append(byLane[l], n)
		}
		for l, nodes := range byLane {
			slices.SortFunc(nodes, func(a, b int) int {
				return int(sched.Begin[a]+sched.End[a]) - int(sched.Begin[b]+sched.End[b])
			})
			for i := range nodes[1:] {
				if sched.End[nodes[i]] > sched.Begin[nodes[i+1]] {
					t.Fatalf("worker %d runs two tasks at a time", l.worker)
				}
			}
		}
		path, length := criticalPath(g)
		if length > sched.Makespan {
			t.Fatalf("critical path %d is longer than the makespan %d", length, sched.Makespan)
		}
		var sum time.Duration
		for i, n := range path {
			sum += g.Nodes[n].Time
			if i > 0 {
				for _, e := range g.from(path[i-1]) {
					if e.To == n {
						sum += e.Lag
						if e.Late {
							sum -= g.Nodes[n].Time // the lag counts to its end
						}
						break
					}
				}
			}
		}
		if sum != length {
			t.Fatalf("critical path adds up to %d, not %d", sum, length)
		}
		if last := sched.Critical[len(sched.Critical)-1]; sched.End[last] != sched.Makespan || sched.Begin[sched.Critical[0]] != 0 {
			t.Fatalf("the critical chain does not span the step")
		}
	})
}

// criticalPath returns the longest chain of tasks and its length: the time
// of the step if no task ever waited for a worker.
func criticalPath(g *Graph) (nodes []int, length time.Duration) {
	ready := newInputs(g)
	end := -1
	for n, node := range g.Nodes {
		done, cause := ready.end(n, ready.at[n]+node.Time)
		ready.cause[n] = cause
		if end < 0 || done > length {
			end, length = n, done
		}
		for _, e := range g.from(n) {
			ready.add(e, done)
		}
	}
	return chain(ready.cause, end), length
}
