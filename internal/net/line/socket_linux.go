//go:build linux && !portable

package line

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/net/look"
)

const supported = true

// socket is a socket that Go's poller does not know. Its calls never block.
type socket struct {
	fd int
	io *call
}

// call is memory for the arguments of a system call.
type call struct {
	msg unix.Msghdr
	vec [2]unix.Iovec
}

// newSocket returns the socket of a connection, which may be closed afterwards.
func newSocket(c net.Conn) (s socket, err error) {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return s, errors.ErrUnsupported
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return s, err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { s.fd, failed = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return s, err
	}
	if failed != nil {
		return s, failed
	}
	s.io = new(call)
	// Nothing urgent waits behind a line's data, so the system may have as many of them as it likes under way. Where it knows no such option, the bounds of a link hold.
	_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK, 0)
	_ = unix.SetsockoptInt(s.fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, 0)
	return s, nil
}

func (s socket) shutdown() { _ = unix.Shutdown(s.fd, unix.SHUT_RDWR) }
func (s socket) close()    { _ = unix.Close(s.fd) }

// pass makes a system call that passes two pieces of memory. It does not tell Go's scheduler: the call does not wait for anything.
func (s socket) pass(trap uintptr, a, b []byte) (int, error) {
	s.io.msg = unix.Msghdr{Iov: &s.io.vec[0]}
	for _, x := range [2][]byte{a, b} {
		if len(x) == 0 {
			continue
		}
		v := &s.io.vec[s.io.msg.Iovlen]
		v.Base = &x[0]
		v.SetLen(len(x))
		s.io.msg.Iovlen++
	}
	defer clear(s.io.vec[:])
	for {
		n, _, err := unix.RawSyscall(trap, uintptr(s.fd), uintptr(unsafe.Pointer(&s.io.msg)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		switch {
		case err == 0 && n == 0 && trap == unix.SYS_RECVMSG:
			return 0, fmt.Errorf("closed by the peer: %w", io.EOF)
		case err == 0:
			return int(n), nil
		case err == unix.EAGAIN:
			return 0, nil
		case err != unix.EINTR:
			return 0, err
		}
	}
}

// send returns how many bytes the socket takes, 0 if none.
func (s socket) send(a, b []byte) (int, error) { return s.pass(unix.SYS_SENDMSG, a, b) }

// receive returns how many bytes it has read, 0 if none are there.
func (s socket) receive(a, b []byte) (int, error) { return s.pass(unix.SYS_RECVMSG, a, b) }

// poller sleeps on sockets, and on an alarm.
type poller struct {
	fds []unix.PollFd

	mu    sync.Mutex // of ring and close; all else is under the lock of the hub, or done by the sleeper
	alarm int        // -1 when it is closed
}

func newPoller() (*poller, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	return &poller{alarm: fd}, err
}

func (p *poller) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = unix.Close(p.alarm)
	p.alarm = -1
}

// ring wakes the sleeper, or the next one.
func (p *poller) ring() {
	p.mu.Lock()
	defer p.mu.Unlock()
	one := [8]byte{1}
	if p.alarm >= 0 {
		_, _ = unix.Write(p.alarm, one[:]) // fails where it rings already
	}
}

// reset forgets all sockets.
func (p *poller) reset() {
	p.fds = append(p.fds[:0], unix.PollFd{Fd: int32(p.alarm), Events: unix.POLLIN})
}

// add adds a socket that is to be read, and perhaps written.
func (p *poller) add(s socket, write bool) {
	f := unix.PollFd{Fd: int32(s.fd), Events: unix.POLLIN}
	if write {
		f.Events |= unix.POLLOUT
	}
	p.fds = append(p.fds, f)
}

// sleep returns when one of them can be, or the alarm rings.
func (p *poller) sleep() {
	began := time.Now()
	_, _ = unix.Poll(p.fds, -1)
	look.Slept(time.Since(began))
	if p.fds[0].Revents != 0 {
		var count [8]byte
		_, _ = unix.Read(p.alarm, count[:])
	}
}
