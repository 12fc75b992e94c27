//go:build !linux || portable

package platform

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// Missing returns what this system lacks.
func Missing() []Gap {
	return []Gap{
		{"canaries", "the agent detects a killed worker when it reaps it: tens of milliseconds later on a busy machine"},
		{"parent-death signal", "a worker outlives its agent until it finds their socket closed"},
		{"thread priorities", "computing threads compete with those that answer peers, and these for the same processor: recoveries take longer on a busy machine"},
		{"figure of the available memory", "jobs that do not fit into memory are not refused, and plans ignore its size"},
		{"number of runnable threads", "missed heartbeats count after the usual timeout when a machine becomes crowded: a starved worker may be evicted"},
		{"news of stopped processes", "a worker that a signal has stopped is found by missed heartbeats"},
		{"sight of other processes' threads", "missed heartbeats alone tell of a worker that is frozen, or has no processor for long"},
		{"reads of another process's memory", "large messages between workers of one host pass through their sockets"},
		{"socket filters", "--chaos cut is refused"},
	}
}

// NewCanary fails: this system has no canaries.
func NewCanary() (agent, process *os.File, err error) {
	return nil, nil, fmt.Errorf("canary: %w", errors.ErrUnsupported)
}

// KeepCanary fails: this system has no canaries.
func KeepCanary(int) error { return fmt.Errorf("canary: %w", errors.ErrUnsupported) }

// Killed reports false: this system does not show pending signals.
func Killed(int) bool { return false }

// SharesPIDs reports true: this system has one numbering of processes.
func SharesPIDs(*net.UnixConn) bool { return true }

// ChildAttr returns the attributes of a process that must not outlive this one: a process group of its own, so that a terminal's
// Ctrl-C does not reach it. Such a process has to notice by itself that this one is gone.
func ChildAttr(syscall.Signal) *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// Executable returns "": this system has no path that stays valid when the file is replaced.
func Executable(int) string { return "" }

// Children returns the processes that a process has started and not yet reaped.
func Children(pid int) (children []int) {
	table, _ := exec.Command("ps", "-A", "-o", "pid=,ppid=").Output()
	for line := range bytes.Lines(table) {
		var child, parent int
		if n, _ := fmt.Sscan(string(line), &child, &parent); n == 2 && parent == pid {
			children = append(children, child)
		}
	}
	return children
}

// SharedFile returns an empty file without a name, to be mapped by this process and by those that inherit it.
func SharedFile(name string) (*os.File, error) {
	f, err := os.CreateTemp("", name+"-")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// Allocate fails: this system is not asked to set bytes aside.
func Allocate(*os.File, int64) error { return errors.ErrUnsupported }

// StartWriteback does nothing: this system writes when it sees fit.
func StartWriteback(*os.File, int64, int64) {}

// AvailableMemory returns false: it is unknown.
func AvailableMemory() (bytes float64, ok bool) { return 0, false }

// Runnable returns false: it is unknown how many threads there are.
func Runnable() (threads int, ok bool) { return 0, false }

// ThreadDelay returns a function that reports no delay, and one that does nothing.
func ThreadDelay() (delay func() time.Duration, stop func()) {
	return func() time.Duration { return 0 }, func() {}
}

// Queued returns 0: this system does not tell how long threads wait for processors.
func Queued() time.Duration { return 0 }

// lowerPriority does nothing: a priority is the whole process's.
func lowerPriority(int) {}

// Spread does nothing: the system chooses where threads run.
func Spread(int, int) {}

func computeAnywhere() {}

func startAnywhere(cmd *exec.Cmd) error { return cmd.Start() }

// SetCongestion does nothing.
func SetCongestion(syscall.RawConn, string) {}

// LimitSocket leaves the kernel's own limits.
func LimitSocket(syscall.RawConn, int, int, time.Duration) error { return nil }

// SmallSegments leaves the size of segments to the system.
func SmallSegments(_, _ string, _ syscall.RawConn) error { return nil }

// SignalThread sends a signal to the calling process: this system cannot choose the thread.
func SignalThread(s syscall.Signal) error { return syscall.Kill(os.Getpid(), s) }

// CanFilter fails: this system does not filter the sockets of other processes.
func CanFilter() error { return errors.ErrUnsupported }

// FilterSockets fails: see [CanFilter].
func FilterSockets(int, netip.Addr, []netip.Addr, map[string]string) error { return CanFilter() }

// Stopped reports whether a process is stopped; here nothing tells.
func Stopped(int) bool { return false }

// Threads returns false: this system does not tell what the threads of other processes do.
func Threads(int) (map[int]Thread, bool) { return nil, false }
