package session

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
)

// watchesOf returns what workers are told to tell of.
func watchesOf(effects []Effect) (every []int) {
	for _, e := range effects {
		if m, ok := e.(Send); ok {
			if w, ok := m.Message.(control.Watch); ok {
				every = append(every, w.Every)
			}
		}
	}
	return every
}

func TestWatchers(t *testing.T) {
	now := time.Unix(100, 0)
	s := begin(Config{}, 1)
	step := func(e Event) []int {
		now = now.Add(time.Millisecond)
		return watchesOf(s.Step(now, e))
	}
	for _, e := range []Event{hello, ready} {
		if got := step(Received{0, e.(control.Message)}); got != nil {
			t.Fatalf("timelines are not wanted, and the worker is told %v", got)
		}
	}
	quick := func(n int) control.Step {
		m := committedStep(n)
		m.MS = 10
		return m
	}
	if got := step(Received{0, quick(1)}); got != nil {
		t.Fatalf("timelines are not wanted, and the worker is told %v", got)
	}
	// Of steps of 10 ms, one of 16 is enough.
	if got := step(WatchAsked{true}); !slices.Equal(got, []int{16}) {
		t.Fatalf("the worker is told %v", got)
	}
	if got := step(Received{0, quick(2)}); got != nil {
		t.Errorf("the worker is told again: %v", got)
	}
	if got := step(WatchAsked{false}); !slices.Equal(got, []int{0}) {
		t.Errorf("at the end the worker is told %v", got)
	}
	// It has not said anything since, so nothing more is sent to it until it does.
	for range 1000 {
		if got := append(step(WatchAsked{true}), step(WatchAsked{false})...); got != nil {
			t.Fatalf("a silent worker is told %v", got)
		}
	}
	step(WatchAsked{true})
	if got := step(Received{0, quick(3)}); !slices.Equal(got, []int{16}) {
		t.Errorf("after its next step the worker is told %v", got)
	}
}

func TestTimelineIsShown(t *testing.T) {
	s := begin(Config{}, 1)
	for _, e := range []control.Message{hello, ready} {
		s.Step(time.Now(), Received{0, e})
	}
	effects := s.Step(time.Now(), Received{0, control.Timeline{Step: 1, Passes: make([]control.Pass, control.MaxPasses+5)}})
	if len(effects) != 1 {
		t.Fatalf("%v", effects)
	}
	if tl, ok := effects[0].(Show).Event.(view.Timeline); !ok || tl.ID != 0 || len(tl.Passes) != control.MaxPasses {
		t.Errorf("%T with %d passes is shown", effects[0].(Show).Event, len(tl.Passes))
	}
}

// A run is bound by data from when a worker reads samples for more than a fifth of some steps, until all read for less than a tenth.
func TestBoundByData(t *testing.T) {
	r := trainingOf(t, Config{}, 2)
	r.s.job.Steps = 30
	var said []string
	for n := 2; n <= 25; n++ {
		r.effects = nil
		for w := range 2 {
			m := committedStep(n)
			m.MS = 100
			if w == 1 && n <= 10 {
				m.Reading = (35 * time.Millisecond).Nanoseconds()
			}
			r.feed(Received{w, m})
		}
		for _, text := range append(r.notes("starved"), r.notes("fed")...) {
			said = append(said, fmt.Sprintf("%d: %s", n, text))
		}
	}
	// The first step was without a wait: 35 % in 7 of 8.
	if want := []string{"8: bound by data: worker 1 reads samples for 31 % of a step", "19: no longer bound by data"}; !slices.Equal(said, want) {
		t.Errorf("%q, want %q", said, want)
	}
}
