package kernel

import (
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// Pool is a fixed set of compute threads: the goroutine that calls For or Each
// and Threads()-1 helpers, which live until Close. A nil *Pool computes
// everything in the caller, and so does a pool that is in use, by another
// goroutine or by the one that calls, or that several goroutines have entered.
//
// A call consists of parts. Its threads take them one after the other, and the
// caller takes all that no helper has begun. So a helper that gets no processor
// delays nothing, and a slow one delays the call by one part at most.
type Pool struct {
	helpers int
	wg      sync.WaitGroup
	busy    atomic.Bool
	inside  atomic.Int32 // goroutines that have entered
	closed  atomic.Bool

	f     func(thread, part int) // of the current call; a thread reads it once it has taken a part
	fault atomic.Pointer[Panic]  // the first panic of a helper in the current call

	_      [64]byte // the next fields are written by all threads
	parts  atomic.Uint64
	left   atomic.Int32 // parts of the current call that have not ended
	_      [64]byte
	called gate // helpers wait here for a call
	ended  gate // the caller waits here for the last part
	spin   spinner
}

// parts holds a call's number, how many parts it has, and how many of them
// threads have taken. So a part is taken with one operation, which fails once
// another call has begun.
const (
	partBits = 16
	maxParts = 1<<partBits - 1
)

// Panic is the value For panics with when f panicked in a helper: it carries
// the helper's stack, which would be lost otherwise.
type Panic struct {
	Value any
	Stack []byte
	Lane  int // of the worker's engine, where it is known
}

// NewPool starts a pool of the given number of threads, at least 1. Each helper calls begin
// first.
func NewPool(threads int, begin ...func()) *Pool {
	p := &Pool{helpers: max(threads-1, 0)}
	p.called.init()
	p.ended.init()
	p.spin.now, p.spin.never = sinceStart, threads > runtime.NumCPU()
	for i := range p.helpers {
		p.wg.Go(func() {
			for _, f := range begin {
				f()
			}
			p.help(i + 1)
		})
	}
	return p
}

// Close ends the helpers and waits for them.
func (p *Pool) Close() {
	p.closed.Store(true)
	p.called.open()
	p.wg.Wait()
	p.helpers = 0
}

// Threads returns the number of threads, 1 for a nil pool.
func (p *Pool) Threads() int {
	if p == nil {
		return 1
	}
	return p.helpers + 1
}

// For splits [0, n) into at most Threads() contiguous ranges whose borders
// are multiples of grain, calls f for each and returns when all are done. It
// panics if one of the calls does.
func (p *Pool) For(n, grain int, f func(lo, hi int)) {
	units := (n + grain - 1) / grain
	parts := min(p.Threads(), units)
	if parts <= 1 || !p.begin() {
		if n > 0 {
			f(0, n)
		}
		return
	}
	border := func(i int) int { return min(units*i/parts*grain, n) }
	p.run(parts, func(_, i int) { f(border(i), border(i+1)) })
}

// Each calls f for each i of [0, n) and returns when all calls have. Threads
// take the next i when they are done with one, so uneven calls even out.
// Calls with the same thread, in [0, Threads()), come one after the other.
func (p *Pool) Each(n int, f func(thread, i int)) {
	if min(p.Threads(), n) <= 1 || n > maxParts || !p.begin() {
		for i := range n {
			f(0, i)
		}
		return
	}
	p.run(n, f)
}

// Enter says that a goroutine computes until it calls Leave. While several are inside of a pool, each computes alone what it calls.
// These are no methods because the public package has those of a Pool.
func Enter(p *Pool) {
	if p != nil {
		p.inside.Add(1)
	}
}

// Leave ends what Enter began.
func Leave(p *Pool) {
	if p != nil {
		p.inside.Add(-1)
	}
}

// begin reports whether the pool was free, and takes it.
func (p *Pool) begin() bool { return p.inside.Load() <= 1 && p.busy.CompareAndSwap(false, true) }

// run runs the parts of a call in a pool that the caller has taken.
func (p *Pool) run(parts int, f func(thread, part int)) {
	p.f = f
	p.left.Store(int32(parts))
	call := p.called.word.Load() + 1
	p.parts.Store(uint64(call)<<(2*partBits) | uint64(parts)<<partBits)
	p.called.open()
	inPart := false
	// A panic in a part of the caller must wait for the others, which still use
	// the caller's memory.
	defer func() {
		if inPart {
			p.left.Add(-1)
			for p.take(call) >= 0 {
				p.left.Add(-1)
			}
		}
		p.spin.until(func() bool { return p.left.Load() == 0 })
		for {
			w := p.ended.word.Load()
			if p.left.Load() == 0 {
				break
			}
			p.ended.wait(w)
		}
		p.f = nil
		fault := p.fault.Swap(nil)
		p.busy.Store(false)
		if fault != nil {
			panic(fault)
		}
	}()
	for i := p.take(call); i >= 0; i = p.take(call) {
		inPart = true
		f(0, i)
		inPart = false
		p.left.Add(-1)
	}
}

// take returns the next part of a call, or -1 if there is none.
func (p *Pool) take(call uint32) int {
	for {
		s := p.parts.Load()
		next, parts := int(s&maxParts), int(s>>partBits&maxParts)
		if uint32(s>>(2*partBits)) != call || next >= parts {
			return -1
		}
		if p.parts.CompareAndSwap(s, s+1) {
			return next
		}
	}
}

// help is a helper.
func (p *Pool) help(thread int) {
	for call := uint32(0); ; {
		p.spin.until(func() bool { return p.called.word.Load() != call })
		// The number is read before closed is: Close changes them in the other order, so a helper that finds the pool open does not
		// take Close's number for a call's and wait for the one behind it.
		call = p.called.wait(call)
		if p.closed.Load() {
			return
		}
		for i := p.take(call); i >= 0; i = p.take(call) {
			p.part(thread, i)
		}
	}
}

// part runs a part in a helper.
func (p *Pool) part(thread, i int) {
	defer func() {
		if v := recover(); v != nil {
			p.fault.CompareAndSwap(nil, &Panic{Value: v, Stack: debug.Stack()})
		}
		if p.left.Add(-1) == 0 {
			p.ended.open()
		}
	}()
	p.f(thread, i)
}
