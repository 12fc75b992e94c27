package meter

import (
	"slices"
	"sync/atomic"
	"time"
)

// Pace measures how a worker gets on with its step, while it is in it. Unlike a [Meter] it counts all time, since others wait for a worker
// however it comes to be late. The zero Pace is ready to use; a nil one takes no notice. One goroutine tells it what happens, and any may
// look: heartbeats must not wait for a thread that has no processor.
type Pace struct {
	pace
	seen atomic.Pointer[pace]
}

type pace struct {
	step        int
	left, ready int
	done        float64 // pairs
	spent       time.Duration
	usual       time.Duration // for a pair, in the step before
	passes      []running     // by lane
	ended       time.Time     // the newest pass that has
}

type running struct {
	since   time.Time // zero: none
	forward bool
}

// How much of a pair its passes are: a backward pass has two products for each of a forward pass.
const (
	forwardPart  = 1. / 3
	backwardPart = 1 - forwardPart
)

// show lets others see what has changed.
func (p *Pace) show() {
	now := p.pace
	now.passes = slices.Clone(p.passes)
	p.seen.Store(&now)
}

// Begin says that a pass begins in a lane, in a step.
func (p *Pace) Begin(lane, step int, forward bool, now time.Time) {
	if p == nil {
		return
	}
	p.in(step)
	for len(p.passes) <= lane {
		p.passes = append(p.passes, running{})
	}
	p.passes[lane] = running{now, forward}
	p.show()
}

// in enters a step, in which there is something left to do until it is told what.
func (p *Pace) in(step int) {
	if p.step != step {
		p.step, p.left, p.ready, p.done, p.spent = step, 1, 0, 0, 0
		clear(p.passes)
	}
}

// End says that the pass of a lane has ended.
func (p *Pace) End(lane int, now time.Time) {
	if p == nil || lane >= len(p.passes) || p.passes[lane].since.IsZero() {
		return // the last: of a step that was given up
	}
	x := &p.passes[lane]
	p.spent += now.Sub(x.since)
	p.done += x.part()
	p.ended = now
	*x = running{}
	p.show()
}

func (x *running) part() float64 {
	if x.forward {
		return forwardPart
	}
	return backwardPart
}

// Has says how many pairs of a step are not finished, and how many of these could begin; step 0 says that the worker is in none.
func (p *Pace) Has(step, left, ready int) {
	if p == nil || p.step == step && p.left == left && p.ready == ready {
		return
	}
	p.in(step)
	p.left, p.ready = left, ready
	if left == 0 && p.done > 0 {
		p.usual = p.each()
	}
	p.show()
}

// each is how long a pair takes, by the passes of the step that have ended, or else by those of the step before.
func (p *pace) each() time.Duration {
	if p.done == 0 {
		return p.usual
	}
	return time.Duration(float64(p.spent) / p.done / float64(len(p.passes)))
}

// Progress is how far a worker is in a step.
type Progress struct {
	Step        int           // 0: in none
	Left, Ready int           // pairs that are not finished; those of them that could begin
	Running     int           // passes
	Each        time.Duration // from the end of one pair to that of the next; 0: not known
	Stuck       time.Duration // for how long a pass has run beyond what it should have taken
	Idle        time.Duration // for how long it has had nothing left to do
}

// Look returns how far the worker is.
func (p *Pace) Look(now time.Time) (x Progress) {
	seen := p.seen.Load()
	if seen == nil || seen.step == 0 {
		return x
	}
	x = Progress{Step: seen.step, Left: seen.left, Ready: seen.ready, Each: seen.each()}
	if seen.left == 0 && !seen.ended.IsZero() {
		x.Idle = max(0, now.Sub(seen.ended))
	}
	for _, r := range seen.passes {
		if !r.since.IsZero() {
			x.Running++
			usual := time.Duration(r.part() * float64(x.Each) * float64(len(seen.passes)))
			x.Stuck = max(x.Stuck, now.Sub(r.since)-usual)
		}
	}
	return x
}
