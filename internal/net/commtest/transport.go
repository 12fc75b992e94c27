package commtest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/comm"
)

// TestTransport checks the connections of a transport.
func TestTransport(t *testing.T, network Network) {
	for _, c := range []struct {
		name string
		test func(t *testing.T, near, far net.Conn)
	}{
		{"bytes pass in order both ways", testBytes},
		{"close lets the other side read to the end", testCloseEnd},
		{"close ends a read and a write that wait", testCloseUnblocks},
		{"a deadline ends a read and a write that wait", testDeadlines},
	} {
		t.Run(c.name, func(t *testing.T) {
			near, far := pipe(t, network)
			c.test(t, near, far)
		})
	}
	t.Run("dial to a closed listener fails", func(t *testing.T) {
		tr := network(t, 0)
		l, err := tr.Listen("")
		if err != nil {
			t.Fatal(err)
		}
		addr := l.Addr()
		l.Close()
		if c, err := tr.Dial(t.Context(), addr); err == nil {
			c.Close()
			t.Error("a closed listener answered")
		}
	})
	t.Run("dial ends with its context", func(t *testing.T) {
		tr := network(t, 0)
		l, err := tr.Listen("")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if c, err := tr.Dial(ctx, l.Addr()); err == nil {
			c.Close()
			t.Error("a dial with a context that has ended succeeded")
		}
	})
	t.Run("close ends accept", func(t *testing.T) {
		l, err := network(t, 0).Listen("")
		if err != nil {
			t.Fatal(err)
		}
		end := make(chan error)
		go func() {
			_, err := l.Accept()
			end <- err
		}()
		l.Close()
		if err := <-end; err == nil {
			t.Error("accept returned a connection")
		}
	})
}

// pipe returns two ends of a connection between worker 0 and worker 1.
func pipe(t *testing.T, network Network) (near, far net.Conn) {
	t.Helper()
	l, err := network(t, 1).Listen("")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var wg sync.WaitGroup
	var errs [2]error
	wg.Go(func() { near, errs[0] = network(t, 0).Dial(t.Context(), l.Addr()) })
	wg.Go(func() { far, errs[1] = l.Accept() })
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		near.Close()
		far.Close()
	})
	return near, far
}

// frame is bytes that begin with a valid header, because wrappers follow the
// frames.
func frame(n int) []byte {
	b := comm.Frame{Type: comm.FrameData, ID: 1, Len: n}.Append(nil)
	body := make([]byte, n)
	for i := range min(n, 4099) {
		body[i] = byte(i * i >> 3)
	}
	for at := 4099; at < n; at *= 2 {
		copy(body[at:], body[:at])
	}
	return append(b, body...)
}

func testBytes(t *testing.T, near, far net.Conn) {
	var wg sync.WaitGroup
	send := func(c net.Conn, skip int) {
		b := frame(1 << 20)
		for at := 0; at < len(b); skip = skip*3%9973 + 1 {
			n, err := c.Write(b[at:min(at+skip, len(b))])
			if err != nil {
				t.Error(err)
				return
			}
			at += n
		}
	}
	receive := func(c net.Conn) {
		want := frame(1 << 20)
		got := make([]byte, len(want))
		if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, want) {
			t.Errorf("other bytes arrived (%v)", err)
		}
	}
	wg.Go(func() { send(near, 1) })
	wg.Go(func() { send(far, 70) })
	wg.Go(func() { receive(near) })
	wg.Go(func() { receive(far) })
	wg.Wait()
}

func testCloseEnd(t *testing.T, near, far net.Conn) {
	want := frame(1000)
	if _, err := near.Write(want); err != nil {
		t.Fatal(err)
	}
	near.Close()
	got, err := io.ReadAll(far)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes and then %v, want %d and the end", len(got), err, len(want))
	}
	if _, err := near.Write(want); err == nil {
		t.Error("a closed connection took bytes")
	}
	if _, err := near.Read(got); err == nil {
		t.Error("a closed connection gave bytes")
	}
}

func testCloseUnblocks(t *testing.T, near, far net.Conn) {
	var wg sync.WaitGroup
	reading, writing := make(chan struct{}), make(chan struct{})
	wg.Go(func() {
		close(reading)
		if _, err := near.Read(make([]byte, 1)); err == nil {
			t.Error("a read of nothing succeeded")
		}
	})
	wg.Go(func() {
		close(writing)
		big := frame(32 << 20) // more than any buffer
		if n, err := near.Write(big); err == nil {
			t.Errorf("%d bytes were written to a closed connection", n)
		}
	})
	<-reading
	<-writing
	near.Close()
	wg.Wait()
}

func testDeadlines(t *testing.T, near, far net.Conn) {
	if _, err := far.Write(frame(0)); err != nil { // so that an accepted end is read once
		t.Fatal(err)
	}
	head := make([]byte, headerSize)
	if _, err := io.ReadFull(near, head); err != nil {
		t.Fatal(err)
	}
	near.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	if _, err := near.Read(head); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %v", err)
	}
	near.SetReadDeadline(time.Time{})

	big := frame(32 << 20)
	near.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
	n, err := near.Write(big)
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("write: %v", err)
	}
	// What was reported as written is what arrives, and the rest follows.
	near.SetWriteDeadline(time.Time{})
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := near.Write(big[n : n+1000]); err != nil {
			t.Errorf("write after the deadline: %v", err)
		}
	})
	got := make([]byte, n+1000)
	if _, err := io.ReadFull(far, got); err != nil || !bytes.Equal(got, big[:n+1000]) {
		t.Errorf("read %d bytes: %v", len(got), err)
	}
	wg.Wait()
}
