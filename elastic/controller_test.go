package elastic

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/soliton-train/soliton/elastic/plan"
)

// cluster is a simple model of workers: they pass points together, are sealed by
// queries, and apply orders. Messages of each pair are in order, those of different
// pairs in any.
type cluster struct {
	t    *rapid.T
	c    *Controller
	now  time.Time
	w    map[plan.WorkerID]*fake
	last struct {
		ballot  Ballot
		version plan.Version
	}
	agreeing  []plan.Version
	down      map[[2]plan.WorkerID]bool // links
	timers    map[Timer]time.Time
	recovered int
	end       error
}

type fake struct {
	plan.Worker
	alive, sealed, done bool
	ballot              Ballot
	plan                plan.Version
	members             []plan.Worker
	passed, entered     Point
	epoch               int // of the newest restart that it applied
	in                  []Effect
	out                 []Event
}

const lastStep = 6

func pair(a, b plan.WorkerID) [2]plan.WorkerID { return [2]plan.WorkerID{min(a, b), max(a, b)} }

func next(p Point) Point {
	switch {
	case p.Step == lastStep && p.Gate == Committed:
		return Point{Step: p.Step, Gate: Evaluated}
	case p.Step == lastStep:
		return Point{Step: p.Step, Gate: Kept}
	}
	return Point{Step: p.Step + 1}
}

func (x *cluster) alive() (all []*fake) {
	for _, w := range x.w {
		if w.alive {
			all = append(all, w)
		}
	}
	slices.SortFunc(all, func(a, b *fake) int { return int(a.ID - b.ID) })
	return all
}

// progress lets a worker enter its next point, or pass it when all of its plan have
// entered it, as they would find out by their exchange.
func (x *cluster) progress(w *fake) bool {
	if !w.alive || w.sealed || w.done {
		return false
	}
	for _, m := range w.members {
		if x.down[pair(w.ID, m.ID)] {
			return false
		}
	}
	to := next(w.passed)
	if w.entered != to {
		w.entered = to
		return true
	}
	for _, m := range w.members {
		if p := x.w[m.ID]; p.epoch != w.epoch || p.entered.Compare(to) < 0 {
			return false
		}
	}
	w.passed = to
	if to.Gate == Kept {
		w.done = true
		w.out = append(w.out, Finished{w.Worker, to.Step, []byte(fmt.Sprint(to))})
	}
	return true
}

func (x *cluster) report(w *fake) Report {
	r := Report{Plan: w.plan, Passed: w.passed}
	if w.passed.Step > 0 {
		r.Result = []byte(fmt.Sprint(w.passed))
	}
	return r
}

// receive lets a worker handle its next message.
func (x *cluster) receive(w *fake) {
	m := w.in[0]
	w.in = w.in[1:]
	if !w.alive {
		return
	}
	switch m := m.(type) {
	case Ask:
		if m.Ballot.Compare(w.ballot) >= 0 {
			w.sealed, w.ballot = true, m.Ballot
			w.out = append(w.out, Answered{w.Worker, m.Ballot, x.report(w)})
		}
	case Command:
		o := m.Order
		if o.Ballot.Compare(w.ballot) < 0 {
			return
		}
		if !follows(w.passed, o.Passed) && !o.Restart {
			x.t.Fatalf("worker %d is at %v and was told of %v", w.ID, w.passed, o.Passed)
		}
		if o.Restart {
			w.epoch = o.Plan.Version.N
		} else if o.Passed != w.passed && string(o.Result) != fmt.Sprint(o.Passed) {
			x.t.Fatalf("worker %d was told %q at %v", w.ID, o.Result, o.Passed)
		}
		w.ballot, w.sealed, w.plan, w.passed, w.entered = o.Ballot, false, o.Plan.Version, o.Passed, o.Passed
		w.members = o.Plan.Workers
		for _, m := range w.members {
			delete(x.down, pair(w.ID, m.ID))
		}
		if o.Passed.Gate == Kept && !w.done {
			w.done = true
			w.out = append(w.out, Finished{w.Worker, o.Passed.Step, o.Result})
		}
		w.out = append(w.out, Applied{Worker: w.Worker, Ballot: o.Ballot, Version: o.Plan.Version, Opened: 1})
	}
}

func (x *cluster) step(e Event) {
	x.now = x.now.Add(time.Millisecond)
	if a, ok := e.(Agreed); ok {
		a.Proposed = x.now
		e = a
	}
	for _, effect := range x.c.Step(x.now, e) {
		switch effect := effect.(type) {
		case Ask:
			if effect.Ballot.Compare(x.last.ballot) < 0 {
				x.t.Fatalf("ballot %v after %v", effect.Ballot, x.last.ballot)
			}
			x.last.ballot = effect.Ballot
			w := x.w[effect.Worker.ID]
			w.in = append(w.in, effect)
		case Command:
			w := x.w[effect.Worker.ID]
			w.in = append(w.in, effect)
		case Propose:
			if effect.Order.Plan.Version.Compare(x.last.version) <= 0 {
				x.t.Fatalf("plan %v after %v", effect.Order.Plan.Version, x.last.version)
			}
			x.last.version = effect.Order.Plan.Version
			if err := effect.Order.Plan.Validate(storyLayers()); err != nil {
				x.t.Fatal(err)
			}
			x.agreeing = append(x.agreeing, x.last.version)
		case SetTimer:
			x.timers[effect.Timer] = x.now.Add(effect.After)
		case CancelTimer:
			delete(x.timers, effect.Timer)
		case Kill:
			x.kill(x.w[effect.Worker.ID])
		case Recovered:
			r := effect.Recovery
			if sum := r.Detect + r.Query + r.Plan + r.Agree + r.Edit + r.Resume; sum != r.Total || min(r.Detect, r.Query, r.Plan, r.Agree, r.Edit, r.Resume) < 0 {
				x.t.Fatalf("phases do not add up: %+v", r)
			}
			x.recovered++
		case End:
			x.end = effect.Err
		}
	}
}

func (x *cluster) kill(w *fake) {
	if w.alive {
		w.alive = false
		w.in = nil
		w.out = append(w.out, Dead{Worker: w.Worker, Cause: fmt.Sprintf("worker %d is dead", w.ID), Died: x.now, How: Reaped})
	}
}

// Workers die and links break at random moments of training and of recoveries. In the
// end, all that live are under one plan and done, or nobody lives.
func TestDeathsAtAnyMoment(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 6).Draw(t, "workers")
		c := storyJob(t, n, rapid.IntRange(1, min(n, 3)).Draw(t, "stages"), 8, rapid.IntRange(0, 2).Draw(t, "mirrors"), 1)
		x := &cluster{t: t, c: c, w: make(map[plan.WorkerID]*fake), now: time.Unix(0, 0), down: make(map[[2]plan.WorkerID]bool), timers: make(map[Timer]time.Time)}
		x.last.version = c.cfg.Plan.Version
		for _, w := range c.cfg.Plan.Workers {
			x.w[w.ID] = &fake{Worker: w, alive: true, plan: c.cfg.Plan.Version, members: c.cfg.Plan.Workers}
		}
		deaths, cuts := rapid.IntRange(0, n+1).Draw(t, "deaths"), rapid.IntRange(0, 2).Draw(t, "cuts")
		for quiet := 0; x.end == nil; {
			type act func()
			var acts []act
			var deliver bool
			for id := range plan.WorkerID(n) {
				w := x.w[id]
				if len(w.in) > 0 {
					acts = append(acts, func() { x.receive(w) })
					deliver = true
				}
				if len(w.out) > 0 {
					acts = append(acts, func() {
						e := w.out[0]
						w.out = w.out[1:]
						x.step(e)
					})
					deliver = true
				}
				if w.alive && !w.done && !w.sealed {
					acts = append(acts, func() {
						if x.progress(w) {
							quiet = 0
						}
					})
				}
				if w.alive && deaths > 0 {
					acts = append(acts, func() { x.kill(w); deaths-- })
				}
			}
			if len(x.agreeing) > 0 {
				acts = append(acts, func() {
					v := x.agreeing[0]
					x.agreeing = x.agreeing[1:]
					x.step(Agreed{Version: v})
				})
				deliver = true
			}
			if a, b := plan.WorkerID(0), plan.WorkerID(n-1); cuts > 0 && a != b && x.w[a].alive && x.w[b].alive {
				acts = append(acts, func() {
					cuts--
					x.down[pair(a, b)] = true
					x.w[a].out = append(x.w[a].out, LinkLost{x.w[a].Worker, x.w[b].Worker})
				})
			}
			if len(acts) == 0 || !deliver && quiet > 20*n {
				var first Timer
				for name, at := range x.timers {
					if first == "" || at.Before(x.timers[first]) {
						first = name
					}
				}
				if first == "" {
					break
				}
				if at := x.timers[first]; at.After(x.now) {
					x.now = at
				}
				delete(x.timers, first)
				x.step(Late{first})
				quiet = 0
				continue
			}
			quiet++
			acts[rapid.IntRange(0, len(acts)-1).Draw(t, "act")]()
		}
		if x.end != nil {
			if len(x.alive()) > 0 {
				t.Fatalf("ended with workers alive: %v", x.end)
			}
			return
		}
		for _, w := range x.alive() {
			if !w.done {
				t.Fatalf("worker %d waits under plan %v, sealed %v, at %v, entered %v; controller in phase %d", w.ID, w.plan, w.sealed, w.passed, w.entered, c.phase)
			}
		}
		if len(x.alive()) > 0 && c.phase != steady {
			t.Fatalf("all are at the end, and the controller is in phase %d", c.phase)
		}
	})
}

func TestCompleteNeedsTheWholeShard(t *testing.T) {
	c := storyJob(t, 2, 1, 6, 1, 1)
	at := Point{Step: 3}
	m, s := c.members[1], c.plan.Shards[1]
	mid := s.Lo + 4096
	for _, x := range []struct {
		passed Point
		ranges []plan.Range
		want   int
	}{
		{at, []plan.Range{{Layer: s.Layer, Lo: mid, Hi: s.Hi}, {Layer: s.Layer, Lo: s.Lo, Hi: mid}}, 1},
		{Point{Step: 2}, []plan.Range{{Layer: s.Layer, Lo: s.Lo, Hi: s.Hi}}, 0},            // of another step
		{Point{Step: 3, Repair: 1}, []plan.Range{{Layer: s.Layer, Lo: s.Lo, Hi: s.Hi}}, 0}, // done again
		{at, []plan.Range{{Layer: s.Layer, Lo: mid, Hi: s.Hi}}, 0},
		{at, []plan.Range{{Layer: s.Layer + 9, Lo: s.Lo, Hi: s.Hi}}, 0},
		{at, nil, 0},
	} {
		m.report = &Report{Passed: x.passed, Complete: x.ranges}
		got := c.complete([]*member{m}, at)
		if len(got) != x.want || x.want > 0 && got[0] != (plan.Complete{Shard: 1, Worker: 1}) {
			t.Errorf("%v: %v", x, got)
		}
	}
}

// Who has repaired and who has not are one point apart, like who has passed a
// point and who has not.
func TestPointsFollow(t *testing.T) {
	for _, c := range []struct {
		p, latest Point
		want      bool
	}{
		{Point{Step: 3}, Point{Step: 3}, true},
		{Point{Step: 3}, Point{Step: 3, Repair: 1}, true},
		{Point{Step: 3}, Point{Step: 3, Repair: 2}, false},
		{Point{Step: 2}, Point{Step: 3, Repair: 1}, false},
		{Point{Step: 3, Repair: 2}, Point{Step: 4}, true},
		{Point{Step: 3, Gate: Evaluated, Repair: 1}, Point{Step: 4}, true},
		{Point{Step: 3, Repair: 1}, Point{Step: 3, Gate: Evaluated}, true},
		{Point{Step: 3, Repair: 1}, Point{Step: 3, Gate: Evaluated, Repair: 1}, false},
		{Point{Step: 4, Repair: 1}, Point{Step: 4}, false},
	} {
		if got := follows(c.p, c.latest); got != c.want || c.p != c.latest && got && c.p.Compare(c.latest) >= 0 {
			t.Errorf("%v before %v: %v, compare %d", c.p, c.latest, got, c.p.Compare(c.latest))
		}
	}
}
