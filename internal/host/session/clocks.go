package session

import (
	"maps"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

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
		place := s.find(w)
		if _, told := s.paces.told[w.ID]; !told || place < 0 || s.workers[place].state == gone {
			return
		}
		e.Under[w.ID] = s.paces.detector.Under(w.ID)
		e.Processes[int(w.ID)] = s.workers[place].pid
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
func (s *Session) clockDraw(place int, m control.Step) {
	if s.cfg.Clocks == EmulatedClocks && !s.clocks.off {
		busy, whole := time.Duration(m.Compute).Seconds(), m.MS/1000
		s.then(DeviceUsed{s.id(place), min(max(busy, 0), whole), max(whole-busy, 0)})
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
			if place := s.newest(w); place >= 0 && s.workers[place].state == working {
				s.send(place, control.Clock{Share: e.Shares[w]})
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
