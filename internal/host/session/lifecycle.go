package session

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/timing"
)

// phase is the state of the run.
type phase uint8

const (
	assembling phase = iota // the run began under another leader: hosts tell what became of each worker
	starting                // workers connect and say which job they have
	training                // workers report steps, and the controller decides about faults
	finished                // every file is written, and workers exit by themselves
	ending                  // the verdict is known: workers are killed, and what they say no longer counts
)

func (p phase) String() string {
	return [...]string{"assembling", "starting", "training", "finished", "ending"}[p]
}

// phases are the legal transitions of a run. Its first phase is assembling or starting.
var phases = map[phase][]phase{
	assembling: {training, finished, ending},
	starting:   {training, ending},
	training:   {finished, ending},
	finished:   {ending},
}

// workerState is the state of the conversation with a worker.
type workerState uint8

const (
	connecting workerState = iota // it has yet to say Hello
	greeted                       // it reads its data
	prepared                      // it is Ready, and has the run's job
	working                       // it was told to start
	done                          // it has told its result
	gone                          // the run continues without it
)

func (w workerState) String() string {
	return [...]string{"connecting", "greeted", "prepared", "working", "done", "gone"}[w]
}

// workerStates are the legal transitions of a worker. A leader that takes a run over hears of a worker as it is now.
var workerStates = map[workerState][]workerState{
	connecting: {greeted, prepared, gone},
	greeted:    {prepared, gone},
	prepared:   {working, done, gone},
	working:    {done, gone},
	done:       {gone},
}

// exitState is the state of a worker's process and of its connection.
type exitState uint8

const (
	running   exitState = iota
	hungUp              // its connection is closed, and its process may live
	exited              // its process has exited, and what it has sent may still come
	reaped              // both are over
	abandoned           // it was killed, and has not exited in time
	fenced              // its session is over, and its process may continue as the next incarnation
)

func (e exitState) String() string {
	return [...]string{"running", "hung-up", "exited", "reaped", "abandoned", "fenced"}[e]
}

// exitStates are the legal transitions of a process.
var exitStates = map[exitState][]exitState{
	running: {hungUp, exited, reaped, abandoned, fenced},
	hungUp:  {reaped, abandoned},
	exited:  {reaped},
}

// move returns the state after a transition that the table has, and panics on another one, which is a fault of this package.
func move[S interface {
	comparable
	fmt.Stringer
}](table map[S][]S, from, to S) S {
	if slices.Contains(table[from], to) {
		return to
	}
	panic(fmt.Sprintf("session: from %v to %v", from, to))
}

// How a run ends: what workers and the user say about that, what the exit of a process means, and the verdict.

// verdict is what is known of the end of a run.
type verdict struct {
	stop    Reason  // the first reason to stop, "" while there is none
	err     error   // the first error
	lost    *worker // whose exit is the verdict, so that its last output matters
	detail  string
	help    string
	warning string

	unread   map[int]*worker // by step, a worker that could not read a sample
	claim    *claim          // a failure that workers reported, until its cause is known
	complete bool            // every file is written

	result *control.Done // the first one, if possible of a worker that knows the last loss
	by     *worker       // which sent it
	under  uint64        // Version.N of the plan that the run ends under, as far as known

	elsewhere string // folder of the model, where the run directory did not take it
}

// claim is a failure that may follow from the exit of another worker.
type claim struct {
	err    *FailedError
	detail string
	due    time.Time // when it is believed
}

// enter changes the phase of the run.
func (s *Session) enter(p phase) {
	if s.phase = move(phases, s.phase, p); p > training {
		s.roster.cancel()
	}
}

// set changes the state of a worker.
func (w *worker) set(to workerState) { w.state = move(workerStates, w.state, to) }

// exitTo changes the state of a worker's process.
func (w *worker) exitTo(to exitState) { w.exit = move(exitStates, w.exit, to) }

// hungUp takes in that a connection is over.
func (s *Session) hungUp(w *worker, err error) {
	switch w.exit {
	case exited:
		w.exitTo(reaped)
		s.ended(w)
		return
	case running:
		w.exitTo(hungUp)
	default:
		return
	}
	switch {
	case s.phase == ending:
	case s.phase != assembling && (errors.Is(err, control.ErrFormat) || errors.Is(err, control.ErrFrameSize)):
		s.bad(w, "sent bytes that are no message")
	case w.state != done:
		s.grace(w) // a process that dies closes its connection first, and its exit says more
	}
}

// exited takes in that a process has exited. It is judged when all that it has sent is received.
func (s *Session) exited(w *worker, status Status) {
	switch w.exit {
	case running:
		w.exitTo(exited)
		w.status, w.ended = status, s.now
		s.grace(w)
	case hungUp:
		w.exitTo(reaped)
		w.status, w.ended = status, s.now
		s.ended(w)
	}
}

// unreaped takes in that a worker has not exited in time.
func (s *Session) unreaped(w *worker) {
	switch {
	case w.over():
	case w.exit == exited: // and something holds its connection open
		w.exitTo(reaped)
		s.ended(w)
	case s.phase == ending || w.killed: // the others do not wait for it
		w.exitTo(abandoned)
		s.ended(w)
	case s.phase == assembling:
		s.kill(w)
	default:
		if w.fault == nil {
			w.fault = &ProtocolError{w.id(), "closed its connection and went on" + s.at()}
		}
		s.kill(w) // what that means for the run follows from its part in it
	}
}

// grace gives a worker until timing.Reap from now to exit, and to have said all.
func (s *Session) grace(w *worker) { w.reap = s.now.Add(timing.Reap) }

// kill kills a worker; its exit is the event that follows, for which the session waits no longer than for any.
func (s *Session) kill(w *worker) {
	w.killed = true
	s.first(Kill{w.place, w.stuck})
	if s.grace(w); w.stuck {
		w.reap = w.reap.Add(timing.Stacks)
	}
}

// ended judges a worker that has exited and has nothing more to say.
func (s *Session) ended(w *worker) {
	alone := func() bool { // no other worker can say more
		return !slices.ContainsFunc(s.workers, func(w *worker) bool { return w.state != gone && !w.failed && !w.over() })
	}
	switch {
	case s.phase == ending, s.phase == assembling, w.state == gone:
	case w.joins && s.phase == training:
		s.loseJoiner(w)
	case w.joins:
	case w.state == done && w.status.OK():
		s.tell(controller.Ended{Worker: w.who})
		s.conclude()
	case s.phase == training:
		switch {
		case !w.failed || s.end.claim == nil:
			s.lose(w)
		case alone():
			s.believe()
		}
	case s.phase == finished && w.who != s.plan.Collector(): // its part is done
	case w.failed:
		if s.phase == finished || alone() {
			s.believe()
		}
	case s.phase == finished && w.fromOutside():
		s.killedLate(w)
	case s.phase == starting && s.respawns(w.who.ID) && s.roster.tries[w.who.ID] < maxFirstTries &&
		w.fromOutside():
		s.replaceFirst(w)
	case s.phase == starting && !s.cfg.Respawn && w.fromOutside():
		s.beginWithout(w)
	case w.state == connecting && !w.status.Killed(): // else it is no fault of the program
		s.end.lost = w
		s.judge(&NoMainError{Program: s.cfg.Program, Status: w.status})
	default:
		s.end.lost = w
		s.judge(s.death(w))
	}
}

// fromOutside reports whether a worker was killed or frozen by what is no fault of its own.
func (w *worker) fromOutside() bool { return w.fault == nil && w.status.Killed() || !w.silent.IsZero() }

// killedLate takes in that a worker was lost when all was written: nothing of the run is missing.
func (s *Session) killedLate(w *worker) {
	_, how := culprit(s.death(w))
	s.end.warning = fmt.Sprintf("worker %d %s after all was written; what the program does at the end of a run may be missing", w.id(), how)
	s.then(s.about(w.who.ID, eventNote, s.end.warning))
}

// death is the error of a worker that has exited too early.
func (s *Session) death(w *worker) error {
	if w.fault != nil {
		return w.fault
	}
	return &LostError{Worker: w.id(), Workers: len(s.workers), Status: w.status, Step: s.records.last.Step, Steps: s.job.Steps}
}

// workerFailed takes in that a worker reports a failure.
func (s *Session) workerFailed(w *worker, m control.Failed) {
	if w.joins {
		s.refuse(w, errors.New(OneLine(m.Text)))
		return
	}
	if m.Kind == control.Help {
		s.end.help = m.Text
		s.enter(ending)
		s.then(CloseView{})
		s.killAll()
		return
	}
	w.failed = true
	// A failure without a text would read as success in summary.json.
	text := cmp.Or(OneLine(m.Text), "failed without a reason")
	if m.Kind == control.NoSample && w.again > 0 && w.again == m.Step {
		text += fmt.Sprintf("; step %d was committed with this sample before, so it is not skipped: resume where it can be read", m.Step)
	}
	err := &FailedError{Kind: m.Kind, Worker: w.id(), Workers: len(s.workers), Text: text, Step: m.Step, Exit: m.Exit}
	switch {
	case len(s.workers) == 1 && !(m.Kind == control.Corrupt && s.respawns(w.who.ID)), s.unreadable(w, m), !m.Kind.OfWorker():
		s.end.detail = m.Stack
		s.judge(err)
	case s.phase == training && (m.Kind != control.Faulty || s.ctl.Busy()):
		w.fault = err // its exit is the event
	case s.end.claim == nil:
		// The exit of another worker may be behind this and says more, but it may be heard of later.
		s.end.claim = &claim{err, m.Stack, s.now.Add(timing.Of(s.cfg.Detect).Cause)}
	case s.end.claim.err.Kind == control.PeerLost && m.Kind != control.PeerLost:
		s.end.claim = &claim{err, m.Stack, s.end.claim.due}
	}
}

// unreadable reports whether another worker could not read its samples of the same step either.
func (s *Session) unreadable(w *worker, m control.Failed) bool {
	if m.Kind != control.NoSample {
		return false
	}
	if before := s.end.unread[m.Step]; before != nil && before != w {
		return true
	}
	if s.end.unread == nil {
		s.end.unread = make(map[int]*worker)
	}
	s.end.unread[m.Step] = w
	return false
}

// believe judges by what workers said of a failure, since nothing better came.
func (s *Session) believe() {
	if c := s.end.claim; c != nil && s.phase != ending {
		s.end.detail = c.detail
		s.judge(c.err)
	}
}

// stop takes in that the run is to stop.
func (s *Session) stop(reason Reason) {
	if s.phase == ending {
		return
	}
	first := s.end.stop == ""
	if first {
		s.end.stop = reason
	}
	s.roster.cancel()
	if s.phase != training || !first || s.ctl.Holding() || s.Over() {
		s.judge(&StoppedError{Reason: s.end.stop, Step: s.records.last.Step, Steps: s.job.Steps, AtOnce: true})
		return
	}
	if !s.disk.full.IsZero() {
		s.hold() // not any more
	}
	asked := "the worker is"
	if len(s.workers) > 1 {
		asked = "the workers are"
	}
	for _, w := range s.workers {
		if w.state != gone {
			s.send(w, control.Stop{Reason: string(reason)})
		}
	}
	s.then(s.event(eventStop, fmt.Sprintf("%s: %s asked to end at the next commit", reason, asked)), Show{view.Stopping{Reason: string(reason)}})
}

// finish takes in a worker's result.
func (s *Session) finish(w *worker, m control.Done) {
	e := &s.end
	stopped := m.StoppedBy != ""
	if e.stop == "" && s.tookOver() {
		e.stop = Reason(m.StoppedBy) // the leader before was asked
	}
	last := w.last.Step
	if w.rolled != s.restart.version {
		last = s.restart.step // it has reported no step since: the run went on after its last one
	}
	if m.Steps != last && !w.fresh && !w.inherited || !stopped && m.Steps != s.job.Steps || stopped && Reason(m.StoppedBy) != e.stop {
		s.judge(&ProtocolError{w.id(), fmt.Sprintf("ended with %d steps, stopped by %q,%s", m.Steps, m.StoppedBy, s.at())})
		return
	}
	if !finite(m.Loss) || m.ValLoss != nil && !finite(*m.ValLoss) {
		s.judge(&ProtocolError{w.id(), "ended with a loss that is not finite"})
		return
	}
	if e.result != nil {
		if what := otherEnd(*e.result, m, w.fresh || e.by.fresh); what != "" {
			s.judge(&MismatchError{Worker: w.id(), Than: e.by.id(), What: what})
			return
		}
	}
	if e.result == nil || e.by.fresh {
		e.result, e.by = &m, w
	}
	e.under = max(e.under, m.Plan)
	if m.ModelDir != "" && w.id() == m.Collector && len(m.ModelDir) <= maxPath {
		e.elsewhere = m.ModelDir
	}
	if m.ValLoss != nil { // a worker that joined after the newest evaluation has none
		s.records.val = m.ValLoss
	}
	w.set(done)
	w.own = m.Worker
	w.own.ID, w.own.Incarnation = w.id(), w.who.Incarnation
	s.then(Show{view.Worker{ID: w.id(), Step: m.Steps, Forwards: w.own.Forwards, Backwards: w.own.Backwards, State: "done"}})
	s.tell(controller.Finished{Worker: w.who, Step: m.Steps, Result: m.Result})
	s.conclude()
}

// allPrepared reports whether all workers that the run begins with are ready.
func (s *Session) allPrepared() bool {
	return s.roster.pending == 0 && !slices.ContainsFunc(s.workers, func(w *worker) bool { return w.state < prepared })
}

// conclude ends training when every worker that is left has told its result.
func (s *Session) conclude() {
	m := s.end.result
	if s.phase != training || m == nil || slices.ContainsFunc(s.workers, func(w *worker) bool { return w.state != gone && w.state != done && !s.idle(w) }) {
		return
	}
	if s.ctl.Busy() && slices.ContainsFunc(s.workers, func(w *worker) bool { return w.state != gone && !w.over() && !s.idle(w) }) {
		return // the first worker has yet to learn that it is that
	}
	if !s.deliveries.Done() {
		return // the program has yet to be told of a step
	}
	if s.checkpoints.committing() {
		return // the run is concluded when they are on disk
	}
	if m.Steps != s.records.last.Step {
		s.judge(&ProtocolError{s.end.by.id(), fmt.Sprintf("ended with %d steps, and the newest that was committed is %d", m.Steps, s.records.last.Step)})
		return
	}
	s.enter(finished)
	s.end.complete = true
	sum := s.summarise(m.StoppedBy)
	if sum.Loss = m.Loss; m.Steps == s.restart.step {
		sum.Loss = s.records.last.Loss // the workers have run no step
	}
	sum.ParamsSHA256, sum.StateSHA256 = m.ParamsSHA256, m.StateSHA256
	if i := slices.IndexFunc(s.workers, func(w *worker) bool { return w.id() == m.Collector }); i >= 0 && s.cfg.Home != "" {
		sum.ModelHost = s.workers[i].who.Host // no later life of a worker is on another host
	}
	s.records.summary = &sum

	reason := "all steps are done"
	if m.StoppedBy != "" {
		reason = fmt.Sprintf("stopped after step %d of %d: %s", m.Steps, s.job.Steps, m.StoppedBy)
		s.end.err = &StoppedError{Reason: s.end.stop, Step: m.Steps, Steps: s.job.Steps}
	}
	s.lastRejections()
	if e := &s.end; e.elsewhere != "" {
		e.warning = fmt.Sprintf("the run directory %s could not be written: the model, and the records that it lacks, are in %s", s.cfg.Shown, OneLine(e.elsewhere))
		s.note("%s", e.warning)
	}
	s.then(s.event(eventEnd, reason), WriteSummary{sum, s.end.elsewhere}, Show{view.End{Summary: sum}}, CloseView{})
	for _, w := range s.workers {
		switch {
		case w.state == gone || w.closed():
		case w.joins && w.state < working:
			s.kill(w) // it reads data for a run that is over
		default:
			s.send(w, control.Release{})
		}
	}
}

// maxPath bounds the path at which a worker has written the model.
const maxPath = 4096

// idle reports whether a worker has no part in the end of the run: it is in no plan yet, and not in the one that the run ends under.
func (s *Session) idle(w *worker) bool {
	p, ok := s.known[s.end.under]
	if !w.joins || !ok {
		return w.joins
	}
	in, ok := p.Worker(w.who.ID)
	return !ok || in != w.who
}

// judge sets the verdict, unless there is one, kills the workers and accounts for what was done.
func (s *Session) judge(err error) {
	was := s.phase
	if was != ending {
		s.enter(ending)
		if s.end.err == nil {
			s.end.err = err
		}
	}
	s.killAll()
	switch was {
	case finished:
		// The files are written, and say now how the program has exited.
		sum := *s.records.summary
		sum.StoppedBy = stoppedBy(s.end.err)
		kind := eventFailed
		if errors.As(err, new(*StoppedError)) {
			kind = eventStop
		}
		e := s.event(kind, err.Error())
		if id, _ := culprit(err); id >= 0 {
			e.Event.Worker, sum.WorkersLost = id, s.records.lost+1
		}
		s.records.summary = &sum
		s.then(e, WriteSummary{sum, s.end.elsewhere})
	case training:
		sum := s.summarise(stoppedBy(err))
		s.records.summary = &sum
		e := s.event(eventFailed, err.Error())
		if lost, cause := culprit(err); lost >= 0 {
			e.Event.Worker = lost
			if w := s.newest(id.WorkerID(lost)); w != nil {
				s.then(w.row(cause))
			}
		}
		s.then(e, WriteSummary{Summary: sum}, Show{view.End{Summary: sum}})
	}
	s.then(CloseView{})
}

func (s *Session) killAll() {
	for _, w := range s.workers {
		if w.exit == running || w.exit == hungUp {
			s.kill(w)
		}
	}
}

// bad judges what a worker must not say. A worker that joins is refused, and the run continues.
func (s *Session) bad(w *worker, format string, args ...any) {
	err := fmt.Errorf(format, args...)
	if w.joins {
		s.refuse(w, err)
		return
	}
	s.judge(&ProtocolError{w.id(), err.Error() + s.at()})
}

// at says where the run is, at the end of a sentence.
func (s *Session) at() string {
	if s.job.Steps == 0 {
		return " before training"
	}
	return fmt.Sprintf(" at step %d of %d", s.records.last.Step, s.job.Steps)
}

// resumable returns the run directory from which the run can be resumed, "" if it cannot or need not be.
func (s *Session) resumable() string {
	if s.checkpoints.newest == 0 || s.cfg.RunDir == "" || s.end.complete && s.records.last.Step == s.job.Steps {
		return ""
	}
	var failed *FailedError
	err := s.end.err
	if errors.As(err, &failed) && (failed.Kind == control.Faulty || failed.Kind == control.NoSample || failed.Kind == control.Corrupt) ||
		slices.ContainsFunc([]any{new(*StoppedError), new(*LostError), new(*SilentError), new(*BlockedError), new(*RecoveryError)}, func(as any) bool { return errors.As(err, as) }) {
		return s.cfg.Shown
	}
	return ""
}
