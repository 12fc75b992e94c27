package admit

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/timing"
)

// maxJoiners bounds the connections that have shown a token. A new one beyond it closes the oldest.
const maxJoiners = 1024

// Config is what a [Server] needs.
type Config struct {
	// Secret is that of the run. The key of the certificate follows from it, so all machines of the run have the same.
	Secret []byte
	// Handle answers the request of a joiner whose token is good. Its context ends when the joiner or the server does. The
	// joiner gets the text of the error as one line.
	Handle func(ctx context.Context, from net.Addr, request []byte) (reply []byte, err error)
	// Refused, if it is not nil, is called for each connection that is cut off, by one goroutine at a time.
	Refused func(Refusal)
}

// Cause says why a connection was cut off.
type Cause int

// The causes.
const (
	WrongToken   Cause = iota
	ExpiredToken       // a token that was good
	Garbage            // bytes that are none of the protocol's
	Slow               // no whole message in time, or no room for the reply
	Crowded            // too many others came after it
	causes
)

// String returns the cause in words.
func (c Cause) String() string {
	return [causes]string{"wrong token", "expired token", "garbage", "slow", "crowded"}[c]
}

// Refusal is one connection that was cut off.
type Refusal struct {
	Cause Cause
	From  net.Addr
	Count int // of this cause so far
}

// Server admits machines to a run.
type Server struct {
	cfg      Config
	listener net.Listener
	tls      *tls.Config

	lobby, joiners *auth.Lobby
	ctx            context.Context
	stop           context.CancelFunc
	tasks          sync.WaitGroup

	tokens   issuer
	counting sync.Mutex
	counts   [causes]int
}

// Serve starts a server, which closes the listener in the end. It lets in whoever has a ticket by [Issue].
func Serve(l net.Listener, cfg Config) (*Server, error) {
	cert, _, tokens, err := identity(cfg.Secret)
	if err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, listener: l, tokens: tokens,
		tls:   &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, SessionTicketsDisabled: true},
		lobby: auth.NewLobby(transport.MaxCallers), joiners: auth.NewLobby(maxJoiners),
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.tasks.Go(s.serve)
	return s, nil
}

// Issue returns a ticket that is good for a time with every server of the run's secret, with addresses that lead to one.
func Issue(secret []byte, addrs []string, life time.Duration) (Ticket, error) {
	if err := checkAddrs(addrs); err != nil {
		return Ticket{}, fmt.Errorf("admit: %w", err)
	}
	_, fingerprint, tokens, err := identity(secret)
	if err != nil {
		return Ticket{}, err
	}
	t := Ticket{slices.Clone(addrs), fingerprint, tokens.issue(time.Now().Add(life))}
	if n := len(t.Text()); n > maxText {
		return Ticket{}, fmt.Errorf("admit: a ticket of %d bytes, more than %d: choose fewer addresses", n, maxText)
	}
	return t, nil
}

// identity returns what all servers of a run have in common.
func identity(secret []byte) (cert tls.Certificate, f Fingerprint, tokens issuer, err error) {
	if cert, err = transport.Certificate(secret, "admission"); err == nil {
		f = sha256.Sum256(cert.Leaf.RawSubjectPublicKeyInfo)
		tokens.key, err = auth.DeriveKey(secret, "tickets")
	}
	return cert, f, tokens, err
}

// Close closes the listener and all connections, and waits for the handlers.
func (s *Server) Close() error {
	s.stop()
	err := s.listener.Close()
	s.lobby.Close()
	s.joiners.Close()
	s.tasks.Wait()
	return err
}

// serve takes connections until the listener closes.
func (s *Server) serve() {
	for {
		c, err := auth.Accept(s.ctx, s.listener)
		if err != nil {
			return
		}
		if s.lobby.Enter(c) {
			s.tasks.Go(func() { s.receive(c) })
		}
	}
}

// receive has a caller show its token, and answers its request.
func (s *Server) receive(raw net.Conn) {
	defer raw.Close()
	raw.SetDeadline(time.Now().Add(timing.Handshake))
	c := tls.Server(raw, s.tls)
	token, err := hear(s.ctx, c)
	if !s.lobby.Leave(raw) {
		s.refuse(raw, Crowded)
		return
	}
	if err == nil {
		err = s.tokens.judge(token, time.Now())
		verdict := admitted
		switch {
		case errors.Is(err, ErrToken):
			verdict = unknown
		case errors.Is(err, ErrExpired):
			verdict = expired
		}
		_, sent := c.Write(frame(verdict, nil))
		err = errors.Join(err, sent)
	}
	if err == nil && s.joiners.Enter(raw) {
		err = s.answer(c)
		if !s.joiners.Leave(raw) {
			err = errCrowded
		}
	}
	if cause, refused := causeOf(err); refused {
		s.refuse(raw, cause)
		return
	}
	c.Close()
}

var (
	errCrowded = errors.New("too many joiners")
	errLeft    = errors.New("the joiner has left")
)

// hear shakes hands with a caller and reads its token.
func hear(ctx context.Context, c *tls.Conn) (Token, error) {
	if err := c.HandshakeContext(ctx); err != nil {
		return Token{}, err
	}
	var hello [helloSize]byte
	if _, err := io.ReadFull(c, hello[:]); err != nil {
		return Token{}, err
	}
	if string(hello[:len(magic)]) != magic {
		return Token{}, errGarbage
	}
	return Token(hello[len(magic):]), nil
}

// answer reads the request of a joiner and writes the reply.
func (s *Server) answer(c *tls.Conn) error {
	_, req, err := readFrame(c, request)
	if err != nil {
		return err
	}
	rep, err := s.handle(c, req)
	if errors.Is(err, errLeft) {
		return err
	}
	if err == nil && len(rep) > MaxReply {
		err = fmt.Errorf("the reply has %d bytes, more than %d", len(rep), MaxReply)
	}
	b := frame(reply, rep)
	if err != nil {
		b = frame(refused, []byte(line(err.Error())))
	}
	const chunk = 64 << 10 // a reader may be slow, but not stop
	for len(b) > 0 {
		c.SetWriteDeadline(time.Now().Add(timing.Handshake))
		n, err := c.Write(b[:min(chunk, len(b))])
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		} else if err != nil {
			return errLeft
		}
		b = b[n:]
	}
	return nil
}

// handle calls the handler. A joiner says nothing meanwhile: bytes from it, or its end, end the context.
func (s *Server) handle(c *tls.Conn, req []byte) ([]byte, error) {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	c.SetDeadline(time.Time{})
	var watch sync.WaitGroup
	defer watch.Wait()
	watch.Go(func() {
		_, _ = c.Read(make([]byte, 1))
		cancel()
	})
	defer c.SetReadDeadline(time.Unix(1, 0))
	rep, err := s.cfg.Handle(ctx, c.RemoteAddr(), req)
	if ctx.Err() != nil {
		return nil, errLeft
	}
	return rep, err
}

// causeOf says why a connection that ended with an error was cut off, and whether it was: a caller may leave by itself.
func causeOf(err error) (cause Cause, refused bool) {
	switch {
	case err == nil, errors.Is(err, errLeft), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return 0, false
	case errors.Is(err, ErrToken):
		return WrongToken, true
	case errors.Is(err, ErrExpired):
		return ExpiredToken, true
	case errors.Is(err, errCrowded):
		return Crowded, true
	case errors.Is(err, os.ErrDeadlineExceeded):
		return Slow, true
	}
	return Garbage, true
}

func (s *Server) refuse(c net.Conn, cause Cause) {
	if s.ctx.Err() != nil {
		return // the server has closed it
	}
	s.counting.Lock()
	defer s.counting.Unlock()
	s.counts[cause]++
	if s.cfg.Refused != nil {
		s.cfg.Refused(Refusal{cause, c.RemoteAddr(), s.counts[cause]})
	}
}
