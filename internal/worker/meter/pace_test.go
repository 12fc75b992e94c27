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
	look("in a forward pass", Progress{3, 4, 3, 1, 180 * ms}) // a sixth of a pair in 30 ms
	p.End(0, at)
	look("after it", Progress{3, 4, 3, 0, 90 * ms})
	at = at.Add(time.Second)
	look("while it waits", Progress{3, 4, 3, 0, 90 * ms})
	p.Begin(0, 3, false, at)
	at = at.Add(60 * ms)
	p.End(0, at)
	p.Has(3, 3, 3)
	look("after a pair", Progress{3, 3, 3, 0, 90 * ms})
	p.Begin(1, 3, true, at) // a second lane
	at = at.Add(30 * ms)
	p.End(1, at)
	look("with two lanes", Progress{3, 3, 3, 0, 45 * ms})
	p.Begin(0, 3, true, at)
	p.Has(0, 0, 0)
	look("between two steps", Progress{})
	p.End(0, at.Add(time.Hour)) // of a step that was given up
	p.End(7, at)
	look("after that", Progress{})

	var none *Pace
	none.Begin(0, 1, true, at)
	none.End(0, at)
	none.Has(1, 1, 1)
}
