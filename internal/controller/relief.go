package controller

import (
	"errors"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/timing"
)

// A worker that is late in a step need not be lost for others to take over what it has not begun: its results would be the same bits. So a
// recovery without a loss seals all, and makes a plan for the rest of the step in which the late worker has less to do. Between the steps,
// work is balanced again soon. Where the same worker is late again and again, work is not balanced for a while, each time for longer.

// Relief is a plan for the rest of a step without a loss, by which others do a part of what a late worker had to do.
type Relief struct {
	Recovery
	Worker plan.Worker
	Done   bool // false: it had begun all meanwhile, and the plan is as before
}

// relief is what is known of the newest one of a worker.
type relief struct {
	rest  time.Duration // for how long it was to stay
	until time.Time
}

// stays returns for how long the plan that relieves a worker is to stay, and those that relieve others.
func (r *run) stays(now time.Time, w id.WorkerID) (rest time.Duration) {
	was, again := r.reliefs[w]
	for x, o := range r.reliefs {
		if rest = max(rest, o.until.Sub(now)); now.Sub(o.until) > timing.ReliefAgain+o.rest {
			delete(r.reliefs, x)
			again = again && x != w
		}
	}
	own := timing.Boundary
	if again {
		own = min(max(2*was.rest, timing.ReliefLeast), timing.ReliefMost)
	}
	r.reliefs[w] = relief{own, now.Add(own)}
	return max(rest, own)
}

// behind begins a recovery for a worker that is late, where nothing else is under way.
func (c *Controller) behind(now time.Time, e Behind) []Effect {
	// A plan that only balances work may be withdrawn: it is made again.
	disturbs := c.reconf.copies != nil || c.boundary != nil && (c.boundary.copied || c.boundary.cause != CauseRebalance)
	if c.Busy() || disturbs || c.finished != nil || c.cfg.Reshape == Off || c.member(e.Worker) == nil || !lives(&c.plan, e.Worker) {
		return nil
	}
	c.recovery.open(now).late = &e
	return c.recovery.query(e.Cause)
}

// relieve makes the plan by which others do a part of what a late worker has to do; false where there is none.
func (r *recovery) relieve(ch *change, view plan.View) (bool, error) {
	late := r.account.late
	if late == nil || r.handover != nil || view.Step != late.Step {
		return false, nil
	}
	p, reason, err := planner.Next(r.plan, view, r.profile(), planner.Event{
		Kind: planner.Relieve, Cause: late.Cause, After: r.issued, Late: planner.Late{Worker: late.Worker.ID, Each: late.Each},
	})
	if errors.Is(err, planner.ErrNoGain) {
		return false, nil
	}
	if err == nil {
		r.issued, r.account.relieved = p.Version, true
		ch.cause, ch.order.Plan, ch.reason = CauseLate, p, reason
	}
	return err == nil, err
}
