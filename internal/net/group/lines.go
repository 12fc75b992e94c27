package group

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/line"
)

// Between hosts, the messages of barriers, broadcasts and all-reduces go on lines (package line): the goroutine that runs the operation carries them itself. A pair of members that has no line uses its link
// instead. Both ends of a pair agree on that.

// onLines has the operation use lines, where it can. Links that are new get theirs first. Reduce-scatters and all-gathers use links: a worker runs many of them at a time beside its
// passes, and goroutines that wait for lines at the same time wake each other.
func (o *operation) onLines() error {
	if o.op == OpReduceScatter || o.op == OpAllGather {
		return nil
	}
	for o.host == nil && !o.ed.near && o.n() > 1 {
		o.g.scope.Lock()
		var later <-chan struct{}
		if o.ed.lines == nil && !comm.Closed(o.ed.ended) {
			var all []*line.Line
			var hub *line.Hub
			if all, hub, later = o.g.scope.Lines(o.ed.members); later == nil {
				o.ed.hub, o.ed.lines = hub, all
				o.ed.place.Crowd, o.ed.place.Together = o.g.scope.Crowd(o.ed.members)
			}
		}
		o.hub, o.lines, o.place = o.ed.hub, o.ed.lines, o.ed.place
		o.g.scope.Unlock()
		if later == nil {
			return nil
		}
		if err := o.wait(later); err != nil {
			return err
		}
	}
	return nil
}

// line returns the line to a rank, nil where the operation uses none.
func (o *operation) line(rank int) *line.Line {
	if o.hub == nil {
		return nil
	}
	return o.lines[rank]
}

// name names a message of a round from a rank.
func (o *operation) name(from, round, part int) line.Name {
	return line.Name{
		Group: o.g.number, Tag: o.call.Tag, Op: uint8(o.op), From: uint32(from), Round: uint32(round), Part: uint32(part), Step: o.call.Step, Version: o.call.Version,
	}
}

// message returns memory for one more message.
func (o *operation) message() *line.Message {
	n := len(o.lined)
	if o.lined = slices.Grow(o.lined, 1)[:n+1]; o.lined[n] == nil {
		o.lined[n] = new(line.Message)
	}
	return o.lined[n]
}

func (o *operation) sendOn(l *line.Line, to, round, part int, data []byte) {
	o.slowDown(to, len(data))
	l.Post(o.message(), o.name(o.rank(), round, part), data)
}

func (o *operation) expectOn(l *line.Line, from, round, part int, buf []byte) *line.Message {
	m := o.message()
	l.Expect(m, o.name(from, round, part), buf)
	return m
}

// slowDown waits as long as a link that is limited would take.
func (o *operation) slowDown(to, size int) {
	o.g.scope.Lock()
	var rest time.Duration
	if o.g.scope.Shaped() {
		rest = o.g.scope.Pace(o.ed.members[to], size)
	}
	o.g.scope.Unlock()
	if rest <= 0 {
		return
	}
	over := make(chan struct{})
	t := time.AfterFunc(rest, func() {
		close(over)
		o.hub.Ring()
	})
	defer t.Stop()
	_ = o.wait(over) // the next wait finds out why
}

// carried waits for a message on a line.
func (o *operation) carried(m *line.Message) error {
	if o.ctx.Done() != nil {
		defer context.AfterFunc(o.ctx, o.hub.Ring)()
	}
	return o.lineError(m, o.hub.Wait(m, o.stopped))
}

// carry carries what is on lines until done is closed, when the hub must be rung.
func (o *operation) carry(done <-chan struct{}) error {
	if o.ctx.Done() != nil {
		defer context.AfterFunc(o.ctx, o.hub.Ring)()
	}
	return o.hub.Until(func() bool { return comm.Closed(done) }, o.stopped)
}

// ringOn has the hub rung when a message over a link has ended.
func (o *operation) ringOn(x interface{ OnDone(func()) }) {
	if o.hub != nil {
		x.OnDone(o.hub.Ring)
	}
}

// stopped returns why the operation must end, nil if it need not.
func (o *operation) stopped() error {
	if comm.Closed(o.ed.ended) {
		return o.ed.err
	}
	return o.ctx.Err()
}

// lineError returns the error of a message as one of the member at its other end.
func (o *operation) lineError(m *line.Message, err error) error {
	switch {
	case err == nil || o.stopped() != nil:
		return err
	case errors.Is(err, line.ErrUsed), errors.Is(err, line.ErrMany):
		return fmt.Errorf("%w: %w", comm.ErrUsage, err)
	}
	rank := o.rankOf(m)
	kind := comm.ErrLink
	if errors.Is(err, line.ErrSize) {
		kind = comm.ErrSize
	}
	return o.remote(rank, fmt.Errorf("%w: %w", kind, err))
}

// sentOn waits until all messages on lines have left.
func (o *operation) sentOn() error {
	for _, m := range o.lined {
		if err := o.carried(m); err != nil {
			return err
		}
	}
	return nil
}

// leaveLines ends the operation's messages on lines.
func (o *operation) leaveLines(err error) {
	for _, m := range o.lined {
		if err != nil {
			m.Cancel(err)
		}
		if size, in, ok := m.Passed(); ok && in {
			o.count(o.rankOf(m), comm.Traffic{MessagesReceived: 1, BytesReceived: int64(size)})
		} else if ok {
			o.count(o.rankOf(m), comm.Traffic{MessagesSent: 1, BytesSent: int64(size)})
		}
	}
	o.counted()
}

// rankOf returns the rank at the other end of a message.
func (o *operation) rankOf(m *line.Message) int { return slices.IndexFunc(o.lines, m.On) }
