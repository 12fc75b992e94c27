package kernel

import (
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// Pool is a fixed set of compute threads: the goroutine that calls For and
// Threads()-1 others, which live until Close. A nil *Pool computes everything
// in the caller, and so does a pool that is in use, by another goroutine or by
// the one that calls.
type Pool struct {
	jobs []chan job // one for each helper
	wg   sync.WaitGroup
	busy atomic.Bool
}

type job struct {
	f      func(lo, hi int)
	lo, hi int
	done   *join
}

// join waits for the helpers of one For and keeps the first panic.
type join struct {
	wg    sync.WaitGroup
	mu    sync.Mutex
	fault *Panic
}

// Panic is the value For panics with when f panicked in a helper: it carries
// the helper's stack, which would be lost otherwise.
type Panic struct {
	Value any
	Stack []byte
}

// NewPool starts a pool of the given number of threads, at least 1. Each helper calls begin
// first.
func NewPool(threads int, begin ...func()) *Pool {
	p := &Pool{}
	for range threads - 1 {
		c := make(chan job)
		p.jobs = append(p.jobs, c)
		p.wg.Go(func() {
			for _, f := range begin {
				f()
			}
			for j := range c {
				j.run()
			}
		})
	}
	return p
}

// Close ends the helpers and waits for them.
func (p *Pool) Close() {
	for _, c := range p.jobs {
		close(c)
	}
	p.wg.Wait()
	p.jobs = nil
}

// Threads returns the number of threads, 1 for a nil pool.
func (p *Pool) Threads() int {
	if p == nil {
		return 1
	}
	return len(p.jobs) + 1
}

// For splits [0, n) into at most Threads() contiguous ranges whose borders
// are multiples of grain, calls f for each and returns when all are done. It
// panics if one of the calls does.
func (p *Pool) For(n, grain int, f func(lo, hi int)) {
	units := (n + grain - 1) / grain
	parts := min(p.Threads(), units)
	if parts <= 1 || !p.busy.CompareAndSwap(false, true) {
		if n > 0 {
			f(0, n)
		}
		return
	}
	defer p.busy.Store(false)
	var d join
	border := func(i int) int { return min(units*i/parts*grain, n) }
	for i := 1; i < parts; i++ {
		d.wg.Add(1)
		p.jobs[i-1] <- job{f, border(i), border(i + 1), &d}
	}
	// A panic in the caller's part must wait for the others, which still use
	// the caller's memory.
	defer func() {
		d.wg.Wait()
		if d.fault != nil {
			panic(d.fault)
		}
	}()
	f(0, border(1))
}

func (j job) run() {
	defer j.done.wg.Done()
	defer func() {
		if v := recover(); v != nil {
			j.done.mu.Lock()
			defer j.done.mu.Unlock()
			if j.done.fault == nil {
				j.done.fault = &Panic{Value: v, Stack: debug.Stack()}
			}
		}
	}()
	j.f(j.lo, j.hi)
}
