package straggler

import (
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
)

func TestBehind(t *testing.T) {
	const ms = time.Millisecond
	done := func(w int) Pace {
		return Pace{Worker: id.WorkerID(w), Stages: []int{0}, Step: 7, Each: 10 * ms, Idle: 100 * ms}
	}
	late := func(ready int, each, age time.Duration) Pace {
		return Pace{Worker: 2, Stages: []int{0, 1}, Step: 7, Left: ready + 1, Ready: ready, Each: each, Age: age}
	}
	stuck := func(ready int, each, stuck time.Duration) Pace {
		p := late(ready, each, 0)
		p.Stuck = stuck
		return p
	}
	elsewhere, busy, next, soon := done(1), done(1), done(1), done(0)
	elsewhere.Stages, busy.Left, next.Step = []int{2}, 1, 8
	soon.Idle = 54 * ms
	for _, test := range []struct {
		name string
		all  []Pace
		gain time.Duration // 0: none
	}{
		{"two take two", []Pace{done(0), done(1), late(2, 100*ms, 0)}, 190 * ms},
		{"two take three", []Pace{done(0), done(1), late(3, 100*ms, 0)}, 280 * ms},
		{"told a while ago", []Pace{done(0), late(2, 100*ms, 50*ms)}, 130 * ms},
		{"others have just become ready", []Pace{soon, late(2, 100*ms, 50*ms)}, 0},
		{"others are ready for half a pair's time", []Pace{soon, late(2, 100*ms, 49*ms)}, 131 * ms},
		{"has begun all since", []Pace{done(0), late(1, 100*ms, 100*ms)}, 0},
		{"in a pass that is waited for in any case", []Pace{done(0), done(1), stuck(2, 10*ms, 500*ms)}, 20 * ms},
		{"slow, and in such a pass", []Pace{done(0), stuck(2, 100*ms, 500*ms)}, 200 * ms},
		{"as fast as others", []Pace{done(0), late(1, 10*ms, 0)}, 0},
		{"nothing that has not begun", []Pace{done(0), late(0, time.Second, 0)}, 0},
		{"others have work", []Pace{busy, late(2, 100*ms, 0)}, 0},
		{"others are in another stage", []Pace{elsewhere, late(2, 100*ms, 0)}, 0},
		{"others are in another step", []Pace{next, late(2, 100*ms, 0)}, 0},
		{"pace not known", []Pace{done(0), late(2, 0, 0)}, 0},
	} {
		got, ok := Behind(test.all)
		if ok != (test.gain > 0) || got.Gain != test.gain || ok && (got.Worker != 2 || got.Step != 7) {
			t.Errorf("%s: %+v, %v, want %v", test.name, got, ok, test.gain)
		}
	}
}
