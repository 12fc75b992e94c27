package session

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/timing"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// Between the workers and the controller: what happens becomes the controller's events, and its effects become messages, lines of
// the files and rows of the view.

// evictedError is why the controller has killed a worker.
type evictedError struct{ reason string }

func (e *evictedError) Error() string { return e.reason }

// lose has the run continue without a worker that has exited in training.
func (s *Session) lose(w *worker) {
	w.set(gone)
	s.paces.forget(w.who.ID)
	s.forgetSteps()
	if !s.counted(w) && w.hasLeft() {
		left := fmt.Sprintf("worker %d has left", w.who.ID)
		s.then(s.about(w.who.ID, eventLeft, left), w.row("left"))
		s.tell(s.autopsy(w, left))
		s.conclude() // the others may have told their results before
		return
	}
	err := s.death(w)
	cause := OneLine(stoppedBy(err))
	s.records.lost++
	s.end.lost = w
	if w.status.Panicked && w.fault == nil {
		s.judge(err)
		return
	}
	_, how := culprit(err)
	e := s.about(w.who.ID, eventLost, cause)
	s.noteHost(&e, w)
	s.records.ends = append(s.records.ends, s.inWords(w, err))
	s.then(e)
	s.checkpoints.asked = false // perhaps its part was lost, too
	s.commitCheckpoints()
	s.tell(s.autopsy(w, cause))
	if s.phase == ending {
		return
	}
	s.then(w.row(cmp.Or(how, "lost")), s.processes())
	s.replace(w)
	// Others may have failed because of it, and said so before.
	s.end.claim = nil
	for _, w := range s.workers {
		if w.failed && w.state != gone && w.over() && s.phase != ending {
			s.lose(w)
		}
	}
	s.conclude()
}

// counted reports whether the newest plan counts on a worker.
func (s *Session) counted(w *worker) bool {
	newest := &s.plan
	if coming := s.coming(); coming != nil {
		newest = coming
	}
	return HasPart(newest.Workers, w.who)
}

// hasPart reports whether a worker has a part in the run, or may have.
func (s *Session) hasPart(w *worker) bool {
	coming := s.coming()
	return HasPart(s.plan.Workers, w.who) || coming != nil && HasPart(coming.Workers, w.who)
}

// goesOn reports whether a worker can continue the run: it lives, and has a part in the run and of its state. Who has joined before its shards
// has none yet.
func (s *Session) goesOn(w *worker) bool {
	if w.state < working || w.exit != running || w.fault != nil || !s.hasPart(w) {
		return false
	}
	holds := func(p *plan.Plan) bool {
		return len(p.Shards) == 0 || slices.ContainsFunc(p.Shards, func(sh plan.Shard) bool { return sh.Holds(w.who.ID) })
	}
	coming := s.coming()
	return holds(&s.plan) || coming != nil && holds(coming)
}

// coming returns the boundary plan that was taken over and is not known to be live, or nil.
func (s *Session) coming() *plan.Plan {
	if in := s.cfg.Inherited; in != nil && in.coming != nil && in.coming.Plan.Version.Compare(s.plan.Version) > 0 {
		return &in.coming.Plan
	}
	return nil
}

// autopsy is what the controller is told of a worker that was lost.
func (s *Session) autopsy(w *worker, cause string) controller.Dead {
	dead := controller.Dead{Worker: w.who, Cause: cause, How: controller.Reaped, Died: w.ended, Awaits: s.awaits()}
	progress := w.status.Progress
	for _, p := range progress.Begun {
		dead.Begun = append(dead.Begun, graph.Pair(p))
	}
	dead.BegunIn = progress.Step
	for _, p := range progress.All() {
		if w.status.Fault {
			dead.Crashed = append(dead.Crashed, controller.Crash{Step: progress.Step, Pair: graph.Pair(p)})
		}
	}
	switch {
	case !w.hit.IsZero():
		dead.How, dead.Died = controller.Stamped, w.hit
	case !w.status.Lost.IsZero():
		dead.How, dead.Died = controller.HostOut, w.status.Lost
	case !w.silent.IsZero():
		dead.How, dead.Died = controller.Silent, w.silent
		if silent := new(SilentError); errors.As(w.fault, &silent) && (silent.Stopped || silent.Frozen) {
			dead.How = controller.Halted
		}
	}
	return dead
}

// inWords says in a few words how a worker was lost.
func (s *Session) inWords(w *worker, err error) string {
	how := "failed"
	switch lost, silent, evicted := new(LostError), new(SilentError), new(evictedError); {
	case errors.As(err, &lost):
		how = "exited"
		if signal, ok := strings.CutPrefix(lost.Status.Text, "signal: "); ok {
			how = signal
		}
	case errors.As(err, &silent):
		how = "silent"
		if silent.Stopped {
			how = "stopped"
		} else if silent.Frozen {
			how = "frozen"
		}
	case errors.As(err, &evicted):
		how = "evicted"
	}
	return fmt.Sprintf("worker %d %s", w.id(), how)
}

// evict has the run continue without a worker; the end of its session is the event that follows.
func (s *Session) evict(w *worker, reason string) {
	if w.fault != nil || w.hasExited() {
		return
	}
	w.fault, w.stuck = &evictedError{reason}, w.overdue
	s.exclude(w)
	s.then(s.about(w.who.ID, eventEvict, reason))
}

// tell gives the controller an event and turns what it wants into effects.
func (s *Session) tell(cause controller.Event) {
	if s.phase != training {
		return
	}
	var order control.Order // the last one: an event commands the same to all
	for _, e := range s.ctl.Step(s.now, cause) {
		s.trace(s.tr.Effect(s.moment(), cause, s.victim(cause), e))
		switch e := e.(type) {
		case controller.Ask:
			s.send(s.find(e.Worker), control.Query{Ballot: e.Ballot, Trace: s.tr.Ballot(e.Ballot).String()})
		case controller.Command:
			if order.Plan.Version != e.Order.Plan.Version {
				order = e.Order
				order.Trace = s.tr.Order(e.Order).String()
				var err error
				if order, err = order.Share(); !s.fits(err) {
					return
				}
				s.known[uint64(e.Order.Plan.Version.N)] = e.Order.Plan
			}
			s.send(s.find(e.Worker), order)
		case controller.Copy:
			fill, err := e.Fill.Share()
			if !s.fits(err) {
				return
			}
			s.send(s.find(e.Worker), fill)
		case controller.Propose:
			p := Propose{e.Order, string(e.Reason)}
			s.checkpoints.proposed = e.Order.Plan.Version
			if e.Order.Rollback && e.Order.From != "" {
				s.then(VerifyCheckpoint{p, s.job.Rollback()}) // before workers drop what they have
			} else {
				s.first(p)
			}
		case controller.Balance:
			s.then(Balance{e})
		case controller.Adopt:
			s.adopt(e)
		case controller.Kill:
			w := s.find(e.Worker)
			w.well = e.Well
			s.evict(w, e.Reason)
		case controller.Dismiss:
			s.send(s.find(e.Worker), control.Release{})
			s.then(s.event(eventNote, e.Reason))
		case controller.SetTimer:
			s.timers.set(e.Timer, s.now, e.After)
		case controller.CancelTimer:
			delete(s.timers, e.Timer)
		case controller.Note:
			s.then(s.event(eventNote, e.Reason))
		case controller.Hold:
			if s.end.stop != "" { // no commit would come
				s.judge(&StoppedError{Reason: s.end.stop, Step: s.records.last.Step, Steps: s.job.Steps, AtOnce: true})
				return
			}
			reason := fmt.Sprintf("%s left and --min-workers is %d: waiting for more", plan.Count(e.Have, "worker"), e.Need)
			if e.Have == 0 {
				reason = "no worker is left: waiting for others"
			}
			s.then(s.event(eventHold, reason), Show{view.Note(reason)})
		case controller.Recovered:
			s.recovered(e.Recovery)
		case controller.Relieved: // the plan says what was done
		case controller.StopAll:
			s.stop(Terminated)
		case controller.End:
			s.giveUp(e.Err)
			return
		default:
			panic(fmt.Sprintf("session: the controller wants %T", e))
		}
	}
}

// fits ends the run if an order or a fill could not be encoded.
func (s *Session) fits(err error) bool {
	if errors.Is(err, control.ErrFrameSize) {
		err = fmt.Errorf("%w: use fewer layers, or larger micro-batches: %w", err, ErrTooLarge)
	}
	if err != nil {
		s.judge(&PlanError{err})
	}
	return err == nil
}

// giveUp ends the run, since the controller knows no way to continue.
func (s *Session) giveUp(err error) {
	var none *controller.NoWorkersError
	verdict := err
	if errors.As(err, &none) && s.end.lost != nil {
		verdict = s.death(s.end.lost)
	}
	var evicted *evictedError
	if none == nil || errors.As(verdict, &evicted) {
		verdict = &RecoveryError{Err: err, Step: s.records.last.Step, Steps: s.job.Steps}
	}
	if none != nil {
		// Perhaps all was written before the last one exited.
		if s.conclude(); s.phase == finished && s.end.lost != nil && s.end.lost.fromOutside() {
			s.killedLate(s.end.lost)
			return
		}
	}
	s.judge(verdict)
}

// loseAll ends a run that waits for workers when none is left.
func (s *Session) loseAll() {
	if s.end.lost != nil {
		s.judge(s.death(s.end.lost))
		return
	}
	s.judge(&RecoveryError{Err: errors.New("no worker is left"), Step: s.records.last.Step, Steps: s.job.Steps})
}

// mostKnown bounds the plans that are kept: what workers say is of newer ones.
const mostKnown = 1024

// adopt makes a plan the live one.
func (s *Session) adopt(e controller.Adopt) {
	p := e.Order.Plan
	s.plan, s.known[uint64(p.Version.N)] = p, p
	maps.DeleteFunc(s.known, func(n uint64, _ plan.Plan) bool { return n+mostKnown < uint64(p.Version.N) })
	s.notePlan(e.Cause.String(), string(e.Reason))
	live := view.Plan{Reason: string(e.Reason), Stages: stages(&p)}
	var joined []Effect
	for _, pw := range p.Workers {
		w, part := s.find(pw), share(&p, pw)
		w.own.ID, w.own.Incarnation, w.own.Stages, w.own.Layers = part.ID, part.Incarnation, part.Stages, part.Layers
		live.Workers = append(live.Workers, part)
		if w.joins {
			w.joins = false
			if s.roster.joinedBy[int(pw.ID)] != uint64(p.Version.N) { // else another leader has said so
				s.records.joined++
				joined = append(joined, s.about(pw.ID, eventJoined, fmt.Sprintf("worker %d has joined", pw.ID)))
			}
			joined = append(joined, w.row(""))
		}
	}
	s.then(s.event(eventPlan, string(e.Reason)), Show{live})
	s.clockPlan()
	s.then(joined...)
	if e.Order.Rollback {
		if s.restart.version == (id.Version{}) || s.records.last.Step != s.restart.step {
			s.records.rollbacks++
		}
		s.restart = restart{p.Version, e.Order.Passed.Step}
		s.records.last, _ = s.records.at(s.restart.step)
		clear(s.reports.told)
		s.then(s.event(eventRollback, fmt.Sprintf("the run goes back to step %d", s.restart.step)))
	}
	if thin := thin(&p); thin != s.thin {
		s.thin = thin
		kind, reason := eventProtected, fmt.Sprintf("every shard has its %s", plan.Count(p.Mirrors, "mirror"))
		if thin {
			kind, reason = eventUnprotected, fmt.Sprintf("some shards have fewer than %s", plan.Count(p.Mirrors, "mirror"))
		}
		s.then(s.event(kind, reason))
	}
}

// timers are those of the controller.
type timers map[controller.Timer]timer

type timer struct {
	at    time.Time
	after time.Duration
	slack time.Duration // by which it was made longer
}

func (t timers) set(name controller.Timer, now time.Time, after time.Duration) {
	t[name] = timer{at: now.Add(after), after: after}
}

// extend makes a timer longer on whose time workers are evicted, by what the machine makes them late. It reports whether it did.
func (t timers) extend(name controller.Timer, slack time.Duration) bool {
	x := t[name]
	more := slack - x.slack
	if name != controller.QueryTimer && name != controller.LinkTimer || more <= 0 {
		return false
	}
	t[name] = timer{x.at.Add(more), x.after, slack}
	return true
}

// Alarm returns when AlarmDue is to come, zero for never.
func (s *Session) Alarm() (first time.Time) {
	sooner := func(at time.Time) {
		if !at.IsZero() && (first.IsZero() || at.Before(first)) {
			first = at
		}
	}
	for _, w := range s.workers {
		if !w.over() {
			sooner(w.reap)
			sooner(w.leave)
		}
	}
	if s.phase == ending {
		return first
	}
	sooner(s.disk.due)
	if s.phase == training {
		sooner(s.checkpoints.due)
	}
	for _, w := range s.workers {
		if w.state == connecting && !w.hasExited() {
			sooner(w.hello)
		}
	}
	if c := s.end.claim; c != nil {
		sooner(c.due)
	}
	for _, d := range s.roster.due {
		sooner(d.at)
	}
	for _, t := range s.timers {
		sooner(t.at)
	}
	return first
}

// alarm takes in that a time has come. A timer of the controller that is noticed late runs again: the host was held up itself.
func (s *Session) alarm() {
	passed := func(at *time.Time) bool {
		if at.IsZero() || s.now.Before(*at) {
			return false
		}
		*at = time.Time{}
		return true
	}
	for _, w := range s.workers {
		if passed(&w.reap) {
			s.unreaped(w)
		}
		switch late := passed(&w.hello); {
		case !late || w.state != connecting || w.hasExited() || s.phase == ending:
		case w.fences:
			s.evict(w, fmt.Sprintf("worker %d has missed heartbeats for another %v", w.id(), timing.Of(s.cfg.Detect).Grace))
		case w.joins && s.phase >= training:
			s.refuse(w, fmt.Errorf("has not called trainer.Main within %v", s.cfg.HelloTimeout))
		case !w.stopped.IsZero(): // no fault of the program
			s.excludeHalted(w)
		default:
			s.judge(&NoMainError{Program: s.cfg.Program, Waited: s.cfg.HelloTimeout.String()})
		}
	}
	s.leaveHalted()
	if c := s.end.claim; c != nil && !s.now.Before(c.due) {
		s.believe()
	}
	s.startDue()
	for _, name := range []controller.Timer{controller.QueryTimer, controller.LinkTimer, controller.HoldTimer, controller.WishTimer, controller.LookTimer, controller.RestTimer} {
		switch t, ok := s.timers[name]; {
		case !ok || s.now.Before(t.at):
		case name < controller.WishTimer && timing.Of(s.cfg.Detect).Worker(true).Stopped(s.now.Sub(t.at)),
			(name == controller.QueryTimer || name == controller.LinkTimer) && s.late.stopped:
			s.timers.set(name, s.now, t.after)
		case s.timers.extend(name, s.slack(name)):
		default:
			delete(s.timers, name)
			s.tell(controller.Late{Timer: name})
		}
	}
	if passed(&s.disk.due) {
		s.then(RetryFiles{})
	}
	s.askForCheckpoint()
}
