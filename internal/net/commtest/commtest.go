// Package commtest holds what every transport of package comm must do, as
// tests that a transport runs, and the tools of those tests.
//
//	func TestMine(t *testing.T) {
//		commtest.TestTransport(t, func(testing.TB, int) comm.Transport { return mine })
//		commtest.TestEndpoints(t, func(testing.TB, int) comm.Transport { return mine })
//	}
//
// TestTransport is about connections, TestEndpoints about messages and groups
// on top of them: all that comm promises holds on every transport, or the
// transport is at fault. [Counter] wraps a transport and counts what passes,
// to hold operations against comm's cost model.
package commtest

import (
	"context"
	"encoding/binary"
	"net"
	"sync"
	"testing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/net/transport"
)

// Network returns the transport of worker i; all workers of one test are on
// one network.
type Network func(tb testing.TB, i int) transport.Transport

// Key is the key of all endpoints of [Cluster], the same in every process.
var Key = auth.Key("the key of all runs of the tests")

// Cluster opens n endpoints that admit each other, workers 0 to n-1 in their
// first incarnation, and closes them with the test.
func Cluster(tb testing.TB, n int, cfg comm.Config, network Network) ([]*comm.Endpoint, []comm.Peer) {
	tb.Helper()
	var es []*comm.Endpoint
	var members []comm.Peer
	for i := range n {
		c := cfg
		c.Key = Key
		c.Self, c.Transport = id.Session{Worker: id.WorkerID(i), Incarnation: 1}, network(tb, i)
		e, err := comm.Listen(c)
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { e.Close() })
		es = append(es, e)
		members = append(members, comm.Peer{Session: e.Self(), Addr: e.Addr()})
	}
	for _, e := range es {
		if err := e.SetMembers(members); err != nil {
			tb.Fatal(err)
		}
	}
	return es, members
}

// Groups makes one group of all endpoints in their order, edited to the given
// version.
func Groups(tb testing.TB, es []*comm.Endpoint, id uint16, v id.Version) []*group.Group {
	tb.Helper()
	gs := make([]*group.Group, len(es))
	for i, e := range es {
		g, err := group.New(e, id)
		if err != nil {
			tb.Fatal(err)
		}
		gs[i] = g
	}
	Edit(tb, gs, v, es)
	return gs
}

// Edit edits all groups to the members es.
func Edit(tb testing.TB, gs []*group.Group, v id.Version, es []*comm.Endpoint) (opened int) {
	tb.Helper()
	var members []id.Session
	for _, e := range es {
		members = append(members, e.Self())
	}
	var mu sync.Mutex
	Each(tb, gs, func(_ int, g *group.Group) error {
		n, err := g.Edit(context.Background(), v, members)
		mu.Lock()
		defer mu.Unlock()
		opened += n
		return err
	})
	return opened
}

// Each calls f side by side for all groups, and fails the test on an error.
func Each(tb testing.TB, gs []*group.Group, f func(rank int, g *group.Group) error) {
	tb.Helper()
	var wg sync.WaitGroup
	for i, g := range gs {
		wg.Go(func() {
			if err := f(i, g); err != nil {
				tb.Errorf("rank %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	if tb.Failed() {
		tb.FailNow()
	}
}

// Counter counts the frames that pass through the transports it wraps, in
// both directions once.
type Counter struct {
	mu       sync.Mutex
	messages int
	bytes    int64
	dials    int
	busiest  map[int]int64 // bytes by worker
}

// NewCounter returns a counter at zero.
func NewCounter() *Counter { return &Counter{busiest: make(map[int]int64)} }

// Count is what a [Counter] has seen.
type Count struct {
	Messages int   // announced
	Bytes    int64 // of messages' data
	Busiest  int64 // of them, sent by the worker that sent most
	Dials    int
}

// Take returns the counts since the last Take.
func (c *Counter) Take() Count {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := Count{Messages: c.messages, Bytes: c.bytes, Dials: c.dials}
	for _, b := range c.busiest {
		n.Busiest = max(n.Busiest, b)
	}
	c.messages, c.bytes, c.dials = 0, 0, 0
	clear(c.busiest)
	return n
}

// Network wraps all transports of a network.
func (c *Counter) Network(inner Network) Network {
	return func(tb testing.TB, i int) transport.Transport { return &counted{c, i, inner(tb, i)} }
}

type counted struct {
	c     *Counter
	i     int
	inner transport.Transport
}

func (t *counted) Listen(addr string) (transport.Listener, error) {
	l, err := t.inner.Listen(addr)
	if err != nil {
		return nil, err
	}
	return &countedListener{l, t}, nil
}

func (t *counted) Dial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := t.inner.Dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	t.c.mu.Lock()
	t.c.dials++
	t.c.mu.Unlock()
	return &countedConn{Conn: c, t: t}, nil
}

type countedListener struct {
	transport.Listener
	t *counted
}

func (l *countedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &countedConn{Conn: c, t: l.t}, nil
}

// countedConn follows the frames in what is written.
type countedConn struct {
	net.Conn
	t    *counted
	head []byte
	body int
}

func (c *countedConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.t.c.mu.Lock()
	defer c.t.c.mu.Unlock()
	for rest := p[:n]; len(rest) > 0; {
		if c.body > 0 {
			k := min(c.body, len(rest))
			if comm.FrameType(c.head[0]) == comm.FrameData {
				c.t.c.bytes += int64(k)
				c.t.c.busiest[c.t.i] += int64(k)
			}
			c.body -= k
			rest = rest[k:]
		} else {
			if len(c.head) == headerSize {
				c.head = c.head[:0]
			}
			k := min(headerSize-len(c.head), len(rest))
			c.head = append(c.head, rest[:k]...)
			rest = rest[k:]
			if len(c.head) == headerSize {
				c.body = int(binary.LittleEndian.Uint32(c.head[4:]))
				if comm.FrameType(c.head[0]) == comm.FrameOpen {
					c.t.c.messages++
				}
			}
		}
	}
	return n, err
}

// headerSize is the size of a frame's header in comm's wire format.
const headerSize = 16
