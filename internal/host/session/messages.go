package session

import (
	"fmt"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
)

// message takes in what a worker says.
func (s *Session) message(place int, m control.Message) {
	w := &s.workers[place]
	if _, first := m.(control.Hello); w.state == connecting && !first {
		if _, failed := m.(control.Failed); !failed {
			s.bad(place, "sent %T before its hello", m)
			return
		}
	}
	if s.phase == finished && w.inherited {
		switch m.(type) {
		case control.Step, control.Saved, control.Done, control.Answer, control.Applied:
			return // the leader before has written all down
		}
	}
	switch m := m.(type) {
	case control.Hello:
		switch {
		case w.state != connecting:
			s.bad(place, "said hello twice")
			return
		case m.Protocol != control.Protocol:
			s.bad(place, "speaks version %d of the protocol, not %d", m.Protocol, control.Protocol)
			return
		case m.WorkerID != s.id(place) || m.Incarnation != w.who.Incarnation:
			s.bad(place, "says it is worker %d in incarnation %d", m.WorkerID, m.Incarnation)
			return
		}
		w.set(greeted)
		w.heard, w.pid = s.now, m.PID
		if w.joins {
			s.then(s.processes())
		}

	case control.Beat:
		s.measured(place, m)

	case control.Failed:
		s.workerFailed(place, m)

	case control.Note:
		note := OneLine(m.Text)
		s.then(Show{view.Worker{ID: s.id(place), State: note}})
		if place == 0 { // the others do the same
			s.then(Show{view.Note(note)})
		}

	case control.Ready:
		if w.state != greeted {
			s.bad(place, "sent a job twice")
			return
		}
		if fault := s.fault(m); fault != "" {
			s.bad(place, "%s", fault)
			return
		}
		w.set(prepared)
		w.ready = m
		switch {
		case w.joins:
			s.join(place)
		case s.anyWorker(func(w *worker) bool { return w.state < prepared }):
			s.then(Show{view.Worker{ID: s.id(place), State: "ready"}})
		default:
			s.start()
		}

	case control.Step:
		if w.state != working {
			s.bad(place, "sent a step outside of training")
			return
		}
		s.committed(place, m)

	case control.Output:
		switch {
		case w.state < working:
			s.bad(place, "sent output before training")
		case !s.isFirst(place):
			s.bad(place, "sent output, which is for worker %d to do", s.plan.Workers[0].ID)
		default:
			s.then(Output{m.Text})
		}

	case control.Done:
		switch {
		case w.state != working:
			s.bad(place, "ended a training that had not begun")
		case s.phase == training: // else it joined as the run ended, which did not need it
			s.finish(place, m)
		}

	case control.Timeline:
		if w.state == working {
			m.Passes = m.Passes[:min(len(m.Passes), control.MaxPasses)]
			s.then(Show{view.Timeline{ID: s.id(place), Timeline: m}})
		}

	case control.Spans:
		if w.state == working && s.phase == training {
			if fault := s.spans(place, m); fault != "" {
				s.bad(place, "%s", fault)
			}
		}

	case control.Repaired:
		if w.state == working {
			s.repaired(place, m)
		}

	case control.Saved:
		switch {
		case w.state != working || s.cfg.RunDir == "":
			s.bad(place, "saved a part of a checkpoint outside of training")
		case s.phase == training:
			s.saved(place, m)
		}

	case control.Answer, control.Applied, control.LinkLost, control.Leave, control.Level:
		if s.phase == training { // else it does not know yet
			s.report(place, m)
		}

	default:
		s.bad(place, "sent a message that only an agent sends (%T)", m)
	}
}

// report passes on to the controller what a worker says.
func (s *Session) report(place int, m control.Message) {
	from := s.session(place)
	switch m := m.(type) {
	case control.Answer:
		s.tell(controller.Answered{Worker: from, Ballot: m.Ballot, Report: m.Report})
	case control.Applied:
		s.tell(controller.Applied{
			Worker: from, Ballot: m.Ballot, Version: m.Version, Opened: max(m.Opened, 0),
			Edit: time.Duration(max(m.Edit, 0)), Resume: time.Duration(max(m.Resume, 0)),
		})
		s.conclude() // every worker may have told its result while the order was on its way
	case control.LinkLost:
		s.tell(controller.LinkLost{From: from, To: plan.Worker{ID: m.Peer.Worker, Incarnation: m.Peer.Incarnation}})
	case control.Level:
		level := controller.Level{Worker: from, ID: m.ID, Step: m.Step}
		s.traceLevel(level)
		s.tell(level)
	case control.Leave:
		s.tell(controller.Leaving{Worker: from})
	}
}

// isFirst reports whether a worker is the first of the run's plan, or of another plan that it may not have left yet.
func (s *Session) isFirst(place int) bool {
	for _, p := range s.known {
		if p.Workers[0] == s.workers[place].who {
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
