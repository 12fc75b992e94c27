package session

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// This is what a session does between the workers and the controller: it turns what
// happens into the controller's events, and the controller's effects into messages, lines
// of the files and rows of the view.

// restart is what a run goes back to.
type restart struct {
	version id.Version // of the plan that it goes on with
	step    int        // committed
}

// timer is one of the controller.
type timer struct {
	at    time.Time
	after time.Duration
}

// session is what plans call a worker.
func (s *Session) session(id int) plan.Worker { return s.workers[id].who }

// id is what people call a worker.
func (s *Session) id(id int) int { return int(s.workers[id].who.ID) }

// find returns the place of a session in session.workers, -1 for none.
func (s *Session) find(w plan.Worker) int {
	return slices.IndexFunc(s.workers, func(x worker) bool { return x.who.ID == w.ID && x.who.Incarnation == w.Incarnation })
}

// newest returns the place of the newest session of a worker, -1 for none.
func (s *Session) newest(id id.WorkerID) int {
	return s.find(plan.Worker{ID: id, Incarnation: s.lives[id] - 1})
}

// peers are the workers that there are and where they listen.
func (s *Session) peers() []controller.Peer {
	var all []controller.Peer
	for id := range s.workers {
		all = append(all, controller.Peer{Worker: s.session(id), Addr: s.workers[id].ready.Addr})
	}
	return all
}

// isFirst reports whether a worker is the first of the run's plan, or of another that
// it may not have left yet.
func (s *Session) isFirst(id int) bool {
	for _, p := range s.known {
		if p.Workers[0] == s.workers[id].who {
			return true
		}
	}
	return false
}

// alarm returns when the next alarm is due, zero for never.
func (s *Session) Alarm() (first time.Time) {
	if s.judged {
		return first
	}
	if s.state == training {
		first = s.saves.due
	}
	for id := range s.workers {
		if at := s.workers[id].hello; !at.IsZero() && (first.IsZero() || at.Before(first)) {
			first = at
		}
	}
	for _, t := range s.timers {
		if first.IsZero() || t.at.Before(first) {
			first = t.at
		}
	}
	return first
}

// ring tells the controller which timers have run out. Who comes late by more than a quarter of
// the budget was itself kept from listening, and begins anew.
func (s *Session) ring(now time.Time) []Effect {
	var effects []Effect
	for id := range s.workers {
		if w := &s.workers[id]; !w.hello.IsZero() && !now.Before(w.hello) {
			effects = append(effects, s.refuse(now, id, fmt.Errorf("has not called trainer.Main within %v", s.cfg.HelloTimeout))...)
		}
	}
	for _, name := range []controller.Timer{controller.QueryTimer, controller.LinkTimer, controller.HoldTimer, controller.WishTimer, controller.LookTimer} {
		switch t, ok := s.timers[name]; {
		case !ok || now.Before(t.at):
		case name != controller.WishTimer && name != controller.LookTimer && s.cfg.Detect > 0 && now.Sub(t.at) > s.cfg.Detect/4:
			s.timers[name] = timer{now.Add(t.after), t.after}
		default:
			delete(s.timers, name)
			effects = append(effects, s.tell(now, controller.Late{Timer: name})...)
		}
	}
	return append(effects, s.askForSave(now)...)
}

// evictedError is why the controller ended a worker.
type evictedError struct{ reason string }

func (e *evictedError) Error() string { return e.reason }

// death is the error of a worker that has ended before its time.
func (s *Session) death(id int) error {
	w := &s.workers[id]
	if silent := new(SilentError); errors.As(w.doom, &silent) {
		return silent
	}
	if w.doom != nil {
		return w.doom
	}
	return &LostError{Worker: s.id(id), Workers: len(s.workers), Status: w.status, Step: s.last.Step, Steps: s.job.Steps}
}

// die goes on without a worker that has ended in training.
func (s *Session) die(now time.Time, id int) []Effect {
	w := &s.workers[id]
	w.gone = true
	s.paces.forget(w.who.ID)
	s.forget()
	if in, ok := s.plan.Worker(w.who.ID); (!ok || in != w.who) && w.status.OK() {
		left := fmt.Sprintf("worker %d has left", w.who.ID)
		effects := []Effect{s.about(now, id, "left", left), s.row(id, "left")}
		effects = append(effects, s.tell(now, controller.Dead{Worker: w.who, Cause: left})...)
		return append(effects, s.conclude(now)...) // the others may have come to their end before
	}
	err := s.death(id)
	cause := OneLine(stoppedBy(err))
	s.losses++
	s.lost = id
	if w.status.Panicked && w.doom == nil {
		return s.judge(now, err)
	}
	dead := controller.Dead{Worker: s.session(id), Cause: cause, How: controller.Reaped, Died: w.ended}
	progress := w.status.Progress
	for _, p := range progress.Begun {
		dead.Begun = append(dead.Begun, graph.Pair(p))
	}
	dead.BegunIn = progress.Step
	if w.status.Fault && progress.Running != nil {
		dead.Crashed = &controller.Crash{Step: progress.Step, Pair: graph.Pair(*progress.Running)}
	}
	switch {
	case !w.harmed.IsZero():
		dead.How, dead.Died = controller.Stamped, w.harmed
	case !w.status.Lost.IsZero():
		dead.How, dead.Died = controller.HostOut, w.status.Lost
	case !w.silent.IsZero():
		dead.How, dead.Died = controller.Silent, w.silent
	}
	_, how := culprit(err)
	if how == "" {
		how = "lost"
	}
	lost := s.about(now, id, "lost", cause)
	if !w.status.Lost.IsZero() {
		lost.Event.Host, s.away[w.who.ID] = w.who.Host, w.who.Host
	}
	s.fates = append(s.fates, s.fate(id, err))
	effects := []Effect{lost}
	effects = append(effects, s.lostSave(now)...)
	effects = append(effects, s.tell(now, dead)...)
	if s.judged {
		return effects
	}
	effects = append(effects, s.row(id, how), s.processes())
	effects = append(effects, s.replace(now, w.who)...)
	// Others may have failed because of it, and said so before.
	s.hearsay = nil
	for id := range s.workers {
		if w := &s.workers[id]; w.failed && !w.gone && w.over() && !s.judged {
			effects = append(effects, s.die(now, id)...)
		}
	}
	return append(effects, s.conclude(now)...)
}

// fate says in few words how a worker has ended.
func (s *Session) fate(id int, err error) string {
	how := "failed"
	switch lost, evicted := new(LostError), new(evictedError); {
	case errors.As(err, &lost):
		how = "exited"
		if signal, ok := strings.CutPrefix(lost.Status.Text, "signal: "); ok {
			how = signal
		}
	case errors.As(err, new(*SilentError)):
		how = "silent"
	case errors.As(err, &evicted):
		how = "evicted"
	}
	return fmt.Sprintf("worker %d %s", s.id(id), how)
}

// processes are those that can be reached.
func (s *Session) processes() (e WriteWorkers) {
	for id := range s.workers {
		if w := &s.workers[id]; !w.gone && !w.exited && w.pid > 0 {
			e.Alive = append(e.Alive, rundir.Process{ID: s.id(id), Incarnation: w.who.Incarnation, PID: w.pid, Ring: w.ring.String()})
		}
	}
	return e
}

// about is an event of one worker.
func (s *Session) about(now time.Time, id int, kind, reason string) WriteEvent {
	e := s.event(now, kind, reason)
	e.Event.Worker = s.id(id)
	return e
}

func (s *Session) row(id int, state string) Show {
	w := &s.workers[id]
	return Show{view.Worker{ID: s.id(id), Step: w.last.Step, Forwards: w.own.Forwards, Backwards: w.own.Backwards, State: state}}
}

// hear passes on what a worker says to the controller.
func (s *Session) hear(now time.Time, w int, m control.Message) []Effect {
	from := s.session(w)
	switch m := m.(type) {
	case control.Answer:
		report, err := controller.ParseReport(m.Report)
		if err != nil {
			return s.judge(now, &ProtocolError{s.id(w), "sent a report that is none" + s.place()})
		}
		return s.tell(now, controller.Answered{Worker: from, Ballot: id.Ballot{Term: m.Term, Attempt: m.Attempt}, Report: report})
	case control.Applied:
		effects := s.tell(now, controller.Applied{
			Worker: from, Ballot: id.Ballot{Term: m.Term, Attempt: m.Attempt},
			Version: id.Version{Generation: m.Generation, N: m.N}, Opened: max(m.Opened, 0),
			Edit: time.Duration(max(m.Edit, 0)), Resume: time.Duration(max(m.Resume, 0)),
		})
		return append(effects, s.conclude(now)...) // all may have come to their end while the order was on its way
	case control.LinkLost:
		return s.tell(now, controller.LinkLost{From: from, To: plan.Worker{ID: id.WorkerID(m.Worker), Incarnation: m.Incarnation}})
	case control.Level:
		level := controller.Level{Worker: from, ID: id.Fill{Term: m.Term, N: m.N}, Step: m.Step}
		return append(s.traceLevel(now, level), s.tell(now, level)...)
	case control.Leave:
		return s.tell(now, controller.Leaving{Worker: from})
	}
	panic(fmt.Sprintf("agent: %T is not for the controller", m))
}

// tell gives the controller an event and turns what it wants into effects.
func (s *Session) tell(now time.Time, e controller.Event) []Effect {
	if s.judged || s.state != training {
		return nil
	}
	var effects []Effect
	add := func(e ...Effect) { effects = append(effects, e...) }
	cause := e
	var order control.Order // the last one: an event commands the same to all
	var ordered id.Version
	for _, e := range s.ctl.Step(now, e) {
		add(s.traceEffect(now, cause, e)...)
		switch e := e.(type) {
		case controller.Ask:
			add(Send{s.find(e.Worker), control.Query{
				Term: e.Ballot.Term, Attempt: e.Ballot.Attempt, Trace: s.tr.ballot(e.Ballot).String(),
			}})
		case controller.Command:
			if order.Order == nil || ordered != e.Order.Plan.Version {
				text, err := e.Order.Encode()
				if err == nil && len(text) > control.MaxFrame/2 {
					err = fmt.Errorf("an order of %d bytes: %w", len(text), ErrTooLarge)
				}
				if err != nil {
					return append(effects, s.judge(now, &PlanError{err})...)
				}
				s.known[uint64(e.Order.Plan.Version.N)] = e.Order.Plan
				order, ordered = control.Order{Order: text, Trace: s.tr.order(e.Order).String()}, e.Order.Plan.Version
			}
			add(Send{s.find(e.Worker), order})
		case controller.Copy:
			text, err := e.Fill.Encode()
			if err == nil && len(text) > control.MaxFrame/2 {
				err = fmt.Errorf("a fill of %d bytes: %w", len(text), ErrTooLarge)
			}
			if err != nil {
				return append(effects, s.judge(now, &PlanError{err})...)
			}
			add(Send{s.find(e.Worker), control.Fill{Fill: text}})
		case controller.Propose:
			p := Propose{e.Order, string(e.Reason)}
			s.restarting = e.Order.Plan.Version
			if e.Order.Restart && e.Order.From != "" {
				add(VerifyCheckpoint{p, s.job.ID()}) // before all give up what they have
			} else {
				add(p)
			}
		case controller.Balance:
			add(Balance{e})
		case controller.Adopt:
			add(s.adopt(now, e)...)
		case controller.Kill:
			add(s.evict(now, s.find(e.Worker), e.Reason)...)
		case controller.Dismiss:
			add(s.event(now, "note", e.Reason), Send{s.find(e.Worker), control.Release{}})
		case controller.SetTimer:
			s.timers[e.Timer] = timer{now.Add(e.After), e.After}
		case controller.CancelTimer:
			delete(s.timers, e.Timer)
		case controller.Note:
			add(s.event(now, "note", e.Reason))
		case controller.Hold:
			reason := fmt.Sprintf("%s left and --min-workers is %d: waiting for more", plural(e.Have, "worker"), e.Need)
			add(s.event(now, "hold", reason), Show{view.Note(reason)})
		case controller.Recovered:
			add(s.recovery(now, e.Recovery)...)
		case controller.StopAll:
			add(s.stopAsked(now, Terminated)...)
		case controller.End:
			err := e.Err
			var nobody *controller.NoWorkersError
			if errors.As(err, &nobody) {
				err = s.death(s.lost)
			}
			var evicted *evictedError
			if nobody == nil || errors.As(err, &evicted) {
				err = &RecoveryError{Err: e.Err, Step: s.last.Step, Steps: s.job.Steps}
			}
			if nobody != nil {
				add(s.conclude(now)...) // all was written before the last one died
			}
			return append(effects, s.judge(now, err)...)
		default:
			panic(fmt.Sprintf("agent: the controller wants %T", e))
		}
	}
	return effects
}

// adopt goes over to a plan.
func (s *Session) adopt(now time.Time, e controller.Adopt) []Effect {
	p := e.Order.Plan
	s.plan, s.known[uint64(p.Version.N)] = p, p
	text, err := json.Marshal(p)
	if err != nil {
		return s.judge(now, &PlanError{err})
	}
	news := view.Plan{Reason: string(e.Reason), Stages: stages(&p)}
	var joined []Effect
	for _, pw := range p.Workers {
		id := s.find(pw)
		w, place := &s.workers[id], share(&p, pw)
		w.own.ID, w.own.Incarnation, w.own.Stages, w.own.Layers = place.ID, place.Incarnation, place.Stages, place.Layers
		news.Workers = append(news.Workers, place)
		if w.joins {
			w.joins = false
			s.tries[pw.ID] = 0
			if s.joinedBy[int(pw.ID)] != uint64(p.Version.N) { // else another leader has said so
				s.joined++
				joined = append(joined, s.about(now, id, "joined", fmt.Sprintf("worker %d has joined", pw.ID)))
			}
			joined = append(joined, s.row(id, ""))
		}
	}
	var effects []Effect
	if p.Version.Compare(s.noted) > 0 { // another leader may have done so
		s.noted = p.Version
		effects = append(effects, WritePlan{rundir.Plan{Time: rundir.Time{Time: now}, Event: e.Cause.String(), Reason: string(e.Reason), Plan: text}})
	}
	effects = append(effects, s.event(now, "plan", string(e.Reason)), Show{news})
	effects = append(effects, s.clockPlan()...)
	effects = append(effects, joined...)
	if e.Order.Restart {
		if s.restart.version == (id.Version{}) || s.last.Step != s.restart.step {
			s.rollbacks++
		}
		s.restart = restart{p.Version, e.Order.Passed.Step}
		s.last = rundir.Metrics{Step: s.restart.step}
		clear(s.told)
		effects = append(effects, s.event(now, "rollback", fmt.Sprintf("the run goes back to step %d", s.restart.step)))
	}
	if thin := thin(&p); thin != s.thin {
		s.thin = thin
		kind, reason := "protected", fmt.Sprintf("every shard has its %s", plural(p.Mirrors, "mirror"))
		if thin {
			kind, reason = "unprotected", fmt.Sprintf("some shards have fewer than %s", plural(p.Mirrors, "mirror"))
		}
		effects = append(effects, s.event(now, kind, reason))
	}
	return effects
}

// recovery writes down that a recovery is over.
func (s *Session) recovery(now time.Time, r controller.Recovery) []Effect {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	account := rundir.Recovery{
		Step: min(r.Step, s.job.Steps), Cause: r.Cause, DiedAt: r.How.String(),
		DetectMS: ms(r.Detect), QueryMS: ms(r.Query), PlanMS: ms(r.Plan), AgreeMS: ms(r.Agree), EditMS: ms(r.Edit), ResumeMS: ms(r.Resume),
		TotalMS: ms(r.Total), RecomputedMicrobatches: r.Again, LinksOpened: r.Opened,
	}
	s.recovered = append(s.recovered, account)
	reason := fmt.Sprintf("%s: %s on after %.1f ms", r.Cause, plural(len(s.plan.Workers), "worker"), account.TotalMS)
	if r.Rollback {
		reason = fmt.Sprintf("%s: %s on from step %d after %.1f ms", r.Cause, plural(len(s.plan.Workers), "worker"), r.From, account.TotalMS)
	}
	e := s.event(now, "recovered", reason)
	e.Event.Recovery = &account
	what := strings.Join(s.fates, ", ")
	s.fates = nil
	return []Effect{e, Show{view.Recovered{Recovery: account, What: what}}}
}

// stallWindow is how many steps before a struck one say how long it should have been.
const stallWindow = 10

// stall notes how long a step took, and accounts for what that says of a recovery in it.
func (s *Session) stall(m control.Step) {
	for i := range s.recovered {
		if r := &s.recovered[i]; r.Step == m.Step && r.StallMS == 0 && len(s.times) > 0 {
			sorted := slices.Sorted(slices.Values(s.times))
			r.StallMS = max(0, m.MS-sorted[len(sorted)/2])
		}
	}
	s.times = append(s.times, m.MS)
	s.times = s.times[max(0, len(s.times)-stallWindow):]
}
