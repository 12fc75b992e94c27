package meet

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

func serve(t *testing.T, p Prover) (addr string, refused chan error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refused = make(chan error, 8)
	s, err := Serve(l, p, func() (string, error) { return "ticket", nil }, func(_ net.Addr, err error) { refused <- err })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return l.Addr().String(), refused
}

// Those with the key get the ticket; others nothing, whichever side they are on.
func TestKey(t *testing.T) {
	addr, refused := serve(t, Key("right"))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	ticket, err := Ask(ctx, []string{"127.0.0.1:1", addr}, Key("right"))
	if err != nil || ticket != "ticket" {
		t.Errorf("%q, %v", ticket, err)
	}
	if ticket, err := ask(ctx, addr, Key("wrong")); err == nil {
		t.Errorf("with another key: %q", ticket)
	}
	if err := <-refused; !errors.Is(err, errWrongKey) {
		t.Errorf("refused: %v", err)
	}
}

// recorder keeps the proofs that it makes, and gives the first one for all.
type recorder struct {
	Key
	first []byte
}

func (r *recorder) Prove(ctx context.Context, statement string) ([]byte, error) {
	proof, err := r.Key.Prove(ctx, statement)
	if r.first == nil {
		r.first = proof
	}
	return r.first, err
}

func TestReplay(t *testing.T) {
	addr, refused := serve(t, Key("right"))
	r := &recorder{Key: Key("right")}
	if ticket, err := ask(t.Context(), addr, r); err != nil || ticket != "ticket" {
		t.Fatal(ticket, err)
	}
	if ticket, err := ask(t.Context(), addr, r); err == nil {
		t.Errorf("a recorded proof: %q", ticket)
	}
	if err := <-refused; !errors.Is(err, errWrongKey) {
		t.Errorf("refused: %v", err)
	}
}

// A machine in the middle that passes proofs on gets no ticket.
func TestRelay(t *testing.T) {
	addr, _ := serve(t, Key("right"))
	cert, err := certificate()
	if err != nil {
		t.Fatal(err)
	}
	middle, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS13})
	if err != nil {
		t.Fatal(err)
	}
	defer middle.Close()
	seen := make(chan []byte, 1)
	go func() {
		c, err := middle.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		on, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			return
		}
		defer on.Close()
		go func() { _, _ = io.Copy(on, c) }()
		var b bytes.Buffer
		_, _ = io.Copy(io.MultiWriter(c, &b), on)
		seen <- b.Bytes()
	}()
	if ticket, err := ask(t.Context(), middle.Addr().String(), Key("right")); err == nil {
		t.Errorf("through another machine: %q", ticket)
	}
	if b := <-seen; len(b) > 0 {
		t.Errorf("the machine in the middle saw %d bytes", len(b))
	}
}

func TestFrameIsBounded(t *testing.T) {
	if _, err := readFrame(bytes.NewReader([]byte{0xff, 0xff, 0})); err == nil {
		t.Error("65535 bytes")
	}
	if err := writeFrame(io.Discard, make([]byte, maxFrame+1)); err == nil {
		t.Error("too many bytes")
	}
}
