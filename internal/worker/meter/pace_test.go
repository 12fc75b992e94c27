package meter

import (
	"testing"
	"time"
)

func TestPace(t *testing.T) {
	const ms = time.Millisecond
	var p Pace
	at := time.Unix(100, 0)
	look := func(what string, want Progress) {
		t.Helper()
		if got := p.Look(at); got != want {
			t.Errorf("%s: %+v, want %+v", what, got, want)
		}
	}
	look("before all", Progress{})
	p.Begin(0, 3, true, at)
	look("as a step begins", Progress{Step: 3, Left: 1, Running: 1})
	p.Has(3, 4, 3)
	at = at.Add(30 * ms)
	look("in the first pass of all", Progress{3, 4, 3, 1, 0, 30 * ms, 0})
	p.End(0, at)
	look("after it", Progress{3, 4, 3, 0, 90 * ms, 0, 0})
	at = at.Add(time.Second)
	look("while it waits", Progress{3, 4, 3, 0, 90 * ms, 0, 0})
	p.Begin(0, 3, false, at)
	at = at.Add(60 * ms)
	look("in a backward pass", Progress{3, 4, 3, 1, 90 * ms, 0, 0})
	at = at.Add(30 * ms)
	look("in one that takes long", Progress{3, 4, 3, 1, 90 * ms, 30 * ms, 0})
	p.End(0, at)
	p.Has(3, 0, 0)
	look("when all is done", Progress{3, 0, 0, 0, 120 * ms, 0, 0})
	at = at.Add(7 * ms)
	look("a while after it", Progress{3, 0, 0, 0, 120 * ms, 0, 7 * ms})
	p.Has(0, 0, 0)
	look("between two steps", Progress{})
	p.End(0, at.Add(time.Hour)) // of a step that was given up
	p.End(7, at)

	p.Has(4, 2, 2)
	look("in the next step", Progress{4, 2, 2, 0, 120 * ms, 0, 0})
	p.Begin(0, 4, true, at)
	p.Begin(1, 4, true, at) // a second lane
	at = at.Add(90 * ms)
	look("with two passes", Progress{4, 2, 0 + 2, 2, 120 * ms, 10 * ms, 0}) // 80 ms each
	p.End(0, at)
	p.End(1, at)
	look("after them", Progress{4, 2, 2, 0, 135 * ms, 0, 0})

	var none *Pace
	none.Begin(0, 1, true, at)
	none.End(0, at)
	none.Has(1, 1, 1)
}
