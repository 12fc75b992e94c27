package group

import (
	"slices"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/net/board"
	"github.com/soliton-train/soliton/internal/net/comm"
)

// arrivals are what all others have for us in a round of an operation: segment by segment, and of each segment in rank order. Some are on boards, the others come
// in messages, each with a segment.
type arrivals struct {
	o     *operation
	round int
	segs  []span // of the numbers that we are to have
	shown int    // how many numbers each shows on its board
	at    int    // where ours begin among them
	views []board.View

	senders []int     // the ranks that send messages
	window  []numbers // messages that are expected, by their index modulo the length
	posted  int
	taken   int
	scratch []float32 // for what is read in the memory of others
}

// numbers are on their way from another rank.
type numbers struct {
	data []float32
	r    coming
}

// reset keeps nothing but the memory.
func (a *arrivals) reset() arrivals {
	clear(a.window)
	return arrivals{views: a.views[:0], senders: a.senders[:0], window: a.window[:0]}
}

// arrivals begins to expect messages, so many ahead. Of a board it takes the numbers from at on among those shown.
func (o *operation) arrivals(round int, segs []span, shown, at, ahead int) *arrivals {
	a := &o.in
	*a = a.reset()
	a.o, a.round, a.segs, a.shown, a.at = o, round, segs, shown, at
	for rank := range o.n() {
		if rank != o.rank() && !o.shares(rank) {
			a.senders = append(a.senders, rank)
		}
	}
	if len(a.senders) < o.n()-1 {
		a.views = slices.Grow(a.views, o.n())[:o.n()]
	}
	n := min(ahead, len(segs)*len(a.senders))
	a.window = slices.Grow(a.window, n)[:n]
	for range n {
		a.expect()
	}
	return a
}

// expect posts the receive of the next message.
func (a *arrivals) expect() {
	x, s := &a.window[a.posted%len(a.window)], a.segs[a.posted/len(a.senders)]
	if x.data == nil {
		x.data = a.o.scratch(s.hi - s.lo)
	}
	x.data = x.data[:s.hi-s.lo]
	x.r = a.o.expect(a.senders[a.posted%len(a.senders)], a.round, a.posted/len(a.senders), comm.Bytes(x.data))
	a.posted++
}

// add adds what arrives next, a segment from a rank, to a place, or, if it is the first there, copies it.
func (a *arrivals) add(rank, seg int, place []float32, first bool) error {
	put := func(x []float32) {
		if first {
			copy(place, x)
		} else {
			kernel.Add(place, place, x)
		}
	}
	if a.o.shares(rank) {
		x, err := a.view(rank, seg)
		if err == nil {
			put(x)
		}
		return err
	}
	x := a.window[a.taken%len(a.window)]
	if err := a.o.received(x.r); err != nil {
		return err
	}
	put(x.data)
	a.taken++
	if a.posted < len(a.segs)*len(a.senders) {
		a.expect()
	}
	return nil
}

// view returns a segment of what a rank shows.
func (a *arrivals) view(rank, seg int) (x []float32, err error) {
	if seg == 0 {
		if a.views[rank], err = a.o.see(rank, a.round, 4*a.shown); err != nil {
			return nil, err
		}
	}
	v, s := a.views[rank], a.segs[seg]
	if v.Addr == 0 {
		return numbersOf(v.Data())[a.at+s.lo : a.at+s.hi], nil
	}
	if a.scratch == nil {
		a.scratch = a.o.scratch(s.hi - s.lo) // the first segment is the longest
	}
	x = a.scratch[:s.hi-s.lo]
	return x, a.o.read(rank, v, 4*(a.at+s.lo), comm.Bytes(x))
}

// end takes what was read from boards.
func (a *arrivals) end() error {
	for rank := range a.views {
		if rank != a.o.rank() && a.o.shares(rank) {
			s := a.segs[len(a.segs)-1]
			if err := a.o.take(rank, a.views[rank], 4*s.hi); err != nil {
				return err
			}
		}
	}
	return nil
}
