package controller

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/internal/timing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
)

// run is what both machines know of the run: the plan, the workers, and what can be resumed from.
type run struct {
	cfg    Config
	timing timing.Policy

	plan     plan.Plan      // the newest that is known to be live
	live     *control.Order // of the newest recovery; nil before the first
	epoch    int            // of the newest restart
	issued   id.Version     // the newest that any plan has got
	proposed *change        // the newest
	boundary *change        // the boundary plan that may be live or go live; nil for none
	handover *handover      // nil when all workers have applied plan

	members   map[id.WorkerID]*member
	joining   map[id.WorkerID]*member    // ready, and in no plan that was proposed
	times     map[id.WorkerID]plan.Times // measured by sessions that live
	exhausted *measurement               // for which no better plan was found, or one that is to stay for a while
	reliefs   map[id.WorkerID]relief     // of late workers
	awaits    bool                       // more workers, as of the newest that died
	finished  *Finished                  // the first: the model is written
	saved     Saved                      // newest checkpoint; zero: none
	over      bool
}

// member is a living session.
type member struct {
	control.Peer
	report  *control.Report // answer to the ballot under way
	applied bool            // the order of the ballot under way, or the boundary plan
	leaving bool
	suspect string // member of the gossip ring that cannot reach it; "" for none
}

// change is a plan with its cause.
type change struct {
	order      control.Order
	cause      Cause
	reason     planner.Reason
	recomputed int  // passes of failed workers that run again
	copied     bool // new holders have caught up with it
	agreed     bool
}

// handover is the replacement of a plan by a boundary plan that a recovery found live. Until all workers have
// applied it, a new holder of a shard may lack state that only the old holder has.
type handover struct {
	from plan.Plan
	to   id.Version
}

// lives reports whether the plan has this session of the worker.
func lives(p *plan.Plan, w plan.Worker) bool {
	was, ok := p.Worker(w.ID)
	return ok && was.Incarnation == w.Incarnation
}

// member returns a living session, nil if it is over.
func (r *run) member(w plan.Worker) *member {
	if m := r.members[w.ID]; m != nil && m.Worker.Incarnation == w.Incarnation {
		return m
	}
	return nil
}

// joiner returns a living session that is in no plan, nil if there is none.
func (r *run) joiner(w plan.Worker) *member {
	if m := r.joining[w.ID]; m != nil && m.Worker.Incarnation == w.Incarnation {
		return m
	}
	return nil
}

// session returns a living session, in a plan or not.
func (r *run) session(w plan.Worker) *member { return cmp.Or(r.joiner(w), r.member(w)) }

// all returns the members by their IDs.
func (r *run) all() []*member {
	return slices.SortedFunc(maps.Values(r.members), func(a, b *member) int { return int(a.ID - b.ID) })
}

// forget removes a member that has failed, exited or left, and what it has measured.
func (r *run) forget(m *member) {
	delete(r.members, m.ID)
	delete(r.times, m.ID)
}

// planned reports whether the live plan or the newest proposed one has a session. Workers begin under a plan that is
// proposed where it is a boundary plan or a rollback.
func (r *run) planned(w plan.Worker) bool {
	return lives(&r.plan, w) || r.proposed != nil && lives(&r.proposed.order.Plan, w)
}

// profile is what is known of the model and the workers.
func (r *run) profile() plan.Profile { return r.cfg.Profile.With(r.times) }

// modelHosts are the hosts that may get the model, the most wanted first. Between Home and Leader comes the host that is to get it
// so far: another leader alone changes nothing.
func (r *run) modelHosts() []string { return []string{r.cfg.Home, r.plan.ModelHost, r.cfg.Leader} }

// next returns the version of the next plan.
func (r *run) next() id.Version {
	r.issued = id.Version{Generation: r.issued.Generation, N: r.issued.N + 1}
	return r.issued
}

// address fills in the epoch of a plan, its workers and their addresses.
func (r *run) address(ch *change) *change {
	ch.order.Epoch = r.epoch
	if ch.order.Rollback {
		ch.order.Epoch = ch.order.Plan.Version.N
	}
	for _, w := range ch.order.Plan.Workers {
		if m := cmp.Or(r.members[w.ID], r.joining[w.ID]); m != nil {
			ch.order.Peers = append(ch.order.Peers, m.Peer)
		}
	}
	return ch
}

// propose puts a plan to the agents. Its predecessor has a lower ballot or is withdrawn.
func (r *run) propose(ch *change) []Effect {
	r.proposed = ch
	return []Effect{note("propose plan %v: %s", ch.order.Plan.Version, ch.reason), Propose{ch.order, ch.cause, ch.reason}}
}

// command sends an order to all members.
func (r *run) command(order *control.Order) (effects []Effect) {
	for _, m := range r.all() {
		m.applied = false
		effects = append(effects, Command{m.Worker, *order})
	}
	return effects
}

// allApplied reports whether all members have applied what they were sent.
func (r *run) allApplied() bool {
	return !slices.ContainsFunc(r.all(), func(m *member) bool { return !m.applied })
}

// adopt makes a plan the run's.
func (r *run) adopt(ch *change) []Effect {
	if r.plan.Version == ch.order.Plan.Version {
		return nil
	}
	r.plan = ch.order.Plan
	return []Effect{Adopt{ch.order, ch.cause, ch.reason}}
}

// dismiss lets members exit that are not in a plan: all have applied it, or nothing of what they have is needed.
func (r *run) dismiss(p *plan.Plan) []Effect {
	var effects []Effect
	for _, m := range r.all() {
		if !lives(p, m.Worker) {
			r.forget(m)
			effects = append(effects, Dismiss{m.Worker, fmt.Sprintf("worker %d has handed over what it had", m.ID)})
		}
	}
	return effects
}

// enlist makes the workers that are ready to join members.
func (r *run) enlist() {
	maps.Copy(r.members, r.joining)
	clear(r.joining)
}

// end ends the run.
func (r *run) end(err error) []Effect {
	r.over = true
	return []Effect{End{err}}
}

func note(format string, args ...any) Note { return Note{fmt.Sprintf(format, args...)} }

// workers prints members.
func workers(all []*member) string {
	var ids []string
	for _, m := range all {
		ids = append(ids, fmt.Sprint(m.ID))
	}
	if len(ids) == 1 {
		return "worker " + ids[0]
	}
	return "workers " + strings.Join(ids, ", ")
}
