package session

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/platform/progress"
)

// message takes in what a worker says.
func (s *Session) message(w *worker, m control.Message) {
	if _, first := m.(control.Hello); w.state == connecting && !first {
		if _, failed := m.(control.Failed); !failed {
			s.bad(w, "sent %T before its hello", m)
			return
		}
	}
	if s.phase == finished && w.inherited {
		switch m.(type) {
		case control.Step, control.Delivered, control.Saved, control.Done, control.Answer, control.Applied:
			return // the leader before has written all down
		}
	}
	switch m := m.(type) {
	case control.Hello:
		switch {
		case w.state != connecting:
			s.bad(w, "said hello twice")
			return
		case m.Protocol != control.Protocol:
			s.bad(w, "speaks version %d of the protocol, not %d", m.Protocol, control.Protocol)
			return
		case m.WorkerID != w.id() || m.Incarnation != w.who.Incarnation:
			s.bad(w, "says it is worker %d in incarnation %d", m.WorkerID, m.Incarnation)
			return
		}
		w.set(greeted)
		w.heard.Restart(s.now)
		w.pid = m.PID
		if w.joins {
			s.then(s.processes())
		}

	case control.Beat:
		s.measured(w, m)
		s.paced(w, m.Pace)
		s.called(w, m.Call)
		s.rejected(w.who.Host, w.id(), m.Rejected)

	case control.Failed:
		s.workerFailed(w, m)

	case control.Note:
		note := OneLine(m.Text)
		s.then(Show{view.Worker{ID: w.id(), State: note}})
		if w.place == 0 { // the others do the same
			s.then(Show{view.Note(note)})
		}

	case control.Ready:
		if w.state != greeted {
			s.bad(w, "sent a job twice")
			return
		}
		if fault := s.fault(m); fault != "" {
			s.bad(w, "%s", fault)
			return
		}
		w.set(prepared)
		w.ready = m
		switch {
		case w.joins:
			s.join(w)
		case !s.allPrepared():
			s.then(Show{view.Worker{ID: w.id(), State: "ready"}})
		default:
			s.start()
		}

	case control.Step:
		if w.state != working {
			s.bad(w, "sent a step outside of training")
			return
		}
		s.committed(w, m)

	case control.Delivered:
		if s.phase == training {
			s.delivered(w, m)
		}

	case control.Output:
		switch {
		case w.state < working:
			s.bad(w, "sent output before training")
		case !s.collects(w):
			s.bad(w, "sent output, which is for worker %d to do", s.plan.Collector().ID)
		default:
			s.then(Output{m.Text})
		}

	case control.Done:
		switch {
		case w.state != working:
			s.bad(w, "ended a training that had not begun")
		case s.phase == training: // else it joined as the run ended, which did not need it
			s.finish(w, m)
		}

	case control.Timeline:
		if w.state == working {
			m.Passes = m.Passes[:min(len(m.Passes), control.MaxPasses)]
			for i := range m.Passes {
				m.Passes[i].Lane = max(0, min(m.Passes[i].Lane, progress.Lanes-1))
			}
			s.then(Show{view.Timeline{ID: w.id(), Timeline: m}})
		}

	case control.Spans:
		if w.state == working && s.phase == training {
			out, fault := s.tr.Worker(s.moment(), w.who, m, s.roster.lives)
			if s.trace(out); fault != "" {
				s.bad(w, "%s", fault)
			}
		}

	case control.Repaired:
		if w.state == working {
			s.repaired(w, m)
		}

	case control.Unread:
		if w.state == working && s.phase == training {
			s.unread(w, m)
		}

	case control.Saved:
		switch {
		case w.state != working || s.cfg.RunDir == "":
			s.bad(w, "saved a part of a checkpoint outside of training")
		case s.phase == training:
			s.saved(w, m)
		}

	case control.Answer, control.Applied, control.LinkLost, control.Leave, control.Level:
		if s.phase == training { // else it does not know yet
			s.report(w, m)
		}

	default:
		s.bad(w, "sent a message that only an agent sends (%T)", m)
	}
}

// report passes on to the controller what a worker says.
func (s *Session) report(w *worker, m control.Message) {
	from := w.who
	switch m := m.(type) {
	case control.Answer:
		s.tell(controller.Answered{Worker: from, Ballot: m.Ballot, Report: m.Report})
	case control.Applied:
		s.tell(controller.Applied{
			Worker: from, Ballot: m.Ballot, Version: m.Version, Opened: max(m.Opened, 0),
			Edit: max(m.Edit, 0), Resume: max(m.Resume, 0), Update: max(m.Update, 0),
		})
		s.conclude() // every worker may have told its result while the order was on its way
	case control.LinkLost:
		s.tell(controller.LinkLost{From: from, To: plan.Worker{ID: m.Peer.Worker, Incarnation: m.Peer.Incarnation}})
	case control.Level:
		level := controller.Level{Worker: from, ID: m.ID, Step: m.Step}
		s.trace(s.tr.Level(s.now, level))
		s.tell(level)
	case control.Leave:
		s.tell(controller.Leaving{Worker: from})
	}
}

// collects reports whether a worker writes the model and runs the end of the program under the run's plan, or under another one
// that it may not have left yet.
func (s *Session) collects(w *worker) bool {
	for _, p := range s.known {
		if p.Collector() == w.who {
			return true
		}
	}
	return false
}

// fault returns what is wrong with a worker's job, "" if nothing is.
func (s *Session) fault(m control.Ready) string {
	job := m.Job
	switch {
	case job.Steps < 1:
		return fmt.Sprintf("sent a job of %d steps", job.Steps)
	case job.GlobalBatch < 1 || job.MicroBatch < 1 || job.GlobalBatch%job.MicroBatch != 0:
		return fmt.Sprintf("sent a global batch of %d in micro-batches of %d", job.GlobalBatch, job.MicroBatch)
	case len(s.workers) > 1 && (m.Addr == "" || len(m.Addr) > 255):
		return "sent no address where others could reach it,"
	case len(s.workers) > 1 && len(m.Layers) == 0:
		return "sent no layers"
	case len(m.Layers) > 0 && len(m.Layers) != job.Layers:
		return fmt.Sprintf("sent %d layers of a model of %d", len(m.Layers), job.Layers)
	}
	room := maxParameters
	for _, l := range m.Layers {
		for _, n := range l.Tensors {
			if n < 1 || n > room {
				return fmt.Sprintf("sent a tensor of %d elements", n)
			}
			room -= n
		}
	}
	return ""
}

// reports are what workers have told of steps. Every worker reports every committed step, with the same bits.
type reports struct {
	told  map[int]said // steps that some worker has still to report
	ahead []said       // of workers that have reported none yet: others have yet to report steps before, over connections of their own
}

// said is a step as one worker reported it.
type said struct {
	by   *worker
	step control.Step
}

// committed takes in that a worker reports a committed step.
func (s *Session) committed(w *worker, m control.Step) {
	bad := func(format string, args ...any) {
		s.judge(&ProtocolError{w.id(), fmt.Sprintf(format, args...)})
	}
	r := &s.records
	m.Plan = cmp.Or(m.Plan, uint64(s.plan.Version.N))
	under, ok := s.known[m.Plan]
	rolled := ok && under.Version.Compare(s.restart.version) < 0 // the run has gone back since
	if w.fresh && ok && !rolled && m.Step > r.last.Step+1 && m.Step <= s.job.Steps && len(s.reports.ahead) < maxLead {
		s.reports.ahead = append(s.reports.ahead, said{w, m})
		return
	}
	if ok && w.inherited && !rolled {
		// What it reported before, the leader before has in its records.
		w.inherited = false
		w.rolled, w.last.Step = s.restart.version, m.Step-1
	}
	switch {
	case !ok || m.Plan < w.last.Plan:
		bad("committed step %d under plan %d, and plan %d is live", m.Step, m.Plan, s.plan.Version.N)
		return
	case rolled:
		w.own.Forwards, w.own.Backwards = m.Forwards, m.Backwards
		return
	case w.fresh:
		// Its first step is any that the others may be in.
		w.fresh, w.rolled, w.last.Step = false, s.restart.version, m.Step-1
		s.roster.tries[w.who.ID] = 0
		if m.Step > r.last.Step+1 || m.Step < 1 {
			bad("committed step %d, and the others %d", m.Step, r.last.Step)
			return
		}
	case w.rolled != s.restart.version:
		w.rolled, w.last.Step = s.restart.version, s.restart.step
	}
	switch {
	case m.Step != w.last.Step+1 || m.Step > s.job.Steps:
		bad("committed step %d after step %d of %d", m.Step, w.last.Step, s.job.Steps)
		return
	case m.Tokens < 0 || m.MS < 0 || !finite(m.Loss, m.LR, m.GradNorm, m.MS) || m.ValLoss != nil && !finite(*m.ValLoss) ||
		!finite(slices.Collect(maps.Values(m.Metrics))...) || !finite(slices.Collect(maps.Values(m.TrainMetrics))...):
		bad("committed step %d with numbers that are not finite", m.Step)
		return
	case max(len(m.Metrics), len(m.TrainMetrics)) > control.MaxMetrics:
		bad("committed step %d with %d metrics, more than %d", m.Step, max(len(m.Metrics), len(m.TrainMetrics)), control.MaxMetrics)
		return
	}
	w.last = m
	w.own.Forwards, w.own.Backwards = m.Forwards, m.Backwards
	row := w.row("")
	if m.Left {
		s.then(row) // the others report the step, and the evaluation after it
		return
	}

	if m.Step <= r.last.Step {
		if was, ok := s.reports.told[m.Step]; ok {
			if what := otherStep(was.step, m); what != "" {
				s.judge(&MismatchError{Worker: w.id(), Than: was.by.id(), What: what, Step: m.Step})
				return
			}
		}
		s.forgetSteps()
		s.then(row)
		s.workerStep(w, m)
		return
	}
	if m.Joined && !r.last.Time.IsZero() { // all that ran the step are lost
		m.MS = float64(max(0, m.Time.Sub(r.last.Time.Time)).Microseconds()) / 1000
	}
	s.reports.told[m.Step] = said{w, m}
	s.forgetSteps()
	if len(s.reports.told) > maxLead {
		bad("is %d steps ahead of others", maxLead)
		return
	}
	r.step(m, len(under.Workers))
	s.deliveries.Commit(m)
	s.then(WriteMetrics{r.last}, row, Show{view.Step(r.last)})
	s.askForTimelines()
	s.trace(s.tr.Step(s.moment(), m, under.Version, r.last.Workers, s.thin))
	s.workerStep(w, m)
	s.commitCheckpoints()
	s.clockStep(m)
	ahead := s.reports.ahead
	s.reports.ahead = nil
	for _, e := range ahead {
		if s.phase != ending {
			s.message(e.by, e.step)
		}
	}
}

// workerStep takes in what a worker measured in a step that it ran.
func (s *Session) workerStep(w *worker, m control.Step) {
	if m.Joined {
		return
	}
	s.clockDraw(w, m)
	s.trace(s.tr.WorkerStep(w.who.ID, m))
	s.starve(w, m)
}

// reading is what share of its steps a worker reads samples, and computes nothing.
type reading struct {
	share float64 // moving average
	steps int
}

// Shares of a step from which on, and below which, steps count as bound by data, and how many steps the average is of.
const (
	starved     = 0.2
	fed         = 0.1
	readingMean = 8
)

// starve notes when workers begin to wait for data, and when none does any more.
func (s *Session) starve(w *worker, m control.Step) {
	if m.MS <= 0 || m.Reading < 0 {
		return
	}
	r := &w.reading
	r.steps++
	r.share += (min(1, float64(m.Reading)/1e6/m.MS) - r.share) / min(float64(r.steps), readingMean)
	if !s.starved && r.steps >= readingMean && r.share > starved {
		s.starved = true
		e := s.event(eventStarved, fmt.Sprintf("bound by data: worker %d reads samples for %.0f %% of a step", w.id(), 100*r.share))
		e.Event.Worker = w.id()
		s.then(e)
		return
	}
	if s.starved && !slices.ContainsFunc(s.workers, func(w *worker) bool { return w.state != gone && w.reading.share > fed }) {
		s.starved = false
		s.then(s.event(eventFed, "no longer bound by data"))
	}
}

// delivered takes in that OnStep has returned in a worker.
func (s *Session) delivered(w *worker, m control.Delivered) {
	changed, err := s.deliveries.Confirm(w.who, m)
	if err != nil {
		s.bad(w, "%s", err)
		return
	}
	if changed {
		s.then(WriteDelivery{s.deliveries.Record()})
		s.conclude()
	}
}

// deliver has OnStep called for what is committed. The record is written before the worker that it names is told, so a full disk
// holds the calls.
func (s *Session) deliver() (effects []Effect) {
	if s.phase != training || s.starts != nil || s.holds() {
		return nil
	}
	if w, ok := s.deliveries.Caller(); ok {
		if x := s.find(w); x == nil || x.state == gone {
			s.deliveries.Lost(w)
		}
	}
	var candidates []plan.Worker
	for _, w := range s.plan.Workers {
		if x := s.find(w); x != nil && x.canCall() {
			candidates = append(candidates, x.who)
		}
	}
	to, m, appointed, ok := s.deliveries.Next(candidates)
	if appointed {
		effects = append(effects, WriteDelivery{s.deliveries.Record()})
	}
	if ok {
		effects = append(effects, Send{s.find(to).place, m})
	}
	return effects
}

// canCall reports whether a worker can call OnStep.
func (w *worker) canCall() bool {
	return w.state >= prepared && w.state < gone && w.fault == nil && !w.killed && !w.closed() && !w.hasExited()
}

// forgetSteps drops the steps that all workers have reported that are to.
func (s *Session) forgetSteps() {
	least := math.MaxInt
	for _, w := range s.workers {
		switch {
		case w.state == gone, w.joins, w.fresh:
		case w.rolled != s.restart.version:
			least = min(least, s.restart.step)
		default:
			least = min(least, w.last.Step)
		}
	}
	for step := range s.reports.told {
		if step <= least {
			delete(s.reports.told, step)
		}
	}
}

// timelines are what workers tell of single steps while the user looks.
type timelines struct {
	watched bool
	every   int // of which steps; 0: of none
}

// timelineEvery is about how many milliseconds lie between two timelines of a worker.
const timelineEvery = 250

// pace returns of which steps the user can look at timelines, given the milliseconds that a step takes, 0 if that is not known:
// a power of two apart, and another one only when the steps take twice as long as they did, or half.
func (t *timelines) pace(ms float64) int {
	every := 0
	if t.watched {
		every = max(1, t.every)
		for every > 1 && float64(every)*ms > 2*timelineEvery {
			every /= 2
		}
		for ms > 0 && every < maxLead && float64(every)*ms < timelineEvery/2 {
			every *= 2
		}
	}
	t.every = every
	return every
}

// askForTimelines tells the workers of which steps timelines are wanted.
func (s *Session) askForTimelines() {
	ms := 0.
	if len(s.records.recent) > 0 {
		ms = max(s.records.median(), 1e-9)
	}
	every := s.timelines.pace(ms)
	for _, w := range s.workers {
		// A silent worker is not told again and again: what is sent to it has to be kept.
		if w.every != every && w.state == working && !w.closed() && w.heard.Heard.After(w.told) {
			w.every, w.told = every, s.now
			s.send(w, control.Watch{Every: every})
		}
	}
}
