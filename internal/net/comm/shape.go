package comm

import (
	"time"

	"github.com/soliton-train/soliton/internal/id"
)

// FullSpeed is the speed in bytes per second that parts of a link's speed are
// parts of, where they are asked for: that of a network of 8 Gbit/s.
const FullSpeed = 1e9

// shapeAhead is the most time without anything to send that counts as a timer
// that came late, which is made up for.
const shapeAhead = 5 * time.Millisecond

// Shape limits what this side sends to a worker, in whichever incarnation, to
// so many bytes per second; 0 lifts the limit. It is there to see what a slow
// link does. The limit holds from the next chunk on, and chunks still go by
// priority.
func (e *Endpoint) Shape(to id.WorkerID, rate float64) {
	e.lock()
	defer e.unlock()
	if e.shaped == nil {
		e.shaped = make(map[id.WorkerID]float64)
	}
	if rate > 0 {
		e.shaped[to] = rate
	} else {
		delete(e.shaped, to)
	}
}

// pace accounts for n bytes whose write began at a time, and returns how long
// the link is still taken by them.
func (p *peer) pace(began time.Time, n int) (rest time.Duration) {
	p.e.lock()
	defer p.e.unlock()
	now := time.Now()
	p.stats.Busy += now.Sub(began)
	rate := p.e.shaped[p.Worker]
	if rate <= 0 {
		return 0
	}
	if began.Sub(p.free) > shapeAhead {
		p.free = began
	}
	p.free = p.free.Add(time.Duration(float64(n) / rate * float64(time.Second)))
	if rest = p.free.Sub(now); rest > 0 {
		p.stats.Busy += rest
	}
	return rest
}
