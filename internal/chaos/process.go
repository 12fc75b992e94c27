package chaos

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A Process is what can be harmed. An [os.Process] is one, and its Signal returns [os.ErrProcessDone] when the process has ended.
type Process interface {
	Signal(os.Signal) error
}

// Open returns the process with an id. The answer goes on to mean that process, also when the id is used for another one later.
// Release it in the end.
func Open(pid int) (*os.Process, error) {
	if pid <= 1 { // to kill(2), 0 and below are whole groups
		return nil, fmt.Errorf("chaos: %d is no process that can be harmed: want an id above 1", pid)
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

// Thaw lets a process go on that was frozen (SIGCONT).
func Thaw(p Process) error { return send(p, "thaw", syscall.SIGCONT) }

// Terminate asks a process to end (SIGTERM); a worker then leaves its run.
func Terminate(p Process) error { return send(p, "terminate", syscall.SIGTERM) }

func send(p Process, what string, sig syscall.Signal) error {
	if err := p.Signal(sig); err != nil {
		return fmt.Errorf("chaos: %s: %w", what, err)
	}
	return nil
}

// The duty cycle of Slow: short against every timeout, long against the accuracy of timers.
const (
	slowPeriod = 20 * time.Millisecond
	leastRun   = 100 * time.Microsecond // of a period; very small factors have longer periods instead
)

// Slow lets a process run for the share factor of the time, 0 < factor <= 1, by freezing and thawing it fifty times a second. It
// returns nil when the context or the process ends, at once with factor 1, or else the error that kept it from its work; the
// process is left running in any case, unless the caller's own process is killed. A process that somebody else freezes meanwhile
// is thawed.
func Slow(ctx context.Context, p Process, factor float64) (err error) {
	if !(factor >= MinFactor && factor <= 1) {
		return fmt.Errorf("chaos: slow: the factor %v is wrong: want a share of the full speed, from %v to 1", factor, MinFactor)
	}
	defer func() {
		// Also after a failure: thawing what runs does no harm.
		if err = errors.Join(err, Thaw(p)); errors.Is(err, os.ErrProcessDone) {
			err = nil
		}
	}()
	if factor == 1 {
		return nil
	}
	run := max(leastRun, time.Duration(factor*float64(slowPeriod)))
	rest := time.Duration(float64(run) * (1/factor - 1))
	timer := time.NewTimer(run)
	defer timer.Stop()
	for frozen := false; ; frozen = !frozen {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return nil
		}
		if frozen {
			timer.Reset(run)
			err = Thaw(p)
		} else {
			timer.Reset(rest)
			err = Freeze(p)
		}
		if err != nil {
			return err
		}
	}
}

// Now returns the time of CLOCK_MONOTONIC in nanoseconds. All processes of one machine read the same clock.
func Now() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic("chaos: no monotonic clock: " + err.Error()) // every kernel has it
	}
	return t.Nano()
}

// Self returns the process that calls it. Killed or frozen by its own hand, it does not go on with the goroutine that did it.
func Self() Process { return self{} }

type self struct{}

func (self) Signal(sig os.Signal) error {
	s, ok := sig.(syscall.Signal)
	if !ok {
		return fmt.Errorf("chaos: %v is no signal of this system", sig)
	}
	// The calling thread gets it: a signal to the process may go to another thread, which has to wake up first while this one runs on.
	// What it does, it does to the whole process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return unix.Tgkill(unix.Getpid(), unix.Gettid(), s)
}
