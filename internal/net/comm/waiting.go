package comm

import (
	"context"
	"slices"
)

// ending is how a send or a receive ends, for those that wait for it.
type ending struct {
	e *Endpoint

	// Guarded by e.mu until done is closed, then constant.
	done  chan struct{}
	after func()
	err   error
}

func newEnding(e *Endpoint) ending { return ending{e: e, done: make(chan struct{})} }

// Done is closed when it has ended. The memory is the caller's again then.
func (x *ending) Done() <-chan struct{} { return x.done }

// OnDone calls f once, when it has ended; Wait returns at once from then on. f must not block.
func (x *ending) OnDone(f func()) {
	x.e.lock()
	defer x.e.unlock()
	if Closed(x.done) {
		x.e.later = append(x.e.later, f)
		return
	}
	x.after = f
}

// finish ends it. The caller holds the endpoint's lock.
func (x *ending) finish(err error) {
	x.err = err
	close(x.done)
	if x.after != nil {
		x.e.later = append(x.e.later, x.after)
	}
}

// wait returns when it has ended. It is cancelled when ctx ends.
func (x *ending) wait(ctx context.Context, cancel func(error)) error {
	if !Closed(x.done) {
		select {
		case <-x.done:
		case <-ctx.Done():
			cancel(ctx.Err())
		}
	}
	return x.err
}

// Closed reports whether a channel is closed on which nothing is sent.
func Closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// turn is the place of a message in a heap of those that wait: by priority, then by age.
type turn struct {
	prio  Priority
	order uint64
	index int // -1 if it is in no heap
}

func (t *turn) place() *turn { return t }

func (t *turn) before(o *turn) bool { return t.prio < o.prio || t.prio == o.prio && t.order < o.order }

// turns is a heap of messages.
type turns[M interface{ place() *turn }] []M

func (h turns[M]) Len() int           { return len(h) }
func (h turns[M]) Less(i, j int) bool { return h[i].place().before(h[j].place()) }
func (h turns[M]) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place().index, h[j].place().index = i, j
}
func (h *turns[M]) Push(x any) {
	m := x.(M)
	m.place().index = len(*h)
	*h = append(*h, m)
}
func (h *turns[M]) Pop() any {
	last := len(*h) - 1
	m := (*h)[last]
	*h = slices.Delete(*h, last, last+1)
	m.place().index = -1
	return m
}
