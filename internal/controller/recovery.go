package controller

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/timing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

// recoveryState is a state of the machine [recovery]. The package doc has its transitions.
type recoveryState uint8

const (
	idle     recoveryState = iota
	querying               // the members are sealed or are about to be, and report
	holding                // all have reported, and are too few
	agreeing               // the order of the ballot is proposed
	applying               // it is agreed, and sent to the members
)

var recoveryNames = [...]string{"idle", "querying", "holding", "agreeing", "applying"}

func (s recoveryState) String() string { return recoveryNames[s] }

// recovery is the machine that brings all members under one plan after a failure within a step.
type recovery struct {
	*run
	state   recoveryState
	ballot  id.Ballot
	silent  int      // query timeouts in a row without any answer
	account *account // nil while idle
	links   links
}

// account is the record of the recovery under way.
type account struct {
	Recovery
	first      plan.Worker // that failed
	last       id.WorkerID // that failed
	causes     []string
	dead       map[id.WorkerID]Dead
	recomputed int // under plans that were agreed and superseded
	late       *Behind
	relieved   bool // the plan gives work of the late worker to others

	died, known, answered, proposed, agreed time.Time
}

// queryTimeouts is the number of query timeouts in a row without any answer after which the members are killed where others are ready to
// take their place: a single one may be the fault of the machine. Where none is, nothing is gained by that, and missed heartbeats decide:
// the members have timing.Hold.
const queryTimeouts = 4

// open returns the account of the recovery under way, or begins one.
func (r *recovery) open(now time.Time) *account {
	if r.account == nil {
		r.account = &account{died: now, known: now, dead: make(map[id.WorkerID]Dead)}
		if n := len(r.cfg.Causes); n > 0 {
			a := r.account
			a.causes, a.Lost, a.How, a.first = r.cfg.Causes, n, HostOut, plan.Worker{Incarnation: -1}
			if r.cfg.Failed.Before(now) {
				a.died = r.cfg.Failed
			}
			r.cfg.Causes = nil
		}
	}
	return r.account
}

// lost begins a recovery from the failure of a planned worker, or starts over the one under way.
func (r *recovery) lost(now time.Time, e Dead) []Effect {
	first := len(r.cfg.Causes) == 0 && (r.account == nil || r.account.late != nil && len(r.account.causes) == 0)
	a := r.open(now)
	if first {
		a.died, a.known = now, now // also where a worker was late before
		a.first, a.How = e.Worker, e.How
		if !e.Died.IsZero() && e.Died.Before(now) {
			a.died = e.Died
		}
	}
	a.last = e.Worker.ID
	a.Lost++
	a.causes = append(a.causes, e.Cause)
	a.dead[e.Worker.ID] = e
	if len(r.members) == 0 {
		return r.none()
	}
	return r.query(e.Cause)
}

// none continues where no member is left. The workers that are ready to join become members, which report that they have
// nothing, so the run rolls back; until there are enough of them, it holds.
func (r *recovery) none() []Effect {
	switch {
	case r.finished != nil || !r.hopes():
		return r.end(r.account.none())
	case len(r.joining) < r.cfg.MinWorkers:
		var effects []Effect
		if r.state == querying && r.cfg.Detect > 0 {
			effects = append(effects, CancelTimer{QueryTimer})
		}
		return append(effects, r.hold(0)...)
	}
	r.enlist()
	return r.query("no worker of the plan is left")
}

// hopes reports whether a run can continue of whose plan no worker is left: by replacements, workers that are ready to join or may
// come, or workers that have left and are not dismissed.
func (r *recovery) hopes() bool {
	return r.cfg.Respawn || r.awaits || len(r.joining)+len(r.members) > 0
}

// unhold ends a run that holds without any worker, and of which the last that could have come is lost.
func (r *recovery) unhold() []Effect {
	if r.state == holding && len(r.members) == 0 && !r.hopes() {
		return r.end(r.account.none())
	}
	return nil
}

// none is the error of a run without workers.
func (a *account) none() error {
	if len(a.causes) == 0 {
		return &NoWorkersError{Cause: "all workers have left"}
	}
	return &NoWorkersError{Worker: a.last, Cause: a.causes[len(a.causes)-1]}
}

// hold waits for more workers.
func (r *recovery) hold(have int) []Effect {
	r.state = holding
	return []Effect{note("%d of at least %d workers are left: hold for more", have, r.cfg.MinWorkers),
		Hold{have, r.cfg.MinWorkers}, SetTimer{HoldTimer, r.cfg.Hold}}
}

// stamped corrects the time of the first failure.
func (r *recovery) stamped(e Stamp) []Effect {
	if a := r.account; a != nil && a.first == e.Worker && a.Lost > 0 && e.At.Before(a.died) {
		a.died, a.How = e.At, Stamped
	}
	return nil
}

// lead begins a recovery under a new leader.
func (r *recovery) lead(now time.Time, term uint64) []Effect {
	if term > r.ballot.Term {
		r.ballot = id.Ballot{Term: term}
	}
	r.open(now)
	return r.query(fmt.Sprintf("this agent leads in term %d", term))
}

// query begins a ballot: all members are asked for their reports.
func (r *recovery) query(why string) []Effect {
	r.ballot.Attempt++
	r.account.Ballots++
	var effects []Effect
	if r.state == holding {
		effects = append(effects, CancelTimer{HoldTimer})
	}
	r.state, r.silent = querying, 0
	all := r.all()
	effects = append(effects, note("%s: query %s, ballot %v", why, workers(all), r.ballot))
	for _, m := range all {
		m.report, m.applied = nil, false
		effects = append(effects, Ask{m.Worker, r.ballot})
	}
	if r.cfg.Detect > 0 {
		effects = append(effects, SetTimer{QueryTimer, r.timing.Query})
	}
	return effects
}

func (r *recovery) answered(now time.Time, e Answered) []Effect {
	m := r.member(e.Worker)
	if m == nil || r.state != querying || e.Ballot != r.ballot {
		return nil
	}
	first := m.report == nil
	m.report = &e.Report
	effects := r.decide(now)
	if first && r.state == querying && r.cfg.Detect > 0 && len(effects) == 0 {
		// While answers come, the others are late, not failed.
		effects = append(effects, SetTimer{QueryTimer, r.timing.Query})
	}
	return effects
}

// fewer continues without a member that had nothing the others need.
func (r *recovery) fewer(now time.Time) []Effect {
	switch r.state {
	case querying:
		return r.decide(now)
	case applying:
		return r.complete(now)
	}
	return nil
}

// decide makes the plan once all members have reported.
func (r *recovery) decide(now time.Time) []Effect {
	all := r.all()
	switch {
	case len(all) == 0 && r.finished == nil:
		return r.none()
	case len(all) == 0 || slices.ContainsFunc(all, func(m *member) bool { return m.report == nil }):
		return nil
	}
	var effects []Effect
	switch {
	case r.state == holding:
		effects = append(effects, CancelTimer{HoldTimer})
	case r.cfg.Detect > 0:
		effects = append(effects, CancelTimer{QueryTimer})
	}
	r.account.answered = now
	// A worker that has never applied a plan has nothing of the run, and needs nothing for a rollback.
	var fresh []*member
	all = slices.DeleteFunc(all, func(m *member) bool {
		if m.report.Plan != (id.Version{}) || r.live != nil && r.live.Rollback && lives(&r.live.Plan, m.Worker) {
			return false
		}
		fresh = append(fresh, m)
		return true
	})
	at, err := r.position(all)
	if err != nil {
		return append(effects, r.end(err)...)
	}
	was := r.plan
	effects = append(effects, r.settle(at.plan)...)
	if r.plan.Version != was.Version {
		r.handover = &handover{from: was, to: r.plan.Version}
	}
	for _, m := range at.missed {
		all = slices.DeleteFunc(all, func(x *member) bool { return x == m })
		r.forget(m)
		effects = append(effects, Kill{Worker: m.Worker, Reason: fmt.Sprintf("worker %d was to leave, and the others have passed the point at which it left", m.ID)})
	}
	for _, m := range fresh {
		r.forget(m)
		if lives(&r.plan, m.Worker) {
			effects = append(effects, Kill{m.Worker, fmt.Sprintf("worker %d had not begun under its first plan when a worker failed", m.ID), true})
		} else {
			r.joining[m.ID] = m
		}
	}
	current, alive := r.current(all)
	kept, have := at.point.Gate == id.Kept, len(alive)
	if have == 0 {
		have = len(r.members) // which roll the run back
	}
	switch {
	case len(alive) == 0 && (kept || !r.hopes()):
		return append(effects, r.end(r.account.none())...)
	case have+len(r.joining) < r.cfg.MinWorkers && !kept:
		return append(effects, r.hold(have)...)
	case current != &r.plan:
		effects = append(effects, note("no worker of plan %v lives: those that were to leave stay", r.plan.Version))
	}
	change, err := r.change(all, current, alive, at)
	if err != nil {
		return append(effects, r.end(err)...)
	}
	if change.order.Rollback {
		effects = append(effects, r.dismiss(&change.order.Plan)...)
	}
	r.state = agreeing
	return append(effects, r.propose(change)...)
}

// current returns the plan that a recovery starts from, and its workers that live. Where none of the live plan does, workers
// that were to leave with it stay, unless they have applied it: it is the plan before.
func (r *recovery) current(all []*member) (*plan.Plan, []plan.Worker) {
	alive := workersOf(all, &r.plan)
	if h := r.handover; h != nil && len(alive) == 0 {
		left := func(m *member) bool { return m.report.Holds.Compare(h.to) >= 0 }
		if stay := workersOf(slices.DeleteFunc(slices.Clone(all), left), &h.from); len(stay) > 0 {
			return &h.from, stay
		}
	}
	return &r.plan, alive
}

// workersOf returns the members that a plan has.
func workersOf(all []*member, p *plan.Plan) (of []plan.Worker) {
	for _, m := range all {
		if was, ok := p.Worker(m.ID); ok && was.Incarnation == m.Incarnation {
			of = append(of, was)
		}
	}
	return of
}

// settle adopts the boundary plan under way if it is live, and withdraws it if it is not.
func (r *recovery) settle(v id.Version) []Effect {
	ch := r.boundary
	r.boundary = nil
	switch {
	case ch == nil:
		return nil
	case v == ch.order.Plan.Version:
		return r.adopt(ch)
	}
	return []Effect{note("plan %v is withdrawn", ch.order.Plan.Version)}
}

// agreed takes note that the order of a ballot is agreed, and sends it if the ballot is still the newest.
func (r *recovery) agreed(now time.Time, ch *change, proposed time.Time) []Effect {
	effects := r.adopt(ch)
	order := &ch.order
	r.live, r.epoch = order, order.Epoch
	if order.Rollback {
		r.handover = nil
	}
	a := r.account
	a.recomputed += ch.recomputed
	if r.state != agreeing || order.Ballot != r.ballot {
		return append(effects, note("plan %v is agreed, and not sent: ballot %v is under way", order.Plan.Version, r.ballot))
	}
	a.proposed, a.agreed = proposed, now
	if a.proposed.Before(a.answered) || now.Before(a.proposed) {
		a.proposed = a.answered
	}
	r.state = applying
	return append(effects, r.command(order)...)
}

func (r *recovery) applied(now time.Time, e Applied) []Effect {
	m := r.member(e.Worker)
	if m == nil || r.state != applying || e.Ballot != r.ballot {
		return nil
	}
	m.applied = true
	r.account.Opened += e.Opened
	r.account.Edit, r.account.Update = max(r.account.Edit, e.Edit), max(r.account.Update, e.Update)
	return r.complete(now)
}

// complete ends the recovery once all members have applied its order.
func (r *recovery) complete(now time.Time) []Effect {
	if !r.allApplied() {
		return nil
	}
	a := r.account
	r.state, r.account, r.handover = idle, nil, nil
	r.links.reopened(a.agreed)
	a.Cause, a.Version = strings.Join(a.causes, "; "), r.plan.Version
	a.Detect, a.Query, a.Plan, a.Agree = a.known.Sub(a.died), a.answered.Sub(a.known), a.proposed.Sub(a.answered), a.agreed.Sub(a.proposed)
	rest := now.Sub(a.agreed)
	a.Edit = min(a.Edit, rest)
	a.Resume, a.Total, a.Again = rest-a.Edit, now.Sub(a.died), a.recomputed
	effects := []Effect{note("all have applied plan %v", a.Version)}
	switch {
	case len(a.causes) > 0:
		effects = append(effects, Recovered{a.Recovery})
	case a.late != nil:
		a.Cause = a.late.Cause
		effects = append(effects, Relieved{Relief{a.Recovery, a.late.Worker, a.relieved}})
		if !a.relieved {
			break
		}
		if rest := r.stays(now, a.late.Worker.ID); rest > timing.Boundary {
			r.exhausted = &measurement{r.plan.Version, r.profile()}
			effects = append(effects, SetTimer{RestTimer, rest})
		}
	}
	effects = append(effects, r.dismiss(&r.plan)...)
	// The interrupted step comes first.
	return append(effects, SetTimer{WishTimer, timing.Boundary})
}

// late kills members that have not answered in time, and ends a run that too few workers are left for.
func (r *recovery) late(t Timer) []Effect {
	switch {
	case t == QueryTimer && r.state == querying:
		all := r.all()
		answered := func(m *member) bool { return m.report != nil }
		r.silent++
		most := queryTimeouts
		if len(r.joining) == 0 {
			most = max(most, int(timing.Hold/r.timing.Query))
		}
		// Where no worker was lost, nothing but a late answer is known of those that have not answered.
		only := r.account.late != nil && len(r.account.causes) == 0
		if r.silent < most && !slices.ContainsFunc(all, answered) || only && r.silent < queryTimeouts {
			effects := []Effect{SetTimer{QueryTimer, r.timing.Query}}
			if r.silent == 1 && !only {
				effects = append(effects, note("no worker has answered within %v: wait on", r.timing.Query))
			}
			return effects
		}
		var effects []Effect
		for _, m := range all {
			if !answered(m) {
				effects = append(effects, Kill{m.Worker, fmt.Sprintf("worker %d has not answered within %v", m.ID, r.timing.Query), only})
			}
		}
		return effects // the first of their failures begins the next ballot
	case t == HoldTimer && r.state == holding:
		return r.end(&FewError{Have: len(r.members), Need: r.cfg.MinWorkers, Held: r.cfg.Hold})
	}
	return nil
}

// checkpoint is called with the newest usable checkpoint. If the order under way goes back to a newer one, that one
// turned out unusable.
func (r *recovery) checkpoint(e Saved) []Effect {
	was := r.saved
	r.saved = e
	if r.state != agreeing || e.Step >= was.Step {
		return nil
	}
	if o := &r.proposed.order; o.Rollback && o.Ballot == r.ballot && o.Passed.Step > e.Step {
		return r.query(fmt.Sprintf("the checkpoint of step %d cannot be used", o.Passed.Step))
	}
	return nil
}
