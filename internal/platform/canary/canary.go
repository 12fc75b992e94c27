// Package canary makes the end of a process known before the process is gone.
//
// A process that is killed in the middle of computing ends slowly: each of its threads needs
// a processor once more to end, its memory is freed, and only then are its
// connections closed and can it be waited for. On a busy machine that takes tens of
// milliseconds. A canary is a thread of it that always sleeps. The signal wakes it, the kernel gives
// a processor to a thread that has not had any, and as it ends it closes the only file of a
// file table of its own, which is the end of a socket whose other end its agent reads.
//
// By then no thread of the process runs its program any more: a fatal signal is
// pending for each of them, which takes effect before they return to it. What they had
// begun in the kernel may still come to its end.
package canary

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

// Create makes the socket: one end to read from until [io.EOF], and one to hand down to the process, which
// the caller closes.
func Create() (agent, process *os.File, err error) {
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

// Keep starts the canary with the end that was handed down as file number fd, 3 or more. From
// then on the thread alone has it, for as long as the process lives: neither the rest of it nor what it starts
// does. Where there can be none, fd is closed, and the error says why.
func Keep(fd int) error {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
		return fmt.Errorf("canary: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	var ready [2]int // a byte comes when the thread has files of its own, and the end when no others are left to it
	if err := unix.Pipe2(ready[:], unix.O_CLOEXEC); err != nil {
		return fmt.Errorf("canary: %w", err)
	}
	defer func() { _ = unix.Close(ready[0]) }()
	kept := make(chan struct{})
	defer close(kept)
	go watch(fd, ready[1], kept)
	var failed [1]byte
	n, err := read(ready[0], failed[:])
	_ = unix.Close(ready[1])
	if err != nil {
		return fmt.Errorf("canary: %w", err)
	}
	if n == 1 && failed[0] != 0 {
		return fmt.Errorf("canary: %w", syscall.Errno(failed[0]))
	}
	_, _ = read(ready[0], failed[:]) // nothing: the thread has closed its own
	return nil
}

func read(fd int, b []byte) (int, error) {
	for {
		if n, err := unix.Read(fd, b); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// watch is the thread. It ends with the process.
//
// With files of its own it must not run the scheduler, which would wake its poller
// through a file that is not there. So signals are held back, as one may be a reason to, the
// system calls up to the last do not tell the scheduler of themselves, and the last has no end.
func watch(fd, ready int, kept <-chan struct{}) {
	runtime.LockOSThread() // for good: other goroutines must not get this thread
	if unix.Gettid() == unix.Getpid() {
		// The first thread's files count as those of the process, for one who looks from outside.
		go watch(fd, ready, kept)
		<-kept // with this thread taken, the other has one of its own
		runtime.UnlockOSThread()
		return
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
		return // and the thread ends
	}
	_, _, _ = syscall.RawSyscall(unix.SYS_CLOSE_RANGE, lo+1, hi-1, 0) // of no effect where nothing is between
	_, _, _ = syscall.RawSyscall(unix.SYS_CLOSE_RANGE, 0, lo-1, 0)
	_, _, _ = syscall.RawSyscall(unix.SYS_WRITE, uintptr(ready), uintptr(unsafe.Pointer(&failed)), 1)
	_, _, _ = syscall.RawSyscall(unix.SYS_CLOSE, uintptr(ready), 0, 0)
	for { // nobody wakes it, and a signal that is not held back does not either
		_, _, _ = syscall.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&never)), futexWait, 0, 0, 0, 0)
	}
}

// futexWait is FUTEX_WAIT_PRIVATE.
const futexWait = 0 | 128

// sigPerThread has a thread do what all do together, such as to change the user, which waits
// for each of them.
const sigPerThread = 33

// Killed reports whether SIGKILL was sent to a process that has not been reaped yet. If the process is
// ending, it is the reason: one that was ending before takes no more signals.
func Killed(pid int) bool {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	lines := bufio.NewScanner(bytes.NewReader(status))
	for lines.Scan() {
		// What is pending for the process as a whole stays so: each of its threads has its own to end by.
		if set, ok := bytes.CutPrefix(lines.Bytes(), []byte("ShdPnd:")); ok {
			pending, err := strconv.ParseUint(string(bytes.TrimSpace(set)), 16, 64)
			return err == nil && pending&(1<<(unix.SIGKILL-1)) != 0
		}
	}
	return false
}
