package platform

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
)

// starts takes functions to the one thread that starts processes. Its goroutine never ends, because the kernel kills a process with
// [ChildAttr] when the thread that started it ends.
var starts = sync.OnceValue(func() chan<- func() {
	ch := make(chan func())
	go keepThread(ch)
	return ch
})

func keepThread(ch <-chan func()) {
	runtime.LockOSThread()
	for f := range ch {
		f()
	}
}

// StartChild starts a process that may have the attributes of [ChildAttr], on a thread that lasts as long as this process.
func StartChild(cmd *exec.Cmd) error {
	err := make(chan error, 1)
	starts() <- func() { err <- startAnywhere(cmd) }
	return <-err
}

// SocketPair makes a connection to a process that is yet to be started: this end, and the file that the process inherits.
func SocketPair() (ours *net.UnixConn, theirs *os.File, err error) {
	syscall.ForkLock.RLock()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fds[0])
		syscall.CloseOnExec(fds[1])
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, nil, fmt.Errorf("socket for a process: %w", err)
	}
	file := os.NewFile(uintptr(fds[0]), "child")
	theirs = os.NewFile(uintptr(fds[1]), "parent")
	conn, err := net.FileConn(file)
	_ = file.Close() // conn is a copy
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("socket for a process: %w", err), theirs.Close())
	}
	return conn.(*net.UnixConn), theirs, nil
}
