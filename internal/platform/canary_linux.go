//go:build !portable

package platform

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A process that is killed in the middle of computing exits slowly: each of its threads needs a processor once more to exit, its
// memory is freed, and only then are its connections closed and can it be reaped. On a busy machine that takes tens of
// milliseconds. A canary is a thread of the process that always sleeps. The signal wakes it, the kernel gives a processor to a
// thread that has not had any, and as it exits it closes the only file of a file table of its own: one end of a socket whose other
// end the agent reads.
//
// By then no thread of the process runs its program any more: a fatal signal is pending for each of them, and takes effect before
// they return to it. System calls that they had begun may still complete.

// NewCanary makes the socket: one end to read from until [io.EOF], and one for the process to inherit, which the caller closes.
func NewCanary() (agent, process *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("canary: %w", err)
	}
	if err := unix.SetNonblock(fds[0], true); err != nil { // so that Close ends a Read
		_ = unix.Close(fds[0])
		_ = unix.Close(fds[1])
		return nil, nil, fmt.Errorf("canary: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "canary"), os.NewFile(uintptr(fds[1]), "canary"), nil
}

// KeepCanary starts the canary with the end that was inherited as file number fd, 3 or more. From then on that thread alone has
// it, for as long as the process lives: neither its other threads nor its children do. On an error fd is closed.
func KeepCanary(fd int) error {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
		return fmt.Errorf("canary: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	var ready [2]int // a byte arrives when the thread has its own file table, io.EOF when that has only fd left
	if err := unix.Pipe2(ready[:], unix.O_CLOEXEC); err != nil {
		return fmt.Errorf("canary: %w", err)
	}
	defer func() { _ = unix.Close(ready[0]) }()
	kept := make(chan struct{})
	defer close(kept)
	go canary(fd, ready[1], kept)
	var failed [1]byte
	n, err := read(ready[0], failed[:])
	_ = unix.Close(ready[1])
	if err != nil {
		return fmt.Errorf("canary: %w", err)
	}
	if n == 1 && failed[0] != 0 {
		return fmt.Errorf("canary: %w", syscall.Errno(failed[0]))
	}
	_, _ = read(ready[0], failed[:]) // the end: the thread has closed its copy
	return nil
}

func read(fd int, b []byte) (int, error) {
	for {
		if n, err := unix.Read(fd, b); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// canary is the thread. It exits with the process.
//
// With files of its own it must not run Go's scheduler, which would wake its poller through a file that the thread does not have.
// So signals, which may call the scheduler, are blocked, the system calls up to the last do not announce themselves to it,
// and the last one never returns.
func canary(fd, ready int, kept <-chan struct{}) {
	runtime.LockOSThread() // never unlocked: other goroutines must not get this thread
	if unix.Gettid() == unix.Getpid() {
		// Other processes see the first thread's files as those of the process.
		go canary(fd, ready, kept)
		<-kept // while this thread is locked, the other goroutine gets another one
		runtime.UnlockOSThread()
		return
	}
	if a, err := unix.SchedGetAttr(0, 0); err == nil && (a.Policy == unix.SCHED_NORMAL || a.Policy == unix.SCHED_BATCH) {
		a.Runtime = canarySlice
		_ = unix.SchedSetAttr(0, a, 0) // of no effect before Linux 6.12
	}
	all := ^uint64(1 << (sigPerThread - 1))
	var failed [1]byte
	var never uint32
	lo, hi := uintptr(min(fd, ready)), uintptr(max(fd, ready))
	const last = uintptr(^uint32(0))
	_, _, errno := syscall.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&all)), 0, unsafe.Sizeof(all), 0, 0)
	if errno == 0 {
		_, _, errno = syscall.RawSyscall(unix.SYS_CLOSE_RANGE, hi+1, last, unix.CLOSE_RANGE_UNSHARE)
	}
	if failed[0] = byte(errno); errno != 0 {
		_, _, _ = syscall.RawSyscall(unix.SYS_WRITE, uintptr(ready), uintptr(unsafe.Pointer(&failed)), 1)
		return // and the thread exits
	}
	_, _, _ = syscall.RawSyscall(unix.SYS_CLOSE_RANGE, lo+1, hi-1, 0) // of no effect where nothing is between
	_, _, _ = syscall.RawSyscall(unix.SYS_CLOSE_RANGE, 0, lo-1, 0)
	_, _, _ = syscall.RawSyscall(unix.SYS_WRITE, uintptr(ready), uintptr(unsafe.Pointer(&failed)), 1)
	_, _, _ = syscall.RawSyscall(unix.SYS_CLOSE, uintptr(ready), 0, 0)
	for { // no other thread wakes it, nor does a signal that cannot be blocked
		_, _, _ = syscall.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&never)), futexWait, 0, 0, 0, 0)
	}
}

// canarySlice is the time slice of the thread, in nanoseconds: the shortest that Linux grants. A thread that wakes up takes the processor from one whose
// slices are longer at once, even if that one has just begun a slice.
const canarySlice = 100_000

// futexWait is FUTEX_WAIT_PRIVATE.
const futexWait = 0 | 128

// sigPerThread makes a thread take part in what all do together, such as changing the user, which waits for each of them.
const sigPerThread = 33

// Killed reports whether SIGKILL was sent to a process that has not been reaped yet. If the process is exiting, that is the cause:
// a process that was exiting before takes no more signals.
func Killed(pid int) bool {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	lines := bufio.NewScanner(bytes.NewReader(status))
	for lines.Scan() {
		// The signal stays pending for the process as a whole: each of its threads exits by one of its own.
		if set, ok := bytes.CutPrefix(lines.Bytes(), []byte("ShdPnd:")); ok {
			pending, err := strconv.ParseUint(string(bytes.TrimSpace(set)), 16, 64)
			return err == nil && pending&(1<<(unix.SIGKILL-1)) != 0
		}
	}
	return false
}
