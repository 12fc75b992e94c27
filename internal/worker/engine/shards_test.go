package engine

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/transport"
)

// laidOut is an engine that holds ranges of a layer of some blocks, whose arrays hold their places: each is an array of its own if apart is set.
func laidOut(t *testing.T, apart bool, borders ...int) *Engine {
	tensors := []zero.Tensor{{Size: 6 * kernel.Block}}
	e := &Engine{c: Config{Rule: adam, Layers: []Layer{{Tensors: tensors}}}}
	e.guard = newGuard(&e.c)
	e.shards, e.incoming = make(map[id.Range]*shard), make(map[id.Range]*incoming)
	var ranges []id.Range
	for i, lo := range borders[:len(borders)-1] {
		ranges = append(ranges, id.Range{Lo: lo * kernel.Block, Hi: borders[i+1] * kernel.Block})
	}
	arrays := lay(ranges, 1+adam.Moments())
	for _, r := range ranges {
		a := arrays[r]
		for j := range a {
			if apart {
				a[j] = slices.Clone(a[j])
			}
			for i := range a[j] {
				a[j][i] = float32(j*1e6 + r.Lo + i)
			}
		}
		state, err := zero.ShardOf(adam, r, tensors, a[1:])
		if err != nil {
			t.Fatal(err)
		}
		e.shards[r] = &shard{Range: r, state: state, params: a[0]}
	}
	return e
}

// A range of a new plan is the memory of the ranges before that make it up, where they lie one after the other, and a copy of them where they do not.
func TestAssembled(t *testing.T) {
	for _, c := range []struct {
		name   string
		apart  bool
		lo, hi int // blocks
		copied bool
	}{
		{"all of them", false, 0, 6, false},
		{"two of them", false, 2, 5, false},
		{"a part of one", false, 3, 4, false},
		{"parts of two", false, 1, 3, false},
		{"apart, a part of one", true, 3, 4, false},
		{"apart, parts of two", true, 1, 3, true},
		{"apart, all", true, 0, 6, true},
	} {
		e := laidOut(t, c.apart, 0, 2, 5, 6)
		r := id.Range{Lo: c.lo * kernel.Block, Hi: c.hi * kernel.Block}
		sh, err := e.assemble(r, nil)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		for j, x := range sh.arrays() {
			if len(x) != r.Hi-r.Lo {
				t.Fatalf("%s: array %d has %d elements of %d", c.name, j, len(x), r.Hi-r.Lo)
			}
			for i, got := range x {
				if want := float32(j*1e6 + r.Lo + i); got != want {
					t.Fatalf("%s: element %d of array %d is %v, not %v", c.name, i, j, got, want)
				}
			}
			inPlace := false
			for _, old := range e.shards {
				y := old.arrays()[j]
				inPlace = inPlace || old.Lo <= r.Lo && r.Lo < old.Hi && &x[0] == &y[r.Lo-old.Lo]
			}
			if inPlace == c.copied {
				t.Errorf("%s: array %d is in place: %v", c.name, j, inPlace)
			}
		}
	}
}

// What is held of a range elsewhere does not make up another.
func TestJoinedNeedsAll(t *testing.T) {
	e := laidOut(t, false, 1, 3)
	for _, r := range []id.Range{
		{Lo: 0, Hi: 2 * kernel.Block}, {Lo: 2 * kernel.Block, Hi: 4 * kernel.Block}, {Layer: 1, Lo: kernel.Block, Hi: 3 * kernel.Block}, {},
	} {
		if x := e.joined(r); x != nil {
			t.Errorf("%v is held: %d arrays", r, len(x))
		}
	}
}

// An array out of which a gradient is being sent is not used for another before that has ended.
func TestGradientIsSentFirst(t *testing.T) {
	mem := transport.NewMem()
	at := func(i int) id.Session { return id.Session{Worker: id.WorkerID(i)} }
	var ends []*comm.Endpoint
	var peers []comm.Peer
	for i := range 2 {
		x, err := comm.Listen(comm.Config{Self: at(i), Transport: mem})
		if err != nil {
			t.Fatal(err)
		}
		defer x.Close()
		ends, peers = append(ends, x), append(peers, comm.Peer{Session: at(i), Addr: x.Addr()})
	}
	for _, x := range ends {
		if err := x.SetMembers(peers); err != nil {
			t.Fatal(err)
		}
	}
	const n = 1 << 20 // too many to be sent before they are asked for
	e := &Engine{}
	sh := &shard{Range: id.Range{Hi: n}}
	e.gradientMemory(sh)
	first := sh.own
	for i := range first {
		first[i] = float32(i)
	}
	name := comm.Key{Kind: comm.KindState, Step: 1}
	e.lend(sh.own, ends[0].Post(at(1), name, comm.Bytes(first), fillPriority))
	e.gradientMemory(sh)
	if &sh.own[0] == &first[0] {
		t.Fatal("the next gradient is put where one is being sent from")
	}
	clear(sh.own)
	got := make([]float32, n)
	if _, _, err := ends[1].Receive(context.Background(), name, comm.Bytes(got)); err != nil {
		t.Fatal(err)
	}
	for i, x := range got {
		if x != float32(i) {
			t.Fatalf("element %d came as %v", i, x)
		}
	}
	s := ends[0].Post(at(1), comm.Key{Kind: comm.KindState, Step: 2}, comm.Bytes(sh.own), fillPriority)
	e.lend(sh.own, s)
	e.giveBack(sh.own)
	if e.reap(); len(e.free.free[n]) != 0 {
		t.Error("an array that is being sent is free")
	}
	s.Cancel(errors.New("the end"))
	<-s.Done()
	if e.reap(); len(e.free.free[n]) != 1 || len(e.loans) != 0 {
		t.Errorf("%d arrays are free in the end, and %d are lent", len(e.free.free[n]), len(e.loans))
	}
}
