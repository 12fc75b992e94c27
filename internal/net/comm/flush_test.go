package comm

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/transport"
)

// What was posted before Flush arrives although the endpoint closes right
// after it, with bytes of the others still unread.
func TestFlushThenClose(t *testing.T) {
	rounds := 10
	if testing.Short() {
		rounds = 3
	}
	eachTransport(t, func(t *testing.T, transport func(int) transport.Transport) {
		for range rounds {
			es := cluster(t, 3, Config{}, transport)
			var received []*Receiving
			for _, e := range es[1:] {
				for i, size := range sizes {
					received = append(received, e.Expect(user(1, i), make([]byte, size)))
					es[0].Post(e.Self(), user(1, i), pattern(size, byte(i)), Bulk)
				}
				for i := range 50 { // no peer asks for these
					e.Post(es[0].Self(), Key{Kind: KindUser, Step: 2, Dir: uint8(i), Lo: int64(e.Self().Worker)}, pattern(10_000, 1), Bulk)
				}
				es[0].Post(e.Self(), user(1, 100), []byte("the last"), Control)
			}
			if err := es[0].Flush(t.Context()); err != nil {
				t.Fatal(err)
			}
			es[0].Close()
			for j, r := range received {
				i := j % len(sizes)
				if n, _, err := r.Wait(t.Context()); err != nil || !bytes.Equal(r.buf[:n], pattern(sizes[i], byte(i))) {
					t.Errorf("message %d: %d bytes, %v", i, n, err)
				}
			}
			for _, e := range es[1:] { // it was early, and stayed
				buf := make([]byte, 8)
				if _, _, err := e.Receive(t.Context(), user(1, 100), buf); err != nil || string(buf) != "the last" {
					t.Errorf("the last message: %q, %v", buf, err)
				}
				e.Close()
			}
		}
	})
}

func TestFlushEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := transport.NewMem()
		es := cluster(t, 4, Config{}, func(int) transport.Transport { return m })
		if err := es[0].Flush(t.Context()); err != nil {
			t.Errorf("with nothing posted: %v", err)
		}
		flush := func(ctx context.Context) chan error {
			end := make(chan error, 1)
			go func() { end <- es[0].Flush(ctx) }()
			synctest.Wait()
			select {
			case err := <-end:
				t.Errorf("it did not wait: %v", err)
				end <- err
			default:
			}
			return end
		}
		// One that is not received waits for credit.
		s := es[0].Post(es[1].Self(), user(1, 1), make([]byte, 1<<20), Bulk)
		ctx, cancel := context.WithCancel(t.Context())
		end := flush(ctx)
		cancel()
		if err := <-end; !errors.Is(err, context.Canceled) {
			t.Errorf("with its context over: %v", err)
		}
		if err := es[0].Flush(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("with its context over before: %v", err)
		}
		// Eviction makes it pointless.
		end = flush(t.Context())
		members := []Peer{{es[2].Self(), es[2].Addr()}, {es[3].Self(), es[3].Addr()}, {id.Session{Worker: 9, Incarnation: 1}, "nowhere"}}
		if err := es[0].SetMembers(members); err != nil {
			t.Fatal(err)
		}
		if err := <-end; err != nil {
			t.Errorf("after the eviction: %v", err)
		}
		if err := s.Wait(t.Context()); !errors.Is(err, ErrNotMember) {
			t.Errorf("the message: %v", err)
		}
		// The peer that dies meanwhile is named, and the other's message arrives.
		es[0].Post(es[2].Self(), user(1, 2), make([]byte, 1<<20), Bulk)
		es[0].Post(es[3].Self(), user(1, 3), []byte("x"), Bulk)
		end = flush(t.Context())
		es[2].Close()
		err := <-end
		var ce *Error
		if !errors.Is(err, ErrLink) || !errors.As(err, &ce) || ce.Peer != es[2].Self() || !ce.Remote {
			t.Errorf("after the peer's death: %v", err)
		}
		if _, _, err := es[3].Receive(t.Context(), user(1, 3), make([]byte, 1)); err != nil {
			t.Error(err)
		}
		// A peer that does not read answers no sync.
		mute := call(t, m, es[0], id.Session{Worker: 9, Incarnation: 1})
		s = es[0].Post(id.Session{Worker: 9, Incarnation: 1}, user(1, 4), []byte("x"), Bulk)
		if err := s.Wait(t.Context()); err != nil {
			t.Error(err)
		}
		end = flush(t.Context())
		mute.Close()
		if err := <-end; !errors.Is(err, ErrLink) {
			t.Errorf("after a peer that does not answer: %v", err)
		}
		// Close ends it.
		es[0].Post(es[2].Self(), user(1, 5), make([]byte, 1<<20), Bulk)
		end = flush(t.Context())
		es[0].Close()
		if err := <-end; !errors.Is(err, ErrClosed) {
			t.Errorf("after close: %v", err)
		}
		if err := es[0].Flush(t.Context()); !errors.Is(err, ErrClosed) {
			t.Errorf("on a closed endpoint: %v", err)
		}
	})
}
