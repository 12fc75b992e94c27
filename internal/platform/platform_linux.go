//go:build !portable

package platform

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Missing returns what this system lacks.
func Missing() []Gap { return nil }

// ChildAttr returns the attributes of a process that must not outlive this one: a process group of its own, so that a terminal's
// Ctrl-C does not reach it, and where the system can, a signal when the thread that starts it exits.
func ChildAttr(death syscall.Signal) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: death}
}

// Executable returns a path of the file that a process runs, which stays valid when the file is replaced. It is "" where the
// system has no such path.
func Executable(pid int) string { return fmt.Sprintf("/proc/%d/exe", pid) }

// Children returns the processes that a process has started and not yet reaped.
func Children(pid int) (children []int) {
	lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, list := range lists {
		text, _ := os.ReadFile(list)
		for word := range strings.FieldsSeq(string(text)) {
			if child, err := strconv.Atoi(word); err == nil {
				children = append(children, child)
			}
		}
	}
	return children
}

// SharesPIDs reports whether the process at the other end of a unix socket numbers processes as this one does: it is in no other PID
// namespace, as one in a container is.
func SharesPIDs(c *net.UnixConn) bool {
	var peer *unix.Ucred
	raw, err := c.SyscallConn()
	if err == nil {
		err = errors.Join(raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }), err)
	}
	if err != nil {
		return false
	}
	theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", peer.Pid)) // the number is 0 where this process cannot see it
	ours, err2 := os.Readlink("/proc/self/ns/pid")
	return err == nil && err2 == nil && theirs == ours
}

// SharedFile returns an empty file without a name, to be mapped by this process and by those that inherit it.
func SharedFile(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Allocate has the file system set bytes aside for the first size bytes of a file, whose length stays as it is. The error is
// errors.ErrUnsupported where the file system cannot.
func Allocate(f *os.File, size int64) error {
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, max(size, 1)); err != nil {
		return &os.PathError{Op: "fallocate", Path: f.Name(), Err: err}
	}
	return nil
}

// StartWriteback has the system begin to write size bytes of a file to its disk, without waiting for them as Sync does.
func StartWriteback(f *os.File, from, size int64) {
	_ = unix.SyncFileRange(int(f.Fd()), from, size, unix.SYNC_FILE_RANGE_WRITE) // Sync tells what fails
}

func parseMeminfo(r io.Reader) (bytes float64, ok bool) {
	for lines := bufio.NewScanner(r); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) == 3 && fields[0] == "MemAvailable:" && fields[2] == "kB" {
			n, err := strconv.ParseUint(fields[1], 10, 63)
			return 1024 * float64(n), err == nil
		}
	}
	return 0, false
}

// Runnable returns how many threads of the machine have a processor or wait for one, or false where that is unknown.
func Runnable() (threads int, ok bool) {
	line, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, false
	}
	return parseLoad(line)
}

// parseLoad reads the first half of the fourth field of loadavg.
func parseLoad(line []byte) (threads int, ok bool) {
	fields := bytes.Fields(line)
	if len(fields) != 5 {
		return 0, false
	}
	runnable, _, ok := strings.Cut(string(fields[3]), "/")
	n, err := strconv.ParseUint(runnable, 10, 31)
	if !ok || err != nil {
		return 0, false
	}
	return int(n), true
}

// ThreadDelay returns a function that reports how long the calling thread has waited for a processor so far, and one that
// releases it. Where the system does not tell, the delay is always 0.
func ThreadDelay() (delay func() time.Duration, stop func()) {
	fd, err := unix.Open("/proc/thread-self/schedstat", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return func() time.Duration { return 0 }, func() {}
	}
	buf := make([]byte, 96)
	return func() time.Duration {
		n, _ := unix.Pread(fd, buf, 0) // os.File would read once more, for the end
		return parseDelay(buf[:max(n, 0)])
	}, func() { _ = unix.Close(fd) }
}

// Queued returns for how long the threads of this process that live have waited for processors so far, 0 where the system does
// not tell.
func Queued() (sum time.Duration) {
	threads, _ := filepath.Glob("/proc/self/task/*/schedstat")
	for _, path := range threads {
		line, _ := os.ReadFile(path) // the thread may have ended
		sum += parseDelay(line)
	}
	return sum
}

// parseDelay reads the second number of a line of schedstat: nanoseconds.
func parseDelay(line []byte) time.Duration {
	fields := bytes.Fields(line)
	if len(fields) < 2 {
		return 0
	}
	n, err := strconv.ParseInt(string(fields[1]), 10, 64)
	if err != nil || n < 0 {
		return 0
	}
	return time.Duration(n)
}

// lowerPriority makes the calling thread nicer by n. Where the system refuses, the priority stays as it is.
func lowerPriority(n int) {
	if was, more := niceness(0); more {
		_ = unix.Setpriority(unix.PRIO_PROCESS, 0, min(was+n, 19))
	}
}

// LimitSocket keeps at most about so many bytes unsent and unread in the kernel's buffers of a TCP socket, and ends its connection where
// no answer comes to what was sent for so long.
func LimitSocket(c syscall.RawConn, unsent, unread int, unanswered time.Duration) error {
	var err error
	if e := c.Control(func(fd uintptr) {
		// A write that is under way may pass the mark by one kernel buffer, hence half; the kernel doubles the second itself.
		err = errors.Join(unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, unsent/2),
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, unread/2),
			unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(unanswered.Milliseconds())))
	}); e != nil {
		return e
	}
	return err
}

// SetCongestion has an algorithm control the congestion of a TCP socket, if the system allows that.
func SetCongestion(c syscall.RawConn, name string) {
	_ = c.Control(func(fd uintptr) { _ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, name) })
}

// smallSegment is what fits into a datagram of 576 bytes, which every host must take (RFC 791, RFC 9293 3.7.1).
const smallSegment = 536

// SmallSegments has a TCP connection that is to be dialled send and get segments that pass everywhere. It is a net.Dialer's Control. Where
// large packets vanish on the way, a connection stands still with the first of them, and with it all that comes after.
func SmallSegments(_, _ string, c syscall.RawConn) error {
	var err error
	if e := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG, smallSegment) }); e != nil {
		return e
	}
	return err
}

// SignalThread sends a signal to the calling thread. A signal to the process may go to another thread, which has to wake up first
// while the calling one runs on.
func SignalThread(s syscall.Signal) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return unix.Tgkill(unix.Getpid(), unix.Gettid(), s)
}

// Stopped reports whether a process is stopped, as by SIGSTOP.
func Stopped(pid int) bool {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)) // of a process that has exited, there is none
	return parseState(stat) == ThreadStopped
}
