package engine

import (
	"math"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/worker/core"
)

// Flip flips a bit of this worker's memory: as soon as nothing reads or writes there, and there is memory of the kind. It is the
// only fault that is injected inside of the engine, since no other process can reach the memory.
func (e *Engine) Flip(t core.Target) { e.mail.put(t) }

// flipper holds the faults that are to be injected.
type flipper struct {
	self  id.WorkerID
	flips []core.Target // that were asked for
	drawn uint64        // state of their random numbers
}

// flip injects the faults that were asked for, if it may now.
func (e *Engine) flip() {
	if len(e.flips) > 0 && e.core.Quiet() && !slices.ContainsFunc(e.sent, func(s *comm.Sending) bool { return !ended(s) }) {
		e.flipper.inject(e.spans())
	}
}

// inject flips a bit of each target of which there is memory.
func (f *flipper) inject(spans []span) {
	f.flips = slices.DeleteFunc(f.flips, func(t core.Target) bool {
		var at [][]float32
		for i := range spans {
			for j, x := range spans[i].arrays {
				if len(x) > 0 && spans[i].target(j) == t {
					at = append(at, x)
				}
			}
		}
		if len(at) == 0 {
			return false
		}
		x := at[f.draw(len(at))]
		i := f.draw(len(x))
		x[i] = math.Float32frombits(math.Float32bits(x[i]) ^ 1<<f.draw(32))
		return true
	})
}

// draw returns a number below n, of the sequence of splitmix64.
func (f *flipper) draw(n int) int {
	f.drawn += 0x9e3779b97f4a7c15
	z := f.drawn + uint64(f.self)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return int((z ^ z>>31) % uint64(n))
}
