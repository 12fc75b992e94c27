package admit

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/timing"
)

// ErrFingerprint means that an address leads to something else than the run of the ticket.
var ErrFingerprint = errors.New("another run, or another program, answers there")

// UnreachableError means that no address of a ticket leads to its run.
type UnreachableError struct {
	Addrs  []string
	Causes []error // one for each address
}

// Error implements error.
func (e *UnreachableError) Error() string {
	var b strings.Builder
	b.WriteString("no address of the ticket leads to its run")
	for i, a := range e.Addrs {
		cause := e.Causes[i]
		if op := (*net.OpError)(nil); errors.As(cause, &op) {
			cause = op.Err // the rest repeats the address
		}
		fmt.Fprintf(&b, "; %s: %v", a, cause)
	}
	return b.String()
}

// Unwrap returns the causes.
func (e *UnreachableError) Unwrap() []error { return e.Causes }

// RefusedError is what the run answers instead of a reply.
type RefusedError struct{ Text string }

// Error implements error.
func (e *RefusedError) Error() string { return "the run refuses this machine: " + e.Text }

// Dial shows the ticket's token to a machine of its run, sends a request and returns the reply, and the address that it came from. It tries
// all addresses at once, and keeps the first that proves the ticket's fingerprint; others get not a byte of the token or of the request.
// Errors are [UnreachableError], [RefusedError], ErrToken, ErrExpired, that of the context, or one of the connection.
func Dial(ctx context.Context, t Ticket, request []byte) (reply []byte, from net.Addr, err error) {
	return dial(ctx, (&net.Dialer{Control: platform.SmallSegments}).DialContext, t, request)
}

type dialer = func(ctx context.Context, network, addr string) (net.Conn, error)

func dial(ctx context.Context, connect dialer, t Ticket, request []byte) ([]byte, net.Addr, error) {
	if len(request) > MaxRequest {
		return nil, nil, fmt.Errorf("admit: a request of %d bytes, more than %d", len(request), MaxRequest)
	}
	c, err := reach(ctx, connect, t)
	if err != nil {
		return nil, nil, fmt.Errorf("admit: %w", err)
	}
	defer c.Close()
	broken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(broken)
		c.SetDeadline(time.Unix(1, 0))
	})
	rep, err := ask(c, t.Token, request)
	if !stop() {
		<-broken
		if err != nil {
			err = context.Cause(ctx)
		}
	}
	if errors.Is(err, io.EOF) {
		err = fmt.Errorf("it ended the connection without an answer; the run may be over: %w", err)
	}
	if err != nil {
		return nil, c.RemoteAddr(), fmt.Errorf("admit: %s: %w", c.RemoteAddr(), err)
	}
	return rep, c.RemoteAddr(), nil
}

// reach connects to the first address that proves the fingerprint.
func reach(ctx context.Context, connect dialer, t Ticket) (*tls.Conn, error) {
	try, cancel := context.WithTimeout(ctx, timing.Handshake)
	defer cancel()
	var (
		tasks  sync.WaitGroup
		mu     sync.Mutex
		first  *tls.Conn
		causes = make([]error, len(t.Addrs))
	)
	for i, addr := range t.Addrs {
		tasks.Go(func() {
			c, err := prove(try, connect, addr, t.Fingerprint)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				causes[i] = err
			case first != nil:
				c.Close()
			default:
				first = c
				cancel()
			}
		})
	}
	tasks.Wait()
	if first != nil {
		return first, nil
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return nil, context.Cause(ctx)
	}
	return nil, &UnreachableError{slices.Clone(t.Addrs), causes}
}

// prove connects to an address that proves the fingerprint.
func prove(ctx context.Context, connect dialer, addr string, want Fingerprint) (*tls.Conn, error) {
	raw, err := connect(ctx, "tcp", addr)
	if err == nil {
		c := tls.Client(raw, &tls.Config{
			MinVersion:         tls.VersionTLS13,
			InsecureSkipVerify: true, // instead of names and authorities, the key itself:
			VerifyConnection: func(s tls.ConnectionState) error {
				got := sha256.Sum256(s.PeerCertificates[0].RawSubjectPublicKeyInfo)
				if subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
					return ErrFingerprint
				}
				return nil
			},
		})
		if err = c.HandshakeContext(ctx); err == nil {
			return c, nil
		}
		raw.Close()
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("no answer in time: %w", ctx.Err())
	}
	return nil, err
}

// ask shows a token, sends a request and returns the reply.
func ask(c net.Conn, token Token, req []byte) ([]byte, error) {
	if _, err := c.Write(slices.Concat([]byte(magic), token[:])); err != nil {
		return nil, err
	}
	verdict, _, err := readFrame(c, admitted, unknown, expired)
	switch {
	case err != nil:
		return nil, err
	case verdict == unknown:
		return nil, ErrToken
	case verdict == expired:
		return nil, ErrExpired
	}
	if _, err := c.Write(frame(request, req)); err != nil {
		return nil, err
	}
	k, b, err := readFrame(c, reply, refused)
	switch {
	case err != nil:
		return nil, err
	case k == refused:
		return nil, &RefusedError{line(string(b))}
	}
	return b, nil
}
