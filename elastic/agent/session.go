package agent

import (
	"errors"
	"fmt"
	"math"
	"path"
	"time"

	"github.com/soliton-train/soliton/internal/control"
	"github.com/soliton-train/soliton/internal/rundir"
	"github.com/soliton-train/soliton/internal/view"
)

// session decides what the agent does about one worker. It has no goroutine, socket,
// file or clock: step takes an event and returns the effects to carry out in
// their order.
//
//	connecting --Hello--> greeted --Ready--> training --Done--> finished
//
// and from each of them, at the first failure or with a stop at once, the verdict is set and nothing
// the worker says counts any more. The session is over when the worker has
// ended and its connection too; so whatever a dying worker has sent is
// read before its death is judged.
type session struct {
	cfg   Config
	state state

	job   rundir.Job
	start time.Time // of training
	last  rundir.Metrics
	total struct {
		tokens int64
		ms     float64
	}
	val     *float64
	summary *rundir.Summary

	stop   Reason // the first reason to stop, "" while there is none
	err    error  // the verdict: the first error
	judged bool   // a verdict is there, or help: what the worker says no longer counts
	lost   bool   // the verdict came from the worker's end, so its last words matter
	detail string
	help   string

	closed, exited bool
	status         Status
	gaveUp         bool // the worker was killed and did not end
}

type state uint8

const (
	connecting state = iota
	greeted
	training
	finished
)

// What happens.
type (
	event any

	received     struct{ m control.Message }
	connClosed   struct{ err error } // or never made
	workerExited struct{ status Status }
	stopAsked    struct{ reason Reason }
	helloLate    struct{}
	reapLate     struct{} // a second after kill or awaitExit
	fileFailed   struct{ err error }
)

// What is to be done.
type (
	effect any

	writeJob struct {
		job  rundir.Job
		data []rundir.DataFile
	}
	writeMetrics struct{ m rundir.Metrics }
	writeEvent   struct{ e rundir.Event }
	writeSummary struct{ s rundir.Summary }
	sendMessage  struct{ m control.Message }
	show         struct{ e view.Event }
	closeView    struct{}
	output       struct{ text string }
	kill         struct{}
	awaitExit    struct{} // reapLate comes if the worker has not ended in a second
)

func newSession(cfg Config) *session { return &session{cfg: cfg} }

// over reports whether nothing can come any more.
func (s *session) over() bool { return s.gaveUp || s.exited && s.closed }

func (s *session) outcome() Outcome {
	return Outcome{Summary: s.summary, Err: s.err, Detail: s.detail, Help: s.help}
}

func (s *session) step(now time.Time, e event) []effect {
	switch e := e.(type) {
	case received:
		if s.judged {
			return nil
		}
		return s.message(now, e.m)
	case stopAsked:
		return s.stopAsked(now, e.reason)
	case helloLate:
		if s.state != connecting || s.judged || s.exited {
			return nil
		}
		return s.judge(now, &NoMainError{Program: s.cfg.Program, Waited: s.cfg.HelloTimeout.String()})
	case fileFailed:
		return s.judge(now, &FileError{Err: e.err})
	case connClosed:
		s.closed = true
		if s.exited {
			return s.ended(now)
		}
		if !s.judged && (errors.Is(e.err, control.ErrFormat) || errors.Is(e.err, control.ErrFrameSize)) {
			return s.judge(now, &ProtocolError{s.cfg.WorkerID, "sent bytes that are no message" + s.place()})
		}
		if !s.judged && s.state != finished {
			// A process that dies closes its connection first; its exit
			// says more.
			return []effect{awaitExit{}}
		}
	case workerExited:
		s.exited, s.status = true, e.status
		if s.closed {
			return s.ended(now)
		}
		return []effect{awaitExit{}}
	case reapLate:
		switch {
		case s.exited:
			// Ended, but something holds its connection open.
			s.closed = true
			return s.ended(now)
		case s.judged:
			s.gaveUp = true
		default:
			return s.judge(now, &ProtocolError{s.cfg.WorkerID, "closed its connection and went on" + s.place()})
		}
	}
	return nil
}

// ended judges a worker that has ended and has nothing more to say.
func (s *session) ended(now time.Time) []effect {
	if s.judged || s.state == finished && s.status.OK() {
		return nil
	}
	s.lost = true
	if s.state == connecting {
		return s.judge(now, &NoMainError{Program: s.cfg.Program, Status: s.status})
	}
	return s.judge(now, &LostError{Worker: s.cfg.WorkerID, Status: s.status, Step: s.last.Step, Steps: s.job.Steps})
}

func (s *session) message(now time.Time, m control.Message) []effect {
	bad := func(format string, args ...any) []effect {
		return s.judge(now, &ProtocolError{s.cfg.WorkerID, fmt.Sprintf(format, args...) + s.place()})
	}
	switch m := m.(type) {
	case control.Hello:
		switch {
		case s.state != connecting:
			return bad("said hello twice")
		case m.Protocol != control.Protocol:
			return bad("speaks version %d of the protocol, not %d", m.Protocol, control.Protocol)
		case m.WorkerID != s.cfg.WorkerID || m.Incarnation != s.cfg.Incarnation:
			return bad("says it is worker %d in incarnation %d", m.WorkerID, m.Incarnation)
		}
		s.state = greeted
		return nil

	case control.Failed:
		return s.failed(now, m)

	case control.Note:
		if s.state == connecting {
			return bad("sent a note before its hello")
		}
		return []effect{show{view.Note(oneLine(m.Text))}}

	case control.Ready:
		if s.state != greeted {
			return bad("sent a job twice or before its hello")
		}
		if m.Job.Steps < 1 {
			return bad("sent a job of %d steps", m.Job.Steps)
		}
		return s.begin(now, m)

	case control.Step:
		if s.state != training {
			return bad("sent a step outside of training")
		}
		return s.committed(now, m)

	case control.Output:
		if s.state < training {
			return bad("sent output before training")
		}
		return []effect{output{m.Text}}

	case control.Done:
		if s.state != training {
			return bad("ended a training that had not begun")
		}
		return s.done(now, m)
	}
	return bad("sent a message that only an agent sends (%T)", m)
}

func (s *session) begin(now time.Time, m control.Ready) []effect {
	s.state, s.start = training, now
	s.job = m.Job
	s.job.Program = path.Base(s.job.Program)
	s.job.Threads, s.job.Reduction, s.job.Workers, s.job.Started = s.cfg.Threads, s.cfg.Reduction, 1, now.UTC()

	begin := view.Begin{Job: s.job}
	start := control.Start{Threads: s.cfg.Threads, Reduction: s.cfg.Reduction}
	if s.cfg.RunDir != nil {
		start.RunDir = s.cfg.RunDir.Path()
		begin.RunDir = s.cfg.RunDir.String()
	}
	return []effect{
		writeJob{s.job, m.Data},
		s.event(now, "start", fmt.Sprintf("%d steps begin with 1 worker", s.job.Steps)),
		sendMessage{start},
		show{begin},
	}
}

func (s *session) committed(now time.Time, m control.Step) []effect {
	bad := func(format string, args ...any) []effect {
		return s.judge(now, &ProtocolError{s.cfg.WorkerID, fmt.Sprintf(format, args...)})
	}
	if m.Step != s.last.Step+1 || m.Step > s.job.Steps {
		return bad("committed step %d after step %d of %d", m.Step, s.last.Step, s.job.Steps)
	}
	if m.Tokens < 0 || m.MS < 0 || !finite(m.Loss, m.LR, m.GradNorm, m.MS) || m.ValLoss != nil && !finite(*m.ValLoss) {
		return bad("committed step %d with numbers that are not finite", m.Step)
	}
	s.last = rundir.Metrics{
		Step: m.Step, Loss: m.Loss, LR: m.LR, GradNorm: m.GradNorm, Tokens: m.Tokens, MS: m.MS,
		Time: rundir.Time{Time: m.Time}, Workers: 1, Plan: m.Plan, ValLoss: m.ValLoss,
	}
	s.total.tokens += m.Tokens
	s.total.ms += m.MS
	if m.ValLoss != nil {
		s.val = m.ValLoss
	}
	return []effect{writeMetrics{s.last}, show{view.Step(s.last)}}
}

func finite(xs ...float64) bool {
	for _, x := range xs {
		if math.IsNaN(x) || math.IsInf(x, 0) {
			return false
		}
	}
	return true
}

func (s *session) done(now time.Time, m control.Done) []effect {
	stopped := m.StoppedBy != ""
	if m.Steps != s.last.Step || !stopped && m.Steps != s.job.Steps || stopped && Reason(m.StoppedBy) != s.stop {
		return s.judge(now, &ProtocolError{s.cfg.WorkerID, fmt.Sprintf("ended with %d steps, stopped by %q,%s", m.Steps, m.StoppedBy, s.place())})
	}
	if !finite(m.Loss) || m.ValLoss != nil && !finite(*m.ValLoss) {
		return s.judge(now, &ProtocolError{s.cfg.WorkerID, "ended with a loss that is not finite"})
	}
	s.state = finished
	s.val = m.ValLoss
	sum := s.summarise(now, m.StoppedBy)
	sum.Loss = m.Loss
	sum.ParamsSHA256, sum.StateSHA256 = m.ParamsSHA256, m.StateSHA256
	m.Worker.ID = s.cfg.WorkerID
	sum.Workers = []rundir.Worker{m.Worker}
	s.summary = &sum

	reason := "all steps are done"
	if stopped {
		reason = fmt.Sprintf("stopped after step %d of %d: %s", m.Steps, s.job.Steps, m.StoppedBy)
		s.err = &StoppedError{Reason: s.stop, Step: m.Steps, Steps: s.job.Steps}
	}
	return []effect{s.event(now, "end", reason), writeSummary{sum}, show{view.End{Summary: sum}}, closeView{}}
}

func (s *session) failed(now time.Time, m control.Failed) []effect {
	if m.Kind == control.Help {
		s.help, s.judged = m.Text, true
		return []effect{closeView{}, kill{}}
	}
	s.detail = m.Stack
	return s.judge(now, &FailedError{Kind: m.Kind, Text: oneLine(m.Text), Step: m.Step})
}

func (s *session) stopAsked(now time.Time, reason Reason) []effect {
	if s.judged {
		return nil
	}
	first := s.stop == ""
	if first {
		s.stop = reason
	}
	if s.state == training && first {
		return []effect{
			sendMessage{control.Stop{Reason: string(reason)}},
			s.event(now, "stop", fmt.Sprintf("%s: the worker is asked to end at the next commit", reason)),
			show{view.Stopping{Reason: string(reason)}},
		}
	}
	return s.judge(now, &StoppedError{Reason: s.stop, Step: s.last.Step, Steps: s.job.Steps, AtOnce: true})
}

// judge sets the verdict, ends the worker and accounts for what was done.
func (s *session) judge(now time.Time, err error) []effect {
	var effects []effect
	if !s.judged {
		s.judged = true
		if s.err == nil {
			s.err = err
		}
		if s.state == training {
			sum := s.summarise(now, s.stoppedBy(err))
			s.summary = &sum
			effects = append(effects, s.event(now, "failed", err.Error()), writeSummary{sum}, show{view.End{Summary: sum}})
		}
	}
	if !s.exited {
		effects = append(effects, kill{})
	}
	return append(effects, closeView{})
}

func (s *session) stoppedBy(err error) string {
	var (
		stopped *StoppedError
		lost    *LostError
	)
	switch {
	case errors.As(err, &stopped):
		return string(stopped.Reason)
	case errors.As(err, &lost):
		return lost.cause()
	}
	return err.Error()
}

// summarise accounts for the committed steps.
func (s *session) summarise(now time.Time, stoppedBy string) rundir.Summary {
	sum := rundir.Summary{
		Steps: s.last.Step, Loss: s.last.Loss, ValLoss: s.val, DataSHA256: s.job.DataSHA256,
		Seconds:        float64(now.Sub(s.start).Milliseconds()) / 1000,
		WorkersStarted: 1, Reduction: s.cfg.Reduction, StoppedBy: stoppedBy,
		Workers:    []rundir.Worker{{ID: s.cfg.WorkerID}},
		Recoveries: []rundir.Recovery{},
	}
	if s.total.ms > 0 {
		sum.TokensPerSecond = math.Round(float64(s.total.tokens) / s.total.ms * 1000)
	}
	if s.lost {
		sum.WorkersLost = 1
	}
	return sum
}

func (s *session) event(now time.Time, kind, reason string) writeEvent {
	return writeEvent{rundir.Event{Time: rundir.Time{Time: now}, Kind: kind, Worker: s.cfg.WorkerID, Plan: s.last.Plan, Reason: reason}}
}

func (s *session) place() string {
	if s.job.Steps == 0 {
		return " before training"
	}
	return fmt.Sprintf(" at step %d of %d", s.last.Step, s.job.Steps)
}
