package agent

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/soliton-train/soliton/internal/control"
	"github.com/soliton-train/soliton/internal/rundir"
)

// Outcome is how a run ended.
type Outcome struct {
	// Summary is what summary.json holds; nil where training never began.
	Summary *rundir.Summary

	// Err is nil when all steps are done, and when Help is set. Otherwise it is a *StoppedError,
	// *FailedError, *NoMainError, *LostError, *ProtocolError or *FileError.
	Err error

	// Detail is what there is to read about Err besides its line: the stack of
	// a panic, or the last lines a lost worker printed. It may be empty.
	Detail string

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
	switch {
	case o.Err == nil:
		return ExitDone
	case errors.As(o.Err, &stopped) && stopped.Reason == Terminated:
		return ExitTerminated
	case errors.As(o.Err, &stopped):
		return ExitInterrupted
	case errors.As(o.Err, &failed) && failed.Kind == control.Usage:
		return ExitUsage
	}
	return ExitFailed
}

// Report writes what a person should read: help to stdout; an error to stderr, as one
// line that begins with the command's name, and its detail indented below.
func (o Outcome) Report(stdout, stderr io.Writer, command string) {
	if o.Help != "" {
		fmt.Fprintln(stdout, strings.TrimRight(o.Help, "\n"))
	}
	if o.Err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", command, o.Err)
		if o.Detail != "" {
			fmt.Fprintln(stderr, "    "+strings.ReplaceAll(strings.TrimRight(o.Detail, "\n"), "\n", "\n    "))
		}
	}
}

// StoppedError means that the run was asked to stop before all steps were done.
type StoppedError struct {
	Reason      Reason
	Step, Steps int // committed, and of the whole job; 0 of 0 before training
	AtOnce      bool
}

func (e *StoppedError) Error() string {
	by := map[Reason]string{Interrupt: "interrupted", Terminated: "terminated", Cancelled: "cancelled"}[e.Reason]
	switch {
	case e.Steps == 0:
		return by + " before training began"
	case e.Step == e.Steps:
		return by + " after the last step"
	case e.AtOnce:
		return fmt.Sprintf("%s at step %d of %d; the step under way is lost", by, e.Step, e.Steps)
	}
	return fmt.Sprintf("%s after step %d of %d", by, e.Step, e.Steps)
}

// FailedError is a failure that the worker itself reported.
type FailedError struct {
	Kind control.FailKind
	Text string // one line
	Step int    // from 1; 0 before training
}

func (e *FailedError) Error() string { return e.Text }

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

// LostError means that a worker ended in the middle.
type LostError struct {
	Worker      int
	Status      Status
	Step, Steps int // committed, and of the whole job; 0 of 0 before training
}

func (e *LostError) Error() string { return e.cause() + e.place() }

// cause is the part of the message that summary.json has as well.
func (e *LostError) cause() string { return fmt.Sprintf("worker %d exited: %s", e.Worker, e.Status) }

func (e *LostError) place() string {
	if e.Steps == 0 {
		return ", before training began"
	}
	return fmt.Sprintf(", at step %d of %d", e.Step, e.Steps)
}

// ProtocolError means that the worker said something it must not say. Worker and agent
// are then of different versions, or one is broken.
type ProtocolError struct {
	Worker int
	Text   string
}

func (e *ProtocolError) Error() string {
	return fmt.Sprintf("worker %d %s: was PROGRAM built from another version than the launcher?", e.Worker, e.Text)
}

// FileError means that a file of the run directory could not be written.
type FileError struct{ Err error }

func (e *FileError) Error() string {
	return fmt.Sprintf("the run directory cannot be written: %v", e.Err)
}

func (e *FileError) Unwrap() error { return e.Err }

// oneLine makes a line of a text that should have been one.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
