package group

import (
	"context"
	"fmt"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/net/comm"
)

// Parts returns the borders of n even parts of a length: part i is
// [parts[i], parts[i+1]). The first parts are longer by one where n does not
// divide it.
func Parts(length, n int) []int {
	parts := make([]int, n+1)
	for i := range n {
		parts[i+1] = parts[i] + length/n
		if i < length%n {
			parts[i+1]++
		}
	}
	return parts
}

// check refuses parts that are not those of a buffer.
func (o *operation) check(parts []int, length int) error {
	if len(parts) != o.n()+1 || parts[0] != 0 || parts[o.n()] != length {
		return fmt.Errorf("%w: parts must be %d borders from 0 to %d", comm.ErrUsage, o.n()+1, length)
	}
	for i := range o.n() {
		if parts[i] > parts[i+1] {
			return fmt.Errorf("%w: parts must ascend", comm.ErrUsage)
		}
	}
	return nil
}

// algorithm returns the call's, or chooses.
func (o *operation) algorithm(size int) Algorithm {
	switch a := o.call.Algorithm; {
	case a == Pairwise && o.op != OpAllReduce:
		return Direct
	case a != Auto:
		return a
	}
	cfg := o.g.scope.Config()
	if o.op == OpAllReduce && o.ed.near {
		return ChooseNear(o.n(), int64(size), cfg.Segment)
	}
	return Choose(o.op, o.n(), int64(size), cfg.Segment, cfg.Incast)
}

// Send sends data to a member's Receive with the same call.
func (g *Group) Send(ctx context.Context, call Call, to int, data []byte) error {
	o, err := g.begin(ctx, OpSend, call)
	if err != nil {
		return err
	}
	if to < 0 || to >= o.n() || to == o.rank() {
		return o.error(fmt.Errorf("%w: rank %d is no other member", comm.ErrUsage, to))
	}
	o.send(to, 0, 0, data)
	return o.finish(nil)
}

// Receive receives a member's Send with the same call into buf, and returns
// the number of bytes.
func (g *Group) Receive(ctx context.Context, call Call, from int, buf []byte) (int, error) {
	o, err := g.begin(ctx, OpSend, call)
	if err != nil {
		return 0, err
	}
	if from < 0 || from >= o.n() || from == o.rank() {
		return 0, o.error(fmt.Errorf("%w: rank %d is no other member", comm.ErrUsage, from))
	}
	r := o.expect(from, 0, 0, buf)
	var n int
	if err = o.wait(r.Done()); err == nil {
		n, _, err = r.Wait(ctx)
	}
	return n, o.finish(err)
}

// Barrier returns when all members have entered it: each has gathered nothing from all.
func (g *Group) Barrier(ctx context.Context, call Call) error {
	o, err := g.begin(ctx, OpBarrier, call)
	if err != nil || o.n() == 1 {
		return err
	}
	return o.finish(o.allGather(nil, make([]int, o.n()+1), o.algorithm(0), 0))
}

// Broadcast sends root's buf to all members, whose buffers have its size.
func (g *Group) Broadcast(ctx context.Context, call Call, root int, buf []byte) error {
	o, err := g.begin(ctx, OpBroadcast, call)
	if err != nil {
		return err
	}
	if root < 0 || root >= o.n() {
		return o.error(fmt.Errorf("%w: rank %d is no member", comm.ErrUsage, root))
	}
	if o.n() == 1 {
		return nil
	}
	if o.algorithm(len(buf)) == Direct {
		return o.finish(o.directBroadcast(root, buf))
	}
	return o.finish(o.ringBroadcast(root, buf))
}

func (o *operation) directBroadcast(root int, buf []byte) error {
	if o.rank() != root {
		return o.received(o.expect(root, 0, 0, buf))
	}
	for d := 1; d < o.n(); d++ {
		o.send(o.peer(d), 0, 0, buf)
	}
	return nil
}

// ringBroadcast passes segments down the ring from the root.
func (o *operation) ringBroadcast(root int, buf []byte) error {
	segs := split(len(buf), o.g.scope.Config().Segment)
	distance := mod(o.rank()-root, o.n())
	waiting := make([]*comm.Receiving, len(segs))
	for i, s := range segs {
		if distance > 0 {
			waiting[i] = o.expect(o.peer(-1), distance-1, i, buf[s.lo:s.hi])
		}
	}
	for i, s := range segs {
		if distance > 0 {
			if err := o.received(waiting[i]); err != nil {
				return err
			}
		}
		if distance < o.n()-1 {
			o.send(o.peer(1), distance, i, buf[s.lo:s.hi])
		}
	}
	return nil
}

// span is a range of a buffer.
type span struct{ lo, hi int }

// split cuts a length into segments, at least one.
func split(length, segment int) []span {
	spans := []span{{0, min(segment, length)}}
	for at := segment; at < length; at += segment {
		spans = append(spans, span{at, min(at+segment, length)})
	}
	return spans
}

// AllGather fills buf on all members: each has set its own part, the range
// parts[rank] to parts[rank+1].
func (g *Group) AllGather(ctx context.Context, call Call, buf []byte, parts []int) error {
	o, err := g.begin(ctx, OpAllGather, call)
	if err != nil {
		return err
	}
	if err := o.check(parts, len(buf)); err != nil {
		return o.error(err)
	}
	if o.n() == 1 {
		return nil
	}
	return o.finish(o.allGather(buf, parts, o.algorithm(len(buf)), 0))
}

// allGather numbers its rounds from first.
func (o *operation) allGather(buf []byte, parts []int, a Algorithm, first int) error {
	part := func(i int) []byte { return buf[parts[i]:parts[i+1]] }
	rounds := make([]*comm.Receiving, o.n()-1)
	if a == Direct {
		for d := 1; d < o.n(); d++ {
			rounds[d-1] = o.expect(o.peer(-d), first, 0, part(o.peer(-d)))
		}
		for d := 1; d < o.n(); d++ {
			o.send(o.peer(d), first, 0, part(o.rank()))
		}
	} else {
		for r := range rounds {
			rounds[r] = o.expect(o.peer(-1), first+r, 0, part(o.peer(-r-1)))
		}
		o.send(o.peer(1), first, 0, part(o.rank()))
	}
	for r, waiting := range rounds {
		if err := o.received(waiting); err != nil {
			return err
		}
		if a == Ring && r+1 < len(rounds) {
			o.send(o.peer(1), first+r+1, 0, part(o.peer(-r-1)))
		}
	}
	return nil
}

// ReduceScatter adds the members' buffers and leaves each with its part of the
// sum, the range parts[rank] to parts[rank+1]; the rest of buf is undefined
// afterwards. The order of the additions depends on the algorithm and the
// number of members: ring adds in rank order beginning behind the part's own
// rank, direct begins with the part's own rank and then adds the others in
// rank order. For sums that depend on neither, see [Group.TreeReduce].
func (g *Group) ReduceScatter(ctx context.Context, call Call, buf []float32, parts []int) error {
	o, err := g.begin(ctx, OpReduceScatter, call)
	if err != nil {
		return err
	}
	if err := o.check(parts, len(buf)); err != nil {
		return o.error(err)
	}
	if o.n() == 1 {
		return nil
	}
	if o.algorithm(4*len(buf)) == Ring {
		return o.finish(o.ringReduceScatter(buf, parts))
	}
	return o.finish(o.directReduceScatter(buf, parts))
}

// ahead is how many messages that will be added are expected at a time: one
// is added while the others arrive.
const ahead = 4

// ringReduceScatter sends a part in segments, each as soon as it is added to,
// so that all links and all members are busy all the time.
func (o *operation) ringReduceScatter(buf []float32, parts []int) error {
	type item struct {
		round, seg int
		data       []float32
	}
	part := o.segmented(buf, parts)
	var items []item
	for r := range o.n() - 1 {
		for i, data := range part(o.peer(-r - 2)) {
			items = append(items, item{r, i, data})
		}
	}
	for i, data := range part(o.peer(-1)) {
		o.send(o.peer(1), 0, i, comm.Bytes(data))
	}
	return o.reduce(len(items),
		func(i int, scratch []float32) *comm.Receiving {
			return o.expect(o.peer(-1), items[i].round, items[i].seg, comm.Bytes(scratch))
		},
		func(i int) []float32 { return items[i].data },
		func(i int) {
			if r := items[i].round + 1; r < o.n()-1 {
				o.send(o.peer(1), r, items[i].seg, comm.Bytes(items[i].data))
			}
		})
}

// directReduceScatter sends every part to its member, in segments, so that
// what is added is still in the cache.
func (o *operation) directReduceScatter(buf []float32, parts []int) error {
	part := o.segmented(buf, parts)
	var segs int
	for i := range o.n() {
		segs = max(segs, len(part(i)))
	}
	for i := range segs {
		for d := 1; d < o.n(); d++ {
			if p := part(o.peer(d)); i < len(p) {
				o.send(o.peer(d), 0, i, comm.Bytes(p[i]))
			}
		}
	}
	mine := part(o.rank())
	from := func(i int) int { // all others in rank order, segment by segment
		i %= o.n() - 1
		if i >= o.rank() {
			i++
		}
		return i
	}
	seg := func(i int) int { return i / (o.n() - 1) }
	return o.reduce(len(mine)*(o.n()-1),
		func(i int, scratch []float32) *comm.Receiving {
			return o.expect(from(i), 0, seg(i), comm.Bytes(scratch))
		},
		func(i int) []float32 { return mine[seg(i)] },
		func(int) {})
}

// segmented returns the segments of each part.
func (o *operation) segmented(buf []float32, parts []int) func(i int) [][]float32 {
	all := make([][][]float32, o.n())
	for i := range all {
		p := buf[parts[i]:parts[i+1]]
		for _, s := range split(len(p), o.g.scope.Config().Segment/4) {
			all[i] = append(all[i], p[s.lo:s.hi])
		}
	}
	return func(i int) [][]float32 { return all[i] }
}

// reduce receives n messages into scratch memory, adds each to its place, in
// order, and calls added.
func (o *operation) reduce(n int, expect func(i int, scratch []float32) *comm.Receiving, place func(i int) []float32, added func(i int)) error {
	var scratch [ahead][]float32
	var waiting [ahead]*comm.Receiving
	post := func(i int) {
		k, size := i%ahead, len(place(i))
		if scratch[k] == nil {
			scratch[k] = o.scratch(size)
		}
		scratch[k] = scratch[k][:size]
		waiting[k] = expect(i, scratch[k])
	}
	for i := range min(n, ahead) {
		post(i)
	}
	for i := range n {
		k := i % ahead
		if err := o.received(waiting[k]); err != nil {
			return err
		}
		kernel.Add(place(i), place(i), scratch[k])
		added(i)
		if i+ahead < n {
			post(i + ahead)
		}
	}
	return nil
}

// AllReduce adds the members' buffers; all end with the same bits. The order
// of the additions depends on the algorithm and the number of members; direct
// adds in rank order. When it returns, our numbers may still be on their way to
// others, from memory of the group: an Edit or Close before they have them ends
// their call, so let a Barrier come first.
func (g *Group) AllReduce(ctx context.Context, call Call, buf []float32) error {
	o, err := g.begin(ctx, OpAllReduce, call)
	if err != nil || o.n() == 1 {
		return err
	}
	switch o.algorithm(4 * len(buf)) {
	case Ring:
		return o.finish(o.ringAllReduce(buf))
	case Pairwise:
		return o.finish(o.pairwiseAllReduce(buf))
	}
	return o.finish(o.directAllReduce(buf))
}

func (o *operation) ringAllReduce(buf []float32) error {
	parts := Parts(len(buf), o.n())
	if err := o.ringReduceScatter(buf, parts); err != nil {
		return err
	}
	// The gather writes where the scatter sent from.
	if err := o.sent(); err != nil {
		return err
	}
	return o.gatherParts(buf, parts, Ring, o.n()-1)
}

func (o *operation) pairwiseAllReduce(buf []float32) error {
	parts := Parts(len(buf), o.n())
	if err := o.directReduceScatter(buf, parts); err != nil {
		return err
	}
	// The gather writes where the scatter sent from, but a member sends its sum only when it has received all that is in it.
	return o.gatherParts(buf, parts, Direct, 1)
}

// gatherParts is the second half of an all-reduce, with its rounds numbered from first.
func (o *operation) gatherParts(buf []float32, parts []int, a Algorithm, first int) error {
	for i := range parts {
		parts[i] *= 4
	}
	return o.allGather(comm.Bytes(buf), parts, a, first)
}

// directAllReduce sends all segments, and adds one after the other; those of the next ones arrive meanwhile.
func (o *operation) directAllReduce(buf []float32) error {
	segs := split(len(buf), o.g.scope.Config().Segment/4)
	// Sent from a copy, because the sum begins with rank 0's numbers before all of ours are sent.
	own := make([][]float32, len(segs))
	for i, s := range segs {
		own[i] = o.lend(0, i, buf[s.lo:s.hi])
	}
	// By segment, modulo its length, and rank.
	window := make([][]numbers, min(ahead, len(segs)))
	for i := range window {
		window[i] = make([]numbers, o.n())
	}
	expect := func(i int) {
		for d := 1; d < o.n(); d++ {
			from := o.peer(-d)
			x, size := &window[i%len(window)][from], segs[i].hi-segs[i].lo
			if x.data == nil {
				x.data = o.scratch(size)
			}
			x.data = x.data[:size]
			x.r = o.expect(from, 0, i, comm.Bytes(x.data))
		}
	}
	for i := range window {
		expect(i)
	}
	for i, s := range segs {
		for rank, x := range window[i%len(window)] {
			if rank == o.rank() {
				x.data = own[i]
			} else if err := o.received(x.r); err != nil {
				return err
			}
			if sum := buf[s.lo:s.hi]; rank == 0 {
				copy(sum, x.data)
			} else {
				kernel.Add(sum, sum, x.data)
			}
		}
		if next := i + len(window); next < len(segs) {
			expect(next)
		}
	}
	return nil
}

// numbers are on their way from another rank.
type numbers struct {
	data []float32
	r    *comm.Receiving
}
