package platform

import (
	"errors"

	"golang.org/x/sys/unix"
)

// WaitExit waits until a child process has exited, and leaves it to be reaped: until then its number, and its group's, stay its own.
func WaitExit(pid int) {
	for {
		if err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil); !errors.Is(err, unix.EINTR) {
			return
		}
	}
}
