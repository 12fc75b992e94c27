package session

import (
	"maps"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// What goes to the goroutine.
type (
	// observe asks whether clocks are to be set after a step.
	ObserveStep struct {
		Plan      plan.Plan
		Profile   plan.Profile            // as plans are made with
		Under     map[id.WorkerID]float64 // how many times as long each worker takes at the clock of the moment
		Seconds   float64
		Processes map[int]int
		Changes   uint64 // of clocks before it
	}
	// release has lowered clocks put back: another plan is live.
	ReleaseClocks struct{ Version id.Version }
	// drawn lets an emulated device have computed and waited, in seconds.
	DeviceUsed struct {
		Worker     int
		Busy, Idle float64
	}
)

// What comes from it.
type (
	// clocked says that clocks were set, or, where there are no settings, why none will be.
	ClocksSet struct {
		Reason   string
		Settings []rundir.Clock
		Lowered  map[id.WorkerID]float64 // how many times as long workers whose clock was set may take, at least 1
		Raised   []id.WorkerID           // workers whose clock is higher than it was found
		Shares   map[id.WorkerID]float64 // of the speed as found
		Joules   float64
	}
	Metered struct{ Devices []trace.Device }
)

// clocking is what a session knows of clocks.
type clocking struct {
	off  bool // none will be set any more
	prof plan.Profile
	made bool // prof is that of the newest times

	since int // step after which devices are looked after; 0: they are not
}

// clockStep follows the step that was committed last.
func (s *Session) clockStep(m control.Step) []Effect {
	if s.cfg.Clocks == NoClocks || s.clocks.off || s.state != training || s.stop != "" || s.ctl.Busy() || s.thin || m.Plan != uint64(s.plan.Version.N) {
		return nil
	}
	e := ObserveStep{Plan: s.plan, Seconds: m.MS / 1000, Under: make(map[id.WorkerID]float64), Processes: make(map[int]int)}
	for _, w := range s.plan.Workers {
		id := s.find(w)
		if _, told := s.paces.told[w.ID]; !told || id < 0 || s.workers[id].gone {
			return nil
		}
		e.Under[w.ID] = s.paces.detector.Under(w.ID)
		e.Processes[int(w.ID)] = s.workers[id].pid
	}
	if !s.clocks.made {
		s.clocks.prof, s.clocks.made = s.ctl.Profile(), true
	}
	if e.Profile = s.clocks.prof; s.clocks.since == 0 {
		s.clocks.since = m.Step
	}
	return []Effect{e}
}

// clockPlan follows a new plan.
func (s *Session) clockPlan() []Effect {
	s.clocks.made = false
	if s.cfg.Clocks == NoClocks || s.clocks.off {
		return nil
	}
	return []Effect{ReleaseClocks{s.plan.Version}}
}

// clockDraw follows what a worker says of its step.
func (s *Session) clockDraw(id int, m control.Step) []Effect {
	if s.cfg.Clocks == NoClocks || s.clocks.off || s.cfg.Clocks != EmulatedClocks {
		return nil
	}
	busy, whole := time.Duration(m.Compute).Seconds(), m.MS/1000
	return []Effect{DeviceUsed{s.id(id), min(max(busy, 0), whole), max(whole-busy, 0)}}
}

// clocked takes in that clocks were set.
func (s *Session) clocked(now time.Time, e ClocksSet) []Effect {
	if s.judged {
		return nil
	}
	for w, by := range e.Lowered {
		s.paces.detector.Lowered(w, by)
	}
	for _, w := range e.Raised { // it is another device from now on, and is measured anew
		s.paces.forget(w)
	}
	effects := []Effect{s.clockEvent(now, e), Show{view.Note(e.Reason)}}
	s.clocks.off = s.clocks.off || len(e.Settings) == 0
	if s.cfg.Clocks == EmulatedClocks {
		for _, w := range slices.Sorted(maps.Keys(e.Shares)) {
			if id := s.newest(w); id >= 0 && !s.workers[id].gone && s.workers[id].state == training {
				effects = append(effects, Send{id, control.Clock{Share: e.Shares[w]}})
			}
		}
	}
	return effects
}

// clocksRestored returns the line of events.jsonl about clocks that were put back at the end of the run; false if there is none.
func (s *Session) ClocksRestored(now time.Time, e ClocksSet) (rundir.Event, bool) {
	return s.clockEvent(now, e).Event, e.Reason != "" && s.plan.Version.N > 0
}

// clockEvent is the line of events.jsonl.
func (s *Session) clockEvent(now time.Time, e ClocksSet) WriteEvent {
	line := s.event(now, "clocks", e.Reason)
	line.Event.Clocking = &rundir.Clocking{Clocks: e.Settings, Emulated: s.cfg.Clocks == EmulatedClocks, Joules: e.Joules, AfterStep: s.last.Step, SinceStep: s.clocks.since}
	return line
}

// metered passes on what devices do.
func (s *Session) metered(e Metered) (effects []Effect) {
	if s.tr == nil {
		return nil
	}
	for _, d := range e.Devices {
		effects = append(effects, Measure{d})
	}
	return effects
}
