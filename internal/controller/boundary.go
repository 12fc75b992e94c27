package controller

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

// filling is a boundary plan whose new holders are still to get their state.
type filling struct {
	fill   Fill
	change *change
	wait   map[id.WorkerID]bool // who is not level yet
}

// wishes begins a boundary plan where one is called for and nothing else is
// under way: workers leave, workers join, shards get mirrors again, and work is
// balanced anew, in this order.
func (c *Controller) wishes() []Effect {
	if c.phase != steady || c.coming != nil || c.kept != nil || c.filling != nil {
		return nil
	}
	var view plan.View
	for _, m := range c.all() {
		was, ok := c.plan.Worker(m.ID)
		if !ok || was.Incarnation != m.Worker.Incarnation {
			continue
		}
		view.Workers = append(view.Workers, was)
		if m.leaving {
			view.Leaving = append(view.Leaving, m.ID)
		}
	}
	event, what := plan.Event{After: c.issued}, ""
	switch stay := len(view.Workers) - len(view.Leaving); {
	case len(view.Leaving) > 0 && stay > 0 && stay >= c.cfg.MinWorkers:
		event.Kind, what = plan.Leave, "leave"
	case len(c.joining) > 0:
		event.Kind, what = plan.Join, "join"
		view.Leaving = nil
		for _, m := range c.joining {
			view.Workers = append(view.Workers, m.Worker)
		}
		slices.SortFunc(view.Workers, func(a, b plan.Worker) int { return int(a.ID - b.ID) })
	case len(view.Leaving) > 0:
		return []Effect{note("nobody leaves: %d of at least %d workers would stay", stay, c.cfg.MinWorkers)}
	case !c.plan.Protected():
		event.Kind, what = plan.Protect, "protect"
	default:
		event.Kind, what = plan.Rebalance, "rebalance"
	}
	if event.Kind != plan.Rebalance {
		p, reason, err := plan.Next(c.plan, view, c.profile(), event)
		if event.Kind != plan.Protect || err != nil || len(plan.Diff(&c.plan, &p).Mirror) > 0 || p.Protected() {
			return c.fillFor(p, view, what, reason, err)
		}
		event.Kind = plan.Rebalance // as many mirrors as there can be are there
	}
	prof := c.profile()
	if c.balance != nil || c.cfg.Reshape == Off || len(c.times) == 0 || !c.seen.news(c.plan.Version, &prof) {
		return nil
	}
	event.Fixed = c.cfg.Reshape == Dataflow
	c.looks++
	c.balance = &Balance{c.looks, c.plan, view, prof, event}
	return []Effect{*c.balance}
}

// balanced takes a plan that divides the work better, if all is still as it was.
func (c *Controller) balanced(e Balanced) []Effect {
	b := c.balance
	if b == nil || e.Look != b.Look {
		return nil
	}
	c.balance = nil
	prof := c.profile()
	switch {
	case c.phase != steady || c.coming != nil || c.kept != nil || c.filling != nil:
		return nil // it is asked for again afterwards
	case b.Current.Version != c.plan.Version || b.Event.After != c.issued || b.Profile.Differs(&prof):
		return c.wishes()
	case errors.Is(e.Err, plan.ErrNoGain):
		c.seen = &look{c.plan.Version, b.Profile}
		return nil
	}
	return c.fillFor(e.Plan, b.View, "rebalance", e.Reason, e.Err)
}

// fillFor brings those who are to hold a range under a plan what they need for it, and proposes the plan then, at once
// where nobody needs anything.
func (c *Controller) fillFor(p plan.Plan, view plan.View, what string, reason plan.Reason, err error) []Effect {
	if err != nil {
		return []Effect{note("no plan to %s: %v", what, err)}
	}
	state, _ := plan.Needs(&c.plan, &p, view)
	for _, t := range state {
		if t.From < 0 {
			return []Effect{note("no plan to %s: nobody has [%d,%d) of layer %d", what, t.Lo, t.Hi, t.Layer)}
		}
	}
	ch := c.address(&change{order: Order{Plan: p}, cause: what, reason: reason})
	if len(state) == 0 {
		return c.come(ch)
	}
	c.fill.N++
	f := &filling{change: ch, wait: make(map[id.WorkerID]bool), fill: Fill{ID: c.fill, Transfers: state}}
	for _, m := range c.all() {
		f.fill.Peers = append(f.fill.Peers, m.Peer)
	}
	for _, w := range view.Workers {
		if m := c.joining[w.ID]; m != nil {
			f.fill.Peers = append(f.fill.Peers, m.Peer)
		}
	}
	for _, t := range state {
		f.wait[t.To] = true
	}
	c.filling = f
	effects := []Effect{note("%s: %d ranges go to %d new holders first", reason, len(state), len(f.wait))}
	for _, p := range f.fill.Peers {
		effects = append(effects, Copy{p.Worker, f.fill})
	}
	return effects
}

// level takes note of a holder that is there, and proposes the plan when all
// are.
func (c *Controller) level(e Level) []Effect {
	f := c.filling
	if f == nil || e.ID != f.fill.ID || c.phase != steady || c.session(e.Worker) == nil {
		return nil
	}
	delete(f.wait, e.Worker.ID)
	if len(f.wait) > 0 {
		return nil
	}
	c.filling = nil
	return c.come(f.change)
}

// come proposes a boundary plan.
func (c *Controller) come(ch *change) []Effect {
	c.issued = ch.order.Plan.Version
	c.coming = ch
	// From here on, the death of one that joins strikes the plan.
	for _, w := range ch.order.Plan.Workers {
		if m := c.joining[w.ID]; m != nil {
			delete(c.joining, w.ID)
			c.members[w.ID] = m
		}
	}
	return c.propose(ch)
}

func (c *Controller) joined(now time.Time, e Joined) []Effect {
	if c.member(e.Worker) != nil || c.joining[e.Worker.ID] != nil {
		return nil
	}
	c.joining[e.Worker.ID] = &member{Peer: Peer{Worker: e.Worker, Addr: e.Addr}}
	effects := []Effect{note("worker %d is ready to join", e.Worker.ID)}
	if c.phase == holding {
		return append(effects, c.decide(now)...)
	}
	return append(append(effects, c.refill("join", "protect", "rebalance")...), c.wishes()...)
}

// refill withdraws the boundary plan that is being filled, if it is of a kind,
// and begins again with what is wished for now.
func (c *Controller) refill(kinds ...string) []Effect {
	if c.filling == nil || !slices.Contains(kinds, c.filling.change.cause) {
		return nil
	}
	c.filling = nil
	return c.wishes()
}

// session returns the living session, also of a worker that is to join.
func (c *Controller) session(w plan.Worker) *member {
	if m := c.joining[w.ID]; m != nil && m.Worker.Incarnation == w.Incarnation {
		return m
	}
	return c.member(w)
}

// dismiss lets those end that the plan does without, as soon as all have
// applied it.
func (c *Controller) dismiss() []Effect {
	var effects []Effect
	for _, m := range c.all() {
		if was, ok := c.plan.Worker(m.ID); !ok || was.Incarnation != m.Worker.Incarnation {
			delete(c.members, m.ID)
			effects = append(effects, Dismiss{m.Worker, fmt.Sprintf("worker %d has handed over what it had", m.ID)})
		}
	}
	return effects
}
