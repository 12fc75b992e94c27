package comm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/transport"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// runKey is the key of all endpoints of cluster.
var runKey = auth.NewKey()

// cluster opens n endpoints that admit each other, and closes them with the
// test.
func cluster(t testing.TB, n int, cfg Config, transport func(i int) transport.Transport) []*Endpoint {
	t.Helper()
	var es []*Endpoint
	var members []Peer
	for i := range n {
		c := cfg
		if c.Key == nil {
			c.Key = runKey
		}
		c.Self, c.Transport = id.Session{Worker: id.WorkerID(i), Incarnation: 1}, transport(i)
		e, err := Listen(c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.Close() })
		es = append(es, e)
		members = append(members, Peer{e.Self(), e.Addr()})
	}
	for _, e := range es {
		if err := e.SetMembers(members); err != nil {
			t.Fatal(err)
		}
	}
	return es
}

// inMem puts all workers on one network in memory.
func inMem() func(int) transport.Transport {
	m := transport.NewMem()
	return func(int) transport.Transport { return m }
}

func inTCP(int) transport.Transport { return transport.TCP{} }

// inHost puts all workers on one host.
func inHost(t testing.TB) func(int) transport.Transport {
	folder := t.TempDir()
	return func(i int) transport.Transport { return transport.Host{Folder: folder, Name: fmt.Sprint(i)} }
}

// inSockets is inHost, where no memory of a peer is read.
func inSockets(t testing.TB) func(int) transport.Transport {
	folder := t.TempDir()
	return func(i int) transport.Transport {
		return transport.Host{Folder: folder, Name: fmt.Sprint(i), Sockets: true}
	}
}

func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7+i>>8) + seed
	}
	return b
}

func user(step uint64, i int) Key { return Key{Kind: KindUser, Step: step, Lo: int64(i)} }

var sizes = []int{0, 1, 1000, 32 << 10, 32<<10 + 1, 300 << 10, 5 << 20}

// eachTransport runs a test on mem, in a bubble, on tcp, and on one host with and without reads of memory.
func eachTransport(t *testing.T, test func(t *testing.T, transport func(int) transport.Transport)) {
	t.Run("mem", func(t *testing.T) { synctest.Test(t, func(t *testing.T) { test(t, inMem()) }) })
	t.Run("tcp", func(t *testing.T) { test(t, inTCP) })
	t.Run("host", func(t *testing.T) { test(t, inHost(t)) })
	t.Run("sockets", func(t *testing.T) { test(t, inSockets(t)) })
}

func TestSendReceive(t *testing.T) {
	eachTransport(t, func(t *testing.T, transport func(int) transport.Transport) {
		es := cluster(t, 2, Config{}, transport)
		ctx := t.Context()
		for _, posted := range []bool{true, false} {
			var wg sync.WaitGroup
			for i, size := range sizes {
				key := user(1, i)
				if posted {
					key.Dir = 1
				}
				send := func() {
					if err := es[0].Send(ctx, es[1].Self(), key, pattern(size, byte(i)), Bulk); err != nil {
						t.Error(err)
					}
				}
				receive := func() {
					buf := make([]byte, size)
					n, from, err := es[1].Receive(ctx, key, buf)
					if err != nil || n != size || from != es[0].Self() || !bytes.Equal(buf, pattern(size, byte(i))) {
						t.Errorf("%v: %d bytes from %v: %v", key, n, from, err)
					}
				}
				if posted {
					wg.Go(receive)
					wg.Go(send)
				} else {
					wg.Go(send)
					wg.Go(receive)
				}
			}
			wg.Wait()
		}
	})
}

func TestSecondCopyIsDropped(t *testing.T) {
	eachTransport(t, func(t *testing.T, transport func(int) transport.Transport) {
		es := cluster(t, 3, Config{}, transport)
		ctx := t.Context()
		for i, size := range sizes {
			key := user(1, i)
			var copies []*Sending
			for _, e := range es[1:] {
				copies = append(copies, e.Post(es[0].Self(), key, pattern(size, 3), Bulk))
			}
			buf := make([]byte, size)
			if _, _, err := es[0].Receive(ctx, key, buf); err != nil || !bytes.Equal(buf, pattern(size, 3)) {
				t.Fatalf("size %d: %v", size, err)
			}
			// A copy after the receive ends too, and nothing is kept of it.
			copies = append(copies, es[1].Post(es[0].Self(), key, pattern(size, 3), Bulk))
			for _, s := range copies {
				if err := s.Wait(ctx); err != nil {
					t.Errorf("size %d: %v", size, err)
				}
			}
			if _, _, err := es[0].Receive(ctx, key, buf); !errors.Is(err, ErrDuplicate) {
				t.Errorf("size %d: second receive: %v", size, err)
			}
		}
	})
}

func TestReceiveEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		es := cluster(t, 2, Config{}, inMem())
		var wg sync.WaitGroup
		wait := func(want error, ctx context.Context, key Key) *Receiving {
			r := es[0].Expect(key, make([]byte, 10))
			wg.Go(func() {
				if _, _, err := r.Wait(ctx); !errors.Is(err, want) {
					t.Errorf("%v: %v, want %v", key, err, want)
				}
			})
			return r
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		wait(context.DeadlineExceeded, ctx, user(1, 1))
		wait(ErrStale, t.Context(), user(1, 2))
		wait(ErrSize, t.Context(), user(3, 3))
		wait(ErrSize, t.Context(), user(3, 4))
		wait(ErrClosed, t.Context(), user(3, 5))
		synctest.Wait()
		time.Sleep(2 * time.Second)
		es[0].Advance(2)
		if err := es[1].Send(t.Context(), es[0].Self(), user(3, 3), make([]byte, 11), Bulk); err != nil {
			t.Error(err)
		}
		es[1].Post(es[0].Self(), user(3, 4), make([]byte, 1<<20), Bulk)
		synctest.Wait()
		es[0].Close()
		wg.Wait()
		if err := es[1].Send(t.Context(), id.Session{Worker: 9, Incarnation: 1}, user(1, 1), nil, Bulk); !errors.Is(err, ErrNotMember) {
			t.Errorf("send to a stranger: %v", err)
		}
	})
}

func TestSendEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		es := cluster(t, 3, Config{}, inMem())
		var wg sync.WaitGroup
		wait := func(want error, ctx context.Context, to id.Session, key Key) {
			s := es[0].Post(to, key, make([]byte, 1<<20), Bulk)
			wg.Go(func() {
				if err := s.Wait(ctx); !errors.Is(err, want) {
					t.Errorf("%v: %v, want %v", key, err, want)
				}
			})
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		wait(context.DeadlineExceeded, ctx, es[1].Self(), user(1, 1))
		wait(ErrStale, t.Context(), es[1].Self(), user(1, 2))
		wait(ErrNotMember, t.Context(), es[1].Self(), user(3, 3))
		wait(ErrLink, t.Context(), es[2].Self(), user(3, 4))
		synctest.Wait()
		time.Sleep(2 * time.Second)
		es[0].Advance(2)
		es[0].SetMembers([]Peer{{es[2].Self(), es[2].Addr()}})
		es[2].Close()
		synctest.Wait()
		wait(ErrClosed, t.Context(), es[2].Self(), user(3, 5))
		synctest.Wait()
		es[0].Close()
		wg.Wait()
	})
}

// A cancelled call returns although the other side neither sends nor reads,
// and the link is whole afterwards.
func TestCancelInMidMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := transport.NewMem()
		gate := &gated{Mem: net}
		es := cluster(t, 2, Config{}, func(i int) transport.Transport {
			if i == 0 {
				return gate
			}
			return net
		})
		if _, err := es[0].Connect(t.Context(), es[1].Self()); err != nil {
			t.Fatal(err)
		}
		const size = 10 << 20
		data := pattern(size, 1)
		run := func(cancelSend bool, key Key) {
			sendCtx, cancelSending := context.WithCancel(t.Context())
			receiveCtx, cancelReceiving := context.WithCancel(t.Context())
			defer cancelSending()
			defer cancelReceiving()
			r := es[1].Expect(key, make([]byte, size))
			gate.hold(1 << 20)
			s := es[0].Post(es[1].Self(), key, data, Bulk)
			var wg sync.WaitGroup
			if cancelSend {
				wg.Go(func() {
					if err := s.Wait(sendCtx); !errors.Is(err, context.Canceled) {
						t.Errorf("send: %v", err)
					}
				})
				synctest.Wait()
				cancelSending()
			} else {
				wg.Go(func() {
					if _, _, err := r.Wait(receiveCtx); !errors.Is(err, context.Canceled) {
						t.Errorf("receive: %v", err)
					}
				})
				synctest.Wait()
				cancelReceiving()
			}
			wg.Wait()
			gate.hold(-1)
			if cancelSend {
				// Another copy still finds the receive.
				s = es[0].Post(es[1].Self(), key, data, Bulk)
				if n, _, err := r.Wait(t.Context()); err != nil || !bytes.Equal(r.buf[:n], data) {
					t.Errorf("receive of the second copy: %v", err)
				}
			}
			if err := s.Wait(t.Context()); err != nil {
				t.Errorf("send: %v", err)
			}
			small := key
			small.Dir++
			es[0].Post(es[1].Self(), small, []byte("whole"), Bulk)
			buf := make([]byte, 10)
			if n, _, err := es[1].Receive(t.Context(), small, buf); err != nil || string(buf[:n]) != "whole" {
				t.Errorf("after the cancel: %q %v", buf[:n], err)
			}
		}
		run(true, user(1, 1))
		run(false, user(1, 2))
	})
}

// With Incast 1, the receiver has credit with one sender at a time.
func TestIncast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		es := cluster(t, 5, Config{Incast: 2, Ahead: 1}, inMem())
		var wg sync.WaitGroup
		for i, e := range es[1:] {
			for j := range 3 {
				e.Post(es[0].Self(), user(1, 10*i+j), pattern(100<<10, byte(i+j)), Bulk)
			}
		}
		synctest.Wait()
		es[0].lock()
		if es[0].in.active != 0 {
			t.Errorf("%d senders have credit for nothing", es[0].in.active)
		}
		es[0].unlock()
		for i := range 4 {
			for j := range 3 {
				r := es[0].Expect(user(1, 10*i+j), make([]byte, 100<<10))
				r.OnDone(func() {
					es[0].lock()
					defer es[0].unlock()
					if n := es[0].in.active; n > 2 {
						t.Errorf("%d senders have credit", n)
					}
				})
				wg.Go(func() {
					if _, _, err := r.Wait(t.Context()); err != nil || !bytes.Equal(r.buf, pattern(100<<10, byte(i+j))) {
						t.Error(err)
					}
				})
			}
		}
		wg.Wait()
	})
}

// An evicted session's early messages are thrown away, and another session's
// copy counts.
func TestEvictionDiscards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		es := cluster(t, 3, Config{}, inMem())
		for _, e := range es[1:] {
			e.Post(es[0].Self(), user(1, 1), []byte{byte(e.Self().Worker)}, Bulk)
			synctest.Wait()
		}
		if err := es[0].SetMembers([]Peer{{es[2].Self(), es[2].Addr()}}); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 1)
		if _, from, err := es[0].Receive(t.Context(), user(1, 1), buf); err != nil || from != es[2].Self() || buf[0] != 2 {
			t.Errorf("received %v from %v: %v", buf, from, err)
		}
		// The evicted one is refused when it calls again.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		synctest.Wait()
		if _, err := es[1].Connect(ctx, es[0].Self()); !errors.Is(err, ErrRefused) {
			t.Errorf("the evicted worker's call: %v", err)
		}
	})
}

// A new incarnation is another session.
func TestIncarnations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		es := cluster(t, 2, Config{}, inMem())
		if _, err := es[0].Connect(t.Context(), es[1].Self()); err != nil {
			t.Fatal(err)
		}
		again := Peer{id.Session{Worker: 1, Incarnation: 2}, es[1].Addr()}
		if err := es[0].SetMembers([]Peer{again}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := es[0].Connect(ctx, again.Session); !errors.Is(err, ErrRefused) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("connect to an incarnation that is not there: %v", err)
		}
		if err := es[0].Send(t.Context(), es[1].Self(), user(1, 1), nil, Bulk); !errors.Is(err, ErrNotMember) {
			t.Errorf("send to the old incarnation: %v", err)
		}
	})
}

// All pairs call each other at once: one link is made for each pair, on which
// messages pass both ways.
func TestSimultaneousDials(t *testing.T) {
	for _, transport := range []func(int) transport.Transport{inMem(), inTCP} {
		for range 20 {
			const n = 5
			es := cluster(t, n, Config{}, transport)
			var wg sync.WaitGroup
			for i, e := range es {
				wg.Go(func() {
					for _, to := range es {
						if e != to {
							e.Post(to.Self(), user(1, i), pattern(50<<10, byte(i)), Bulk)
						}
					}
					for j, from := range es {
						buf := make([]byte, 50<<10)
						if e == from {
							continue
						}
						if _, _, err := e.Receive(t.Context(), user(1, j), buf); err != nil || !bytes.Equal(buf, pattern(50<<10, byte(j))) {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			for _, e := range es {
				for _, s := range e.Stats() {
					if s.Links != 1 {
						t.Errorf("workers %v and %v have had %d links", e.Self(), s.Peer, s.Links)
					}
				}
			}
			for _, e := range es {
				e.Close()
			}
		}
	}
}

// Control messages overtake bulk, and lower numbers higher ones.
func TestPriorities(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := transport.NewMem()
		gate := &gated{Mem: net}
		es := cluster(t, 2, Config{Chunk: 64 << 10}, func(i int) transport.Transport {
			if i == 0 {
				return gate
			}
			return net
		})
		if _, err := es[0].Connect(t.Context(), es[1].Self()); err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		var order []string
		expect := func(name string, i, size int) {
			es[1].Expect(user(1, i), make([]byte, size)).OnDone(func() {
				mu.Lock()
				defer mu.Unlock()
				order = append(order, name)
			})
		}
		expect("low", 1, 4<<20)
		expect("high", 2, 4<<20)
		expect("control", 3, 100)
		gate.hold(1 << 20)
		es[0].Post(es[1].Self(), user(1, 1), make([]byte, 4<<20), Bulk+9)
		synctest.Wait() // a megabyte of it is gone, and the writer sits in its next chunk
		es[0].Post(es[1].Self(), user(1, 2), make([]byte, 4<<20), Bulk+1)
		synctest.Wait()
		es[0].Post(es[1].Self(), user(1, 3), make([]byte, 100), Control)
		synctest.Wait()
		gate.hold(-1)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		if got := fmt.Sprint(order); got != "[control high low]" {
			t.Errorf("messages ended in the order %s", got)
		}
	})
}
