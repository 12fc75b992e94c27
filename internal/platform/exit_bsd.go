//go:build darwin || dragonfly || freebsd || netbsd || openbsd

package platform

import (
	"errors"

	"golang.org/x/sys/unix"
)

// WaitExit waits until a child process has exited, and leaves it to be reaped: until then its number, and its group's, stay its own.
// This system does not tell when the process is stopped by a signal.
func WaitExit(pid int, _ func(bool)) {
	queue, err := unix.Kqueue()
	if err != nil {
		return
	}
	defer func() { _ = unix.Close(queue) }()
	unix.CloseOnExec(queue)
	watch := make([]unix.Kevent_t, 1)
	unix.SetKevent(&watch[0], pid, unix.EVFILT_PROC, unix.EV_ADD|unix.EV_ONESHOT)
	watch[0].Fflags = unix.NOTE_EXIT
	for {
		// A process that has exited already is not found, which ends the wait, too.
		if _, err := unix.Kevent(queue, watch, make([]unix.Kevent_t, 1), nil); !errors.Is(err, unix.EINTR) {
			return
		}
	}
}
