package raftlog

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/platform"
)

// stream is the network under raft's transport. It owns every connection, so
// that closing it ends whatever waits for one.
type stream struct {
	id       string // of this node's server
	listener net.Listener
	address  address
	from     net.Addr    // where connections begin; nil leaves it to the system
	tls      *tls.Config // nil for plain connections
	timeout  time.Duration
	rejected *auth.Tally

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	ready  chan net.Conn // accepted, and through the handshake
	joined sync.WaitGroup

	mu    sync.Mutex
	conns map[net.Conn]struct{}
}

// maxUnproven bounds the connections that have not finished their handshake.
const maxUnproven = 64

func newStream(c Config, id string) *stream {
	s := &stream{
		id: id, listener: c.Listener, address: address{id, c.Listener.Addr().String()}, timeout: c.Timeout, rejected: c.Rejected,
		ready: make(chan net.Conn), conns: make(map[net.Conn]struct{}),
	}
	if c.Advertise != "" {
		s.address.addr = c.Advertise
	}
	if a, ok := c.Listener.Addr().(*net.TCPAddr); ok && !a.IP.IsUnspecified() {
		s.from = &net.TCPAddr{IP: a.IP, Zone: a.Zone} // a fault of the network between two hosts then ends both directions
	}
	if c.TLS != nil {
		s.tls = c.TLS.Clone()
		s.tls.SessionTicketsDisabled, s.tls.NextProtos = true, []string{"soliton-agree-2"}
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.joined.Go(s.accept)
	return s
}

// An address is where raft reaches a server: "ID@ADDR". It names the server as two of one host may share the rest: the one that lost
// its log, and the one that the host is now.
type address struct{ id, addr string }

func (address) Network() string  { return "tcp" }
func (a address) String() string { return a.id + "@" + a.addr }

func parseAddress(a raft.ServerAddress) address {
	i := strings.LastIndexByte(string(a), '@')
	return address{string(a[:max(i, 0)]), string(a[i+1:])}
}

// configuration returns servers in raft's terms. Those of a node of the memory network are at their IDs.
func (c Config) configuration(all []agree.Server) raft.Configuration {
	var list raft.Configuration
	for _, s := range all {
		v := raft.Server{ID: raft.ServerID(s.ID), Address: c.address(s), Suffrage: raft.Nonvoter}
		if s.Voter {
			v.Suffrage = raft.Voter
		}
		list.Servers = append(list.Servers, v)
	}
	return list
}

func (c Config) address(s agree.Server) raft.ServerAddress {
	switch {
	case c.memory != nil:
		return raft.ServerAddress(s.ID)
	case s.Addr == "" && c.Advertise != "":
		s.Addr = c.Advertise
	case s.Addr == "":
		s.Addr = c.Listener.Addr().String()
	}
	return raft.ServerAddress(address{s.ID, s.Addr}.String())
}

// resolver adds to the addresses of servers whose they are.
type resolver struct{ resolve func(id string) string }

var errUnresolved = errors.New("not known")

// ServerAddr implements raft.ServerAddressProvider; raft takes the address in
// the configuration after an error.
func (r resolver) ServerAddr(id raft.ServerID) (raft.ServerAddress, error) {
	if addr := r.resolve(string(id)); addr != "" {
		return raft.ServerAddress(address{string(id), addr}.String()), nil
	}
	return "", errUnresolved
}

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
			if err == nil {
				err = s.expect(proven)
			}
			stays := unproven.Leave(conn)
			switch {
			case s.ctx.Err() != nil:
			case !stays:
				s.rejected.Add(auth.Crowded, 1)
			case errors.Is(err, errServer):
				s.rejected.Add(auth.Outdated, 1)
			default:
				s.rejected.AddError(err)
			}
			if !stays && err == nil {
				_ = proven.Close()
				return
			}
			if err != nil {
				return // it is closed, and the dialling node logs it
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

// A connection begins with the ID of the server that it is for, after a byte for its length.

// name says which server a connection is for. It closes one that fails.
func (s *stream) name(conn net.Conn, id string) error {
	_ = conn.SetWriteDeadline(time.Now().Add(s.timeout)) // a closed connection fails below
	_, err := conn.Write(append([]byte{byte(len(id))}, id...))
	if err != nil {
		_ = conn.Close()
		return err
	}
	return conn.SetWriteDeadline(time.Time{})
}

var errServer = errors.New("a connection for another server")

// expect closes a connection that is not for this node's server.
func (s *stream) expect(conn net.Conn) error {
	_ = conn.SetReadDeadline(time.Now().Add(s.timeout)) // a closed connection fails below
	var n [1]byte
	_, err := io.ReadFull(conn, n[:])
	id := make([]byte, n[0])
	if err == nil {
		_, err = io.ReadFull(conn, id)
	}
	if err == nil && string(id) != s.id {
		err = fmt.Errorf("agree: %v: %w: it is for %.64q, and this is %s", conn.RemoteAddr(), errServer, id, s.id)
	}
	if err != nil {
		_ = conn.Close()
		return err
	}
	return conn.SetReadDeadline(time.Time{})
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
	server := parseAddress(to)
	raw, err := (&net.Dialer{LocalAddr: s.from, Control: platform.SmallSegments}).DialContext(ctx, "tcp", server.addr)
	if err != nil {
		return nil, err
	}
	conn, err := s.prove(raw, false)
	if err != nil {
		return nil, err
	}
	if err := s.name(conn, server.id); err != nil {
		return nil, err
	}
	return conn, nil
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
