package controller

import (
	"errors"
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
)

// reconfigurationState is a state of the machine [reconfiguration]. The package doc has its transitions.
type reconfigurationState uint8

const (
	stable      reconfigurationState = iota
	catchingUp                       // new holders receive the state that the boundary plan gives them
	proposed                         // the boundary plan is proposed
	switching                        // it is agreed, and goes live after the next commit for which all members have it
	interrupted                      // a recovery is under way, and decides what becomes of the boundary plan
)

var reconfigurationNames = [...]string{"stable", "catchingUp", "proposed", "switching", "interrupted"}

func (s reconfigurationState) String() string { return reconfigurationNames[s] }

// reconfiguration is the machine that changes the plan between two steps: workers leave and join, shards get mirrors,
// and work is balanced. A recovery interrupts it.
type reconfiguration struct {
	*run
	suspended bool    // by a recovery
	fill      id.Fill // the newest
	copies    *copies

	search   *Balance // under way
	searches int
	looking  bool // LookTimer runs
}

// copies are the transfers that a boundary plan waits for.
type copies struct {
	fill   control.Fill
	change *change
	wait   map[id.WorkerID]bool // workers that lack something
}

// state returns the state of the machine.
func (r *reconfiguration) state() reconfigurationState {
	switch {
	case r.suspended:
		return interrupted
	case r.copies != nil:
		return catchingUp
	case r.boundary == nil:
		return stable
	case !r.boundary.agreed:
		return proposed
	}
	return switching
}

// free reports whether a boundary plan can begin.
func (r *reconfiguration) free() bool { return r.state() == stable && r.finished == nil }

// suspend ends the copies when a recovery begins. No boundary plan begins before the recovery ends.
func (r *reconfiguration) suspend(recovering bool) {
	if r.suspended = recovering; recovering {
		r.copies = nil
	}
}

// next begins the boundary plan that is needed most, if none is under way: workers leave, workers join, shards get
// mirrors, workers that have joined without shards get theirs, and work is balanced, in this order.
func (r *reconfiguration) next() []Effect {
	if !r.free() {
		return nil
	}
	view := plan.View{ModelHosts: r.modelHosts()}
	for _, m := range r.all() {
		if !lives(&r.plan, m.Worker) {
			continue
		}
		was, _ := r.plan.Worker(m.ID)
		view.Workers = append(view.Workers, was)
		if m.leaving {
			view.Leaving = append(view.Leaving, m.ID)
		}
	}
	switch stay := len(view.Workers) - len(view.Leaving); {
	case len(view.Leaving) > 0 && stay > 0 && stay >= r.cfg.MinWorkers:
		return r.change(planner.Leave, CauseLeave, view)
	case len(r.joining) > 0:
		view.Leaving = nil
		for _, m := range r.joining {
			view.Workers = append(view.Workers, m.Worker)
		}
		slices.SortFunc(view.Workers, func(a, b plan.Worker) int { return int(a.ID - b.ID) })
		return r.join(view)
	case len(view.Leaving) > 0:
		return []Effect{note("no worker leaves: %d of at least %d workers would stay", stay, r.cfg.MinWorkers)}
	case !r.plan.Protected():
		p, reason, err := r.draft(view, planner.Event{Kind: planner.Protect})
		if err != nil || len(plan.Needs(&r.plan, &p, view)) > 0 || p.Protected() {
			return r.begin(p, view, CauseProtect, reason, err)
		}
		// As many mirrors as possible are there.
	}
	if p, reason, err := r.draft(view, planner.Event{Kind: planner.Spread, Least: r.share()}); !errors.Is(err, planner.ErrNoGain) {
		return r.begin(p, view, CauseRebalance, reason, err)
	}
	return r.balance(view)
}

// draft makes the boundary plan that an event calls for.
func (r *reconfiguration) draft(view plan.View, e planner.Event) (plan.Plan, planner.Reason, error) {
	e.After = r.issued
	return planner.Next(r.plan, view, r.profile(), e)
}

func (r *reconfiguration) change(kind planner.EventKind, cause Cause, view plan.View) []Effect {
	p, reason, err := r.draft(view, planner.Event{Kind: kind})
	return r.begin(p, view, cause, reason, err)
}

// join lets workers join. Those that are to hold much state get it later: without it they compute from the next step on.
func (r *reconfiguration) join(view plan.View) []Effect {
	p, reason, err := r.draft(view, planner.Event{Kind: planner.Join})
	if err == nil {
		moved := 0
		for _, t := range plan.Needs(&r.plan, &p, view) {
			moved += t.Hi - t.Lo
		}
		if moved > r.cfg.mostAtOnce() {
			p, reason, err = r.draft(view, planner.Event{Kind: planner.Join, Later: true})
		}
	}
	return r.begin(p, view, CauseJoin, reason, err)
}

// share is the least fair share of a worker that has joined without its shards, or less: such workers had to hold more than mostAtOnce together,
// as owners and mirrors.
func (r *reconfiguration) share() int {
	return r.cfg.mostAtOnce() / (2 * (1 + r.plan.Mirrors) * len(r.plan.Workers))
}

// begin lets new holders catch up with a boundary plan. Where none needs anything, it proposes the plan at once.
func (r *reconfiguration) begin(p plan.Plan, view plan.View, cause Cause, reason planner.Reason, err error) []Effect {
	if err != nil {
		return []Effect{note("no plan to %s: %v", cause, err)}
	}
	state := plan.Needs(&r.plan, &p, view)
	for _, t := range state {
		if t.From < 0 {
			return []Effect{note("no plan to %s: no worker has [%d,%d) of layer %d", cause, t.Lo, t.Hi, t.Layer)}
		}
	}
	ch := r.address(&change{order: control.Order{Plan: p}, cause: cause, reason: reason})
	if len(state) == 0 {
		return r.commit(ch)
	}
	r.fill.N++
	f := &copies{change: ch, wait: make(map[id.WorkerID]bool), fill: control.Fill{ID: r.fill, Transfers: state}}
	for _, m := range r.all() {
		f.fill.Peers = append(f.fill.Peers, m.Peer)
	}
	for _, w := range view.Workers {
		if m := r.joining[w.ID]; m != nil {
			f.fill.Peers = append(f.fill.Peers, m.Peer)
		}
	}
	for _, t := range state {
		f.wait[t.To] = true
	}
	r.copies = f
	effects := []Effect{note("%s: %d ranges go to %d new holders first", reason, len(state), len(f.wait))}
	for _, p := range f.fill.Peers {
		effects = append(effects, Copy{p.Worker, f.fill})
	}
	return effects
}

// level takes note that a new holder has caught up, or comes no nearer, and proposes the plan when all have.
func (r *reconfiguration) level(e Level) []Effect {
	f := r.copies
	if f == nil || e.ID != f.fill.ID || r.session(e.Worker) == nil {
		return nil
	}
	delete(f.wait, e.Worker.ID)
	if len(f.wait) > 0 {
		return nil
	}
	r.copies, f.change.copied = nil, true
	return r.commit(f.change)
}

// commit proposes a boundary plan. From here on its new workers are members, whose failure needs a recovery.
func (r *reconfiguration) commit(ch *change) []Effect {
	r.issued, r.boundary = ch.order.Plan.Version, ch
	for _, w := range ch.order.Plan.Workers {
		if m := r.joining[w.ID]; m != nil {
			delete(r.joining, w.ID)
			r.members[w.ID] = m
		}
	}
	return r.propose(ch)
}

// again starts over with what is needed now, if copies for one of the causes are under way.
func (r *reconfiguration) again(causes ...Cause) []Effect {
	if r.copies == nil || !slices.Contains(causes, r.copies.change.cause) {
		return nil
	}
	r.copies = nil
	return r.next()
}

// agreed sends the boundary plan to the members.
func (r *reconfiguration) agreed() []Effect {
	order := &r.boundary.order
	return append([]Effect{note("plan %v is agreed and goes live between two steps", order.Plan.Version)}, r.command(order)...)
}

func (r *reconfiguration) applied(e Applied) []Effect {
	m := r.member(e.Worker)
	if m == nil || r.suspended || r.boundary == nil || e.Version != r.boundary.order.Plan.Version {
		return nil
	}
	m.applied = true
	return r.complete()
}

// complete ends the switch to the boundary plan once all members have applied it.
func (r *reconfiguration) complete() []Effect {
	if r.state() != switching || !r.allApplied() {
		return nil
	}
	effects := r.adopt(r.boundary)
	r.boundary = nil
	effects = append(effects, note("plan %v is live", r.plan.Version))
	return append(append(effects, r.dismiss(&r.plan)...), r.next()...)
}

// joined takes note of a worker that is ready to join.
func (r *reconfiguration) joined(e Joined) []Effect {
	r.joining[e.Worker.ID] = &member{Peer: control.Peer{Worker: e.Worker, Addr: e.Addr}}
	effects := append([]Effect{note("worker %d is ready to join", e.Worker.ID)}, r.again(CauseJoin, CauseProtect, CauseRebalance)...)
	return append(effects, r.next()...)
}

// leaving lets a worker hand over its state and leave.
func (r *reconfiguration) leaving(e Leaving) []Effect {
	if j := r.joiner(e.Worker); j != nil {
		delete(r.joining, j.ID)
		return append([]Effect{Dismiss{j.Worker, fmt.Sprintf("worker %d leaves before it had a part in the plan", j.ID)}}, r.again(CauseJoin)...)
	}
	m := r.member(e.Worker)
	if m == nil || m.leaving || r.finished != nil {
		return nil
	}
	m.leaving = true
	if !slices.ContainsFunc(r.all(), func(m *member) bool { return !m.leaving }) {
		return []Effect{note("all workers want to leave"), StopAll{}}
	}
	effects := append([]Effect{note("worker %d wants to leave", m.ID)}, r.again(CauseJoin, CauseProtect, CauseLeave, CauseRebalance)...)
	return append(effects, r.next()...)
}
