package session

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Outcome is how a run ended.
type Outcome struct {
	// Summary is what summary.json holds; nil where training never began.
	Summary *rundir.Summary

	// Err is nil when all steps are done, and when Help is set. Otherwise it is a *StoppedError,
	// *FailedError, *NoMainError, *LostError, *SilentError, *BlockedError, *DifferError, *PlanError, *MismatchError,
	// *ProtocolError, *RecoveryError, *ResumeError, *GatherError or *FileError. For a run that had no directory, it is the error of rundir.Create.
	Err error

	// Detail explains Err: the stack of a panic, or the last lines that a lost worker printed. It may be empty.
	Detail string

	// Resume is the run directory from which the run can be resumed, as the user knows it; "" if it cannot.
	Resume string

	// ModelHost is the host on which the model and its configuration were written; "" where there is one run directory.
	ModelHost string

	// Warning says what may be missing although the run ended as Err says; "" if nothing.
	Warning string

	// Lost is the place of the worker whose exit decided the outcome, so that its last output is the Detail; -1 if there is none.
	Lost int

	// Help is the program's answer to --help, where that was asked for.
	Help string
}

// Exit statuses of a command that ran a job.
const (
	ExitDone        = 0   // all steps are done
	ExitFailed      = 1   // the run failed
	ExitUsage       = 2   // flags or job are wrong
	ExitTerminated  = 75  // SIGTERM came before all steps were done
	ExitInterrupted = 130 // Ctrl-C came before all steps were done
)

// ExitStatus returns the exit status for the outcome.
func (o Outcome) ExitStatus() int {
	var stopped *StoppedError
	var failed *FailedError
	var flag *planner.FlagError
	var chaos *ChaosError
	switch {
	case o.Err == nil:
		return ExitDone
	case errors.As(o.Err, &stopped) && stopped.Reason == Terminated:
		return ExitTerminated
	case errors.As(o.Err, &stopped) && stopped.Reason == Stopped:
		return ExitFailed
	case errors.As(o.Err, &failed) && failed.Kind == control.Usage && failed.Exit > 0 && failed.Exit < 256:
		return failed.Exit
	case errors.As(o.Err, &stopped):
		return ExitInterrupted
	case errors.As(o.Err, &failed) && failed.Kind == control.Usage, errors.As(o.Err, &flag), errors.As(o.Err, &chaos), errors.Is(o.Err, ErrTooLarge),
		errors.Is(o.Err, rundir.ErrHasRun), errors.Is(o.Err, rundir.ErrInUse):
		return ExitUsage
	}
	return ExitFailed
}

// Report writes what a person should read: help to stdout; a warning and an error to stderr,
// each as one line that begins with the command's name, and the error's detail indented below. What programs have said is
// made fit for a terminal.
func (o Outcome) Report(stdout, stderr io.Writer, command string) {
	if o.Help != "" {
		fmt.Fprintln(stdout, view.Clean(strings.TrimRight(o.Help, "\n")))
	}
	if o.Warning != "" {
		fmt.Fprintf(stderr, "%s: %s\n", command, view.Clean(o.Warning))
	}
	if o.Err != nil {
		text := o.Err.Error()
		if o.Resume != "" {
			text += "; to go on: launcher resume " + o.Resume
		}
		fmt.Fprintf(stderr, "%s: %s\n", command, view.Clean(text))
		if o.Detail != "" {
			fmt.Fprintln(stderr, "    "+strings.ReplaceAll(view.Clean(strings.TrimRight(o.Detail, "\n")), "\n", "\n    "))
		}
	}
}

// StoppedError means that the run was asked to stop before all steps were done.
type StoppedError struct {
	Reason      Reason
	Step, Steps int // committed, and of the whole job; 0 of 0 before training
	AtOnce      bool
	Blocked     string // what kept the run from its next commit, "" for nothing
	Saved       int    // step of the newest checkpoint, 0 for none
}

func (e *StoppedError) Error() string {
	by := map[Reason]string{Interrupt: "interrupted", Terminated: "terminated", Cancelled: "cancelled", Stopped: "stopped"}[e.Reason]
	switch {
	case e.Steps == 0:
		return by + " before training began"
	case e.Step == e.Steps:
		return by + " after the last step"
	case e.Blocked != "":
		saved := "there is no checkpoint"
		if e.Saved > 0 {
			saved = fmt.Sprintf("the newest checkpoint is of step %d", e.Saved)
		}
		return fmt.Sprintf("%s at step %d of %d without a checkpoint, since %s; %s", by, e.Step, e.Steps, e.Blocked, saved)
	case e.AtOnce:
		return fmt.Sprintf("%s at step %d of %d; the step under way is lost", by, e.Step, e.Steps)
	}
	return fmt.Sprintf("%s after step %d of %d", by, e.Step, e.Steps)
}

// FailedError is a failure that the worker itself reported.
type FailedError struct {
	Kind    control.FailKind
	Worker  int
	Workers int    // of the run
	Text    string // one line
	Step    int    // from 1; 0 before training
	Exit    int    // status that the program chose for its exit; 0 for none
}

func (e *FailedError) Error() string {
	if e.Workers > 1 && (e.Kind == control.UserPanic || e.Kind == control.Faulty || e.Kind == control.NoSample || e.Kind == control.PeerLost) {
		return fmt.Sprintf("worker %d: %s", e.Worker, e.Text)
	}
	return e.Text // the same from every worker
}

// NoMainError means that the program did not behave like one that calls trainer.Main.
type NoMainError struct {
	Program string
	Status  Status // how it ended; zero where it was still running
	Waited  string // how long it was waited for, where it was still running
}

func (e *NoMainError) Error() string {
	if e.Waited != "" {
		return fmt.Sprintf("%s has not called trainer.Main within %s: PROGRAM must be a program that trains with this package", e.Program, e.Waited)
	}
	return fmt.Sprintf("%s ended without calling trainer.Main (%s)", e.Program, e.Status)
}

// LostError means that a worker exited during the run and none was left to continue, or that it panicked.
type LostError struct {
	Worker      int
	Workers     int // of the run
	Status      Status
	Step, Steps int // committed, and of the whole job; 0 of 0 before training
}

func (e *LostError) Error() string {
	if e.Status.Panicked {
		return e.cause() + loss(1, e.Step, e.Steps)
	}
	return e.cause() + loss(e.Workers, e.Step, e.Steps)
}

// cause is the part of the message that summary.json has as well.
func (e *LostError) cause() string {
	text := fmt.Sprintf("worker %d exited: %s", e.Worker, e.Status)
	if e.Status.Panicked {
		text += " after a panic"
	}
	return text
}

// SilentError means that a worker missed its heartbeats for too long, or that its process is stopped.
type SilentError struct {
	Worker      int
	Workers     int // of the run
	For         time.Duration
	Stopped     bool   // its process is: by a signal
	Frozen      bool   // its process is, otherwise
	By          string // the member of the gossip ring that cannot reach it either; "" if there is none
	Step, Steps int    // committed, and of the whole job; 0 of 0 before training
}

func (e *SilentError) Error() string { return e.cause() + loss(e.Workers, e.Step, e.Steps) }

func (e *SilentError) cause() string {
	if e.Stopped {
		return fmt.Sprintf("worker %d is stopped by a signal", e.Worker)
	}
	if e.Frozen {
		return fmt.Sprintf("worker %d is frozen: none of its threads runs", e.Worker)
	}
	text := fmt.Sprintf("worker %d has been silent for %v", e.Worker, e.For)
	if e.By != "" {
		text += fmt.Sprintf(", and %s cannot reach it", e.By)
	}
	return text
}

// BlockedError means that a call of user code did not return, before training or in the only worker that was left.
type BlockedError struct {
	Worker int
	Call   string // such as "Sample(17)"
	For    time.Duration
}

func (e *BlockedError) Error() string {
	return e.cause() + "; --call-timeout sets how long a call may take"
}

func (e *BlockedError) cause() string { return blocked(e.Worker, e.Call, e.For) }

// blocked says that a call has not returned.
func blocked(worker int, call string, after time.Duration) string {
	digits := 0
	if after < time.Second {
		digits = 1
	}
	return fmt.Sprintf("worker %d: %s has not returned for %.*f s", worker, call, digits, after.Seconds())
}

// loss ends the message that a worker is gone.
func loss(workers, step, steps int) string {
	text := ", before training began"
	if steps > 0 {
		text = fmt.Sprintf(", at step %d of %d", step, steps)
	}
	if workers > 1 && step < steps {
		text += "; no worker is left"
	}
	return text
}

// culprit returns the worker whose loss an error is and how it was lost, -1 for another error.
func culprit(err error) (worker int, how string) {
	var lost *LostError
	var silent *SilentError
	switch {
	case errors.As(err, &lost):
		return lost.Worker, "exited: " + lost.Status.String()
	case errors.As(err, &silent) && silent.Stopped:
		return silent.Worker, "stopped by a signal"
	case errors.As(err, &silent) && silent.Frozen:
		return silent.Worker, "frozen"
	case errors.As(err, &silent):
		return silent.Worker, fmt.Sprintf("silent for %v", silent.For)
	}
	return -1, ""
}

// stoppedBy is what summary.json says of an error.
func stoppedBy(err error) string {
	var stopped *StoppedError
	var gone interface{ cause() string }
	switch {
	case errors.As(err, &stopped):
		return string(stopped.Reason)
	case errors.As(err, &gone):
		return gone.cause()
	}
	return err.Error()
}

// DifferError means that two workers run different programs, or have different data.
type DifferError struct {
	Worker, Than int
	Field        string // of job.json, or "data" or "layers"
	Values       string // "7, not 1"; "" where they say nothing to people
}

func (e *DifferError) Error() string {
	text := fmt.Sprintf("worker %d has another %s than worker %d", e.Worker, e.Field, e.Than)
	if e.Values != "" {
		text += " (" + e.Values + ")"
	}
	return text + ": all workers must run the same PROGRAM on the same data"
}

// PlanError means that the job has no plan. It wraps the error of package planner, a *planner.FlagError for wrong flags.
type PlanError struct{ Err error }

func (e *PlanError) Error() string { return OneLine(strings.ReplaceAll(e.Err.Error(), "\n", "; ")) }
func (e *PlanError) Unwrap() error { return e.Err }

// ChaosError means that the faults of Settings.Chaos cannot be injected into the run.
type ChaosError struct{ Err error }

func (e *ChaosError) Error() string { return OneLine(strings.ReplaceAll(e.Err.Error(), "\n", "; ")) }
func (e *ChaosError) Unwrap() error { return e.Err }

// ResumeError means that a run cannot be resumed as what the program now describes.
type ResumeError struct{ Err error }

func (e *ResumeError) Error() string { return e.Err.Error() }
func (e *ResumeError) Unwrap() error { return e.Err }

// GatherError means that the hosts of a run that is to be resumed do not have a checkpoint together.
type GatherError struct{ Refused []string } // why newer ones are not used

func (e *GatherError) Error() string {
	text := "nothing to resume from: these machines have no whole checkpoint together"
	if len(e.Refused) > 0 {
		text += ": " + strings.Join(e.Refused, "; ")
	}
	return text
}

// ErrTooLarge is wrapped by the [PlanError] of a job whose plan cannot be handled.
var ErrTooLarge = errors.New("the plan is too large")

// MismatchError means that two workers report different numbers for the same step.
type MismatchError struct {
	Worker, Than int
	What         string
	Step         int // 0 for the end of training
}

func (e *MismatchError) Error() string {
	at := "the end"
	if e.Step > 0 {
		at = fmt.Sprintf("step %d", e.Step)
	}
	return fmt.Sprintf("worker %d reports another %s for %s than worker %d", e.Worker, e.What, at, e.Than)
}

// ProtocolError means that a worker broke the protocol: it is of another version than its host, or one of them is faulty.
type ProtocolError struct {
	Worker int
	Text   string
}

func (e *ProtocolError) Error() string {
	return fmt.Sprintf("worker %d %s: was PROGRAM built from another version than the launcher?", e.Worker, e.Text)
}

// RecoveryError means that the controller gave the run up. It wraps its reason.
type RecoveryError struct {
	Err         error
	Step, Steps int // committed, and of the whole job
}

func (e *RecoveryError) Error() string {
	return fmt.Sprintf("%s, at step %d of %d", OneLine(e.Err.Error()), e.Step, e.Steps)
}

func (e *RecoveryError) Unwrap() error { return e.Err }

// FileError means that a file of the run directory could not be written.
type FileError struct{ Err error }

func (e *FileError) Error() string {
	return fmt.Sprintf("the run directory cannot be written: %v", e.Err)
}

func (e *FileError) Unwrap() error { return e.Err }

// OneLine makes a line of a text that should have been one.
func OneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
