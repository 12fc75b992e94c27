package session

import (
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
)

func TestChangedTimes(t *testing.T) {
	times := func(a, b time.Duration, links ...plan.LinkTime) plan.Times {
		return plan.Times{Layers: []plan.LayerTime{{Layer: 2, Forward: a}, {Layer: 3, Backward: b}}, Links: links}
	}
	for _, c := range []struct {
		a, b plan.Times
		want bool
	}{
		{times(100, 200), times(105, 190), false},
		{times(100, 200), times(100, 230), true},
		{times(100, 200), plan.Times{}, true},
		{times(100, 200), times(100, 200, plan.LinkTime{To: 1, Bandwidth: 10}), true},
		{times(100, 200, plan.LinkTime{To: 1, Bandwidth: 10}), times(100, 200, plan.LinkTime{To: 1, Bandwidth: 10.5}), false},
		{times(100, 200, plan.LinkTime{To: 1, Bandwidth: 10}), times(100, 200, plan.LinkTime{To: 1, Bandwidth: 20}), true},
	} {
		if got := changed(c.a, c.b); got != c.want {
			t.Errorf("%+v to %+v: %v", c.a, c.b, got)
		}
	}
}

// What a worker says of layers and links that there are not is dropped, and a session that
// does not train yet hears nothing.
func TestPacedBounds(t *testing.T) {
	s := begin(Config{}, 1)
	beat := control.Beat{
		Step: 1, Over: 1,
		Layers: []control.LayerTime{{Layer: -1, Forward: 1}, {Layer: 1 << 40, Forward: 1}, {Forward: -5}, {Backward: 1 << 62}},
		Links:  []control.LinkTime{{To: 77, Bytes: 1, Busy: 1}},
	}
	s.measured(0, beat)
	if e := s.out.take(); len(e) != 0 {
		t.Errorf("before training: %v", e)
	}
	s.phase, s.workers[0].state = training, working
	for step := range 20 {
		beat.Step = step + 1
		s.measured(0, beat)
		if e := s.out.take(); len(e) != 0 {
			t.Errorf("effects %v", e)
		}
	}
	if _, ok := s.paces.detector.Times(0); ok {
		t.Error("layers that there are not have times")
	}
}

// What a machine has to spare changes all the time; a plan hears of it when it is wrong by a third.
func TestRoom(t *testing.T) {
	var p pacing
	for _, c := range []struct{ bytes, want int64 }{{1000, 1000}, {1300, 1000}, {760, 1000}, {1400, 1400}, {1000, 1000}, {700, 700}} {
		if p.measure(3, c.bytes); p.room[3] != c.want {
			t.Errorf("%d bytes: %d, want %d", c.bytes, p.room[3], c.want)
		}
	}
	if p.forget(3); p.room[3] != 700 {
		t.Errorf("a worker that is measured again has %d: its machine is the same", p.room[3])
	}
	if !changed(plan.Times{Memory: 1}, plan.Times{Memory: 2}) {
		t.Error("a change of the memory is none")
	}
}
