package kernel

import (
	"sync"
	"sync/atomic"
	"time"
)

// gate lets goroutines wait until a number has changed.
type gate struct {
	word    atomic.Uint32
	waiting atomic.Int32
	mu      sync.Mutex
	changed sync.Cond
}

func (g *gate) init() { g.changed.L = &g.mu }

// open changes the number and wakes all goroutines that wait. It costs little
// where none waits.
func (g *gate) open() {
	g.word.Add(1)
	if g.waiting.Load() == 0 {
		return
	}
	g.mu.Lock() // no goroutine is between its look at the number and its sleep
	defer g.mu.Unlock()
	g.changed.Broadcast()
}

// wait returns the number once it is not old.
func (g *gate) wait(old uint32) uint32 {
	if now := g.word.Load(); now != old {
		return now
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.waiting.Add(1)
	defer g.waiting.Add(-1)
	for {
		if now := g.word.Load(); now != old {
			return now
		}
		g.changed.Wait()
	}
}

// A thread that waits for another one spins for spinFor before it sleeps, because
// waking it costs about as much. A thread that the system interrupts for longer
// than spinGap while it spins shares its core, where spinning takes time from
// what it waits for. The pool then does not spin for spinRest.
const (
	spinFor   = 20 * time.Microsecond
	spinGap   = 100 * time.Microsecond
	spinRest  = 20 * time.Millisecond
	spinLooks = 4096 // at most, where the clock stands still
)

type spinner struct {
	now   func() time.Duration
	never bool
	rest  atomic.Int64 // by now: no spinning before
}

var start = time.Now()

func sinceStart() time.Duration { return time.Since(start) }

// until returns when a condition holds, or after a short time.
func (s *spinner) until(done func() bool) {
	if done() || s.never {
		return
	}
	began := s.now()
	if int64(began) < s.rest.Load() {
		return
	}
	last := began
	for range spinLooks {
		if done() {
			return
		}
		now := s.now()
		if now-last > spinGap {
			s.rest.Store(int64(now + spinRest))
			return
		}
		if now-began > spinFor {
			return
		}
		last = now
	}
}
