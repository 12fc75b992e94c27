package transport

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"syscall"

	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/timing"
)

// Bounds of what a link keeps in the kernel, which a control message cannot
// overtake. Set on Linux; elsewhere the kernel's own hold.
const (
	// Unsent bounds the bytes that wait for the network to take them.
	Unsent = 256 << 10
	// Unread bounds the bytes that wait for the receiver to read them. It also
	// bounds what is under way: a round trip of 100 µs carries 5 GB/s.
	Unread = 512 << 10
)

// TCP is the transport over TCP. The zero value is ready for use and
// encrypts nothing.
type TCP struct {
	// TLS, if it is not nil, protects all links with TLS 1.3; [TLSFromSecret]
	// makes one. It needs a certificate, which links of both directions use.
	// Whom its ClientAuth and its roots let in is trusted to be whichever worker
	// it says.
	TLS *tls.Config
	// Addr is the IP address of this machine at which links begin and end; ""
	// leaves it to the system, which listens on the loopback interface.
	Addr string
	// Ports are those at which links end; the zero value leaves them to the system.
	Ports ports.Range
	// Rejected counts the callers that failed to shake hands; nil counts none.
	Rejected *auth.Tally
}

// unpaced controls the congestion of connections over the loopback interface, which are sent as fast as they are read. The system may have connections paced for the sake of networks, as BBR does, which halves what that
// interface carries. A socket that was paced once remains so, so this is set before it is connected.
const unpaced = "reno"

func limit(_, address string, c syscall.RawConn) error {
	if a, err := netip.ParseAddrPort(address); err == nil && a.Addr().Unmap().IsLoopback() {
		platform.SetCongestion(c, unpaced)
	}
	return platform.LimitSocket(c, Unsent, Unread, timing.Unanswered)
}

// Dial connects to host:port.
func (t TCP) Dial(ctx context.Context, addr string) (net.Conn, error) {
	return t.dial(ctx, addr, limit)
}

// DialSmall implements [SmallDialer].
func (t TCP) DialSmall(ctx context.Context, addr string) (net.Conn, error) {
	return t.dial(ctx, addr, func(network, address string, c syscall.RawConn) error {
		return errors.Join(limit(network, address, c), platform.SmallSegments(network, address, c))
	})
}

func (t TCP) dial(ctx context.Context, addr string, control func(network, address string, c syscall.RawConn) error) (net.Conn, error) {
	d := net.Dialer{KeepAlive: timing.KeepAlive, Control: control}
	if t.Addr != "" {
		ip, err := netip.ParseAddr(t.Addr)
		if err != nil {
			return nil, fmt.Errorf("transport: TCP.Addr: %w", err)
		}
		d.LocalAddr = &net.TCPAddr{IP: ip.AsSlice(), Zone: ip.Zone()}
	}
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	if t.TLS == nil {
		return c, nil
	}
	s, err := secureClient(ctx, c, addr, t.TLS)
	if err != nil {
		c.Close()
		return nil, err
	}
	return s, nil
}

// Listen opens a listener at host:port; an empty address means any free port
// of Ports at Addr.
func (t TCP) Listen(addr string) (Listener, error) {
	if t.TLS != nil && len(t.TLS.Certificates) == 0 && t.TLS.GetCertificate == nil && t.TLS.GetConfigForClient == nil {
		return nil, errors.New("transport: TCP.TLS has no certificate; set Certificates, or use TLSFromSecret")
	}
	// Accepted sockets inherit the limits, and what controls their congestion.
	lc := net.ListenConfig{KeepAlive: timing.KeepAlive, Control: limit}
	var l net.Listener
	listen := func(addr string) (err error) {
		l, err = lc.Listen(context.Background(), "tcp", addr)
		return err
	}
	var err error
	if addr != "" {
		err = listen(addr)
	} else {
		err = t.Ports.Listen(func(port int) error { return listen(net.JoinHostPort(cmp.Or(t.Addr, "127.0.0.1"), strconv.Itoa(port))) })
	}
	if err != nil {
		return nil, err
	}
	if t.TLS != nil {
		return newSecureListener(tcpListener{l}, t.TLS, t.Rejected), nil
	}
	return tcpListener{l}, nil
}

type tcpListener struct{ net.Listener }

func (l tcpListener) Addr() string { return l.Listener.Addr().String() }
