package comm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/timing"
)

// A stranger is a process that can reach the port of an endpoint and knows all about a run but its key.

// challengeSize is what an endpoint says to everybody.
const challengeSize = 16 + 40

// linked is a cluster in which all pairs have links, and the number of links that have ended since.
func linked(t *testing.T, n int, network func(int) transport.Transport) (es []*Endpoint, ended *atomic.Int64) {
	t.Helper()
	ended = new(atomic.Int64)
	es = cluster(t, n, Config{OnLink: func(ev LinkEvent) {
		if !ev.Up && ev.Link > 0 && !errors.Is(ev.Err, ErrClosed) && !errors.Is(ev.Err, ErrNotMember) {
			ended.Add(1)
		}
	}}, network)
	for _, e := range es {
		for _, o := range es {
			if _, err := e.Connect(t.Context(), o.Self()); err != nil {
				t.Fatal(err)
			}
		}
	}
	return es, ended
}

func dialled(t *testing.T, network func(int) transport.Transport, e *Endpoint) net.Conn {
	t.Helper()
	c, err := network(0).Dial(t.Context(), e.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// A forged hello of any session, with any number of a link, gets no answer but the challenge, and boundary tensors for coming
// steps behind it are not taken: no link ends, and the honest tensors arrive.
func TestForgedHello(t *testing.T) {
	forged := pattern(1000, 1)
	tensors := func() (b []byte) {
		for step := range uint64(5) {
			b = Frame{Type: FrameOpen, ID: step + 1, Key: user(step+1, 0), Size: int64(len(forged)), Eager: true}.Append(b)
			b = Frame{Type: FrameData, ID: step + 1, Len: len(forged)}.Append(b)
			b = append(b, forged...)
		}
		return b
	}()
	attacks := map[string]func(c net.Conn, hello Frame){
		"no proof": func(c net.Conn, hello Frame) { c.Write(append(hello.Append(nil), tensors...)) },
		"zeros for a proof": func(c net.Conn, hello Frame) {
			proof := make([]byte, 16+80)
			proof[0], proof[4] = 0xc2, 80
			c.Write(slices.Concat(proof, hello.Append(nil), tensors))
		},
		"another key": func(c net.Conn, hello Frame) {
			_ = auth.Call(c, auth.NewKey(), auth.Ends{From: hello.From, To: hello.To}, append(hello.Append(nil), tensors...))
		},
		"no key": func(c net.Conn, hello Frame) {
			_ = auth.Call(c, nil, auth.Ends{From: hello.From, To: hello.To}, append(hello.Append(nil), tensors...))
		},
	}
	eachTransport(t, func(t *testing.T, network func(int) transport.Transport) {
		es, ended := linked(t, 3, network)
		for name, attack := range attacks {
			for _, e := range es {
				for worker := range 4 {
					for incarnation := range 3 {
						for _, link := range []uint64{0, 1, 2, 1 << 40} {
							from := id.Session{Worker: id.WorkerID(worker), Incarnation: incarnation}
							c := dialled(t, network, e)
							heard := &counting{Conn: c}
							attack(heard, Frame{Type: FrameHello, From: from, To: e.Self(), Link: link, Pool: 1 << 20})
							_, _ = io.Copy(io.Discard, heard)
							if n := heard.n; n > challengeSize {
								t.Errorf("%s: %v got %d bytes from %v with link %d", name, from, n, e.Self(), link)
							}
							c.Close()
						}
					}
				}
			}
		}
		if n := ended.Load(); n > 0 {
			t.Errorf("%d links ended", n)
		}
		for _, s := range es[0].Stats() {
			if !s.Linked || s.Links != 1 {
				t.Errorf("link %d with %v, up: %v", s.Links, s.Peer, s.Linked)
			}
		}
		for step := range uint64(5) {
			buf := make([]byte, len(forged))
			if err := es[1].Send(t.Context(), es[0].Self(), user(step+1, 0), pattern(len(forged), 2), Bulk); err != nil {
				t.Fatal(err)
			}
			if _, from, err := es[0].Receive(t.Context(), user(step+1, 0), buf); err != nil || from != es[1].Self() || !bytes.Equal(buf, pattern(len(forged), 2)) {
				t.Errorf("step %d: a tensor from %v, %v", step+1, from, err)
			}
		}
	})
}

// counting counts what is read.
type counting struct {
	net.Conn
	n int
}

func (c *counting) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.n += n
	return n, err
}

// recorded is a mem network that keeps what callers write.
type recorded struct {
	*transport.Mem
	mu    sync.Mutex
	calls [][]byte
}

func (r *recorded) Dial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := r.Mem.Dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, nil)
	return &recordedConn{c, r, len(r.calls) - 1}, nil
}

type recordedConn struct {
	net.Conn
	r *recorded
	i int
}

func (c *recordedConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	c.r.calls[c.i] = append(c.r.calls[c.i], p[:n]...)
	return n, err
}

// All bytes of a link, sent once more, bring neither a link nor a message, while the link is up and after it is lost.
func TestReplay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &recorded{Mem: transport.NewMem()}
		network := func(int) transport.Transport { return r }
		es, ended := linked(t, 2, network)
		for i := range 3 {
			if err := es[0].Send(t.Context(), es[1].Self(), user(1, i), pattern(100, 1), Bulk); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		play := func() {
			for _, call := range slices.Clone(r.calls) {
				c, err := r.Mem.Dial(t.Context(), es[1].Addr())
				if err != nil {
					t.Fatal(err)
				}
				c.Write(call)
				if n, _ := io.Copy(io.Discard, c); n > challengeSize {
					t.Errorf("an answer of %d bytes", n)
				}
				c.Close()
			}
		}
		play()
		if n := ended.Load(); n > 0 {
			t.Errorf("%d links ended", n)
		}
		es[0].Close()
		synctest.Wait()
		for i := range 3 {
			if _, _, err := es[1].Receive(t.Context(), user(1, i), make([]byte, 100)); err != nil {
				t.Fatal(err)
			}
		}
		es[1].Advance(1)
		play()
		for _, s := range es[1].Stats() {
			if s.Linked || s.Links != 1 {
				t.Errorf("link %d with %v, up: %v", s.Links, s.Peer, s.Linked)
			}
		}
	})
}

// A session whose worker has a newer one gets no link, although it holds the key.
func TestOldIncarnation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := transport.NewMem()
		network := func(int) transport.Transport { return m }
		es, ended := linked(t, 2, network)
		old := es[1].Self()
		next, err := Listen(Config{Self: id.Session{Worker: old.Worker, Incarnation: old.Incarnation + 1}, Transport: m, Key: runKey})
		if err != nil {
			t.Fatal(err)
		}
		defer next.Close()
		if err := errors.Join(es[0].SetMembers([]Peer{{next.Self(), next.Addr()}}), next.SetMembers([]Peer{{es[0].Self(), es[0].Addr()}})); err != nil {
			t.Fatal(err)
		}
		if _, err := next.Connect(t.Context(), es[0].Self()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // until the old one knows that its link is over
		ended.Store(0)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := es[1].Connect(ctx, es[0].Self()); !errors.Is(err, ErrRefused) {
			t.Errorf("the old session connects: %v", err)
		}
		// Nor with the name of the new one in its hello alone.
		c := dialled(t, network, es[0])
		greetWith(t, c, Frame{From: old, To: es[0].Self()}, Frame{Type: FrameHello, From: next.Self(), To: es[0].Self(), Link: 1 << 40, Pool: 1}.Append(nil))
		if n, _ := io.Copy(io.Discard, c); n > 0 {
			t.Errorf("an answer of %d bytes", n)
		}
		for _, s := range es[0].Stats() {
			if !s.Linked || s.Links != 1 || s.Peer != next.Self() {
				t.Errorf("link %d with %v, up: %v", s.Links, s.Peer, s.Linked)
			}
		}
	})
}

// Callers that stay silent, as many as an endpoint takes, do not delay a member that joins.
func TestSquatters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := transport.NewMem()
		network := func(int) transport.Transport { return m }
		es := cluster(t, 2, Config{}, network)
		for _, e := range es {
			for range transport.MaxCallers {
				dialled(t, network, e)
			}
		}
		began := time.Now()
		if _, err := es[1].Connect(t.Context(), es[0].Self()); err != nil || time.Since(began) > timing.Redial {
			t.Errorf("joined after %v: %v", time.Since(began), err)
		}
	})
}

// Ten thousand connections that stay half open cost a bounded number of goroutines, end no link, and let a new one be made.
func TestHalfOpen(t *testing.T) {
	const callers = 10_000
	es, ended := linked(t, 2, inTCP)
	third, err := Listen(Config{Self: id.Session{Worker: 2, Incarnation: 1}, Transport: transport.TCP{}, Key: runKey})
	if err != nil {
		t.Fatal(err)
	}
	defer third.Close()
	members := []Peer{{es[0].Self(), es[0].Addr()}, {es[1].Self(), es[1].Addr()}, {third.Self(), third.Addr()}}
	for _, e := range append(es, third) {
		if err := e.SetMembers(members); err != nil {
			t.Fatal(err)
		}
	}
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	most := 0
	for i := range callers {
		c, err := net.Dial("tcp", es[0].Addr())
		if err != nil {
			t.Logf("the system allows %d connections: %v", i, err)
			break
		}
		conns = append(conns, c)
		if i%100 == 0 {
			most = max(most, runtime.NumGoroutine())
		}
		if i == callers/2 {
			if _, err := third.Connect(t.Context(), es[0].Self()); err != nil {
				t.Error(err)
			}
		}
	}
	if most > 4*transport.MaxCallers {
		t.Errorf("%d goroutines", most)
	}
	if err := es[1].Send(t.Context(), es[0].Self(), user(1, 1), []byte(fmt.Sprint(len(conns))), Bulk); err != nil {
		t.Error(err)
	}
	if n := ended.Load(); n > 0 {
		t.Errorf("%d links ended", n)
	}
}
