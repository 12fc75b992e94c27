package transport

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/timing"
)

// MaxPath is the length in bytes of the longest path that a unix socket may have on this system.
const MaxPath = len(syscall.RawSockaddrUnix{}.Path) - 1

// buffer bounds what one direction of a unix socket keeps in the kernel. One buffer takes the place of the two that TCP has; the
// kernel counts its own overhead and doubles the size for that.
const buffer = Unsent

// Host is the transport of a worker whose host has a folder for its sockets. Workers of one host reach each other through that
// folder, and in no other way: whom the folder keeps out cannot connect. Workers of other hosts are reached over another transport.
//
// An address is "unix:PATH" for workers of the same host, or "unix:PATH,ADDRESS" with the address for workers of other hosts.
type Host struct {
	// Folder is the path of the folder, which only the user of the run may enter. It tells hosts apart.
	Folder string
	// Name is the name of our socket in the folder.
	Name string
	// Far reaches the workers of other hosts; nil where there are none.
	Far Transport
	// Sockets has links of this host carry all bytes themselves: no process reads the memory of another, see [Neighbour].
	Sockets bool
}

// Far returns the part of an address that workers of other hosts dial, "" for none.
func Far(addr string) string {
	_, far := parts(addr)
	return far
}

// parts returns the path of the socket in an address, and the address for other hosts.
func parts(addr string) (path, far string) {
	near, rest, _ := strings.Cut(addr, ",")
	if path, ok := strings.CutPrefix(near, "unix:"); ok {
		return path, rest
	}
	return "", addr
}

// Near implements [Neighbourhood].
func (h Host) Near(addr string) bool {
	path, _ := parts(addr)
	return path != "" && filepath.Dir(path) == h.Folder
}

// Dial connects to a worker of this host through the folder, and to one of another host over Far.
func (h Host) Dial(ctx context.Context, addr string) (net.Conn, error) {
	return h.dial(ctx, addr, func(far string) (net.Conn, error) { return h.Far.Dial(ctx, far) })
}

// DialSmall implements [SmallDialer]: a socket of this host has no packets.
func (h Host) DialSmall(ctx context.Context, addr string) (net.Conn, error) {
	return h.dial(ctx, addr, func(far string) (net.Conn, error) { return DialSmall(ctx, h.Far, far) })
}

func (h Host) dial(ctx context.Context, addr string, dialFar func(far string) (net.Conn, error)) (net.Conn, error) {
	path, far := parts(addr)
	switch {
	case h.Near(addr):
		return h.dialUnix(ctx, path)
	case far != "" && h.Far != nil:
		return dialFar(far)
	}
	return nil, fmt.Errorf("transport: dial %q: not a worker of this host, and no address for other hosts", addr)
}

// Listen opens the socket, and with Far a listener of that. The address must be empty.
func (h Host) Listen(addr string) (Listener, error) {
	if addr != "" {
		return nil, fmt.Errorf("%w: transport: listen on %q: a host chooses its addresses", ErrUsage, addr)
	}
	path := filepath.Join(h.Folder, h.Name)
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("%w: transport: Host.Folder is %q; it must be an absolute path", ErrUsage, h.Folder)
	}
	if len(path) > MaxPath {
		return nil, fmt.Errorf("transport: the path of the socket %s has %d bytes, more than %d: set TMPDIR to a shorter path", path, len(path), MaxPath)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("transport: socket for workers of this host: %w; it lies in a folder of TMPDIR", err)
	}
	near := unixListener{l, h}
	if h.Far == nil {
		return near, nil
	}
	far, err := h.Far.Listen("")
	if err != nil {
		return nil, errors.Join(err, near.Close())
	}
	b := &bothListener{near: near, far: far, gate: newGate()}
	for _, l := range []Listener{near, far} {
		b.tasks.Go(func() {
			for b.ctx.Err() == nil {
				c, err := l.Accept()
				b.hand(accepted{c, err})
			}
		})
	}
	return b, nil
}

// dialUnix connects to a socket. It waits while the queue of the listener is full, as TCP does.
func (h Host) dialUnix(ctx context.Context, path string) (net.Conn, error) {
	for {
		c, err := new(net.Dialer).DialContext(ctx, "unix", path)
		switch {
		case err == nil:
			return h.local(c.(*net.UnixConn))
		case !errors.Is(err, syscall.EAGAIN):
			return nil, err
		}
		full := time.NewTimer(timing.Redial)
		select {
		case <-full.C:
		case <-ctx.Done():
			full.Stop()
			return nil, errors.Join(ctx.Err(), err)
		}
	}
}

// local bounds the buffers of a connection and returns it; it closes one that fails.
func (h Host) local(c *net.UnixConn) (net.Conn, error) {
	if err := errors.Join(c.SetWriteBuffer(buffer), c.SetReadBuffer(buffer)); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	if h.Sockets {
		return unread{c}, nil
	}
	return c, nil
}

type unixListener struct {
	*net.UnixListener
	h Host
}

func (l unixListener) Addr() string { return "unix:" + l.UnixListener.Addr().String() }

func (l unixListener) Accept() (net.Conn, error) {
	c, err := l.AcceptUnix()
	if err != nil {
		return nil, err
	}
	return l.h.local(c)
}

// bothListener accepts from the socket of a host and from other hosts.
type bothListener struct {
	near, far Listener
	*gate
}

func (l *bothListener) Addr() string { return l.near.Addr() + "," + l.far.Addr() }

func (l *bothListener) Close() error {
	l.stop()
	err := errors.Join(l.near.Close(), l.far.Close())
	l.tasks.Wait()
	return err
}

// gate hands the connections that goroutines accept to Accept.
type gate struct {
	ready chan accepted
	ctx   context.Context
	stop  context.CancelFunc
	tasks sync.WaitGroup
}

type accepted struct {
	c   net.Conn
	err error
}

func newGate() *gate {
	g := &gate{ready: make(chan accepted)}
	g.ctx, g.stop = context.WithCancel(context.Background())
	return g
}

func (g *gate) hand(a accepted) {
	select {
	case g.ready <- a:
	case <-g.ctx.Done():
		if a.c != nil {
			_ = a.c.Close()
		}
	}
}

// Accept waits for the next connection.
func (g *gate) Accept() (net.Conn, error) {
	select {
	case a := <-g.ready:
		return a.c, a.err
	case <-g.ctx.Done():
		return nil, net.ErrClosed
	}
}
