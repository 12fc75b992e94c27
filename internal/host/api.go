package host

import "github.com/soliton-train/soliton/internal/host/session"

// What a run is asked for and how it ends is said in the words of its session.
type (
	// Settings are what a run is asked for.
	Settings     = session.Settings
	Resume       = session.Resume
	Reason       = session.Reason
	Status       = session.Status
	Outcome      = session.Outcome
	StoppedError = session.StoppedError
	FailedError  = session.FailedError
	FileError    = session.FileError
)

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

// Bounds of settings.
const (
	MinDetect  = session.MinDetect
	MaxThreads = session.MaxThreads
)
