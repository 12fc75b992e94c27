package group

import (
	"context"
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/net/comm"
)

// Parts returns the borders of n even parts of a length: part i is
// [parts[i], parts[i+1]). The first parts are longer by one where n does not
// divide it.
func Parts(length, n int) []int { return appendParts(make([]int, 0, n+1), length, n) }

func appendParts(parts []int, length, n int) []int {
	at := 0
	parts = append(parts, at)
	for i := range n {
		at += length / n
		if i < length%n {
			at++
		}
		parts = append(parts, at)
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
	case (a == Pairwise || a == Halving) && o.op != OpAllReduce:
		return Direct
	case a == Halving && !powerOfTwo(o.n()):
		return Pairwise
	case a != Auto:
		return a
	}
	if o.ed.near {
		return ChooseNear(o.op, size)
	}
	cfg := o.g.scope.Config()
	return Choose(o.op, o.n(), int64(size), cfg.Segment, cfg.Incast, o.place)
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
	r := o.receive(o.key(from, tree.Node{}), buf)
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
	o.borders = appendParts(o.borders[:0], 0, o.n())
	return o.run(func() error { return o.allGather(nil, o.borders, o.algorithm(0), 0) })
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
	return o.run(func() error {
		if o.algorithm(len(buf)) == Direct {
			return o.directBroadcast(root, buf)
		}
		return o.ringBroadcast(root, buf)
	})
}

func (o *operation) directBroadcast(root int, buf []byte) error {
	switch {
	case o.rank() == root:
		return o.publish(0, buf)
	case o.shares(root):
		return o.fetch(root, 0, buf)
	}
	return o.received(o.expect(root, 0, 0, buf))
}

// publish lets all others have the same data in a round.
func (o *operation) publish(round int, data []byte) error {
	if err := o.show(round, data, func(int) int { return len(data) }); err != nil {
		return err
	}
	for d := 1; d < o.n(); d++ {
		if !o.shares(o.peer(d)) {
			o.send(o.peer(d), round, 0, data)
		}
	}
	return nil
}

// castAhead is how many segments of a broadcast are expected at a time.
const castAhead = 16

// ringBroadcast passes segments down the ring from the root.
func (o *operation) ringBroadcast(root int, buf []byte) error {
	segs := split(len(buf), o.g.scope.Config().Segment)
	distance := mod(o.rank()-root, o.n())
	var waiting [castAhead]coming
	expect := func(i int) {
		if distance > 0 && i < len(segs) {
			waiting[i%castAhead] = o.expect(o.peer(-1), distance-1, i, buf[segs[i].lo:segs[i].hi])
		}
	}
	for i := range castAhead {
		expect(i)
	}
	for i, s := range segs {
		if distance > 0 {
			if err := o.received(waiting[i%castAhead]); err != nil {
				return err
			}
			expect(i + castAhead)
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
func split(length, segment int) []span { return appendSpans(nil, length, segment) }

func appendSpans(spans []span, length, segment int) []span {
	spans = append(spans, span{0, min(segment, length)})
	for at := segment; at < length; at += segment {
		spans = append(spans, span{at, min(at+segment, length)})
	}
	return spans
}

// split cuts numbers into segments, in memory of the operation.
func (o *operation) split(length int) []span {
	o.segs = appendSpans(o.segs[:0], length, o.g.scope.Config().Segment/4)
	return o.segs
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
	return o.run(func() error { return o.allGather(buf, parts, o.algorithm(len(buf)), 0) })
}

// allGather numbers its rounds from first.
func (o *operation) allGather(buf []byte, parts []int, a Algorithm, first int) error {
	part := func(i int) []byte { return buf[parts[i]:parts[i+1]] }
	if a == Direct {
		return o.directAllGather(part, first)
	}
	rounds := make([]coming, o.n()-1)
	for r := range rounds {
		rounds[r] = o.expect(o.peer(-1), first+r, 0, part(o.peer(-r-1)))
	}
	o.send(o.peer(1), first, 0, part(o.rank()))
	for r, waiting := range rounds {
		if err := o.received(waiting); err != nil {
			return err
		}
		if r+1 < len(rounds) {
			o.send(o.peer(1), first+r+1, 0, part(o.peer(-r-1)))
		}
	}
	return nil
}

func (o *operation) directAllGather(part func(rank int) []byte, round int) error {
	o.parts = slices.Grow(o.parts[:0], o.n())[:o.n()]
	for rank := range o.n() {
		if rank != o.rank() && !o.shares(rank) {
			o.parts[rank] = o.expect(rank, round, 0, part(rank))
		}
	}
	if err := o.publish(round, part(o.rank())); err != nil {
		return err
	}
	for d := 1; d < o.n(); d++ {
		from, err := o.peer(-d), error(nil)
		if o.shares(from) {
			err = o.fetch(from, round, part(from))
		} else {
			err = o.received(o.parts[from])
		}
		if err != nil {
			return err
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
	return o.run(func() error {
		if o.algorithm(4*len(buf)) == Ring {
			return o.ringReduceScatter(buf, parts)
		}
		return o.directReduceScatter(buf, parts)
	})
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
		func(i int, scratch []float32) coming {
			return o.expect(o.peer(-1), items[i].round, items[i].seg, comm.Bytes(scratch))
		},
		func(i int) []float32 { return items[i].data },
		func(i int) {
			if r := items[i].round + 1; r < o.n()-1 {
				o.send(o.peer(1), r, items[i].seg, comm.Bytes(items[i].data))
			}
		})
}

// directReduceScatter lets every member have its part, by messages in segments, so that what is added is still in the cache.
func (o *operation) directReduceScatter(buf []float32, parts []int) error {
	size := func(rank int) int { return 4 * (parts[rank+1] - parts[rank]) }
	if err := o.show(0, comm.Bytes(buf), size); err != nil {
		return err
	}
	segment := o.g.scope.Config().Segment / 4
	for i, more := 0, true; more; i++ {
		more = false
		for d := 1; d < o.n(); d++ {
			to := o.peer(d)
			p, lo := buf[parts[to]:parts[to+1]], i*segment
			if (lo < len(p) || i == 0) && !o.shares(to) {
				hi := min(lo+segment, len(p))
				o.send(to, 0, i, comm.Bytes(p[lo:hi]))
				more = more || hi < len(p)
			}
		}
	}
	mine, at := buf[parts[o.rank()]:parts[o.rank()+1]], parts[o.rank()]
	segs := o.split(len(mine))
	from := o.arrivals(0, segs, len(buf), at, ahead)
	for i, s := range segs {
		for rank := range o.n() {
			if rank == o.rank() {
				continue
			}
			if err := from.add(rank, i, mine[s.lo:s.hi], false); err != nil {
				return err
			}
		}
	}
	return from.end()
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
func (o *operation) reduce(n int, expect func(i int, scratch []float32) coming, place func(i int) []float32, added func(i int)) error {
	var scratch [ahead][]float32
	var waiting [ahead]coming
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
	return o.run(func() error {
		switch o.algorithm(4 * len(buf)) {
		case Ring:
			return o.ringAllReduce(buf)
		case Pairwise:
			return o.pairwiseAllReduce(buf)
		case Halving:
			return o.halvingAllReduce(buf)
		}
		return o.directAllReduce(buf)
	})
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
	o.borders = appendParts(o.borders[:0], len(buf), o.n())
	parts := o.borders
	if err := o.directReduceScatter(buf, parts); err != nil {
		return err
	}
	// The gather writes where the scatter sent from.
	if err := o.sentOnLinks(); err != nil {
		return err
	}
	return o.gatherParts(buf, parts, Direct, 1)
}

// powerOfTwo reports whether n is one: that many members can halve.
func powerOfTwo(n int) bool { return n&(n-1) == 0 }

// halvingAllReduce has members exchange halves in pairs: of all numbers at first, then of the half that a member has added, until each has the sum of one part. As many rounds backwards double what each has of the
// sum. (R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH, 2005.)
func (o *operation) halvingAllReduce(buf []float32) error {
	o.borders = appendParts(o.borders[:0], len(buf), o.n())
	// numbers are the parts of as many ranks as size, which the rank is one of.
	numbers := func(rank, size int) []float32 {
		first := rank &^ (size - 1)
		return buf[o.borders[first]:o.borders[first+size]]
	}
	round := 0
	for size := o.n() / 2; size > 0; size /= 2 {
		if err := o.swapHalves(o.rank()^size, round, numbers(o.rank()^size, size), numbers(o.rank(), size)); err != nil {
			return err
		}
		round++
	}
	// This writes where the rounds before sent from.
	if err := o.sentOnLinks(); err != nil {
		return err
	}
	for size := 1; size < o.n(); size *= 2 {
		with := o.rank() ^ size
		theirs := o.expect(with, round, 0, comm.Bytes(numbers(with, size)))
		o.send(with, round, 0, comm.Bytes(numbers(o.rank(), size)))
		if err := o.received(theirs); err != nil {
			return err
		}
		round++
	}
	return nil
}

// swapHalves sends a member its half, and adds what it has to ours, in segments.
func (o *operation) swapHalves(with, round int, theirs, ours []float32) error {
	for i, s := range o.split(len(theirs)) {
		o.send(with, round, i, comm.Bytes(theirs[s.lo:s.hi]))
	}
	segs := o.split(len(ours))
	return o.reduce(len(segs),
		func(i int, scratch []float32) coming { return o.expect(with, round, i, comm.Bytes(scratch)) },
		func(i int) []float32 { return ours[segs[i].lo:segs[i].hi] },
		func(int) {})
}

// gatherParts is the second half of an all-reduce, with its rounds numbered from first.
func (o *operation) gatherParts(buf []float32, parts []int, a Algorithm, first int) error {
	for i := range parts {
		parts[i] *= 4
	}
	return o.allGather(comm.Bytes(buf), parts, a, first)
}

// directAllReduce lets all have all numbers, by messages in segments, and adds one after the other; those of the next segments arrive meanwhile.
func (o *operation) directAllReduce(buf []float32) error {
	segs := o.split(len(buf))
	// From a copy, because the sum begins with rank 0's numbers, in the place of ours, before all have ours.
	for i, s := range segs {
		o.own = append(o.own, o.lend(0, i, buf[s.lo:s.hi]))
	}
	if err := o.show(0, comm.Bytes(buf), func(int) int { return 4 * len(buf) }); err != nil {
		return err
	}
	from := o.arrivals(0, segs, len(buf), 0, ahead*(o.n()-1))
	for i, s := range segs {
		sum := buf[s.lo:s.hi]
		for rank := range o.n() {
			switch {
			case rank != o.rank():
				if err := from.add(rank, i, sum, rank == 0); err != nil {
					return err
				}
			case rank == 0: // it is in its place
			default:
				kernel.Add(sum, sum, o.own[i])
			}
		}
	}
	return from.end()
}
