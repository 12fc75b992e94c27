package session

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/gossip"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// The evidence that a worker has failed: heartbeats that are missed, and what the gossip ring says. Broken links and exits are the
// controller's evidence. Gossip is read here only. It decides nothing by itself: the controller breaks ties by it.

// signs are the evidence of whether a worker lives.
type signs struct {
	heard  timing.History // not heard before its Hello
	silent time.Time      // since when it was silent, where that is why it was killed
	// runs is when its host said last that its process runs although it is silent, and excused when it was last heard before it was noted
	// that it would have been evicted otherwise.
	runs, excused time.Time
	halt

	member   bool // of the ring, at any time
	standing gossip.State
	by       string // the member that cannot reach it, in words; "" while it is not suspected
	differs  bool   // it was noted that the ring and its host differ
}

// membership is what the user sees of a worker's state in the ring.
func (g *signs) membership() string {
	if !g.member {
		return ""
	}
	return g.standing.String()
}

// ring is what the session knows of the gossip ring as a whole.
type ring struct {
	formed bool      // all workers have been members
	due    time.Time // when missing members are noted; zero: not any more
}

// lateness is what the session knows of how late everything is.
type lateness struct {
	looks timing.Looks
	crowd timing.Crowd
	slack time.Duration // by which a controller's timer for evidence is longer than on an idle machine
	// stopped says that none of several workers has been heard for a while, so that none is to blame; noted, that it was noted.
	stopped, noted bool
	woke           time.Time // when this process was found to have been stopped itself
}

// watched reports whether heartbeats of a worker are expected.
func (w *worker) watched() bool {
	return w.state != gone && w.exit == running && w.fault == nil && !w.heard.Heard.IsZero()
}

// watch looks for workers that are silent.
func (s *Session) watch(e WatchTick) {
	if s.cfg.Detect == 0 {
		return
	}
	s.late.crowd = e.Crowd
	d, lateness := s.detector(), s.now.Sub(e.Due)
	s.noteMissing()
	if d.Stopped(lateness) {
		s.late.woke = s.now
		s.dropSuspicions()
	}
	var peers []*timing.History
	hosts := make(map[string][]timing.Intervals)
	for _, w := range s.workers {
		if w.watched() {
			if !w.joins { // those that join do not continue the run
				peers = append(peers, &w.heard)
			}
			hosts[w.who.Host] = append(hosts[w.who.Host], w.heard.Intervals)
		}
	}
	s.late.stopped = s.late.looks.Look(d, s.now, lateness, peers)
	s.noteStopped(peers)
	s.late.slack = 0
	around := make(map[string]timing.Intervals)
	for host, all := range hosts {
		around[host] = timing.Pool(all)
		s.late.slack = max(s.late.slack, d.Limit(around[host], s.late.looks.Intervals)-d.Least)
	}
	for _, w := range s.workers {
		if !w.watched() || s.phase == ending {
			continue
		}
		var failed bool
		failed, w.heard = d.Suspect(w.heard, s.now, lateness, around[w.who.Host], s.late.looks.Intervals)
		if failed && s.excuses(w) {
			if w.excused != w.heard.Heard {
				w.excused = w.heard.Heard
				s.note("worker %d has been silent for %v: its process runs or waits for a processor, and it stays", w.id(), w.heard.Silence(s.now).Truncate(10*time.Millisecond))
			}
			continue
		}
		if failed && (w.heard.Silence(s.now) > timing.Of(s.cfg.Detect).Grace || !s.isLast(w)) {
			w.silent = w.heard.Heard
			w.fault = &SilentError{
				Worker: w.id(), Workers: len(s.workers), By: w.by, Step: s.records.last.Step, Steps: s.job.Steps,
				For: d.Limit(w.heard.Intervals, around[w.who.Host], s.late.looks.Intervals).Truncate(10 * time.Millisecond),
			}
			if s.phase == assembling && !s.respawns(w.who.ID) {
				s.judge(w.fault)
				return
			}
			s.exclude(w)
		}
	}
}

// excuses reports whether a silent worker stays because its process runs or waits for a processor, as its host has said not long ago. Nothing is wrong
// with it, and to continue without it would leave more to do on a machine that is short of processors. But others may wait for it while something keeps
// the processors from it alone, so it may be silent for Spare beyond a limit that is as for all others.
func (s *Session) excuses(w *worker) bool {
	p, d := timing.Of(s.cfg.Detect), s.detector()
	return !w.runs.IsZero() && s.now.Sub(w.runs) <= p.Runs && w.heard.Silence(s.now) <= min(d.Most, d.Least+s.late.slack+p.Spare)
}

// slack is by how much longer a timer of the controller is than on an idle machine: an answer may be missing of a worker that stays so.
func (s *Session) slack(name controller.Timer) time.Duration {
	waits := func(w *worker) bool {
		return w.watched() && w.heard.Silence(s.now) > s.detector().Pause && s.excuses(w)
	}
	if name == controller.QueryTimer && slices.ContainsFunc(s.workers, waits) {
		return s.late.slack + timing.Of(s.cfg.Detect).Spare
	}
	return s.late.slack
}

// A process that a signal has stopped (SIGSTOP, SIGTSTP ...), or of which no thread runs, sends nothing, and its host says so after a short time. The run does not wait
// until its heartbeats have been missed for long: the worker is fenced, and joins again when it is continued. Missed
// heartbeats decide where no other worker could continue the run, and where its process would have to be killed.

// halt is what a session knows of a process that is stopped.
type halt struct {
	stopped time.Time // since when; zero: it runs
	frozen  bool      // by no signal
	leave   time.Time // when the run continues without it; zero: missed heartbeats decide
}

// halted takes in that the process of a worker is stopped, or that it was continued.
func (s *Session) halted(w *worker, e WorkerHalted) {
	if !e.Stopped {
		if w.halt = (halt{}); s.helpless(w) { // up to now none could continue the run, and others may be continued later than this one
			s.allowHalts()
		}
		return
	}
	if w.stopped.IsZero() {
		w.stopped = s.now.Add(-e.For)
	}
	w.frozen = e.Frozen
	if e.For >= timing.Halt && w.leave.IsZero() {
		w.leave = s.now
		s.leaveHalted()
	}
}

// allowHalts gives stopped processes as long as silent ones to continue.
func (s *Session) allowHalts() {
	for _, w := range s.workers {
		if !w.stopped.IsZero() {
			w.leave = s.now.Add(s.cfg.Detect)
		}
	}
}

// leaveHalted has the run continue without workers whose processes are stopped.
func (s *Session) leaveHalted() {
	for _, w := range s.workers {
		if w.leave.IsZero() || s.now.Before(w.leave) {
			continue
		}
		late := s.now.Sub(w.leave)
		w.leave = time.Time{}
		switch {
		case s.cfg.Detect == 0 || !w.watched():
		case s.detector().Stopped(late) || s.now.Sub(s.late.woke) < s.cfg.Detect: // this process was stopped, too
			s.allowHalts()
			return
		case s.helpless(w) || !s.fences(w): // missed heartbeats decide
		default:
			s.excludeHalted(w)
		}
	}
}

// excludeHalted has the run go on without a worker whose process is stopped.
func (s *Session) excludeHalted(w *worker) {
	w.silent = w.stopped
	w.fault = &SilentError{Worker: w.id(), Workers: len(s.workers), Stopped: !w.frozen, Frozen: w.frozen, Step: s.records.last.Step, Steps: s.job.Steps}
	s.exclude(w)
}

// helpless reports whether no other worker of the plan could continue the run without this one.
func (s *Session) helpless(w *worker) bool {
	for _, x := range s.workers {
		if x != w && x.stopped.IsZero() && s.goesOn(x) {
			return false
		}
	}
	return true
}

// detector is that of the session for its workers.
func (s *Session) detector() timing.Detector {
	return timing.Of(s.cfg.Detect).Worker(s.phase >= training).In(s.late.crowd)
}

// noteStopped notes, once, that no worker is heard.
func (s *Session) noteStopped(peers []*timing.History) {
	if !s.late.stopped {
		s.late.noted = false
		return
	}
	for _, h := range peers {
		if s.now.Sub(h.Heard) < s.cfg.Detect {
			return
		}
	}
	s.dropSuspicions()
	if !s.late.noted && s.phase == training {
		s.late.noted = true
		reason := fmt.Sprintf("no worker has been heard for %v: all of them are stopped, or the machine is; none is evicted", s.cfg.Detect)
		s.then(s.event(eventNote, reason), Show{view.Note(reason)})
	}
}

// gossip takes in what the ring says of a worker.
func (s *Session) gossip(e Gossip) {
	w := s.find(e.Worker)
	if w == nil || s.phase == ending || w.state == gone || w.hasExited() {
		return
	}
	by := w.by
	w.member, w.standing = true, e.State
	if e.By == "" || by == "" { // else the first member that cannot reach it stays
		w.by = e.By
	}
	if w.by != by {
		s.tell(controller.Suspected{Worker: w.who, By: w.by})
	}
	if s.ring.formed = s.ring.formed || len(s.outside()) == 0; s.ring.formed {
		s.then(s.processes())
	}
	if e.State == gossip.StateDead && w.state == working && w.fault == nil && !w.differs && s.now.Sub(w.heard.Heard) < 2*timing.Heartbeat {
		w.differs = true
		s.then(s.about(w.who.ID, eventNote, fmt.Sprintf("the ring takes worker %d for dead, since %s cannot reach it; its agent hears it, and it stays", w.id(), e.By)))
	}
}

// outside returns the workers of the run that have never been members of the ring.
func (s *Session) outside() (all []int) {
	for _, w := range s.workers {
		if !w.member && w.state != gone && !w.hasExited() && !w.joins {
			all = append(all, w.id())
		}
	}
	return all
}

// dropSuspicions forgets suspicions: where the host or all workers were held up, they tell of that delay only.
func (s *Session) dropSuspicions() {
	for _, w := range s.workers {
		if w.by != "" {
			w.by = ""
			s.tell(controller.Suspected{Worker: w.who})
		}
	}
}

// awaitRing sets when members that are missing are noted.
func (s *Session) awaitRing() {
	if len(s.cfg.Ring.Seeds) > 0 {
		s.ring.due = s.now.Add(max(timing.Of(s.cfg.Detect).RingForm, 5*s.cfg.Ring.Detect))
	}
}

// noteMissing notes, once, which workers are not in the ring although it had time enough to form.
func (s *Session) noteMissing() {
	if s.ring.due.IsZero() || s.now.Before(s.ring.due) || s.phase != training {
		return
	}
	s.ring.due = time.Time{}
	if out := s.outside(); len(out) > 0 {
		s.note("not in the gossip ring: %v; what becomes of these workers their agents alone say", out)
	}
}

// ringOf is what a worker is told of the ring.
func (s *Session) ringOf(w *worker) control.Ring {
	r := s.cfg.Ring
	r.Host = w.who.Host
	return r
}

// userCode is what a worker tells of the user code that it runs.
type userCode struct {
	call    control.Call // that has run for a heartbeat at least; of kind NoCall for none
	called  time.Time    // when, as far as it is overdue
	overdue bool         // it was reported
	stuck   bool         // the worker is killed for it, and writes its stacks before
}

// calls are what the session knows of calls of user code.
type calls struct {
	longest map[callKey]time.Duration // that returned
	held    bool                      // it was reported that the run waits for calls

	// The newest call for which a worker was evicted, and the newest step then.
	evicted control.Call
	by      id.WorkerID
	step    int
}

// callKey names calls that take about as long as each other.
type callKey struct {
	kind  control.CallKind
	layer int
}

// callText names the call that a worker runs.
func (w *worker) callText() string {
	layer := ""
	if w.call.Layer < len(w.ready.Layers) {
		layer = w.ready.Layers[w.call.Layer].Name
	}
	return w.call.Text(layer)
}

// counted is how long a call has taken, but for what the machine made it wait.
func counted(c control.Call) time.Duration { return time.Duration(c.For - c.Waited) }

// blocked says that the call of a worker has not returned.
func (w *worker) blocked() string {
	return blocked(w.id(), w.callText(), time.Duration(w.call.For))
}

// called takes in which call of user code a worker runs, nil for none that has run for a heartbeat. One that is overdue is reported,
// and the worker evicted after a while, if others can do its work.
func (s *Session) called(w *worker, told *control.Call) {
	call := control.Call{}
	if told != nil {
		call = *told
	}
	layers := len(w.ready.Layers)
	if w.fences { // the call may be one of the session before
		layers = s.job.Layers
	}
	if call.Kind > control.CallOnEnd || call.Layer < 0 || call.Layer > 0 && call.Layer >= layers || call.Waited < 0 || call.Waited > call.For {
		s.bad(w, "told of a call that cannot be")
		return
	}
	if was := w.call; was.Kind != call.Kind || was.Number != call.Number {
		if was.Kind != control.NoCall {
			s.calls.returned(was)
		}
		if w.overdue {
			w.overdue, s.calls.held = false, false
			s.then(w.row(""), s.processes())
			s.tellCall(w, eventReturned, fmt.Sprintf("worker %d: %s has returned after %.0f s", w.id(), w.callText(), time.Duration(was.For).Seconds()))
		}
	}
	if w.call = call; call.Kind == control.NoCall || s.phase == ending || w.fault != nil || w.hasExited() {
		return
	}
	longest := s.calls.longest[callKey{call.Kind, call.Layer}]
	report, evict := timing.CallLimits(s.cfg.CallTimeout, longest, w.state >= working || w.fences)
	limit := timing.Of(s.cfg.Detect).Suspend(longest)
	if call.Kind == control.CallSample { // it may fail, and be repeated
		limit += timing.SampleRetries()
	}
	if s.cfg.Detect > 0 && s.cfg.CallTimeout >= 0 && counted(call) >= limit && !s.skips.Open() && s.waitsFor(w) {
		s.suspend(w)
		return
	}
	if counted(call) < report {
		return
	}
	if !w.overdue {
		w.overdue, w.called = true, s.now.Add(-time.Duration(call.For))
		s.then(w.row(fmt.Sprintf("in %s since %s", w.callText(), w.called.Format(time.TimeOnly))), s.processes())
		s.tellCall(w, eventBlocked, w.blocked())
	}
	if s.phase == training && s.end.stop != "" {
		evict = report // the run waits for a commit
	}
	if counted(call) >= evict {
		s.unblock(w)
	}
}

// returned takes in that a call has returned.
func (c *calls) returned(call control.Call) {
	if c.longest == nil {
		c.longest = make(map[callKey]time.Duration)
	}
	k := callKey{call.Kind, call.Layer}
	c.longest[k] = max(c.longest[k], counted(call))
}

// tellCall reports what is known of a call. There are no events before training.
func (s *Session) tellCall(w *worker, kind eventKind, text string) {
	if s.phase >= training {
		s.then(s.about(w.who.ID, kind, text))
	}
	s.then(Show{view.Note(text)})
}

// waitsFor reports whether a worker is in a call within a step for which all others of the plan wait: they have nothing to run, but for
// those whose calls do not return either.
func (s *Session) waitsFor(w *worker) bool {
	if k := w.call.Kind; w.state != working || w.joins || w.last.Step == 0 || !s.fences(w) || s.ctl.Busy() ||
		k != control.CallSample && k != control.CallForward && k != control.CallBackward && k != control.CallLoss {
		return false
	}
	in := func(x *worker) bool { return s.now.Sub(x.pace.at) <= 2*timing.Heartbeat && x.pace.Step == w.pace.Step }
	wait := 0
	for _, pw := range s.plan.Workers {
		x := s.find(pw)
		switch {
		case x == nil, x == w:
		case !in(x):
			return false
		case x.pace.Running == 0:
			wait++
		case x.call.Kind == control.NoCall || counted(x.call) < timing.Of(s.cfg.Detect).Suspend(0):
			return false
		}
	}
	return in(w) && wait > 0 && wait >= s.cfg.MinWorkers && s.coming() == nil && s.spares(w)
}

// spares reports whether all that a worker holds of the state is held by another one as well, that lives and is in no long call itself.
func (s *Session) spares(w *worker) bool {
	return !slices.ContainsFunc(s.plan.Shards, func(sh plan.Shard) bool {
		return sh.Holds(w.who.ID) && !slices.ContainsFunc(s.plan.Workers, func(pw plan.Worker) bool {
			x := s.find(pw)
			return x != nil && x != w && sh.Holds(pw.ID) && x.stopped.IsZero() && s.goesOn(x) && counted(x.call) < timing.Of(s.cfg.Detect).Suspend(0)/2
		})
	})
}

// suspend has the run continue without a worker whose call of user code does not return. Its process joins again when it has. Where the
// same call has blocked another worker before, it is waited for.
func (s *Session) suspend(w *worker) {
	c := &s.calls
	if w.call.Kind == c.evicted.Kind && w.call.Layer == c.evicted.Layer && w.call.Sample == c.evicted.Sample && s.records.last.Step <= c.step {
		return
	}
	c.evicted, c.by, c.step = w.call, w.who.ID, s.records.last.Step
	c.returned(w.call) // so that the next one that takes as long is waited for
	w.well = true
	s.evict(w, w.blocked()+", and all others wait: the run continues without it")
}

// unblock evicts a worker whose call does not return. Where no other worker could continue, or the same call has blocked another
// worker before, the run waits for the call instead, unless it is to stop.
func (s *Session) unblock(w *worker) {
	c := &s.calls
	alive, free := 0, 0 // workers of the plan
	for _, p := range s.plan.Workers {
		if x := s.find(p); x != nil && x.exit == running && x.fault == nil {
			alive++
			if !x.overdue {
				free++
			}
		}
	}
	var why string
	switch again := w.call.Kind == c.evicted.Kind && w.call.Layer == c.evicted.Layer && w.call.Sample == c.evicted.Sample && s.records.last.Step <= c.step; {
	case s.phase == finished: // nothing depends on what the program does at its end
		return
	case w.joins && w.fences: // it is as its session before was
		s.evict(w, w.blocked()+"; its stacks are in its log")
		return
	case w.joins:
		w.stuck = true
		s.refuse(w, errors.New(w.blocked()))
		return
	case s.phase < training:
		w.stuck, s.end.lost = true, w
		w.fault = &BlockedError{Worker: w.id(), Call: w.callText(), For: time.Duration(w.call.For)}
		s.judge(w.fault)
		return
	case again && c.by != w.who.ID:
		why = fmt.Sprintf("worker %d was evicted for the same call", c.by)
	case free == 0 || alive <= s.cfg.MinWorkers && !s.cfg.Respawn:
		why = "no other worker can do its work"
	default:
		c.evicted, c.by, c.step = w.call, w.who.ID, s.records.last.Step
		s.evict(w, w.blocked()+"; its stacks are in its log")
		return
	}
	if s.end.stop != "" {
		s.judge(&StoppedError{Reason: s.end.stop, Step: s.records.last.Step, Steps: s.job.Steps, AtOnce: true, Blocked: w.blocked(), Saved: s.checkpoints.newest})
		return
	}
	if !c.held {
		c.held = true
		s.tellCall(w, eventHold, fmt.Sprintf("%s, and %s: the run waits until it returns; Ctrl-C or launcher stop ends the run", w.blocked(), why))
	}
}

// stamp takes in when a fault was injected.
func (s *Session) stamp(e FaultStamped) {
	w := s.newest(id.WorkerID(e.ID))
	if e.Worker >= 0 {
		w = s.workers[e.Worker]
	}
	if w == nil {
		return
	}
	w.hit = e.At
	s.tr.Stamped(w.who, e.At)
	if w.state == gone && !e.At.IsZero() { // the stamp was slower than the exit
		s.tell(controller.Stamp{Worker: w.who, At: e.At})
	}
}

// maxRepairs is how many times a worker's memory may alter: the next time may be one in which it is not found.
const maxRepairs = 1

// repairTarget is what a worker has repaired. Scripts depend on the words.
type repairTarget string

const (
	repairOwn    repairTarget = "own"
	repairMirror repairTarget = "mirror"
	repairCopy   repairTarget = "copy"
	repairMoment repairTarget = "moment"
	repairPassed repairTarget = "passed" // what a lost worker has passed on
	repairDiffer repairTarget = "differ" // a copy that is not what the owner has
)

// own reports whether the memory that was altered is the worker's own; false for a target that does not exist.
func (t repairTarget) own() bool {
	return t == repairOwn || t == repairMirror || t == repairCopy || t == repairMoment
}

// repairs are the times when a worker's memory was found altered.
type repairs struct {
	count     int
	step, try int // of the newest
}

// repaired writes down that memory of a worker was altered and is as it was again, and evicts a worker to which that happens once
// more while others can continue without it.
func (s *Session) repaired(w *worker, m control.Repaired) {
	id, target := w.id(), repairTarget(m.Target)
	known := slices.ContainsFunc(w.ready.Layers, func(l control.Layer) bool { return l.Name == m.Layer })
	if !known || m.Block < 0 || !target.own() && target != repairPassed && target != repairDiffer {
		s.judge(&ProtocolError{id, "tells of a repair that cannot be" + s.at()})
		return
	}
	reason := fmt.Sprintf("worker %d: block %d of layer %q (%s) was altered in memory before the commit of step %d, and is repaired", id, m.Block, m.Layer, m.Target, m.Step)
	switch target {
	case repairDiffer:
		reason = fmt.Sprintf("worker %d: its copy of a part of layer %q was not what the owner has: it is sent again, and step %d done again", id, m.Layer, m.Step)
	case repairPassed:
		reason = fmt.Sprintf("worker %d: what a lost worker had handed over for layer %q and micro-batch %d is not what was computed again, so memory was altered, or a sample of it is skipped since: step %d is done again", id, m.Layer, m.Block, m.Step)
	}
	e := s.about(w.who.ID, eventRepaired, reason)
	e.Event.Repair = &rundir.Repair{Layer: m.Layer, Block: m.Block, Target: m.Target}
	s.then(e, Show{view.Note(reason)})
	if !target.own() {
		return // another worker's memory was altered
	}
	if r := &w.repairs; r.count == 0 || r.step != m.Step || r.try != m.Try {
		*r = repairs{r.count + 1, m.Step, m.Try}
	}
	others := slices.ContainsFunc(s.plan.Workers, func(p plan.Worker) bool {
		x := s.find(p)
		return x != nil && x != w && x.state != gone
	})
	if w.repairs.count > maxRepairs && others && s.phase != ending {
		s.evict(w, fmt.Sprintf("memory of worker %d was altered %d times", id, w.repairs.count))
	}
}
