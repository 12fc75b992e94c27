//go:build linux && !portable

package cma

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Process is the process at the other end of a unix socket.
type Process struct {
	pid int
	// A pidfd is readable once the process has ended: only then may another one get its number.
	ended [1]unix.PollFd

	mu     sync.Mutex
	closed bool
	// What a call of the system reads and writes.
	word   uint64
	local  [2]unix.Iovec
	remote [2]unix.RemoteIovec
}

// At returns the process that connected a unix socket, or that listened for it. Close it.
func At(c *net.UnixConn) (*Process, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("cma: %w", err)
	}
	var peer *unix.Ucred
	var fault error
	if err := raw.Control(func(fd uintptr) {
		peer, fault = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || fault != nil {
		return nil, fmt.Errorf("cma: who is at the other end of the socket: %w", errors.Join(err, fault))
	}
	if peer.Pid <= 0 {
		return nil, errors.New("cma: the other process is in a namespace of processes that is not visible here")
	}
	fd, err := unix.PidfdOpen(int(peer.Pid), 0)
	if err != nil {
		return nil, fmt.Errorf("cma: process %d: %w", peer.Pid, err)
	}
	return &Process{pid: int(peer.Pid), ended: [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}}, nil
}

// piece is how many bytes one call of the system copies, and small how many where a read may be stopped: it is beside other things then. Most kernels give
// the processor of a call to no other thread, also to one that was woken for a recovery, and Go's scheduler keeps its thread aside.
const (
	piece = 1 << 20
	small = 256 << 10
)

// Another returns the same process once more: each can be closed, and reads at the same time as the other.
func (p *Process) Another() (*Process, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, net.ErrClosed
	}
	fd, err := unix.FcntlInt(uintptr(p.ended[0].Fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("cma: process %d: %w", p.pid, err)
	}
	return &Process{pid: p.pid, ended: [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}}, nil
}

// Number returns the number of the process. It may be that of another one as soon as Read says that this one has ended.
func (p *Process) Number() int { return p.pid }

// Read fills dst from an address of the process, and makes sure that a word of it has a value after that; where wordAddr is 0, there is no word. It returns
// [ErrChanged] where the word has another one, and [ErrStopped] if stop, which is asked from time to time where it is not nil, said so; then dst may hold anything. A
// process that has ended is [os.ErrProcessDone].
func (p *Process) Read(dst []byte, addr, wordAddr, value uint64, stop func() bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return net.ErrClosed
	}
	most := piece
	if stop != nil {
		most = small
	}
	for len(dst) > most {
		if stop != nil && stop() {
			return ErrStopped
		}
		if err := p.read(dst[:most], addr, 0); err != nil {
			return err
		}
		dst, addr = dst[most:], addr+uint64(most)
	}
	// The kernel copies ranges one after the other, so the word is no older than the last byte.
	if len(dst) > 0 || wordAddr != 0 {
		if err := p.read(dst, addr, wordAddr); err != nil {
			return err
		}
	}
	if wordAddr != 0 && p.word != value {
		return ErrChanged
	}
	// Up to now the number was that of the process.
	for {
		p.ended[0].Revents = 0
		switch n, err := unix.Poll(p.ended[:], 0); {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("cma: process %d: %w", p.pid, err)
		case n > 0:
			return fmt.Errorf("cma: process %d: %w", p.pid, os.ErrProcessDone)
		default:
			return nil
		}
	}
}

// read makes one call: for bytes, if there are any, and the word, if it has an address.
func (p *Process) read(dst []byte, addr, wordAddr uint64) error {
	n, want := 0, len(dst)
	if len(dst) > 0 {
		p.local[n] = unix.Iovec{Base: unsafe.SliceData(dst)}
		p.local[n].SetLen(len(dst))
		p.remote[n] = unix.RemoteIovec{Base: uintptr(addr), Len: len(dst)}
		n++
	}
	if wordAddr != 0 {
		p.local[n] = unix.Iovec{Base: (*byte)(unsafe.Pointer(&p.word))}
		p.local[n].SetLen(int(unsafe.Sizeof(p.word)))
		p.remote[n] = unix.RemoteIovec{Base: uintptr(wordAddr), Len: int(unsafe.Sizeof(p.word))}
		want += p.remote[n].Len
		n++
	}
	got, err := unix.ProcessVMReadv(p.pid, p.local[:n], p.remote[:n], 0)
	p.local = [2]unix.Iovec{}
	switch {
	case err == nil && got != want:
		err = unix.EFAULT // of a later page
	case errors.Is(err, unix.ESRCH):
		err = os.ErrProcessDone
	}
	if err != nil {
		return fmt.Errorf("cma: read memory of process %d: %w", p.pid, err)
	}
	return nil
}

// Close lets go of the process.
func (p *Process) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return net.ErrClosed
	}
	p.closed = true
	return unix.Close(int(p.ended[0].Fd))
}

// AllowSiblings lets the other processes that our parent has started read our memory, where the system lets a process be read by its
// ancestors only (Yama).
func AllowSiblings() {
	_ = unix.Prctl(unix.PR_SET_PTRACER, uintptr(os.Getppid()), 0, 0, 0) // fails where no such permission is needed
}
