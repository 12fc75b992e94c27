package platform

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Codes of SIGCHLD, from the kernel's siginfo.h.
const (
	cldStopped   = 5
	cldContinued = 6
)

// WaitExit waits until a child process has exited, and leaves it to be reaped: until then its number, and its group's, stay its own.
// It calls stopped with true when a signal such as SIGSTOP has stopped the process, and with false when it has been continued.
func WaitExit(pid int, stopped func(bool)) {
	for {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WSTOPPED|unix.WCONTINUED|unix.WNOWAIT, nil)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil || info.Code != cldStopped && info.Code != cldContinued:
			return
		}
		// What it was then is left behind; what it has become since is told next.
		_ = unix.Waitid(unix.P_PID, pid, nil, unix.WSTOPPED|unix.WCONTINUED|unix.WNOHANG, nil)
		stopped(info.Code == cldStopped)
	}
}
