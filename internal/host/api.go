package host

import (
	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/host/session"
)

// Settings are what a run is asked for.
type Settings = session.Settings

// Reduction is how gradients are summed.
type Reduction = session.Reduction

// ParseReduction and ParseReshape read the text of flags and of job.json.
var (
	ParseReduction = session.ParseReduction
	ParseReshape   = controller.ParseReshape
)

// Resume describes a run that has ended and is resumed.
type Resume = session.Resume

// Reason says why a run was asked to stop.
type Reason = session.Reason

// Status is how a worker's process exited.
type Status = session.Status

// Outcome is how a run ended.
type Outcome = session.Outcome

// StoppedError is the error of a run that was asked to stop.
type StoppedError = session.StoppedError

// FailedError is the error of a run whose program failed.
type FailedError = session.FailedError

// FileError is the error of a run whose files cannot be written.
type FileError = session.FileError

// Why a run was asked to stop.
const (
	Interrupt  = session.Interrupt
	Terminated = session.Terminated
	Cancelled  = session.Cancelled
	Stopped    = session.Stopped
)

// Exit statuses of a command that ran a job.
const (
	ExitDone        = session.ExitDone
	ExitFailed      = session.ExitFailed
	ExitUsage       = session.ExitUsage
	ExitTerminated  = session.ExitTerminated
	ExitInterrupted = session.ExitInterrupted
)

// Bounds and defaults of settings.
const (
	MinDetect     = session.MinDetect
	MaxDetect     = session.MaxDetect
	MaxThreads    = session.MaxThreads
	MaxWorkers    = session.MaxWorkers
	DefaultVerify = session.DefaultVerify
)
