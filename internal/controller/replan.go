package controller

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/plan/planner"
)

// change makes the order that ends the recovery: the same plan where no worker of it is lost, a plan for the rest of
// the step where every shard has a holder, and a rollback where a shard has none. It starts from a plan, of which the workers
// alive live; where none does, those that are ready to join, or have left and are still here, roll the run back.
func (r *recovery) change(all []*member, from *plan.Plan, alive []plan.Worker, at position) (*change, error) {
	a := r.account
	a.Step = at.point.Step + 1
	causes := strings.Join(a.causes, "; ")
	ch := &change{cause: CauseLost, order: control.Order{Ballot: r.ballot, Passed: at.point, Result: at.result}}
	if len(alive) == 0 {
		r.enlist()
		for _, m := range r.all() {
			alive = append(alive, m.Worker)
		}
		return r.rollback(ch, alive, planner.Reason(causes+": no worker of the plan is left; "))
	}
	current, short, none := *from, false, (*planner.LostError)(nil)
	if from == &r.plan {
		current, short, none = r.held(all, at.point)
	}
	if at.behind {
		return r.rollback(ch, alive, planner.Reason(causes+": not all workers had rolled back; "))
	}
	view := plan.View{Workers: alive, ModelHosts: r.modelHosts(), Step: at.point.Step + 1}
	for _, m := range all {
		if m.report.Passed == at.point {
			for _, w := range m.report.Works {
				view.Works = append(view.Works, plan.Work{Worker: m.ID, Status: w})
			}
		}
	}
	view.Complete = complete(&current, all, at.point)
	if len(alive) == len(current.Workers) && none == nil {
		if relieved, err := r.relieve(ch, view); relieved || err != nil {
			return r.address(ch), err
		}
		// The version is new all the same: what the workers exchanged while they were sealed did not count.
		ch.cause, ch.reason = CauseUnchanged, "no worker of the plan is lost: the same plan, so that all continue under it"
		if len(r.links.broken) > 0 || short {
			ch.cause, ch.reason = CauseLink, planner.Reason(causes+": the same plan, so that what was lost is sent again")
		}
		ch.order.Plan = r.same(current, at.point)
		return r.address(ch), nil
	}
	if none == nil {
		p, reason, err := planner.Next(current, view, r.profile(), planner.Event{Kind: planner.Lost, Cause: causes, After: r.issued})
		if err == nil {
			r.issued = p.Version
			ch.order.Plan, ch.reason = p, reason
			a.Rollback = false
			ch.recomputed = r.recomputed(&p, view)
			return r.address(ch), nil
		}
		if !errors.As(err, &none) {
			return nil, err
		}
	}
	if at.point.Gate == id.Kept {
		// The model is written; the plan only says who is left.
		p, _, err := r.scratch(alive, at.point)
		ch.order.Plan, ch.reason = p, planner.Reason(causes+": the model is written, the others exit")
		return r.address(ch), err
	}
	return r.rollback(ch, alive, planner.Reason(fmt.Sprintf("%s: %v; ", causes, none)))
}

// rollback makes an order that resumes from the newest checkpoint, or from the beginning without one.
func (r *recovery) rollback(ch *change, alive []plan.Worker, why planner.Reason) (*change, error) {
	o := &ch.order
	ch.cause, o.Rollback, o.From, o.Passed, o.Result = CauseRestart, true, r.saved.Dir, id.Point{Step: r.saved.Step}, nil
	p, reason, err := r.scratch(alive, o.Passed)
	if err != nil {
		return nil, err
	}
	from := "the beginning"
	if r.saved.Dir != "" {
		from = fmt.Sprintf("the checkpoint of step %d", r.saved.Step)
	}
	o.Plan, ch.reason = p, why+planner.Reason("resume from "+from+", ")+reason
	a := r.account
	a.Rollback, a.From, a.recomputed = true, r.saved.Step, 0
	return r.address(ch), nil
}

// held returns the live plan with the holders that have the state of their shards. During a handover, members that
// have not applied the plan may lack what was being sent to them: they hold nothing. Where no holder lives, one of the
// plan before takes its place: a worker keeps what it hands over until the next commit, and says so in its report. short says that holders are
// missing, and none that a shard is left without one.
func (r *recovery) held(all []*member, at id.Point) (p plan.Plan, short bool, none *planner.LostError) {
	p = r.plan
	h := r.handover
	if h == nil {
		return p, false, nil
	}
	held := make(map[id.WorkerID][]id.Range) // under the plan before
	for _, s := range h.from.Shards {
		for _, w := range append([]id.WorkerID{s.Owner}, s.Mirrors...) {
			held[w] = append(held[w], id.Range{Layer: s.Layer, Lo: s.Lo, Hi: s.Hi})
		}
	}
	alive := make(map[id.WorkerID]*member)
	for _, m := range all {
		alive[m.ID] = m
		if !lives(&h.from, m.Worker) || m.report.Holds.Compare(h.to) >= 0 {
			delete(held, m.ID) // it says itself what it still has
		}
		for _, f := range m.report.Filled {
			if f.Step == at.Step {
				held[m.ID] = append(held[m.ID], f.Range)
			}
		}
	}
	p.Shards = slices.Clone(p.Shards)
	for i := range p.Shards {
		s := &p.Shards[i]
		var holders []id.WorkerID
		lives := false
		for _, w := range append([]id.WorkerID{s.Owner}, s.Mirrors...) {
			m := alive[w]
			if m != nil && m.report.Holds.Compare(h.to) < 0 && !covers(held[w], *s) {
				continue
			}
			holders = append(holders, w) // the next plan drops failed workers
			lives = lives || m != nil
		}
		if !lives {
			for _, m := range all {
				if _, stays := p.Worker(m.ID); stays && covers(held[m.ID], *s) {
					holders = append([]id.WorkerID{m.ID}, holders...)
					break
				}
			}
		}
		if len(holders) == 0 {
			if none == nil {
				none = &planner.LostError{Shard: *s}
			}
			none.Count++
			continue
		}
		if holders[0] != s.Owner || len(holders) != 1+len(s.Mirrors) {
			short = true
			s.Owner, s.Mirrors = holders[0], holders[1:]
		}
	}
	return p, short, none
}

// same repeats a plan for the rest of the step under a new version.
func (r *recovery) same(p plan.Plan, at id.Point) plan.Plan {
	if p.FromStep != at.Step+1 {
		p.FromStep, p.Settled, p.First = max(at.Step+1, p.FromStep), nil, nil
	}
	p.InStep, p.Degraded, p.Version = true, false, r.next()
	p.PickModelHost(r.modelHosts())
	return p
}

// scratch makes a plan that keeps nothing of the one before but the order of versions.
func (r *recovery) scratch(alive []plan.Worker, at id.Point) (plan.Plan, planner.Reason, error) {
	p, reason, err := planner.Next(plan.Plan{}, plan.View{Workers: alive, ModelHosts: r.modelHosts()}, r.profile(), planner.Event{
		Kind: planner.Start, Micros: r.plan.Micros(),
		Stages: min(r.cfg.Stages, len(alive)), Mirrors: r.cfg.Mirrors, FromStep: at.Step + 1,
	})
	p.Version = r.next()
	return p, reason, err
}

// recomputed counts the passes that failed workers had begun and that run again.
func (r *recovery) recomputed(p *plan.Plan, v plan.View) int {
	begun := make(map[graph.Pair]bool)
	for _, w := range v.Works {
		// What a pass has from its neighbours shows that they were begun.
		if w.Begun() || w.Input {
			begun[graph.Pair{Stage: w.Stage - 1, Micro: w.Micro}] = true
		}
		if w.Phase >= graph.Backing || w.Gradient {
			begun[graph.Pair{Stage: w.Stage + 1, Micro: w.Micro}] = true
		}
	}
	n := 0
	for s, route := range r.plan.Route {
		for m, w := range route {
			pair := graph.Pair{Stage: s, Micro: m}
			was, dead := r.account.dead[w]
			told := (was.BegunIn == 0 || was.BegunIn == v.Step) && slices.Contains(was.Begun, pair)
			if dead && r.plan.Runs(pair, v.Step) && p.Runs(pair, v.Step) && (begun[pair] || told) {
				n++
			}
		}
	}
	return n
}

// complete returns which members have the complete gradient of which shard.
func complete(p *plan.Plan, all []*member, at id.Point) (list []plan.Complete) {
	for i, s := range p.Shards {
		for _, m := range all {
			if m.report.Passed == at && covers(m.report.Complete, s) {
				list = append(list, plan.Complete{Shard: i, Worker: m.ID})
			}
		}
	}
	return list
}

// covers reports whether ranges together hold a shard.
func covers(ranges []id.Range, s plan.Shard) bool {
	at := s.Lo
	for found := true; found && at < s.Hi; {
		found = false
		for _, r := range ranges {
			if r.Layer == s.Layer && r.Lo <= at && at < r.Hi {
				at, found = r.Hi, true
			}
		}
	}
	return at >= s.Hi
}
