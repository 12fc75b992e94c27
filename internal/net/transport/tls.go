package transport

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/timing"
)

// MinSecret is the size in bytes of the shortest secret for [TLSFromSecret].
const MinSecret = 16

// TLSFromSecret returns a configuration for [TCP] under which only processes that hold
// the secret can talk to each other. The secret is the key: MinSecret random
// bytes or more, not a password. A process that holds it is trusted to be
// whichever worker it says.
//
// The secret becomes, by HKDF with SHA-256 (RFC 5869), the seed of an Ed25519
// key, with which both sides of a TLS 1.3 handshake sign, each in its role;
// certificates carry the key and mean nothing else.
func TLSFromSecret(secret []byte) (*tls.Config, error) {
	cert, err := Certificate(secret, "links")
	if err != nil {
		return nil, err
	}
	public := cert.Leaf.PublicKey.(ed25519.PublicKey)
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		Certificates:       []tls.Certificate{cert},
		ClientAuth:         tls.RequireAnyClientCert,
		InsecureSkipVerify: true, // instead of names and authorities, the key itself:
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) == 0 || !public.Equal(s.PeerCertificates[0].PublicKey) {
				return errors.New("transport: the other side has another secret")
			}
			return nil
		},
	}, nil
}

// Certificate returns a certificate whose Ed25519 key follows from the secret and
// from the purpose that it serves. The certificate carries the key and means nothing else.
func Certificate(secret []byte, purpose string) (tls.Certificate, error) {
	if len(secret) < MinSecret {
		return tls.Certificate{}, fmt.Errorf("transport: a secret of %d bytes; it must have at least %d, from a random source", len(secret), MinSecret)
	}
	seed, err := auth.DeriveKey(secret, purpose)
	if err != nil {
		return tls.Certificate{}, err
	}
	key := ed25519.NewKeyFromSeed(seed)
	name := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0), NotAfter: time.Unix(1<<33, 0)}
	der, err := x509.CreateCertificate(rand.Reader, name, name, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("transport: certificate from the secret: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("transport: certificate from the secret: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, nil
}

// secured returns the configuration as links need it.
func secured(c *tls.Config) *tls.Config {
	c = c.Clone()
	c.MinVersion = tls.VersionTLS13
	c.DynamicRecordSizingDisabled = true
	// A ticket that the client has not read when it closes would reset the
	// connection and take what it sent with it.
	c.SessionTicketsDisabled = true
	return c
}

// record is how many bytes one TLS record carries at most.
const record = 16 << 10

// secureConn is a TLS connection on which a write that a deadline has cut
// short can be gone on with, which breaks a tls.Conn. The next write must begin
// with what the last one left.
type secureConn struct {
	*tls.Conn
	raw *heldBack

	writing sync.Mutex
	owed    []byte // reported as not written, but encrypted
}

// secureClient shakes hands with the server at addr.
func secureClient(ctx context.Context, c net.Conn, addr string, cfg *tls.Config) (net.Conn, error) {
	cfg = secured(cfg)
	if cfg.ServerName == "" && !cfg.InsecureSkipVerify {
		host, _, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		cfg.ServerName = host
	}
	raw := &heldBack{Conn: c}
	s := &secureConn{Conn: tls.Client(raw, cfg), raw: raw}
	return s, s.HandshakeContext(ctx)
}

func (c *secureConn) Write(p []byte) (n int, err error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	if k := min(len(c.owed), len(p)); !bytes.Equal(c.owed[:k], p[:k]) {
		return 0, fmt.Errorf("%w: a write after a deadline must go on where the last one stopped", ErrUsage)
	}
	if err := c.raw.flush(); err != nil {
		return 0, err
	}
	n = min(len(c.owed), len(p))
	c.owed = c.owed[n:]
	for n < len(p) {
		k, err := c.Conn.Write(p[n:min(n+record, len(p))])
		if err != nil {
			return n, err
		}
		if err := c.raw.flush(); err != nil {
			c.owed = bytes.Clone(p[n : n+k])
			return n, err
		}
		n += k
	}
	return n, nil
}

// Close ends the connection at once. It leaves TLS's farewell out, which would
// wait for a peer that does not read: frames say themselves where they end.
func (c *secureConn) Close() error { return c.raw.Close() }

// heldBack is a connection whose Write always takes everything; what a
// deadline keeps from the network waits here for flush or the next Write. It is
// one record at most, since its user flushes after each.
type heldBack struct {
	net.Conn
	mu   sync.Mutex
	rest []byte
}

func (c *heldBack) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rest = append(c.rest, p...)
	if err := c.send(); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return 0, err
	}
	return len(p), nil
}

func (c *heldBack) flush() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.send()
}

func (c *heldBack) send() error {
	if len(c.rest) == 0 {
		return nil
	}
	n, err := c.Conn.Write(c.rest)
	c.rest = c.rest[:copy(c.rest, c.rest[n:])]
	return err
}

// secureListener shakes hands with callers beside each other and accepts those
// with whom that has succeeded.
type secureListener struct {
	Listener
	cfg   *tls.Config
	lobby *auth.Lobby // handshakes under way
	*gate

	rejected *auth.Tally
}

func newSecureListener(l Listener, cfg *tls.Config, rejected *auth.Tally) *secureListener {
	s := &secureListener{Listener: l, cfg: secured(cfg), lobby: auth.NewLobby(MaxCallers), gate: newGate(), rejected: rejected}
	s.tasks.Go(s.serve)
	return s
}

// serve takes callers until the listener closes.
func (s *secureListener) serve() {
	for s.ctx.Err() == nil {
		c, err := s.Listener.Accept()
		if err != nil {
			s.hand(accepted{err: err})
			continue
		}
		if s.lobby.Enter(c) {
			s.tasks.Go(func() { s.shake(c) })
		}
	}
}

// shake shakes hands with a caller.
func (s *secureListener) shake(c net.Conn) {
	ctx, cancel := context.WithTimeout(s.ctx, timing.Handshake)
	defer cancel()
	raw := &heldBack{Conn: c}
	sc := &secureConn{Conn: tls.Server(raw, s.cfg), raw: raw}
	err := sc.HandshakeContext(ctx)
	stays := s.lobby.Leave(c)
	if !stays || err != nil {
		c.Close() // a stranger's fault is no error here; it sees the alert or the end
		switch {
		case s.ctx.Err() != nil:
		case !stays:
			s.rejected.Add(auth.Crowded, 1)
		default:
			s.rejected.AddError(err)
		}
		return
	}
	s.hand(accepted{c: sc})
}

// Accept waits for a caller that has shaken hands.
func (s *secureListener) Accept() (net.Conn, error) { return s.gate.Accept() }

func (s *secureListener) Close() error {
	s.stop()
	err := s.Listener.Close()
	s.lobby.Close()
	s.tasks.Wait()
	return err
}
