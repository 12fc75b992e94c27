package comm

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/transport"
)

func secret(t *testing.T, s string) *tls.Config {
	t.Helper()
	cfg, err := transport.TLSFromSecret([]byte(s))
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// An endpoint with another secret, or none, gets no link and delays no other.
func TestSecrets(t *testing.T) {
	good, bad := secret(t, "the secret of these workers"), secret(t, "the secret of some others")
	refused := make(chan error, 1)
	es := cluster(t, 4, Config{OnLink: func(ev LinkEvent) {
		if ev.Peer.Worker == 0 && ev.Err != nil && !errors.Is(ev.Err, ErrClosed) {
			select {
			case refused <- ev.Err:
			default:
			}
		}
	}}, func(i int) transport.Transport {
		return []transport.TCP{{TLS: good}, {TLS: good}, {TLS: bad}, {}}[i]
	})
	silent, err := net.Dial("tcp", es[0].Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for _, e := range es[2:] {
		end := make(chan error, 1)
		go func() {
			_, err := e.Connect(ctx, es[0].Self())
			end <- err
		}()
		select {
		case err := <-end:
			t.Errorf("worker %v: %v", e.Self(), err)
		case err := <-refused:
			t.Log(err)
		}
		e.Close()
		<-end
	}
	if err := es[0].Send(ctx, es[1].Self(), user(1, 1), make([]byte, 100), Bulk); err != nil {
		t.Error(err)
	}
	for _, e := range es[:2] {
		for _, s := range e.Stats() {
			if s.Linked && s.Peer.Worker > 1 {
				t.Errorf("%v has a link with %v", e.Self(), s.Peer)
			}
		}
	}
}

// Nothing of a message can be read on the wire, and a flipped bit ends the
// connection.
func TestTLSOnTheWire(t *testing.T) {
	cfg := secret(t, "the secret of these workers")
	l, err := transport.TCP{TLS: cfg}.Listen("")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	plain, err := net.Listen("tcp", "127.0.0.1:0") // in the middle
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	text := strings.Repeat("nobody reads this", 10)
	seen := make(chan string, 1)
	go func() {
		in, err1 := plain.Accept()
		out, err2 := net.Dial("tcp", l.Addr())
		if errors.Join(err1, err2) != nil {
			close(seen)
			return
		}
		defer in.Close()
		defer out.Close()
		end := make(chan struct{})
		go func() {
			defer close(end)
			_, _ = io.Copy(in, out)
		}()
		var all strings.Builder
		buf := make([]byte, 64<<10)
		for {
			n, err := in.Read(buf)
			all.Write(buf[:n])
			if n == 5+17+1 { // a record with a single byte
				buf[10] ^= 1
			}
			if _, werr := out.Write(buf[:n]); err != nil || werr != nil {
				break
			}
		}
		out.Close()
		<-end
		seen <- all.String()
	}()
	c, err := transport.TCP{TLS: cfg}.Dial(t.Context(), plain.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	far, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	if _, err := c.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(text))
	if _, err := io.ReadFull(far, got); err != nil || string(got) != text {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := c.Write([]byte{7}); err != nil {
		t.Fatal(err)
	}
	if n, err := far.Read(got); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("a flipped bit went through: %d bytes, %v", n, err)
	}
	far.Close()
	c.Close()
	if s := <-seen; s == "" || strings.Contains(s, "nobody") {
		t.Errorf("on the wire: %q", s)
	}
}

func TestTLSFaults(t *testing.T) {
	if _, err := transport.TLSFromSecret(make([]byte, transport.MinSecret-1)); err == nil {
		t.Error("a short secret was taken")
	}
	if _, err := (transport.TCP{TLS: &tls.Config{}}).Listen(""); err == nil || !strings.Contains(err.Error(), "TCP.TLS") {
		t.Errorf("a configuration without a certificate: %v", err)
	}
	// A deadline in mid-record leaves a debt that must be paid first.
	l, err := transport.TCP{TLS: secret(t, "the secret of these workers")}.Listen("")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := transport.TCP{TLS: secret(t, "the secret of these workers")}.Dial(t.Context(), l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	far, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	c.SetWriteDeadline(past)
	if n, err := c.Write([]byte("abc")); n != 0 || err == nil {
		t.Fatalf("%d bytes, %v", n, err)
	}
	c.SetWriteDeadline(time.Time{})
	if _, err := c.Write([]byte("xyz")); !errors.Is(err, ErrUsage) {
		t.Errorf("other bytes instead: %v", err)
	}
	for _, part := range []string{"a", "bcd"} {
		if n, err := c.Write([]byte(part)); n != len(part) || err != nil {
			t.Errorf("%q: %d, %v", part, n, err)
		}
	}
	got := make([]byte, 4)
	if _, err := io.ReadFull(far, got); err != nil || string(got) != "abcd" {
		t.Errorf("%q, %v", got, err)
	}
}
