package chaos

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/platform"
)

// A Process takes signals. An [os.Process] is one, and its Signal returns [os.ErrProcessDone] when the process has ended.
type Process interface {
	Signal(os.Signal) error
}

// Open returns the process with an id. The result keeps denoting that process, even when the id is reused later.
// The caller releases it.
func Open(pid int) (*os.Process, error) {
	if pid <= 1 { // to kill(2), 0 and below are whole groups
		return nil, fmt.Errorf("chaos: %d is not the id of a worker's process: want an id above 1", pid)
	}
	p, err := os.FindProcess(pid)
	if err != nil {
		return nil, fmt.Errorf("chaos: process %d: %w", pid, err)
	}
	if err := p.Signal(syscall.Signal(0)); err != nil {
		p.Release() //nolint:errcheck // the error that counts is the one that follows
		return nil, fmt.Errorf("chaos: process %d: %w", pid, err)
	}
	return p, nil
}

// Kill ends a process at once (SIGKILL), also a frozen one.
func Kill(p Process) error { return send(p, "kill", syscall.SIGKILL) }

// Freeze stops a process (SIGSTOP) until [Thaw].
func Freeze(p Process) error { return send(p, "freeze", syscall.SIGSTOP) }

// Thaw continues a frozen process (SIGCONT).
func Thaw(p Process) error { return send(p, "thaw", syscall.SIGCONT) }

// Terminate asks a process to end (SIGTERM); a worker then leaves its run.
func Terminate(p Process) error { return send(p, "terminate", syscall.SIGTERM) }

func send(p Process, what string, sig syscall.Signal) error {
	if err := p.Signal(sig); err != nil {
		return fmt.Errorf("chaos: %s: %w", what, err)
	}
	return nil
}

// Now returns the time of CLOCK_MONOTONIC in nanoseconds. All processes of one machine read the same clock.
func Now() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic("chaos: no monotonic clock: " + err.Error()) // every kernel has it
	}
	return t.Nano()
}

// Self returns the calling process. When it kills or freezes itself, the calling goroutine runs no further.
func Self() Process { return self{} }

type self struct{}

func (self) Signal(sig os.Signal) error {
	s, ok := sig.(syscall.Signal)
	if !ok {
		return fmt.Errorf("chaos: %v is not a signal of this system", sig)
	}
	if s == unix.SIGKILL { // to the process, not the thread: observers look for a signal that is pending for the process
		return unix.Kill(unix.Getpid(), s)
	}
	return platform.SignalThread(s) // its effect is on the whole process
}
