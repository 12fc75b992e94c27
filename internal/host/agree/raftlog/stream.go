package raftlog

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/soliton-train/soliton/internal/net/auth"
)

// stream is the network under raft's transport. It owns every connection, so
// that closing it ends whatever waits for one.
type stream struct {
	listener net.Listener
	address  net.Addr
	from     net.Addr    // where connections begin; nil leaves it to the system
	tls      *tls.Config // nil for plain connections
	timeout  time.Duration

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	ready  chan net.Conn // accepted, and through the handshake
	joined sync.WaitGroup

	mu    sync.Mutex
	conns map[net.Conn]struct{}
}

// maxUnproven bounds the connections that have not finished their handshake.
const maxUnproven = 64

func newStream(c Config) *stream {
	s := &stream{
		listener: c.Listener, address: c.Listener.Addr(), timeout: c.Timeout,
		ready: make(chan net.Conn), conns: make(map[net.Conn]struct{}),
	}
	if c.Advertise != "" {
		s.address = advertised(c.Advertise)
	} else if a, ok := c.Listener.Addr().(*net.TCPAddr); ok {
		s.from = &net.TCPAddr{IP: a.IP, Zone: a.Zone} // where others reach us
	}
	if c.TLS != nil {
		s.tls = c.TLS.Clone()
		s.tls.SessionTicketsDisabled, s.tls.NextProtos = true, []string{"soliton-agree-1"}
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.joined.Go(s.accept)
	return s
}

type advertised string

func (advertised) Network() string  { return "tcp" }
func (a advertised) String() string { return string(a) }

func (s *stream) accept() {
	unproven := auth.NewLobby(maxUnproven)
	for {
		conn, err := auth.Accept(s.ctx, s.listener)
		if err != nil {
			return
		}
		unproven.Enter(conn)
		s.joined.Go(func() {
			proven, err := s.prove(conn, true)
			if !unproven.Leave(conn) && err == nil {
				_ = proven.Close()
				return
			}
			if err != nil {
				return // the dialling node logs it
			}
			select {
			case s.ready <- proven:
			case <-s.ctx.Done():
				_ = proven.Close()
			}
		})
	}
}

// prove registers a connection and runs its TLS handshake. It closes one that fails.
func (s *stream) prove(raw net.Conn, server bool) (net.Conn, error) {
	conn := &tracked{Conn: raw, of: s}
	s.mu.Lock()
	s.conns[conn] = struct{}{}
	s.mu.Unlock()
	if s.ctx.Err() != nil { // Close may have looked before
		_ = conn.Close()
		return nil, net.ErrClosed
	}
	if s.tls == nil {
		return conn, nil
	}
	secure := tls.Client(conn, s.tls)
	if server {
		secure = tls.Server(conn, s.tls)
	}
	ctx, cancel := context.WithTimeout(s.ctx, s.timeout)
	defer cancel()
	if err := secure.HandshakeContext(ctx); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("agree: %v: %w", raw.RemoteAddr(), err)
	}
	return secure, nil
}

// tracked is a connection that its stream knows of.
type tracked struct {
	net.Conn
	of *stream
}

func (c *tracked) Close() error {
	c.of.mu.Lock()
	delete(c.of.conns, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}

// Accept implements raft.StreamLayer.
func (s *stream) Accept() (net.Conn, error) {
	select {
	case conn := <-s.ready:
		return conn, nil
	case <-s.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Dial implements raft.StreamLayer.
func (s *stream) Dial(to raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(s.ctx, timeout)
	defer cancel()
	raw, err := (&net.Dialer{LocalAddr: s.from}).DialContext(ctx, "tcp", string(to))
	if err != nil {
		return nil, err
	}
	return s.prove(raw, false)
}

// Addr implements raft.StreamLayer.
func (s *stream) Addr() net.Addr { return s.address }

// Close ends the listener and all connections. Raft's transport calls it again.
func (s *stream) Close() error {
	s.cancel()
	err := s.listener.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	s.mu.Lock()
	open := slices.Collect(maps.Keys(s.conns))
	s.mu.Unlock()
	for _, c := range open {
		_ = c.Close()
	}
	s.joined.Wait()
	return err
}
