package graph

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func f(stage, micro int) Task { return ForwardOf(Pair{stage, micro}) }
func b(stage, micro int) Task { return BackwardOf(Pair{stage, micro}) }

// begins takes all tasks that can begin now.
func begins(q *Queue) (ts []Task) {
	for {
		t, ok := q.Next()
		if !ok {
			return ts
		}
		ts = append(ts, t)
	}
}

func want(t *testing.T, what string, got []Task, wanted ...Task) {
	t.Helper()
	if !slices.Equal(got, wanted) {
		t.Errorf("%s: begins %v, want %v", what, got, wanted)
	}
}

func TestLimitAndOrder(t *testing.T) {
	q := NewQueue(2, 1)
	for m := range 5 {
		q.Assign(Pair{0, m})
	}
	for _, m := range []int{4, 1, 3} {
		q.Arrive(f(0, m))
	}
	want(t, "lowest whose input is there, up to stages - s", begins(q), f(0, 1), f(0, 3))
	q.Arrive(f(0, 0))
	want(t, "limit reached", begins(q))
	q.Done(f(0, 1))
	q.Done(f(0, 3))
	q.Arrive(b(0, 3))
	q.Arrive(b(0, 1))
	want(t, "backward, lowest first; a place is free when it is done", begins(q), b(0, 1), b(0, 3))
	q.SetLimit(0, 1, 0) // below stages - s: stays 2
	q.Done(b(0, 1))
	want(t, "the one that came later is lower", begins(q), f(0, 0))
	q.SetLimit(0, 3, 0)
	want(t, "a raised limit", begins(q), f(0, 4))
	if q.Left() != 4 || q.inFlight[0] != 3 {
		t.Errorf("%d left, %d in flight", q.Left(), q.inFlight[0])
	}
}

// before ranks some pairs before all others.
func before(pairs ...Pair) func(Pair) int {
	return func(p Pair) int {
		if slices.Contains(pairs, p) {
			return -1
		}
		return 0
	}
}

func TestRank(t *testing.T) {
	q := NewQueue(2, 1)
	for m := range 4 {
		q.Assign(Pair{0, m})
		q.Assign(Pair{1, m})
	}
	for m := range 3 {
		q.Arrive(f(0, m))
		q.Arrive(f(1, m))
	}
	q.Rank(before(Pair{0, 2}, Pair{0, 3}, Pair{1, 1}))
	want(t, "preferred, of whatever stage, within the limits", begins(q), f(1, 1), f(0, 2), f(0, 0))
	q.Done(f(1, 1))
	q.Arrive(b(1, 1))
	want(t, "backward first", begins(q), b(1, 1))
	q.Done(b(1, 1))
	q.Rank(nil)
	want(t, "not preferred any more", begins(q), f(1, 0))

	q = NewQueue(1, 1)
	for m := range 3 {
		q.Assign(Pair{0, m})
		q.Arrive(f(0, m))
		q.Arrive(b(0, m))
	}
	q.Rank(before(Pair{0, 1}))
	want(t, "preferred among those that run again", begins(q), f(0, 1), f(0, 0), f(0, 2))

	q = NewQueue(2, 1)
	for m := range 3 {
		q.Assign(Pair{0, m})
		q.Arrive(f(0, m))
	}
	want(t, "as many as may be in flight", begins(q), f(0, 0), f(0, 1))
	q.Done(f(0, 0))
	q.Done(f(0, 1))
	q.Arrive(b(0, 0))
	q.Arrive(b(0, 1))
	q.Rank(before(Pair{0, 2}))
	want(t, "an idle worker waits for it, and the limit holds", begins(q), b(0, 0), b(0, 1))
	q.Done(b(0, 1))
	want(t, "it comes next", begins(q), f(0, 2))
}

// In the first stage, the next one has nothing of what runs again.
func TestRerunsAfterForwardPasses(t *testing.T) {
	for stage, order := range [][]Task{{f(0, 1), f(0, 2), f(0, 0)}, {f(1, 0), f(1, 1)}} {
		q := NewQueue(3, 1)
		for m := range 3 {
			q.Assign(Pair{stage, m})
			q.Arrive(f(stage, m))
		}
		q.Arrive(b(stage, 0))
		want(t, "the first of them runs again", begins(q), order...)
	}
}

func TestRerunPassesTheLimit(t *testing.T) {
	q := NewQueue(1, 1)
	for m := range 4 {
		q.Assign(Pair{0, m})
		q.Arrive(f(0, m))
	}
	want(t, "limit 1", begins(q), f(0, 0))
	q.Done(f(0, 0))
	q.Arrive(b(0, 2))
	want(t, "gradient waits", begins(q), f(0, 2))
	q.Arrive(b(0, 0))
	q.Done(f(0, 2))
	next, _ := q.Next()
	want(t, "its backward pass comes before all others", []Task{next}, b(0, 2))
	want(t, "then the others", begins(q), b(0, 0))
	q.Done(b(0, 2))
	want(t, "still over the limit", begins(q))
	q.Done(b(0, 0))
	want(t, "free", begins(q), f(0, 1))
}

func TestWithdraw(t *testing.T) {
	q := NewQueue(1, 1)
	for m := range 3 {
		q.Assign(Pair{0, m})
		q.Arrive(f(0, m))
	}
	q.Arrive(b(0, 2))
	want(t, "one, and the rerun", begins(q), f(0, 0), f(0, 2))
	if q.Withdraw(Pair{0, 0}) || !q.Withdraw(Pair{0, 1}) || !q.Withdraw(Pair{0, 7}) {
		t.Error("what has begun stays, all else goes")
	}
	q.Assign(Pair{0, 0})
	if s := q.Status(Pair{0, 0}); !s.Begun() || !s.Input || s.Gradient {
		t.Errorf("status %+v", s)
	}
	if q.Arrive(f(0, 0)) || q.Arrive(f(0, 1)) {
		t.Error("a second input, or one of a foreign pair, was taken")
	}
	q.Assign(Pair{0, 1})
	if s := q.Status(Pair{0, 1}); s.Phase != Waiting || s.Input {
		t.Errorf("a pair that comes back remembers: %+v", s)
	}
	if got := q.Statuses(); len(got) != 3 || got[1].Micro != 1 {
		t.Errorf("statuses %v", got)
	}
}

func TestPriorities(t *testing.T) {
	list := []Task{
		{Kind: Gather, Layer: 1}, {Kind: Gather}, {Kind: Reduce}, {Kind: Reduce, Layer: 4, Shard: 9},
		f(0, 1), f(1, 1), f(2, 3), b(0, 2), b(1, 2), b(0, 0), {Kind: Update, Layer: 1, Shard: 1}, {Kind: Update},
	}
	slices.SortFunc(list, Task.Compare)
	want(t, "order", list, b(0, 0), b(1, 2), b(0, 2), f(1, 1), f(0, 1), f(2, 3), Task{Kind: Reduce, Layer: 4, Shard: 9},
		Task{Kind: Reduce}, Task{Kind: Update}, Task{Kind: Update, Layer: 1, Shard: 1}, Task{Kind: Gather}, Task{Kind: Gather, Layer: 1})
}

func TestSpare(t *testing.T) {
	of := func(stages int, pairs ...Pair) *Queue {
		q := NewQueue(stages, 1)
		for s := range stages {
			q.SetLimit(s, 8, 8)
		}
		for _, p := range pairs {
			q.Assign(p)
		}
		return q
	}
	next := func(q *Queue, want Task, spare bool) {
		t.Helper()
		if got, ok := q.Next(); !ok || got != want || q.Spare(got) != spare {
			t.Errorf("begins %v, %v, spare %v, want %v, %v", got, ok, q.Spare(got), want, spare)
		}
	}
	first := of(2, Pair{0, 0}, Pair{0, 1}, Pair{0, 2})
	for m := range 3 {
		first.Arrive(f(0, m))
		next(first, f(0, m), m == 2) // the next stage has two already
		first.Done(f(0, m))
	}
	first.Arrive(b(0, 0))
	next(first, b(0, 0), true)

	last := of(2, Pair{1, 0}, Pair{1, 1})
	last.Arrive(f(1, 0))
	next(last, f(1, 0), true) // nothing to go on with comes before what others make
	last.Done(f(1, 0))
	last.Arrive(b(1, 0))
	last.Arrive(f(1, 1))
	last.SetLimit(1, 1, 0)
	next(last, b(1, 0), false)
	last.Done(b(1, 0))
	next(last, f(1, 1), false) // the last one
	alone := of(1, Pair{0, 0})
	alone.Arrive(f(0, 0))
	next(alone, f(0, 0), false)
}

func TestMisuse(t *testing.T) {
	for what, f := range map[string]func(q *Queue){
		"done before begun": func(q *Queue) { q.Assign(Pair{0, 0}); q.Done(f(0, 0)) },
		"backward undone":   func(q *Queue) { q.Assign(Pair{0, 0}); q.Done(b(0, 0)) },
		"arrive":            func(q *Queue) { q.Assign(Pair{0, 0}); q.Arrive(Task{Kind: Commit}) },
		"add":               func(q *Queue) { q.Add(f(0, 0)) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", what)
				}
			}()
			f(NewQueue(1, 1))
		}()
	}
}

// model is the queue as the rules read, without any lists.
type model struct {
	stages int
	side   int // passes beside another one
	limits map[int]int
	leads  map[int]int
	pairs  map[Pair]*entry
	ranks  map[Pair]int
}

func (m *model) next() (best Task, ok bool) {
	inFlight := map[int]int{}
	for p, e := range m.pairs {
		if e.phase == Forwarded || e.phase == Backing {
			inFlight[p.Stage]++
		}
	}
	rank := func(p Pair, e *entry) int {
		limit := max(m.limits[p.Stage], m.stages-p.Stage) + m.side
		forward := e.phase == Waiting && e.input && !e.gradient
		switch {
		case e.phase == Forwarded && e.ran && e.again:
			return 0
		case forward && m.ranks[p] < 0 && inFlight[p.Stage] < limit:
			return 1
		case forward && inFlight[p.Stage] < min(m.leads[p.Stage], limit):
			return 2
		case e.phase == Forwarded && e.ran && e.gradient:
			return 3
		case e.phase == Waiting && e.input && e.gradient && p.Stage > 0:
			return 4
		case forward && inFlight[p.Stage] < limit:
			return 5
		case e.phase == Waiting && e.input && e.gradient:
			return 6
		}
		return 9
	}
	bestRank := 9
	for p, e := range m.pairs {
		r := rank(p, e)
		t := BackwardOf(p)
		forward := r != 0 && r != 3
		if forward {
			t = ForwardOf(p)
		}
		before := t.Compare(best) < 0
		if x, y := m.ranks[p], m.ranks[best.Pair]; forward && x != y {
			before = x < y
		}
		if r < bestRank || r == bestRank && r < 9 && before {
			best, bestRank = t, r
		}
	}
	return best, bestRank < 9
}

// TestQueueAgainstModel plays random calls on the queue and on the model.
func TestQueueAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stages := rapid.IntRange(1, 4).Draw(t, "stages")
		passes := rapid.IntRange(1, 3).Draw(t, "passes")
		q := NewQueue(stages, passes)
		m := &model{stages, passes - 1, map[int]int{}, map[int]int{}, map[Pair]*entry{}, map[Pair]int{}}
		var running []Task
		pair := rapid.Custom(func(t *rapid.T) Pair {
			return Pair{rapid.IntRange(0, stages-1).Draw(t, "stage"), rapid.IntRange(0, 7).Draw(t, "micro")}
		})
		for range rapid.IntRange(1, 120).Draw(t, "calls") {
			switch rapid.IntRange(0, 8).Draw(t, "call") {
			case 0, 1:
				p := pair.Draw(t, "assign")
				q.Assign(p)
				if m.pairs[p] == nil {
					m.pairs[p] = &entry{phase: Waiting}
				}
			case 2, 3:
				p := pair.Draw(t, "input")
				q.Arrive(ForwardOf(p))
				if e := m.pairs[p]; e != nil {
					e.input = true
				}
			case 4:
				p := pair.Draw(t, "gradient")
				q.Arrive(BackwardOf(p))
				if e := m.pairs[p]; e != nil {
					e.gradient = true
				}
			case 5:
				p := pair.Draw(t, "withdraw")
				e := m.pairs[p]
				if gone := e == nil || e.phase == Waiting; gone != q.Withdraw(p) {
					t.Fatalf("Withdraw(%v) is not %v", p, gone)
				} else if gone {
					delete(m.pairs, p)
				}
			case 6:
				s, n, lead := rapid.IntRange(0, stages-1).Draw(t, "limit of"), rapid.IntRange(0, 6).Draw(t, "limit"), rapid.IntRange(0, 6).Draw(t, "lead")
				q.SetLimit(s, n, lead)
				m.limits[s], m.leads[s] = n, lead
			case 8:
				ranks := rapid.MapOfN(pair, rapid.IntRange(-2, 5), 0, 12).Draw(t, "ranks")
				q.Rank(func(p Pair) int { return ranks[p] })
				m.ranks = ranks
			case 7:
				if len(running) == 0 {
					continue
				}
				i := rapid.IntRange(0, len(running)-1).Draw(t, "done")
				d := running[i]
				running = slices.Delete(running, i, i+1)
				q.Done(d)
				if e := m.pairs[d.Pair]; d.Kind == Forward {
					e.ran = true
				} else {
					e.phase = Finished
				}
			}
			if len(running) < 2 && rapid.Bool().Draw(t, "next") {
				wanted, ok := m.next()
				got, gotOK := q.Next()
				if ok != gotOK || ok && got != wanted {
					t.Fatalf("Next is %v (%v), want %v (%v)", got, gotOK, wanted, ok)
				}
				if ok {
					running = append(running, got)
					e := m.pairs[got.Pair]
					if got.Kind == Forward {
						e.phase, e.again = Forwarded, e.gradient
					} else {
						e.phase = Backing
					}
				}
			}
			left := 0
			for p, e := range m.pairs {
				if e.phase != Finished {
					left++
				}
				if s := q.Status(p); s.Phase != e.phase || s.Input != e.input || s.Gradient != e.gradient {
					t.Fatalf("status %+v, want %+v", s, *e)
				}
			}
			if q.Left() != left {
				t.Fatalf("%d left, want %d", q.Left(), left)
			}
		}
	})
}
