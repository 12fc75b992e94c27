package session

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/host/session/skips"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/straggler"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// pacing is what a session knows of the speed of its workers.
type pacing struct {
	detector straggler.Detector
	told     map[id.WorkerID]plan.Times // to the controller
	room     map[id.WorkerID]int64      // bytes for parameters and optimizer state
	since    int                        // samples since the controller was fed last
	looked   time.Time                  // for late workers
}

func (p *pacing) forget(w id.WorkerID) {
	p.detector.Forget(w)
	delete(p.told, w)
}

// measure takes in how much room a worker has. What machines have to spare changes all the time, and plans are not to follow
// that, so what is known stays until it is wrong by a third.
func (p *pacing) measure(w id.WorkerID, bytes int64) {
	const off = 4. / 3
	if was, is := float64(p.room[w]), float64(bytes); was == 0 || is > off*was || is < was/off {
		if p.room == nil {
			p.room = make(map[id.WorkerID]int64)
		}
		p.room[w] = bytes
	}
}

// measured takes in what a worker has measured: verdicts become events, and the controller gets times that differ from what it knows.
func (s *Session) measured(w *worker, m control.Beat) {
	if m.Step < 1 || len(m.Layers) == 0 || s.phase != training || w.state != working || w.joins {
		return
	}
	sample := straggler.Sample{Worker: w.who.ID, Step: m.Step}
	for _, l := range m.Layers[:min(len(m.Layers), control.MaxMeasured)] {
		t := plan.LayerTime{Layer: l.Layer, Forward: time.Duration(l.Forward), Backward: time.Duration(l.Backward)}
		if t.Layer >= 0 && t.Layer < s.plan.Layers() && min(t.Forward, t.Backward) >= 0 && max(t.Forward, t.Backward) < time.Hour {
			sample.Layers = append(sample.Layers, t)
		}
	}
	for _, l := range m.Links[:min(len(m.Links), control.MaxMeasured)] {
		if _, known := s.plan.Worker(id.WorkerID(l.To)); known && l.Busy > 0 && m.Over > 0 {
			sample.Links = append(sample.Links, straggler.Sent{
				To: id.WorkerID(l.To), Bytes: l.Bytes, Took: time.Duration(l.Busy), Busy: float64(l.Busy) / float64(m.Over),
			})
		}
	}
	if m.Available > 0 && m.Available < 1<<60 {
		// What is left beside activations and mirrors is for all workers of the machine.
		sharing := len(s.plan.Workers)
		if s.cfg.Apart {
			sharing = 0
			for _, o := range s.plan.Workers {
				if o.Host == w.who.Host {
					sharing++
				}
			}
		}
		s.paces.measure(w.who.ID, s.plan.Holds(w.who.ID, s.ctl.Profile().Layers)+m.Available/int64(max(sharing, 1)))
	}
	verdicts := s.paces.detector.Observe(sample)
	for _, v := range verdicts {
		kind := eventNormal
		if v.Slow() {
			kind = eventSlow
		}
		s.then(s.about(w.who.ID, kind, fmt.Sprintf("step %d: %s", m.Step, v.Reason)), Show{view.Note(v.Reason)})
	}
	// Once for every worker is as often as times are worth a look, which takes a look at all links.
	if s.paces.since++; len(verdicts) > 0 || s.paces.since >= len(s.plan.Workers) {
		s.paces.since = 0
		s.feed()
	}
}

// lateLook is how long after a look for late workers the next one may be, for each pair of workers: a thousand are looked at 20 times a second.
const lateLook = 50 * time.Nanosecond

// pace is how far a worker is in a step.
type pace struct {
	control.Pace
	at       time.Time
	relieved int // newest step in which the worker was relieved
}

// paced takes in how far a worker is in its step. Where others wait for one, they take over what it has not begun, once in a step, but not in the
// first, which has a spot check.
func (s *Session) paced(w *worker, p *control.Pace) {
	if w.pace.at = (time.Time{}); p == nil || s.phase != training || w.state != working || w.joins || min(p.Step, p.Left, p.Ready, p.Running, int(p.Each), int(p.Stuck), int(p.Idle)) < 0 {
		return
	}
	w.pace.Pace, w.pace.at = *p, s.now
	if s.ctl.Busy() || s.records.last.Step == 0 || s.now.Sub(s.paces.looked) < time.Duration(len(s.workers)*len(s.workers))*lateLook {
		return
	}
	s.paces.looked = s.now
	var all []straggler.Pace
	of := make(map[id.WorkerID]*worker)
	for _, x := range s.workers {
		if x.state == working && !x.joins && x.watched() && s.now.Sub(x.pace.at) <= 2*timing.Heartbeat && x.pace.relieved != x.pace.Step {
			of[x.who.ID] = x
			all = append(all, straggler.Pace{
				Worker: x.who.ID, Stages: s.plan.StagesOf(x.who.ID), Step: x.pace.Step, Left: x.pace.Left, Ready: x.pace.Ready,
				Each: time.Duration(x.pace.Each), Stuck: time.Duration(x.pace.Stuck), Idle: time.Duration(x.pace.Idle), Age: s.now.Sub(x.pace.at),
			})
		}
	}
	late, ok := straggler.Behind(all)
	if !ok || late.Gain < timing.ReliefGain {
		return
	}
	each := make(map[id.WorkerID]float64)
	for _, p := range all {
		if p.Step == late.Step {
			each[p.Worker] = p.Whole().Seconds() / float64(max(p.Ready, 1))
		}
	}
	x := of[late.Worker]
	s.tell(controller.Behind{Worker: x.who, Step: late.Step, Each: each, Cause: fmt.Sprintf("worker %d is late in step %d", late.Worker, late.Step)})
	if s.ctl.Busy() {
		x.pace.relieved = late.Step
	}
}

// feed tells the controller of times that have changed, once those of all workers of the
// plan are known.
func (s *Session) feed() {
	all, news := make([]plan.Times, len(s.plan.Workers)), false
	for i, w := range s.plan.Workers {
		times, ok := s.paces.detector.Times(w.ID)
		if !ok {
			return
		}
		times.Memory = s.paces.room[w.ID]
		all[i] = times
		was, told := s.paces.told[w.ID]
		news = news || !told || changed(was, times)
	}
	if !news {
		return
	}
	// All of one moment: times of several would differ by what the machine did meanwhile.
	s.paces.told = make(map[id.WorkerID]plan.Times)
	s.clocks.made = false
	for i, w := range s.plan.Workers {
		s.paces.told[w.ID] = all[i]
		s.tell(controller.Measured{Worker: w, Times: all[i]})
	}
}

// times is what is known of a worker, for the records; nil if that is not enough.
func (p *pacing) times(w id.WorkerID) (all []rundir.LayerTime) {
	if t, ok := p.detector.Times(w); ok {
		for _, l := range t.Layers {
			all = append(all, rundir.LayerTime{Layer: l.Layer, ForwardMS: 1e3 * l.Forward.Seconds(), BackwardMS: 1e3 * l.Backward.Seconds()})
		}
	}
	return all
}

// changed reports whether times differ by so much that a plan may.
func changed(a, b plan.Times) bool {
	if len(a.Layers) != len(b.Layers) || len(a.Links) != len(b.Links) || a.Memory != b.Memory {
		return true
	}
	const part = 0.1
	for i, x := range a.Layers {
		y := b.Layers[i]
		was, is := float64(x.Forward+x.Backward), float64(y.Forward+y.Backward)
		if x.Layer != y.Layer || math.Abs(is-was) > part*was {
			return true
		}
	}
	for i, x := range a.Links {
		if y := b.Links[i]; x.To != y.To || math.Abs(y.Bandwidth-x.Bandwidth) > part*x.Bandwidth {
			return true
		}
	}
	return false
}

// The clocks of the devices that workers compute on. The session says which steps count: those of a plan that is live, with all
// mirrors and with measured times of all its workers. It writes down which clocks were set, and has the detector of slow workers
// know. Plans know nothing of clocks: they are made with the times that were measured before a clock was lowered.

// clocking is what a session knows of clocks.
type clocking struct {
	off     bool // none will be set any more
	profile plan.Profile
	made    bool // profile is that of the newest times
	since   int  // step after which devices are looked after; 0: they are not
}

// clockStep follows the step that was committed last.
func (s *Session) clockStep(m control.Step) {
	c := &s.clocks
	if s.cfg.Clocks == NoClocks || c.off || s.phase != training || s.end.stop != "" || s.ctl.Busy() || s.thin || m.Plan != uint64(s.plan.Version.N) {
		return
	}
	e := ObserveStep{Plan: s.plan, Seconds: m.MS / 1000, Under: make(map[id.WorkerID]float64), Processes: make(map[int]int)}
	for _, w := range s.plan.Workers {
		x := s.find(w)
		if _, told := s.paces.told[w.ID]; !told || x == nil || x.state == gone {
			return
		}
		e.Under[w.ID] = s.paces.detector.Under(w.ID)
		e.Processes[int(w.ID)] = x.pid
	}
	if !c.made {
		c.profile, c.made = s.ctl.Profile(), true
	}
	if e.Profile = c.profile; c.since == 0 {
		c.since = m.Step
	}
	s.then(e)
}

// clockPlan follows a new plan.
func (s *Session) clockPlan() {
	s.clocks.made = false
	if s.cfg.Clocks != NoClocks && !s.clocks.off {
		s.then(ReleaseClocks{s.plan.Version})
	}
}

// clockDraw follows what a worker says of its step.
func (s *Session) clockDraw(w *worker, m control.Step) {
	if s.cfg.Clocks == EmulatedClocks && !s.clocks.off {
		busy, whole := time.Duration(m.Compute).Seconds(), m.MS/1000
		s.then(DeviceUsed{w.id(), min(max(busy, 0), whole), max(whole-busy, 0)})
	}
}

// clocksSet takes in that clocks were set.
func (s *Session) clocksSet(e ClocksSet) {
	if s.phase == ending {
		return
	}
	for w, by := range e.Lowered {
		s.paces.detector.Lowered(w, by)
	}
	for _, w := range e.Raised { // it is another device from now on, and is measured again
		s.paces.forget(w)
	}
	s.then(s.clockEvent(e), Show{view.Note(e.Reason)})
	s.clocks.off = s.clocks.off || len(e.Settings) == 0
	if s.cfg.Clocks == EmulatedClocks {
		for _, w := range slices.Sorted(maps.Keys(e.Shares)) {
			if x := s.newest(w); x != nil && x.state == working {
				s.send(x, control.Clock{Share: e.Shares[w]})
			}
		}
	}
}

// ClocksRestored returns the line of events.jsonl about clocks that were restored at the end of the run; false if there is none.
func (s *Session) ClocksRestored(now time.Time, e ClocksSet) (rundir.Event, bool) {
	s.now = now
	return s.clockEvent(e).Event, e.Reason != "" && s.plan.Version.N > 0
}

// clockEvent is the line of events.jsonl.
func (s *Session) clockEvent(e ClocksSet) WriteEvent {
	line := s.event(eventClocks, e.Reason)
	line.Event.Clocking = &rundir.Clocking{
		Clocks: e.Settings, Emulated: s.cfg.Clocks == EmulatedClocks, Joules: e.Joules, AfterStep: s.records.last.Step, SinceStep: s.clocks.since,
	}
	return line
}

// unread takes in what a worker says of a sample that cannot be read.
func (s *Session) unread(w *worker, m control.Unread) {
	if !s.cfg.SkipBad {
		s.bad(w, "waits for a sample in a run that skips none")
		return
	}
	m.Text = OneLine(m.Text)
	send, fault := s.skips.Unread(w.who, m, s.records.most)
	if fault != "" {
		s.bad(w, "%s", fault)
		return
	}
	if m.Step <= s.records.most && slices.ContainsFunc(send, func(x skips.Send) bool { return x.Do == control.FailSample }) {
		w.again = m.Step
	}
	s.judgeSamples(send)
}

// weighSamples has workers asked that have not been, and what none can read agreed.
func (s *Session) weighSamples() {
	if s.phase != training || !s.skips.Open() {
		return
	}
	if q := s.skips.First(); s.end.stop != "" { // where the data are gone, one question follows the other, and the next commit may be far
		why := fmt.Sprintf("step %d needs a sample that cannot be read: %s", q.Step, q.Why)
		s.judge(&StoppedError{Reason: s.end.stop, Step: s.records.last.Step, Steps: s.job.Steps, AtOnce: true, Blocked: why, Saved: s.checkpoints.newest})
		return
	}
	send, skip := s.skips.Weigh(s.readers(), s.records.most)
	s.judgeSamples(send)
	for _, q := range skip {
		s.first(ProposeSkip{q})
	}
}

// skipped takes in that it is agreed that a sample is skipped.
func (s *Session) skipped(q skips.Question) {
	send, ok := s.skips.Agreed(q.Spot, s.readers())
	if !ok || s.phase != training {
		return
	}
	reason := fmt.Sprintf("sample %d of the data is skipped in step %d, and sample %d takes its place: no worker can read it: %s", q.Index, q.Step, (q.Index+1)%int(max(s.job.Samples, 1)), q.Why)
	s.first(WriteSkip{rundir.Skip{Sample: q.Sample, Index: q.Index, Step: q.Step, Time: rundir.Time{Time: s.now}, Reason: q.Why}}) // before a worker knows
	s.judgeSamples(send)
	s.then(s.event(eventSkipped, reason), Show{view.Note(reason)})
}

// readers are the workers that read samples, or may soon.
func (s *Session) readers() (all []plan.Worker) {
	for _, w := range s.workers {
		if w.state == working && !w.over() {
			all = append(all, w.who) // also one that has hung up, until it is known to be lost: it may have read what others cannot
		}
	}
	return all
}

func (s *Session) judgeSamples(send []skips.Send) {
	for _, m := range send {
		if w := s.find(m.To); w != nil && w.state == working && !w.closed() {
			s.send(w, m.BadSample)
		}
	}
}
