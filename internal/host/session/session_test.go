package session

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

var (
	hello = control.Hello{Protocol: control.Protocol}
	ready = control.Ready{Job: rundir.Job{Program: "/bin/gpt", Steps: 3, Layers: 2, GlobalBatch: 8, MicroBatch: 1, DataSHA256: "dd", DataFiles: 1}, Data: []rundir.DataFile{{Path: "a"}}}
)

func committedStep(n int) control.Step {
	return control.Step{Step: n, Loss: 4 - float64(n), LR: 0.1, GradNorm: 1, Tokens: 100, MS: 50, Plan: 1}
}

func doneAfter(n int, by Reason) control.Done {
	return control.Done{Steps: n, Loss: 4 - float64(n), ParamsSHA256: "aa", StateSHA256: "bb", StoppedBy: string(by)}
}

// begin returns a new session of a run that begins with n workers.
func begin(cfg Config, n int) *Session {
	cfg.Settings, cfg.Workers = cfg.Settings.WithDefaults(n), n
	var workers []plan.Worker
	for w := range n {
		workers = append(workers, plan.Worker{ID: id.WorkerID(w)})
	}
	s := New(cfg, workers)
	if cfg.Inherited == nil {
		s.Begin(time.Unix(0, 0))
	}
	return s
}

// later is an alarm that comes so long after its turn.
type later time.Duration

func (l later) at(now time.Time) (time.Time, Event) { return now.Add(time.Duration(l)), AlarmDue{} }

// agreeing is a step of a session whose proposals are agreed at once.
func agreeing(s *Session, now time.Time, e Event) []Effect {
	if l, ok := e.(later); ok {
		now, e = l.at(now)
	}
	effects := s.Step(now, e)
	for _, p := range pick[Propose](effects) {
		effects = append(effects, agreeing(s, now, Agreed{p.Order.Plan.Version, now})...)
	}
	return effects
}

// play feeds events to a session, a second apart, and returns it and the names of the effects.
func play(t *testing.T, events ...Event) (*Session, string) {
	t.Helper()
	s := begin(Config{Settings: Settings{Program: "./gpt", Threads: 2}}, 1)
	var names []string
	for i, e := range events {
		if s.Over() {
			t.Fatalf("over before event %d, %T", i, e)
		}
		if m, ok := e.(control.Message); ok {
			e = Received{0, m}
		}
		for _, effect := range agreeing(s, time.Unix(int64(i), 0), e) {
			name := strings.TrimPrefix(fmt.Sprintf("%T", effect), "session.")
			name = strings.ToLower(name[:1]) + name[1:]
			switch e := effect.(type) {
			case Send:
				name = strings.TrimPrefix(fmt.Sprintf("%T", e.Message), "control.")
			case Show:
				if _, row := e.Event.(view.Worker); row {
					continue // beside what else there is to tell
				}
				name = strings.TrimPrefix(fmt.Sprintf("%T", e.Event), "view.")
			case WriteWorkers, Propose:
				continue
			case WriteEvent:
				name = e.Event.Kind
			}
			names = append(names, name)
		}
	}
	return s, strings.Join(names, " ")
}

func TestSession(t *testing.T) {
	good := WorkerExited{0, Status{Code: 0, Text: "exit status 0"}}
	killed := WorkerExited{0, Status{Code: -1, Text: "signal: killed"}}
	closed := ConnClosed{0, errors.New("EOF")}
	begun := "writeJob writePlan start plan Begin Start Order"
	stepped := " writeMetrics Step"
	failed := " failed writeSummary End"

	for _, c := range []struct {
		name    string
		events  []Event
		effects string
		err     error // type and text are compared
		exit    int
		stopped string // summary's stopped_by; "-" for no summary
	}{
		{
			"all steps", []Event{hello, control.Note{Text: "reading"}, ready, committedStep(1), committedStep(2), committedStep(3), doneAfter(3, ""), control.Output{Text: "x"}, closed, good},
			"Note " + begun + stepped + stepped + stepped + " Release end writeSummary End closeView output", nil, 0, "",
		},
		{
			"exit seen before the last messages", []Event{hello, ready, committedStep(1), committedStep(2), good, committedStep(3), doneAfter(3, ""), closed},
			begun + stepped + stepped + stepped + " Release end writeSummary End closeView", nil, 0, "",
		},
		{
			"interrupt", []Event{hello, ready, committedStep(1), StopAsked{Interrupt}, committedStep(2), doneAfter(2, Interrupt), closed, good},
			begun + stepped + " Stop stop Stopping" + stepped + " Release end writeSummary End closeView",
			&StoppedError{Reason: Interrupt, Step: 2, Steps: 3}, 130, "interrupt",
		},
		{
			"interrupt twice", []Event{hello, ready, committedStep(1), StopAsked{Interrupt}, StopAsked{Interrupt}, committedStep(2), closed, killed},
			begun + stepped + " Stop stop Stopping" + " kill" + failed + " closeView",
			&StoppedError{Reason: Interrupt, Step: 1, Steps: 3, AtOnce: true}, 130, "interrupt",
		},
		{
			"interrupt in the last step", []Event{hello, ready, committedStep(1), committedStep(2), StopAsked{Interrupt}, committedStep(3), doneAfter(3, ""), closed, good},
			begun + stepped + stepped + " Stop stop Stopping" + stepped + " Release end writeSummary End closeView", nil, 0, "",
		},
		{
			"terminated", []Event{hello, ready, StopAsked{Terminated}, doneAfter(0, Terminated), closed, good},
			begun + " Stop stop Stopping Release end writeSummary End closeView", &StoppedError{Reason: Terminated, Step: 0, Steps: 3}, 75, "terminated",
		},
		{
			"interrupt before training", []Event{hello, StopAsked{Interrupt}, ready, closed, killed},
			"kill closeView", &StoppedError{Reason: Interrupt, AtOnce: true}, 130, "-",
		},
		{
			"interrupt after training", []Event{hello, ready, committedStep(1), committedStep(2), committedStep(3), doneAfter(3, ""), StopAsked{Interrupt}, closed, killed},
			begun + stepped + stepped + stepped + " Release end writeSummary End closeView kill stop writeSummary closeView",
			&StoppedError{Reason: Interrupt, Step: 3, Steps: 3, AtOnce: true}, 130, "interrupt",
		},
		{
			"killed in the middle", []Event{hello, ready, committedStep(1), closed, killed},
			begun + stepped + " lost" + failed + " closeView",
			&LostError{Worker: 0, Workers: 1, Status: Status{Code: -1, Text: "signal: killed"}, Step: 1, Steps: 3}, 1, "worker 0 exited: signal: killed",
		},
		{
			"bad exit after all steps", []Event{hello, ready, committedStep(1), committedStep(2), committedStep(3), doneAfter(3, ""), closed, WorkerExited{0, Status{Code: 3, Text: "exit status 3"}}},
			begun + stepped + stepped + stepped + " Release end writeSummary End closeView failed writeSummary closeView",
			&LostError{Worker: 0, Workers: 1, Status: Status{Code: 3, Text: "exit status 3"}, Step: 3, Steps: 3}, 1, "worker 0 exited: exit status 3",
		},
		{
			"killed after all steps", []Event{hello, ready, committedStep(1), committedStep(2), committedStep(3), doneAfter(3, ""), closed, killed},
			begun + stepped + stepped + stepped + " Release end writeSummary End closeView note", nil, 0, "",
		},
		{
			"fault after all steps", []Event{hello, ready, committedStep(1), committedStep(2), committedStep(3), doneAfter(3, ""), closed, WorkerExited{0, Status{Code: -1, Text: "signal: segmentation fault", Fault: true}}},
			begun + stepped + stepped + stepped + " Release end writeSummary End closeView failed writeSummary closeView",
			&LostError{Worker: 0, Workers: 1, Status: Status{Code: -1, Text: "signal: segmentation fault", Fault: true}, Step: 3, Steps: 3}, 1, "worker 0 exited: signal: segmentation fault",
		},
		{
			"panic after all steps", []Event{hello, ready, committedStep(1), committedStep(2), committedStep(3), doneAfter(3, ""), control.Failed{Kind: control.UserPanic, Text: "boom"}, closed, killed},
			begun + stepped + stepped + stepped + " Release end writeSummary End closeView kill failed writeSummary closeView",
			&FailedError{Kind: control.UserPanic, Workers: 1, Text: "boom"}, 1, "boom",
		},
		{
			"panic after an interrupt", []Event{hello, ready, committedStep(1), StopAsked{Interrupt}, doneAfter(1, Interrupt), control.Failed{Kind: control.UserPanic, Text: "boom"}, closed, killed},
			begun + stepped + " Stop stop Stopping Release end writeSummary End closeView kill failed writeSummary closeView",
			&StoppedError{Reason: Interrupt, Step: 1, Steps: 3}, 130, "interrupt",
		},
		{
			"no hello", []Event{WorkerExited{0, Status{Code: 3, Text: "exit status 3"}}, closed},
			"closeView", &NoMainError{Program: "./gpt", Status: Status{Code: 3, Text: "exit status 3"}}, 1, "-",
		},
		{
			"hello late", []Event{later(30 * time.Second), closed, killed},
			"kill closeView", &NoMainError{Program: "./gpt", Waited: "30s"}, 1, "-",
		},
		{
			"hello in time", []Event{hello, later(30 * time.Second), ready, closed, killed},
			begun + " lost" + failed + " closeView", &LostError{Workers: 1, Status: Status{Code: -1, Text: "signal: killed"}, Steps: 3}, 1, "worker 0 exited: signal: killed",
		},
		{
			"wrong usage", []Event{hello, control.Failed{Kind: control.Usage, Text: "--steps 0:\ngive at least 1"}, closed, killed},
			"kill closeView", &FailedError{Kind: control.Usage, Workers: 1, Text: "--steps 0: give at least 1"}, 2, "-",
		},
		{
			"panic", []Event{hello, ready, committedStep(1), control.Failed{Kind: control.UserPanic, Text: "boom", Stack: "s", Step: 2}, closed, killed},
			begun + stepped + " kill" + failed + " closeView", &FailedError{Kind: control.UserPanic, Workers: 1, Text: "boom", Step: 2}, 1, "boom",
		},
		{
			"help", []Event{hello, control.Failed{Kind: control.Help, Text: "flags:\n  -a"}, closed, killed},
			"kill closeView", nil, 0, "-",
		},
		{
			"closes and stays", []Event{hello, ready, closed, later(time.Second), killed},
			begun + " kill lost" + failed + " closeView", &ProtocolError{0, "closed its connection and went on at step 0 of 3"}, 1, "*",
		},
		{
			"sends garbage", []Event{ConnClosed{0, fmt.Errorf("x: %w", control.ErrFormat)}, killed},
			"kill closeView", &ProtocolError{0, "sent bytes that are no message before training"}, 1, "-",
		},
		{
			"cannot be killed", []Event{later(30 * time.Second), later(30 * time.Second)},
			"kill closeView", &NoMainError{Program: "./gpt", Waited: "30s"}, 1, "-",
		},
		{
			"disk full", []Event{hello, ready, committedStep(1), FileFailed{errors.New("no space")}, closed, killed},
			begun + stepped + " kill" + failed + " closeView", &FileError{errors.New("no space")}, 1, "*",
		},
		{
			"step left out", []Event{hello, ready, committedStep(2), closed, killed},
			begun + " kill" + failed + " closeView", &ProtocolError{0, "committed step 2 after step 0 of 3"}, 1, "*",
		},
		{
			"stops by itself", []Event{hello, ready, committedStep(1), doneAfter(1, Interrupt), closed, killed},
			begun + stepped + " kill" + failed + " closeView", &ProtocolError{0, `ended with 1 steps, stopped by "interrupt", at step 1 of 3`}, 1, "*",
		},
		{
			"not a number", []Event{hello, ready, control.Step{Step: 1, Loss: math.NaN()}, closed, killed},
			begun + " kill" + failed + " closeView", &ProtocolError{0, "committed step 1 with numbers that are not finite"}, 1, "*",
		},
		{
			"other version", []Event{control.Hello{Protocol: 99}, closed, killed},
			"kill closeView", &ProtocolError{0, fmt.Sprintf("speaks version 99 of the protocol, not %d before training", control.Protocol)}, 1, "-",
		},
		{
			"other worker", []Event{control.Hello{Protocol: control.Protocol, WorkerID: 4}, closed, killed},
			"kill closeView", &ProtocolError{0, "says it is worker 4 in incarnation 0 before training"}, 1, "-",
		},
		{
			"agent's message", []Event{hello, control.Start{}, closed, killed},
			"kill closeView", &ProtocolError{0, "sent a message that only an agent sends (control.Start) before training"}, 1, "-",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, effects := play(t, c.events...)
			if effects != c.effects {
				t.Errorf("effects are\n%s, want\n%s", effects, c.effects)
			}
			if !s.Over() {
				t.Error("not over")
			}
			out := s.Outcome()
			if !reflect.DeepEqual(out.Err, c.err) {
				t.Errorf("error is %#v, want %#v", out.Err, c.err)
			}
			if out.Err != nil && strings.Contains(out.Err.Error(), "\n") {
				t.Errorf("error has more than a line: %q", out.Err)
			}
			if got := out.ExitStatus(); got != c.exit {
				t.Errorf("exit status is %d, want %d", got, c.exit)
			}
			switch {
			case c.stopped == "-":
				if out.Summary != nil {
					t.Errorf("summary of a run that never began: %+v", out.Summary)
				}
			case out.Summary == nil:
				t.Error("no summary")
			case s.phase == finished && (out.Summary.ParamsSHA256 != "aa" || out.Summary.StateSHA256 != "bb"):
				t.Errorf("the hashes are gone: %+v", out.Summary)
			case c.stopped == "*" && out.Summary.StoppedBy == "", c.stopped != "*" && out.Summary.StoppedBy != c.stopped:
				t.Errorf("stopped_by is %q, want %q", out.Summary.StoppedBy, c.stopped)
			}
		})
	}
}

func TestSessionAccounts(t *testing.T) {
	val := 2.0
	last := committedStep(2)
	last.ValLoss = &val
	s, _ := play(t, hello, ready, committedStep(1), last, ConnClosed{}, WorkerExited{0, Status{Code: -1, Text: "signal: killed"}})
	want := rundir.Summary{
		Steps: 2, Loss: 2, ValLoss: &val, DataSHA256: "dd", Seconds: 4, TokensPerSecond: 2000,
		WorkersStarted: 1, WorkersLost: 1, Reduction: "exact", StoppedBy: "worker 0 exited: signal: killed",
		Workers: []rundir.Worker{{Stages: []int{0}, Layers: []int{0, 1}}}, Recoveries: []rundir.Recovery{},
	}
	if got := *s.Outcome().Summary; !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	if s.job.Program != "gpt" || s.job.Threads != 2 || s.job.Workers != 1 || s.job.DataFiles != 1 {
		t.Errorf("job: %+v", s.job)
	}
}
