package host

import (
	"context"
	"sync"
)

// queue hands values from goroutines that must not wait to one that may.
type queue[T any] struct {
	signal chan struct{}

	mu     sync.Mutex
	list   []T
	closed bool
}

func newQueue[T any]() *queue[T] { return &queue[T]{signal: make(chan struct{}, 1)} }

func (q *queue[T]) wake() {
	select {
	case q.signal <- struct{}{}:
	default:
	}
}

// put appends a value, unless the queue is closed.
func (q *queue[T]) put(v T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.closed {
		q.list = append(q.list, v)
		q.wake()
	}
}

// close ends the queue; what is in it can still be taken.
func (q *queue[T]) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.wake()
}

func (q *queue[T]) empty() bool { return q.len() == 0 }

func (q *queue[T]) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.list)
}

// next returns the next value; false if there is none now. The signal comes again while more are left.
func (q *queue[T]) next() (v T, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.list) == 0 {
		return v, false
	}
	v = q.list[0]
	if q.list = q.list[1:]; len(q.list) > 0 || q.closed {
		q.wake()
	}
	return v, true
}

// take waits for the next value; false when the queue is closed and empty, or ctx has ended.
func (q *queue[T]) take(ctx context.Context) (v T, ok bool) {
	for {
		if v, ok := q.next(); ok {
			return v, true
		}
		q.mu.Lock()
		ended := q.closed && len(q.list) == 0
		q.mu.Unlock()
		if ended {
			return v, false
		}
		select {
		case <-q.signal:
		case <-ctx.Done():
			return v, false
		}
	}
}
