package meter

import (
	"testing"
	"testing/synctest"
	"time"
)

const ms = time.Millisecond

// pass runs a pass whose layers take a time each, and waits before each.
func pass(m *Thread, d Direction, lo int, wait time.Duration, took ...time.Duration) {
	m.Begin(1)
	for i := range took {
		resume := m.Hold()
		<-time.After(wait) // of the bubble
		resume()
		l := lo + i
		if d == Backward {
			l = lo + len(took) - 1 - i
		}
		m.Lap(l)
		<-time.After(took[l-lo])
	}
	m.End(d, lo, lo+len(took), 1)
}

func check(t *testing.T, m *Meter, want ...Layer) {
	t.Helper()
	got, _ := m.Layers()
	if len(got) != len(want) {
		t.Fatalf("%d layers: %v", len(got), got)
	}
	for i := range got {
		near := func(a, b time.Duration) bool { return a > b-b/20 && a < b+b/20 }
		if got[i].Layer != want[i].Layer || !near(got[i].Forward, want[i].Forward) || !near(got[i].Backward, want[i].Backward) {
			t.Errorf("got %v, want %v", got[i], want[i])
		}
	}
}

func TestMeter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var preempted time.Duration
		m := New()
		th := m.Thread()
		th.delay = func() time.Duration { return preempted }
		for i := range 10 {
			pass(th, Forward, 4, 5*ms, ms, 3*ms)
			pass(th, Backward, 4, 0, 2*ms, 6*ms)
			if _, n := m.Layers(); n != uint64(2*i+2) {
				t.Errorf("%d passes", n)
			}
		}
		check(t, m, Layer{4, ms, 2 * ms}, Layer{5, 3 * ms, 6 * ms})

		// An outlier does not count, nor what the machine did for others.
		pass(th, Forward, 4, 0, 500*ms, 3*ms)
		for range 8 {
			th.Begin(1)
			th.Lap(5)
			time.Sleep(8 * ms)
			preempted += 2 * ms
			th.Lap(4)
			time.Sleep(9 * ms)
			preempted += 7 * ms
			th.End(Backward, 4, 6, 1)
		}
		for range 24 {
			pass(th, Backward, 4, 0, 2*ms, 6*ms)
		}
		check(t, m, Layer{4, ms, 2 * ms}, Layer{5, 3 * ms, 6 * ms})

		// Half the speed shows after half a window.
		for range 5 {
			pass(th, Forward, 4, 0, 2*ms, 6*ms)
			pass(th, Backward, 4, 0, 4*ms, 12*ms)
		}
		check(t, m, Layer{4, 2 * ms, 4 * ms}, Layer{5, 6 * ms, 12 * ms})

		// Another range of layers starts from no values.
		pass(th, Forward, 4, 0, ms)
		check(t, m)
		m.Keep(7)
		if len(m.stages) != 0 {
			t.Error("stages are kept")
		}
	})
}

// What another process tells of its layers counts, and not the time of the thread that waits for it.
func TestTook(t *testing.T) {
	m := New()
	th := m.Thread()
	for range window {
		for _, d := range []Direction{Forward, Backward} {
			th.Begin(1)
			th.Lap(3)
			th.Lap(4)
			th.Took(3, time.Second)
			th.Took(4, 2*time.Second)
			th.End(d, 3, 5, 1)
		}
	}
	check(t, m, Layer{3, time.Second, time.Second}, Layer{4, 2 * time.Second, 2 * time.Second})
}

// Of two passes that run side by side, each takes half of the worker: in the time of one, it runs two.
func TestBeside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := New()
		th := m.Thread()
		for i := range window {
			for _, d := range []Direction{Forward, Backward} {
				th.Begin(1 + i%2)
				th.Lap(3)
				time.Sleep(4 * ms)
				th.End(d, 3, 4, 2-i%2)
			}
		}
		check(t, m, Layer{3, 2 * ms, 2 * ms})
	})
}
