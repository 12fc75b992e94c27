//go:build linux && !portable

package group_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/commtest"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/net/transport"
)

// byLines is a network of hosts, on which the workers named cannot have lines.
func byLines(without ...int) commtest.Network {
	return func(_ testing.TB, i int) transport.Transport { return &linesOf{without: slices.Contains(without, i)} }
}

// linesOf is TCP whose connections cannot become lines, or which makes no more.
type linesOf struct {
	without bool
	full    atomic.Bool
}

type otherConn struct{ net.Conn }

func (l *linesOf) wrap(c net.Conn, err error) (net.Conn, error) {
	if err == nil && l.without {
		c = otherConn{c}
	}
	return c, err
}

func (l *linesOf) Dial(ctx context.Context, addr string) (net.Conn, error) {
	if l.full.Load() {
		return nil, errors.New("no more connections")
	}
	return l.wrap(transport.TCP{}.Dial(ctx, addr))
}

func (l *linesOf) Listen(addr string) (transport.Listener, error) {
	in, err := transport.TCP{}.Listen(addr)
	return linesListener{in, l}, err
}

type linesListener struct {
	transport.Listener
	l *linesOf
}

func (l linesListener) Accept() (net.Conn, error) { return l.l.wrap(l.Listener.Accept()) }

// Collectives have the same bits whether all pairs of members have lines, some, or none, and what passed is counted the same.
func TestLineBits(t *testing.T) {
	for n := 2; n <= 5; n++ {
		var want [][]byte
		var sent, received int64
		lengths := []int{0, 1, 1000, 4096, 4097, 9000, 70_001, 300_000}
		for i, without := range [][]int{{0, 1, 2, 3, 4}, {}, {1}, {0, n - 1}} {
			es, gs, v := team(t, n, byLines(without...))
			var got [][]byte
			for step, length := range lengths {
				got = append(got, results(t, gs, group.Call{Version: v, Step: uint64(step), Tag: 3, Priority: comm.Bulk}, length)...)
			}
			s, r, wire := passed(es)
			if i == 0 {
				want, sent, received = got, s, r
			}
			for k := range got {
				if !bytes.Equal(got[k], want[k]) {
					t.Errorf("%d members, %v without lines, %d numbers: rank %d has other bits", n, without, lengths[k/n], k%n)
				}
			}
			if s != sent || r != received || s == 0 || wire < s {
				t.Errorf("%d members, %v without lines: %d bytes sent, %d received, %d on the wire, want %d, %d, and more", n, without, s, r, wire, sent, received)
			}
			for _, e := range es {
				e.Close()
			}
		}
	}
}

func TestLinesSideBySide(t *testing.T) {
	sideBySide(t, inTCP)
	sideBySide(t, byLines(1))
}

// A root may run ahead by as much as lines keep.
func TestLinesRootAhead(t *testing.T) { rootAhead(t, inTCP) }

// What a member has sent arrives, also when that member begins the next version.
func TestLinesNextVersion(t *testing.T) { nextVersion(t, inTCP) }

// Waiting on lines ends with the context, with an edit, and with Close.
func TestLinesEnd(t *testing.T) {
	waitsEnd(t, inTCP)
	waitsEnd(t, byLines(2))
}

func TestLinesShape(t *testing.T) { limited(t, inTCP) }

// Each of two members may be the first to begin, and need not wait for the other's first collective.
func TestLinesFirst(t *testing.T) {
	for root := range 2 {
		_, gs, v := team(t, 2, inTCP)
		call := group.Call{Version: v, Step: 1}
		if err := gs[root].Broadcast(t.Context(), call, root, []byte("hello")); err != nil {
			t.Fatal(err)
		}
		if got := make([]byte, 5); gs[1-root].Broadcast(t.Context(), call, root, got) != nil || string(got) != "hello" {
			t.Errorf("%q", got)
		}
	}
}

// Where a line cannot be made, the pair uses its link.
func TestNoLine(t *testing.T) {
	var all []*linesOf
	_, gs, v := team(t, 3, func(testing.TB, int) transport.Transport {
		all = append(all, new(linesOf))
		return all[len(all)-1]
	})
	call := group.Call{Version: v, Step: 1, Priority: comm.Bulk}
	for _, l := range all {
		l.full.Store(true)
	}
	got := results(t, gs, call, 5000)
	_, gs, _ = team(t, 3, byLines(0, 1, 2))
	for rank, want := range results(t, gs, call, 5000) {
		if !bytes.Equal(got[rank], want) {
			t.Errorf("rank %d has other bits", rank)
		}
	}
}

// The death of a process ends operations on its lines; the next version goes on without it.
func TestLinesDeath(t *testing.T) {
	death(t, func() (string, commtest.Network) { return "", inTCP })
}
