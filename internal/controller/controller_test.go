package controller

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
)

// cluster is a simple model of workers: they pass points together, are sealed by
// queries, and apply orders. Messages of each pair are in order, those of different
// pairs in any.
type cluster struct {
	t    *rapid.T
	c    *Controller
	now  time.Time
	w    map[id.WorkerID]*fake
	last struct {
		ballot  id.Ballot
		version id.Version
	}
	agreeing  []id.Version
	balancing []Balance
	down      map[[2]id.WorkerID]bool // links
	timers    map[Timer]time.Time
	recovered int
	joined    int
	live      map[id.Point]id.Version // the plan after a point, once a worker has passed it
	told      map[id.Version]*fake    // who went first under a boundary plan
	at        map[id.Version]id.Point // and from where
	end       error
}

type fake struct {
	plan.Worker
	alive, sealed, done bool
	ballot              id.Ballot
	plan                id.Version
	members             []plan.Worker
	passed, entered     id.Point
	epoch               int // of the newest restart that it applied
	in                  []Effect
	out                 []Event

	holds   id.Version     // the newest plan that it has applied
	coming  *control.Order // a boundary plan that has come
	says    id.Version     // the newest plan that it knew of as it entered a point
	waits   bool           // for its first plan to be live
	leaving bool
	left    bool
}

const lastStep = 6

func pair(a, b id.WorkerID) [2]id.WorkerID { return [2]id.WorkerID{min(a, b), max(a, b)} }

func next(p id.Point) id.Point {
	switch {
	case p.Step == lastStep && p.Gate == id.Committed:
		return id.Point{Step: p.Step, Gate: id.Evaluated}
	case p.Step == lastStep:
		return id.Point{Step: p.Step, Gate: id.Kept}
	}
	return id.Point{Step: p.Step + 1}
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
	if !w.alive || w.sealed || w.done || w.members == nil || w.left {
		return false
	}
	for _, m := range w.members {
		if x.down[pair(w.ID, m.ID)] {
			return false
		}
	}
	to := next(w.passed)
	if w.entered != to {
		w.entered, w.says = to, w.plan
		if w.coming != nil {
			w.says = w.coming.Plan.Version
		}
		return true
	}
	next := w.says
	for _, m := range w.members {
		p := x.w[m.ID]
		if p.Worker != m || p.epoch != w.epoch || p.entered.Compare(to) < 0 {
			return false
		}
		if p.passed.Compare(to) < 0 && p.says.Compare(next) < 0 {
			next = p.says
		}
	}
	if x.live[to] == (id.Version{}) { // who passes first finds out for all
		x.live[to] = next
	}
	next = x.live[to]
	w.passed = to
	if to.Gate == id.Committed && next != w.plan && w.coming != nil && next == w.coming.Plan.Version {
		x.goLive(w, *w.coming)
	}
	if to.Gate == id.Kept && !w.left {
		w.done = true
		w.out = append(w.out, Finished{w.Worker, to.Step, []byte(fmt.Sprint(to))})
	}
	return true
}

// goLive lets a worker go on under a boundary plan, and tells those that join with it.
func (x *cluster) goLive(w *fake, o control.Order) {
	w.coming = nil
	w.plan, w.holds, w.members, w.entered = o.Plan.Version, o.Plan.Version, o.Plan.Workers, w.passed
	w.out = append(w.out, Applied{Worker: w.Worker, Version: w.plan})
	if _, ok := o.Plan.Worker(w.ID); !ok {
		w.left = true
		return
	}
	if x.told[w.plan] == nil {
		x.told[w.plan], x.at[w.plan] = w, w.passed
	}
	for _, m := range o.Plan.Workers {
		x.enter(x.w[m.ID])
	}
}

// enter lets a worker that joins begin, if its plan has come and it was told that it is live.
func (x *cluster) enter(j *fake) {
	if !j.waits || !j.alive || j.coming == nil || x.told[j.coming.Plan.Version] == nil {
		return
	}
	w := x.told[j.coming.Plan.Version]
	j.waits, j.passed, j.epoch = false, x.at[j.coming.Plan.Version], w.epoch
	x.goLive(j, *j.coming)
	x.joined++
}

func (x *cluster) report(w *fake) control.Report {
	r := control.Report{Plan: w.plan, Passed: w.passed, Holds: w.holds}
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
			if w.waits {
				w.coming = nil
			}
			w.out = append(w.out, Answered{w.Worker, m.Ballot, x.report(w)})
		}
	case Command:
		o := m.Order
		if o.Ballot == (id.Ballot{}) {
			w.coming = &o
			if w.waits {
				w.sealed = false
				x.enter(w)
			}
			return
		}
		if o.Ballot.Compare(w.ballot) < 0 {
			return
		}
		if !follows(w.passed, o.Passed) && !o.Rollback {
			x.t.Fatalf("worker %d is at %v and was told of %v", w.ID, w.passed, o.Passed)
		}
		if o.Rollback {
			w.epoch = o.Plan.Version.N
		} else if o.Passed != w.passed && string(o.Result) != fmt.Sprint(o.Passed) {
			x.t.Fatalf("worker %d was told %q at %v", w.ID, o.Result, o.Passed)
		}
		w.ballot, w.sealed, w.plan, w.passed, w.entered = o.Ballot, false, o.Plan.Version, o.Passed, o.Passed
		w.members, w.holds, w.coming = o.Plan.Workers, o.Plan.Version, nil
		for _, m := range w.members {
			delete(x.down, pair(w.ID, m.ID))
		}
		if o.Passed.Gate == id.Kept && !w.done {
			w.done = true
			w.out = append(w.out, Finished{w.Worker, o.Passed.Step, o.Result})
		}
		w.out = append(w.out, Applied{Worker: w.Worker, Ballot: o.Ballot, Version: o.Plan.Version, Opened: 1})
	case Copy:
		if slices.ContainsFunc(m.Fill.Transfers, func(t plan.Transfer) bool { return t.To == w.ID }) {
			w.out = append(w.out, Level{Worker: w.Worker, ID: m.Fill.ID})
		}
	case Dismiss:
		w.alive = false
		w.out = append(w.out, Ended{w.Worker})
	}
}

func (x *cluster) step(e Event) {
	x.now = x.now.Add(time.Millisecond)
	if a, ok := e.(Agreed); ok {
		a.Proposed = x.now
		e = a
	}
	for _, effect := range step(x.c, x.now, e) {
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
		case Copy:
			w := x.w[effect.Worker.ID]
			w.in = append(w.in, effect)
		case Dismiss:
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
		case Balance:
			x.balancing = append(x.balancing, effect)
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

// Workers die, join and leave, and links break, at random moments of training and of recoveries. In the
// end, all that live are under one plan and done, or no worker lives.
func TestDeathsAtAnyMoment(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 6).Draw(t, "workers")
		c := storyJob(t, n, rapid.IntRange(1, min(n, 3)).Draw(t, "stages"), 8, rapid.IntRange(0, 2).Draw(t, "mirrors"), 1)
		x := &cluster{t: t, c: c, w: make(map[id.WorkerID]*fake), now: time.Unix(0, 0), down: make(map[[2]id.WorkerID]bool), timers: make(map[Timer]time.Time), live: make(map[id.Point]id.Version),
			told: make(map[id.Version]*fake), at: make(map[id.Version]id.Point)}
		x.last.version = c.cfg.Plan.Version
		for _, w := range c.cfg.Plan.Workers {
			x.w[w.ID] = &fake{Worker: w, alive: true, plan: c.cfg.Plan.Version, holds: c.cfg.Plan.Version, members: c.cfg.Plan.Workers}
		}
		deaths, cuts := rapid.IntRange(0, n+1).Draw(t, "deaths"), rapid.IntRange(0, 2).Draw(t, "cuts")
		measures := rapid.IntRange(0, 2).Draw(t, "measures")
		joins, leaves := rapid.IntRange(0, 2).Draw(t, "joins"), rapid.IntRange(0, 2).Draw(t, "leaves")
		for quiet := 0; x.end == nil; {
			type act func()
			var acts []act
			var deliver bool
			if joins > 0 {
				acts = append(acts, func() {
					joins--
					w := plan.Worker{ID: id.WorkerID(len(x.w))}
					x.w[w.ID] = &fake{Worker: w, alive: true, waits: true, out: []Event{Joined{w, fmt.Sprint("addr-", w.ID)}}}
				})
			}
			for id := range id.WorkerID(len(x.w)) {
				w := x.w[id]
				if w.alive && !w.leaving && leaves > 0 && !w.done {
					acts = append(acts, func() {
						leaves--
						w.leaving = true
						w.out = append(w.out, Leaving{w.Worker})
					})
				}
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
				if w.alive && deaths > 0 && !w.left {
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
			if measures > 0 {
				acts = append(acts, func() {
					measures--
					for _, w := range x.w {
						if w.alive && !w.waits {
							var times plan.Times
							for l := range storyLayers() {
								times.Layers = append(times.Layers, plan.LayerTime{Layer: l, Forward: time.Duration(1+measures) * time.Millisecond, Backward: time.Duration(2+int(w.ID)) * time.Millisecond})
							}
							x.step(Measured{w.Worker, times})
						}
					}
				})
			}
			if len(x.balancing) > 0 {
				acts = append(acts, func() {
					b := x.balancing[0]
					x.balancing = x.balancing[1:]
					x.step(b.Make())
				})
				deliver = true
			}
			if a, b := id.WorkerID(0), id.WorkerID(n-1); cuts > 0 && a != b && x.w[a].alive && x.w[b].alive {
				acts = append(acts, func() {
					cuts--
					x.down[pair(a, b)] = true
					x.w[a].out = append(x.w[a].out, LinkLost{x.w[a].Worker, x.w[b].Worker})
				})
			}
			if len(acts) == 0 || !deliver && quiet > 20*n {
				moved := false
				for _, w := range x.alive() {
					moved = x.progress(w) || moved
				}
				if moved {
					quiet = 0
					continue
				}
				var first Timer
				for name, at := range x.timers {
					if first == 0 || at.Before(x.timers[first]) {
						first = name
					}
				}
				if first == 0 {
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
			if slices.ContainsFunc(x.alive(), func(w *fake) bool { return !w.waits && !w.left }) {
				t.Fatalf("ended with workers alive: %v", x.end)
			}
			return
		}
		for _, w := range x.alive() {
			if !w.done && !w.waits && !w.left {
				t.Fatalf("worker %d waits under plan %v, sealed %v, at %v, entered %v; controller %v", w.ID, w.plan, w.sealed, w.passed, w.entered, c.recovery.state)
			}
		}
		if len(x.alive()) > 0 && c.Busy() {
			t.Fatalf("all are at the end, and the controller is %v", c.recovery.state)
		}
	})
}

func TestCompleteNeedsTheWholeShard(t *testing.T) {
	c := storyJob(t, 2, 1, 6, 1, 1)
	at := id.Point{Step: 3}
	m, s := c.members[1], c.plan.Shards[1]
	mid := s.Lo + 4096
	for _, x := range []struct {
		passed id.Point
		ranges []id.Range
		want   int
	}{
		{at, []id.Range{{Layer: s.Layer, Lo: mid, Hi: s.Hi}, {Layer: s.Layer, Lo: s.Lo, Hi: mid}}, 1},
		{id.Point{Step: 2}, []id.Range{{Layer: s.Layer, Lo: s.Lo, Hi: s.Hi}}, 0},            // of another step
		{id.Point{Step: 3, Repair: 1}, []id.Range{{Layer: s.Layer, Lo: s.Lo, Hi: s.Hi}}, 0}, // done again
		{at, []id.Range{{Layer: s.Layer, Lo: mid, Hi: s.Hi}}, 0},
		{at, []id.Range{{Layer: s.Layer + 9, Lo: s.Lo, Hi: s.Hi}}, 0},
		{at, nil, 0},
	} {
		m.report = &control.Report{Passed: x.passed, Complete: x.ranges}
		got := complete(&c.plan, []*member{m}, at)
		if len(got) != x.want || x.want > 0 && got[0] != (plan.Complete{Shard: 1, Worker: 1}) {
			t.Errorf("%v: %v", x, got)
		}
	}
}

// Who has repaired and who has not are one point apart, like who has passed a
// point and who has not.
func TestPointsFollow(t *testing.T) {
	for _, c := range []struct {
		p, latest id.Point
		want      bool
	}{
		{id.Point{Step: 3}, id.Point{Step: 3}, true},
		{id.Point{Step: 3}, id.Point{Step: 3, Repair: 1}, true},
		{id.Point{Step: 3}, id.Point{Step: 3, Repair: 2}, false},
		{id.Point{Step: 2}, id.Point{Step: 3, Repair: 1}, false},
		{id.Point{Step: 3, Repair: 2}, id.Point{Step: 4}, true},
		{id.Point{Step: 3, Gate: id.Evaluated, Repair: 1}, id.Point{Step: 4}, true},
		{id.Point{Step: 3, Repair: 1}, id.Point{Step: 3, Gate: id.Evaluated}, true},
		{id.Point{Step: 3, Repair: 1}, id.Point{Step: 3, Gate: id.Evaluated, Repair: 1}, false},
		{id.Point{Step: 4, Repair: 1}, id.Point{Step: 4}, false},
	} {
		if got := follows(c.p, c.latest); got != c.want || c.p != c.latest && got && c.p.Compare(c.latest) >= 0 {
			t.Errorf("%v before %v: %v, compare %d", c.p, c.latest, got, c.p.Compare(c.latest))
		}
	}
}

// TestFillsAreOrdered holds that every fill is newer than all before it, whoever leads: a worker drops older
// ones, and a boundary plan that waits for a dropped fill never comes.
func TestFillsAreOrdered(t *testing.T) {
	c := storyJob(t, 3, 1, 6, 1, 1)
	now := time.Unix(0, 0)
	fills := func(c *Controller, n int) (all []id.Fill) {
		for i := range n {
			w := plan.Worker{ID: 3, Incarnation: i}
			for _, e := range []Event{Joined{w, "addr"}, Dead{Worker: w, Cause: "killed"}} {
				for _, e := range c.Step(now, e) {
					if e, ok := e.(Copy); ok && (len(all) == 0 || all[len(all)-1] != e.Fill.ID) {
						all = append(all, e.Fill.ID)
					}
				}
			}
		}
		return all
	}
	all := fills(c, 1500)
	if len(all) < 1500 {
		t.Fatalf("%d fills", len(all))
	}
	restart := c.cfg // the leader of the term starts over
	restart.Attempt, restart.Fills = c.Last()
	c = New(restart)
	all = append(all, fills(c, 2)...)
	takeover := c.cfg
	takeover.Term, takeover.Attempt, takeover.Fills = 2, 0, 0
	all = append(all, fills(New(takeover), 2)...)
	for i := range all[1:] {
		if all[i].Compare(all[i+1]) >= 0 {
			t.Fatalf("fill %v after %v", all[i+1], all[i])
		}
	}
}
