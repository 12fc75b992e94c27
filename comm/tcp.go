package comm

import (
	"context"
	"net"
	"syscall"
	"time"
)

// Unsent bounds the bytes of one link that wait in the kernel for the network
// to take them: what a control message cannot overtake.
const Unsent = 256 << 10

// TCP is the transport over TCP. The zero value is ready for use.
type TCP struct{}

// Dial connects to host:port.
func (TCP) Dial(ctx context.Context, addr string) (net.Conn, error) {
	d := net.Dialer{KeepAlive: 15 * time.Second, Control: func(_, _ string, c syscall.RawConn) error { return limitUnsent(c) }}
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Listen opens a listener at host:port; an empty address means any free port
// of the loopback interface.
func (TCP) Listen(addr string) (Listener, error) {
	if addr == "" {
		addr = "127.0.0.1:0"
	}
	// Accepted sockets inherit the limit.
	lc := net.ListenConfig{KeepAlive: 15 * time.Second, Control: func(_, _ string, c syscall.RawConn) error { return limitUnsent(c) }}
	l, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		return nil, err
	}
	return tcpListener{l}, nil
}

type tcpListener struct{ net.Listener }

func (l tcpListener) Addr() string { return l.Listener.Addr().String() }
