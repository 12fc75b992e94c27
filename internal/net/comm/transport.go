package comm

import (
	"context"
	"net"
)

// Transport makes connections. Its connections are reliable ordered byte
// streams with deadlines; commtest.TestTransport says in tests what an
// [Endpoint] relies on.
type Transport interface {
	// Dial connects to the listener at an address. It ends with ctx.
	Dial(ctx context.Context, addr string) (net.Conn, error)
	// Listen opens a listener. An empty address means one that is free; the
	// listener's Addr says which.
	Listen(addr string) (Listener, error)
}

// Listener accepts connections.
type Listener interface {
	// Accept waits for a connection; Close ends the wait.
	Accept() (net.Conn, error)
	// Addr returns what others dial.
	Addr() string
	Close() error
}
