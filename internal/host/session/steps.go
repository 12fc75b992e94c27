package session

import (
	"fmt"
	"math"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
)

// reports are what workers have told of steps. Every worker reports every committed step, with the same bits.
type reports struct {
	told  map[int]said // steps that some worker has still to report
	ahead []Received   // after a takeover, steps that others have to report first
}

// said is a step as one worker reported it.
type said struct {
	by   int
	step control.Step
}

// committed takes in that a worker reports a committed step.
func (s *Session) committed(place int, m control.Step) {
	bad := func(format string, args ...any) {
		s.judge(&ProtocolError{s.id(place), fmt.Sprintf(format, args...)})
	}
	w, r := &s.workers[place], &s.records
	if m.Plan == 0 {
		m.Plan = uint64(s.plan.Version.N)
	}
	under, ok := s.known[m.Plan]
	rolled := ok && under.Version.Compare(s.restart.version) < 0 // the run has gone back since
	if w.fresh && w.inherited && ok && !rolled && m.Step > r.last.Step+1 && len(s.reports.ahead) < maxLead {
		s.reports.ahead = append(s.reports.ahead, Received{place, m})
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
	case m.Tokens < 0 || m.MS < 0 || !finite(m.Loss, m.LR, m.GradNorm, m.MS) || m.ValLoss != nil && !finite(*m.ValLoss):
		bad("committed step %d with numbers that are not finite", m.Step)
		return
	}
	w.last = m
	w.own.Forwards, w.own.Backwards = m.Forwards, m.Backwards
	row := Show{view.Worker{ID: s.id(place), Step: m.Step, Forwards: m.Forwards, Backwards: m.Backwards}}
	if m.Left {
		s.then(row) // the others report the step, and the evaluation after it
		return
	}

	if m.Step <= r.last.Step {
		if was, ok := s.reports.told[m.Step]; ok {
			if what := otherStep(was.step, m); what != "" {
				s.judge(&MismatchError{Worker: s.id(place), Than: s.id(was.by), What: what, Step: m.Step})
				return
			}
		}
		s.forgetSteps()
		s.clockDraw(place, m)
		s.then(row)
		s.traceWorkerStep(place, m)
		return
	}
	s.reports.told[m.Step] = said{place, m}
	s.forgetSteps()
	if len(s.reports.told) > maxLead {
		bad("is %d steps ahead of others", maxLead)
		return
	}
	r.step(m, len(under.Workers))
	s.clockDraw(place, m)
	s.then(WriteMetrics{r.last}, row, Show{view.Step(r.last)})
	s.askForTimelines()
	s.traceStep(m)
	s.traceWorkerStep(place, m)
	s.commitCheckpoints()
	s.clockStep(m)
	ahead := s.reports.ahead
	s.reports.ahead = nil
	for _, e := range ahead {
		if s.phase != ending {
			s.message(e.Worker, e.Message)
		}
	}
}

// forgetSteps drops the steps that all workers have reported that are to.
func (s *Session) forgetSteps() {
	least := math.MaxInt
	for place := range s.workers {
		switch w := &s.workers[place]; {
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
