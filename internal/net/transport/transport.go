// Package transport makes the connections under the links of workers: over TCP, with TLS 1.3 or without, and in memory.
package transport

import (
	"context"
	"errors"
	"net"
)

// ErrUsage is the class of errors for a call that is wrong in itself.
var ErrUsage = errors.New("wrong usage")

// MaxCallers bounds the callers whose handshake or hello has not come yet.
const MaxCallers = 256

// Transport makes connections. Its connections are reliable ordered byte streams with deadlines; commtest.TestTransport holds
// what an endpoint relies on.
type Transport interface {
	// Dial connects to the listener at an address. It ends with ctx.
	Dial(ctx context.Context, addr string) (net.Conn, error)
	// Listen opens a listener. An empty address means one that is free; the
	// listener's Addr says which.
	Listen(addr string) (Listener, error)
}

// SmallDialer is a Transport that can connect so that only small packets are sent, in both directions.
type SmallDialer interface {
	DialSmall(ctx context.Context, addr string) (net.Conn, error)
}

// DialSmall is t.Dial, with small packets where t can have them. A link that TCP has ended since no answer came is made again that way:
// perhaps large ones vanish.
func DialSmall(ctx context.Context, t Transport, addr string) (net.Conn, error) {
	if s, ok := t.(SmallDialer); ok {
		return s.DialSmall(ctx, addr)
	}
	return t.Dial(ctx, addr)
}

// Neighbourhood is a Transport that knows hosts.
type Neighbourhood interface {
	// Near reports whether an address is that of a worker of our host. Its worker says the same of ours.
	Near(addr string) bool
}

// Listener accepts connections.
type Listener interface {
	// Accept waits for a connection; Close ends the wait.
	Accept() (net.Conn, error)
	// Addr returns what others dial.
	Addr() string
	Close() error
}
