package transport

import (
	"net"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/internal/net/cma"
	"github.com/soliton-train/soliton/internal/net/shm"
)

// Sharer is a connection that can continue in memory that both ends share. One end offers it, the other accepts, each once and at the
// same place of what they send and receive, while no Read or Write is under way. The connection stays what it is where that does
// not work; reason says why. After an error the connection is to be closed.
type Sharer interface {
	Share(offer bool) (reason, err error)
}

// Neighbour returns the process at the other end of a connection within this host, whose memory may be read; nil where the other end may be
// on another host, or where the transport is not to read memory. The caller closes it.
func Neighbour(c net.Conn) (*cma.Process, error) {
	switch c := c.(type) {
	case *net.UnixConn:
		return cma.At(c)
	case *local:
		if !c.unread {
			return cma.At(c.socket)
		}
	}
	return nil, nil
}

// unread is a unix socket to a process whose memory is not to be read.
type unread struct{ *net.UnixConn }

// Write writes all buffers to a connection, with one system call where possible. It consumes them.
func Write(c net.Conn, buffers *net.Buffers) (int64, error) {
	if l, ok := c.(*local); ok {
		if s := l.shared.Load(); s != nil {
			return s.WriteBuffers(*buffers)
		}
		c = l.socket
	}
	return buffers.WriteTo(c)
}

// local is a unix socket, and shared memory once it is shared.
type local struct {
	socket *net.UnixConn
	unread bool // the memory of the other process is not to be read
	shared atomic.Pointer[shm.Conn]
}

func (l *local) conn() net.Conn {
	if s := l.shared.Load(); s != nil {
		return s
	}
	return l.socket
}

// Share implements [Sharer].
func (l *local) Share(offer bool) (reason, err error) {
	share := shm.Accept
	if offer {
		share = shm.Offer
	}
	c, reason, err := share(l.socket)
	if c != nil {
		l.shared.Store(c)
	}
	return reason, err
}

func (l *local) Read(b []byte) (int, error)         { return l.conn().Read(b) }
func (l *local) Write(b []byte) (int, error)        { return l.conn().Write(b) }
func (l *local) Close() error                       { return l.conn().Close() }
func (l *local) LocalAddr() net.Addr                { return l.socket.LocalAddr() }
func (l *local) RemoteAddr() net.Addr               { return l.socket.RemoteAddr() }
func (l *local) SetDeadline(t time.Time) error      { return l.conn().SetDeadline(t) }
func (l *local) SetReadDeadline(t time.Time) error  { return l.conn().SetReadDeadline(t) }
func (l *local) SetWriteDeadline(t time.Time) error { return l.conn().SetWriteDeadline(t) }
