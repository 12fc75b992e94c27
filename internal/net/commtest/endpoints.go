package commtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/group"
)

// TestEndpoints checks messages and groups over a transport.
func TestEndpoints(t *testing.T, network Network) {
	for _, c := range []struct {
		name string
		test func(t *testing.T, network Network)
	}{
		{"messages of all sizes pass between all pairs", testMessages},
		{"collectives agree with a plain computation", testCollectives},
		{"a tree reduction has the bits of the tree", testTree},
		{"edit opens only links that did not exist", testEdit},
		{"the death of an endpoint that is no member changes nothing", testStranger},
		{"an evicted session is fenced, its successor is not", testFence},
		{"a flush before the end loses nothing", testFlush},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, network) })
	}
}

// small are settings under which little data takes all paths.
var small = comm.Config{Chunk: 1 << 10, Eager: 256, Pool: 2 << 10, Incast: 2, Ahead: 4 << 10, Segment: 512}

func content(n, seed int) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(uint64(n), uint64(seed)))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func testMessages(t *testing.T, network Network) {
	const n = 4
	sizes := []int{0, 1, 255, 256, 257, 1 << 10, 10_000, 300_000}
	for _, cfg := range []comm.Config{{}, small, {Eager: -1}} {
		es, _ := Cluster(t, n, cfg, network)
		var wg sync.WaitGroup
		for from, e := range es {
			for to, other := range es {
				if from == to {
					continue
				}
				for i, size := range sizes {
					key := comm.Key{Kind: comm.KindUser, Step: 1, Layer: int32(from), Micro: int32(to), Lo: int64(i)}
					wg.Go(func() {
						if err := e.Send(t.Context(), other.Self(), key, content(size, i), comm.Priority(i)); err != nil {
							t.Error(err)
						}
					})
					wg.Go(func() {
						buf := make([]byte, size)
						got, who, err := other.Receive(t.Context(), key, buf)
						if err != nil || got != size || who != e.Self() || !bytes.Equal(buf, content(size, i)) {
							t.Errorf("%v: %d bytes of %v, %v", key, got, who, err)
						}
					})
				}
			}
		}
		wg.Wait()
		for _, e := range es {
			e.Close()
		}
	}
}

func floats(n, seed int) []float32 {
	x := make([]float32, n)
	r := rand.New(rand.NewPCG(uint64(n), uint64(seed)))
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return x
}

func same(a, b []float32) bool {
	return bytes.Equal(comm.Bytes(a), comm.Bytes(b))
}

func testCollectives(t *testing.T, network Network) {
	for _, n := range []int{1, 2, 3, 4, 5, 8} {
		es, _ := Cluster(t, n, small, network)
		v := id.Version{Generation: 1, N: 1}
		gs := Groups(t, es, 7, v)
		for _, a := range []group.Algorithm{group.Ring, group.Direct, group.Pairwise, group.Halving, group.Auto} {
			for step, length := range []int{0, 1, n, 100, 3001} {
				if t.Failed() {
					return
				}
				call := group.Call{Version: v, Step: uint64(step), Tag: uint16(a), Algorithm: a, Priority: comm.Bulk}
				where := fmt.Sprintf("%d members, %v, %d elements", n, a, length)
				testOne(t, where, gs, call, length)
			}
		}
		for _, e := range es {
			e.Close()
		}
	}
}

func testOne(t *testing.T, where string, gs []*group.Group, call group.Call, length int) {
	n := len(gs)
	sum := make([]float64, length)
	for i := range n {
		for j, x := range floats(length, i) {
			sum[j] += float64(x)
		}
	}
	near := func(got []float32, want []float64) bool {
		for i := range got {
			if math.Abs(float64(got[i])-want[i]) > 1e-5*float64(n) {
				return false
			}
		}
		return true
	}
	Each(t, gs, func(_ int, g *group.Group) error { return g.Barrier(context.Background(), call) })

	root := length % n
	Each(t, gs, func(rank int, g *group.Group) error {
		buf := make([]byte, length)
		if rank == root {
			buf = content(length, 5)
		}
		if err := g.Broadcast(context.Background(), call, root, buf); err != nil {
			return err
		}
		if !bytes.Equal(buf, content(length, 5)) {
			return errors.New("broadcast: other bytes")
		}
		return nil
	})

	parts := group.Parts(length, n)
	if n > 2 { // an empty one
		parts[1] = 0
	}
	Each(t, gs, func(rank int, g *group.Group) error {
		want := content(length, 6)
		buf := make([]byte, length)
		copy(buf[parts[rank]:parts[rank+1]], want[parts[rank]:])
		if err := g.AllGather(context.Background(), call, buf, parts); err != nil {
			return err
		}
		if !bytes.Equal(buf, want) {
			return errors.New("all-gather: other bytes")
		}
		return nil
	})

	Each(t, gs, func(rank int, g *group.Group) error {
		buf := floats(length, rank)
		if err := g.ReduceScatter(context.Background(), call, buf, parts); err != nil {
			return err
		}
		if lo, hi := parts[rank], parts[rank+1]; !near(buf[lo:hi], sum[lo:hi]) {
			return fmt.Errorf("%s: reduce-scatter: another sum", where)
		}
		return nil
	})

	all := make([][]float32, n)
	Each(t, gs, func(rank int, g *group.Group) error {
		all[rank] = floats(length, rank)
		if err := g.AllReduce(context.Background(), call, all[rank]); err != nil {
			return err
		}
		if !near(all[rank], sum) {
			return fmt.Errorf("%s: all-reduce: another sum", where)
		}
		return nil
	})
	for rank := range all {
		if !same(all[rank], all[0]) {
			t.Errorf("%s: all-reduce: rank %d has other bits than rank 0", where, rank)
		}
	}
}

// Sum is the sum of a node by the definition of the tree.
func Sum(n tree.Node, leaf func(m int) []float32) []float32 {
	if n.Size() == 1 {
		return leaf(n.Lo)
	}
	l, r := n.Split()
	a, b := Sum(l, leaf), Sum(r, leaf)
	out := make([]float32, len(a))
	for i := range out {
		out[i] = a[i] + b[i]
	}
	return out
}

// Maximal returns the maximal nodes of the tree of m micro-batches whose
// leaves all belong to rank.
func Maximal(m int, owner []int, rank int) (nodes []tree.Node) {
	var walk func(n tree.Node)
	walk = func(n tree.Node) {
		whole := true
		for i := n.Lo; i < n.Hi; i++ {
			whole = whole && owner[i] == rank
		}
		if whole {
			nodes = append(nodes, n)
		} else if n.Size() > 1 {
			l, r := n.Split()
			walk(l)
			walk(r)
		}
	}
	walk(tree.Root(m))
	return nodes
}

// Routes returns ways to give m micro-batches to n ranks: contiguous and even,
// contiguous with random borders, and at random.
func Routes(m, n int, seed uint64) [][]int {
	r := rand.New(rand.NewPCG(seed, uint64(m)))
	even, uneven, random := make([]int, m), make([]int, m), make([]int, m)
	rank := 0
	for i := range m {
		even[i] = i * n / m
		if rank < n-1 && r.IntN(m) < n {
			rank++
		}
		uneven[i] = rank
		random[i] = r.IntN(n)
	}
	return [][]int{even, uneven, random}
}

func testTree(t *testing.T, network Network) {
	const layers, width = 2, 500
	for n := 1; n <= 4; n++ {
		es, _ := Cluster(t, n, small, network)
		v := id.Version{Generation: 1, N: 1}
		gs := Groups(t, es, 1, v)
		step := uint64(0)
		for _, m := range []int{1, 3, 8, 13} {
			leaf := func(layer int) func(int) []float32 {
				return func(i int) []float32 { return floats(width, 100*layer+i) }
			}
			var want [layers][]float32
			for l := range want {
				want[l] = Sum(tree.Root(m), leaf(l))
			}
			for _, route := range Routes(m, n, uint64(n)) {
				step++
				tr := group.Tree{Micros: m}
				for rank := range n {
					tr.Nodes = append(tr.Nodes, Maximal(m, route, rank))
				}
				for l := range layers {
					parts := group.Parts(width, n)
					for rank := range n {
						tr.Shards = append(tr.Shards, group.TreeShard{Layer: l, Lo: parts[rank], Hi: parts[rank+1], Owner: rank})
					}
				}
				Each(t, gs, func(rank int, g *group.Group) error {
					sums := make(map[[3]int][]float32)
					for l := range layers {
						for _, node := range tr.Nodes[rank] {
							sums[[3]int{l, node.Lo, node.Hi}] = Sum(node, leaf(l))
						}
					}
					got := make([][]float32, len(tr.Shards))
					done := make([]int, len(tr.Shards))
					for i, s := range tr.Shards {
						if s.Owner == rank {
							got[i] = make([]float32, s.Hi-s.Lo)
						}
					}
					err := g.TreeReduce(context.Background(), group.Call{Version: v, Step: step, Priority: comm.Bulk}, tr,
						func(i int, node tree.Node) []float32 {
							s := tr.Shards[i]
							return sums[[3]int{s.Layer, node.Lo, node.Hi}][s.Lo:s.Hi]
						},
						func(i int) []float32 { return got[i] }, func(i int) { done[i]++ })
					if err != nil {
						return err
					}
					for i, s := range tr.Shards {
						if s.Owner == rank && (done[i] != 1 || !same(got[i], want[s.Layer][s.Lo:s.Hi])) {
							return fmt.Errorf("%d micro-batches as %v: shard %+v has other bits than the tree (done %d times)", m, route, s, done[i])
						}
					}
					return nil
				})
			}
		}
		for _, e := range es {
			e.Close()
		}
	}
}

func testEdit(t *testing.T, network Network) {
	counter := NewCounter()
	es, members := Cluster(t, 4, comm.Config{}, counter.Network(network))
	v := id.Version{Generation: 1, N: 1}
	gs := make([]*group.Group, len(es))
	for i, e := range es {
		var err error
		if gs[i], err = group.New(e, 3); err != nil {
			t.Fatal(err)
		}
	}
	next := func() id.Version { v.N++; return v }
	barrier := func(k int) {
		t.Helper()
		Each(t, gs[:k], func(_ int, g *group.Group) error {
			return g.Barrier(context.Background(), group.Call{Version: v, Step: uint64(v.N)})
		})
	}
	// Each of the k members counts its own links; a pair counts twice.
	for _, c := range []struct{ members, opened int }{{2, 2}, {2, 0}, {3, 4}, {2, 0}, {4, 6}, {3, 0}} {
		if got := Edit(t, gs[:c.members], next(), es[:c.members]); got != c.opened {
			t.Errorf("edit to %d members opened %d ends of links, want %d", c.members, got, c.opened)
		}
		barrier(c.members)
	}
	if err := gs[0].Barrier(context.Background(), group.Call{Version: id.Version{Generation: 1, N: 2}, Step: 9}); !errors.Is(err, comm.ErrVersion) {
		t.Errorf("an operation under an old version: %v", err)
	}
	// Worker 3 is evicted; nothing happens to the others' links.
	counter.Take()
	for _, e := range es[:3] {
		if err := e.SetMembers(members[:3]); err != nil {
			t.Fatal(err)
		}
	}
	if got := Edit(t, gs[:3], next(), es[:3]); got != 0 {
		t.Errorf("edit after an eviction opened %d ends of links", got)
	}
	barrier(3)
	for _, e := range es[:3] {
		for _, s := range e.Stats() {
			if s.Links != 1 {
				t.Errorf("workers %v and %v have had %d links", e.Self(), s.Peer, s.Links)
			}
		}
	}
}

// testStranger lets a worker die that a version has left out already, while
// its link was still up.
func testStranger(t *testing.T, network Network) {
	down := make(chan comm.LinkEvent, 100)
	es, members := Cluster(t, 4, comm.Config{OnLink: func(ev comm.LinkEvent) {
		if !ev.Up && ev.Link == 1 && ev.Peer.Worker == 3 && errors.Is(ev.Err, comm.ErrLink) { // not of a dial after it
			select {
			case down <- ev:
			default:
			}
		}
	}}, network)
	v := id.Version{Generation: 1, N: 1}
	gs := Groups(t, es, 2, v)
	v.N++
	if got := Edit(t, gs[:3], v, es[:3]); got != 0 {
		t.Errorf("leaving one out opened %d ends of links", got)
	}
	ended := gs[0].Ended()
	es[3].Close()
	for range es[:3] { // the event follows what the loss does to groups
		<-down
	}
	for _, e := range es[:3] {
		if err := e.SetMembers(members[:3]); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-ended:
		t.Error("the loss of a link to no member ended the version")
	default:
	}
	Each(t, gs[:3], func(_ int, g *group.Group) error {
		return g.AllReduce(context.Background(), group.Call{Version: v, Step: 1}, make([]float32, 1000))
	})
}

func testFence(t *testing.T, network Network) {
	refused := make(chan struct{}, 1)
	es, members := Cluster(t, 3, comm.Config{OnLink: func(ev comm.LinkEvent) {
		if errors.Is(ev.Err, comm.ErrRefused) {
			select {
			case refused <- struct{}{}:
			default:
			}
		}
	}}, network)
	const messages = 60
	size := func(i int) int { return []int{0, 100, 20_000, 200_000}[i%4] }
	key := func(i int) comm.Key { return comm.Key{Kind: comm.KindUser, Step: 1, Lo: int64(i)} }
	var receives []*comm.Receiving
	var bufs [][]byte
	expect := func(i int) {
		bufs = append(bufs, make([]byte, size(i)))
		receives = append(receives, es[0].Expect(key(i), bufs[i]))
	}
	for i := range messages / 2 {
		expect(i)
	}
	for i := range messages {
		es[2].Post(es[0].Self(), key(i), bytes.Repeat([]byte{1}, size(i)), comm.Bulk)
	}
	if _, _, err := receives[4].Wait(t.Context()); err != nil { // in the middle
		t.Fatal(err)
	}

	// Its successor has the same number and another life. What the two send
	// differs here, as no honest ones do.
	next := id.Session{Worker: 2, Incarnation: 2}
	again, err := comm.Listen(comm.Config{Self: next, Transport: network(t, 3), Key: Key})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if err := es[0].SetMembers([]comm.Peer{members[1], {Session: next, Addr: again.Addr()}}); err != nil {
		t.Fatal(err)
	}
	before := make([]bool, messages)
	for i, r := range receives {
		select {
		case <-r.Done():
			before[i] = true
		default:
		}
	}
	for i := messages / 2; i < messages; i++ {
		expect(i)
	}
	es[2].Post(es[0].Self(), key(messages), []byte("again"), comm.Control)
	<-refused
	if err := again.SetMembers(members[:1]); err != nil {
		t.Fatal(err)
	}
	for i := range messages {
		again.Post(es[0].Self(), key(i), bytes.Repeat([]byte{2}, size(i)), comm.Bulk)
	}
	for i, r := range receives {
		n, from, err := r.Wait(t.Context())
		want, content := next, byte(2)
		if before[i] {
			want, content = es[2].Self(), 1
		}
		if err != nil || from != want || !bytes.Equal(bufs[i][:n], bytes.Repeat([]byte{content}, size(i))) {
			t.Errorf("message %d: %d of %d bytes from %v, want %v: %v", i, n, size(i), from, want, err)
		}
	}
	for _, s := range es[0].Stats() {
		if s.Peer == next && s.Links != 1 {
			t.Errorf("%d links with %v", s.Links, s.Peer)
		}
	}
}

func testFlush(t *testing.T, network Network) {
	es, _ := Cluster(t, 3, comm.Config{}, network)
	big := content(1<<20, 1)
	var receives []*comm.Receiving
	var bufs [][]byte
	for _, e := range es[1:] {
		bufs = append(bufs, make([]byte, len(big)))
		receives = append(receives, e.Expect(comm.Key{Kind: comm.KindUser, Step: 1}, bufs[len(bufs)-1]))
		es[0].Post(e.Self(), comm.Key{Kind: comm.KindUser, Step: 1}, big, comm.Bulk)
		es[0].Post(e.Self(), comm.Key{Kind: comm.KindUser, Step: 2}, []byte("last"), comm.Bulk)
		e.Post(es[0].Self(), comm.Key{Kind: comm.KindUser, Step: 3}, big, comm.Bulk) // never received
	}
	if err := es[0].Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	es[0].Close()
	for i, e := range es[1:] {
		if _, _, err := receives[i].Wait(t.Context()); err != nil || !bytes.Equal(bufs[i], big) {
			t.Errorf("worker %d: the large message: %v", i+1, err)
		}
		last := make([]byte, 4)
		if _, _, err := e.Receive(t.Context(), comm.Key{Kind: comm.KindUser, Step: 2}, last); err != nil || string(last) != "last" {
			t.Errorf("worker %d: the last message: %q, %v", i+1, last, err)
		}
	}
}
