package group

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/soliton-train/soliton/internal/net/board"
	"github.com/soliton-train/soliton/internal/net/cma"
	"github.com/soliton-train/soliton/internal/net/comm"
)

// Where all members of a version are on one host, its collectives pass through boards (package board): a member shows once what all others are to have, and they
// read it there, or in its memory. A pair of members that does not share boards sends messages instead. Both ends of a pair agree on that, and the members all
// take the same algorithm, so no others need to know.

// neighbours is what the members of such a version share.
type neighbours struct {
	ours  *board.Board
	by    []comm.Neighbour // by rank; zero at ours
	alarm board.Alarm      // rings when the version or a context has ended

	mu    sync.Mutex
	users int  // operations
	over  bool // the version has ended
}

// maxUsers bounds the operations of a version that run on boards at a time, so that there is room for each: one takes two slots at most.
const maxUsers = board.Slots / 4

// enter keeps the boards until leave.
func (h *neighbours) enter() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over {
		return comm.ErrVersion
	}
	if h.users == maxUsers {
		return fmt.Errorf("%w: more than %d operations at a time", comm.ErrUsage, maxUsers)
	}
	h.users++
	return nil
}

func (h *neighbours) leave() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.users--
	h.tidy()
}

// end wakes the operations that wait. The last one to leave lets go of the boards.
func (h *neighbours) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over {
		return
	}
	h.over = true
	h.alarm.Ring()
	h.tidy()
}

func (h *neighbours) tidy() {
	if !h.over || h.users > 0 {
		return
	}
	for _, n := range h.by {
		if n.Board != nil {
			_ = n.Board.Close()
		}
		if n.Process != nil {
			_ = n.Process.Close()
		}
	}
	h.ours, h.by = nil, nil
}

// run runs the operation, on boards or lines where it can.
func (o *operation) run(f func() error) error {
	if err := o.onHost(); err != nil {
		return o.finish(err)
	}
	if err := o.onLines(); err != nil {
		return o.finish(err)
	}
	return o.finish(f())
}

// onHost has the operation use boards, where it can. Links that are new tell first what their ends share.
func (o *operation) onHost() error {
	for o.ed.near && o.call.Algorithm == Auto && o.n() > 1 {
		o.g.scope.Lock()
		h, later := o.ed.neighbours, (<-chan struct{})(nil)
		if h == nil && !comm.Closed(o.ed.ended) {
			var all []comm.Neighbour
			var ours *board.Board
			if all, ours, later = o.g.scope.Neighbours(o.ed.members); later == nil {
				h = &neighbours{ours: ours, by: all}
				o.ed.neighbours = h
			}
		}
		o.g.scope.Unlock()
		if h != nil {
			if err := h.enter(); err != nil {
				return err
			}
			o.host = h
			return nil
		}
		if err := o.wait(later); err != nil {
			return err
		}
	}
	return nil
}

// shares reports whether a member and we show each other what we have for each other.
func (o *operation) shares(rank int) bool { return o.host != nil && o.host.by[rank].Board != nil }

// named names what a member shows in a round of the operation.
func (o *operation) named(round int) board.Name {
	return comm.BoardName(o.g.number, o.call.Version, uint8(o.op), o.call.Step, o.call.Tag, round)
}

// until waits for a condition that can become true when the bell rings.
func (o *operation) until(bell board.Bell, done func() bool) error {
	if bell.Look(done) {
		return nil
	}
	alarm := &o.host.alarm
	if o.ctx.Done() != nil {
		defer context.AfterFunc(o.ctx, alarm.Ring)()
	}
	for {
		now, quiet := bell.Now(), alarm.Now()
		switch {
		case done():
			return nil
		case comm.Closed(o.ed.ended):
			return o.ed.err
		case o.ctx.Err() != nil:
			return o.ctx.Err()
		}
		bell.Sleep(now, alarm, quiet)
	}
}

// show shows data in a round to all that see our board: a copy of them in a slot, or, where they are larger, the data, which must then stay as they are until the
// operation ends. size is how many of the bytes each takes.
func (o *operation) show(round int, data []byte, size func(rank int) int) (err error) {
	o.readers = o.readers[:0]
	for rank := range o.n() {
		if o.shares(rank) {
			o.readers = append(o.readers, o.host.by[rank].Board)
			o.count(rank, comm.Traffic{MessagesSent: 1, BytesSent: int64(size(rank))})
		}
	}
	if len(o.readers) == 0 {
		return nil
	}
	if err := o.pace(size); err != nil {
		return err
	}
	s, err := o.reserve()
	if err != nil {
		return err
	}
	o.shown = append(o.shown, s)
	var addr uint64
	if room := s.Memory(); len(data) > len(room) {
		addr = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(data))))
		o.kept = append(o.kept, data)
	} else {
		copy(room, data)
	}
	s.Show(o.named(round), addr, len(data), o.readers)
	return nil
}

// reserve waits for a slot of our board.
func (o *operation) reserve() (board.Slot, error) {
	for {
		s, late, ok := o.host.ours.Reserve()
		switch {
		case ok:
			return s, nil
		case late == nil:
			return s, fmt.Errorf("%w: more than %d operations at a time", comm.ErrUsage, maxUsers)
		}
		err := o.until(late.Took(), func() bool {
			var next *board.Peer
			if s, next, ok = o.host.ours.Reserve(); next != nil {
				_ = next.Close()
			}
			return next != late
		})
		_ = late.Close()
		if ok || err != nil {
			return s, err
		}
	}
}

// pace waits as long as links that are limited would take.
func (o *operation) pace(size func(rank int) int) error {
	o.g.scope.Lock()
	var rest time.Duration
	if o.g.scope.Shaped() {
		for rank, m := range o.ed.members {
			if o.shares(rank) {
				rest = max(rest, o.g.scope.Pace(m, size(rank)))
			}
		}
	}
	o.g.scope.Unlock()
	if rest <= 0 {
		return nil
	}
	over := make(chan struct{})
	t := time.AfterFunc(rest, func() { close(over) })
	defer t.Stop()
	return o.wait(over)
}

// see waits for what a member shows in a round, which must have this size.
func (o *operation) see(rank, round, size int) (v board.View, err error) {
	b, name := o.host.by[rank].Board, o.named(round)
	if err := o.until(b.Shown(), func() (ok bool) {
		v, ok = b.Find(name)
		return ok
	}); err != nil {
		return v, err
	}
	if v.Size != size {
		return v, o.remote(rank, fmt.Errorf("%w: %d bytes, want %d", comm.ErrSize, v.Size, size))
	}
	return v, nil
}

func (o *operation) remote(rank int, err error) error {
	return &comm.Error{Op: "receive", Peer: o.ed.members[rank], Remote: true, Err: err}
}

// read copies bytes of what a member shows, from an offset on. They count once they are taken.
func (o *operation) read(rank int, v board.View, at int, dst []byte) error {
	if v.Addr == 0 {
		copy(dst, v.Data()[at:])
		return nil
	}
	p := o.host.by[rank].Process
	if p == nil {
		return fmt.Errorf("%w: no more open files, to read the memory of worker %v", comm.ErrLink, o.ed.members[rank])
	}
	switch err := p.Read(dst, v.Addr+uint64(at), 0, 0, func() bool { return comm.Closed(o.ed.ended) }); {
	case errors.Is(err, cma.ErrStopped):
		return o.ed.err
	case err != nil:
		return o.remote(rank, fmt.Errorf("%w: %w", comm.ErrLink, err))
	}
	return nil
}

// take ends the reading of size bytes of what a member shows. Where that member has withdrawn it, what was read is worth nothing.
func (o *operation) take(rank int, v board.View, size int) error {
	if !v.Take() {
		return o.remote(rank, comm.ErrAborted)
	}
	o.count(rank, comm.Traffic{MessagesReceived: 1, BytesReceived: int64(size)})
	return nil
}

// fetch fills dst with what a member shows in a round.
func (o *operation) fetch(rank, round int, dst []byte) error {
	v, err := o.see(rank, round, len(dst))
	if err == nil {
		err = o.read(rank, v, 0, dst)
	}
	if err == nil {
		err = o.take(rank, v, len(dst))
	}
	return err
}

// numbersOf returns bytes of a slot as numbers.
func numbersOf(b []byte) []float32 {
	return unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/4)
}

// count notes what passed on boards or lines.
func (o *operation) count(rank int, t comm.Traffic) {
	if len(o.traffic) == 0 {
		o.traffic = slices.Grow(o.traffic, o.n())[:o.n()]
		clear(o.traffic)
	}
	o.traffic[rank].Add(t)
}

// counted adds what passed to the counts of the endpoint.
func (o *operation) counted() {
	o.g.scope.Lock()
	defer o.g.scope.Unlock()
	for rank, t := range o.traffic {
		o.g.scope.Count(o.ed.members[rank], t)
	}
}

// allTaken waits until all have taken what we show.
func (o *operation) allTaken() error {
	for _, s := range o.shown {
		for late := s.Late(); late != nil; late = s.Late() {
			if err := o.until(late.Took(), func() bool { return s.Late() != late }); err != nil {
				return err
			}
		}
	}
	return nil
}

// leaveHost ends the operation's part on boards. It returns when others read nothing of the caller's memory.
func (o *operation) leaveHost(err error) error {
	if err == nil && len(o.kept) > 0 {
		err = o.allTaken()
	}
	if err != nil {
		for _, s := range o.shown {
			s.Withdraw()
		}
	}
	o.counted()
	o.host.leave()
	o.host = nil
	return err
}
