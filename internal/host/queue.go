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

func (q *queue[T]) empty() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.list) == 0
}

// take waits for the next value; false when the queue is closed and empty, or ctx has ended.
func (q *queue[T]) take(ctx context.Context) (v T, ok bool) {
	for {
		q.mu.Lock()
		if len(q.list) > 0 {
			v = q.list[0]
			q.list = q.list[1:]
			if len(q.list) > 0 || q.closed {
				q.wake()
			}
			q.mu.Unlock()
			return v, true
		}
		closed := q.closed
		q.mu.Unlock()
		if closed {
			return v, false
		}
		select {
		case <-q.signal:
		case <-ctx.Done():
			return v, false
		}
	}
}
