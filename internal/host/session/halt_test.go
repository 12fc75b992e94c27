package session

import (
	"slices"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/timing"
)

// The run continues without a worker whose process a signal has stopped, as far as others can continue it and the process need not be
// killed.
func TestHalted(t *testing.T) {
	const detect = 4 * time.Second
	type moment struct {
		ms      int // after the first one
		worker  int // -1: this process
		stopped bool
	}
	look := func(ms int) moment { return moment{ms, -1, false} }
	for _, c := range []struct {
		name    string
		workers int
		config  func(*Config)
		moments []moment
		fenced  []int
	}{
		{"one", 3, nil, []moment{{0, 1, true}, {30, 1, true}}, []int{1}},
		{"continued in time", 3, nil, []moment{{0, 1, true}, {29, 1, false}, look(100)}, nil},
		{"two", 3, nil, []moment{{0, 1, true}, {10, 2, true}, {30, 1, true}, {40, 2, true}}, []int{1, 2}},
		{"all", 3, nil, []moment{{0, 0, true}, {1, 1, true}, {2, 2, true}, {30, 0, true}, {31, 1, true}, {32, 2, true}, look(100)}, nil},
		{"all, and one is continued", 3, nil, []moment{{0, 0, true}, {1, 1, true}, {2, 2, true}, {30, 0, true}, {31, 1, true}, {32, 2, true}, {1000, 1, false}, look(1031), look(4999)}, nil},
		{"all, and one alone is continued", 3, nil, []moment{{0, 0, true}, {1, 1, true}, {2, 2, true}, {30, 0, true}, {31, 1, true}, {32, 2, true}, {1000, 1, false}, look(5000)}, []int{0, 2}},
		{"the only worker", 1, nil, []moment{{0, 0, true}, {30, 0, true}, look(1000)}, nil},
		{"this process has just been continued", 3, nil, []moment{{-1, -1, true}, {0, 1, true}, {30, 1, true}, look(1000), {2000, 1, false}, look(5000)}, nil},
		{"this process has just been continued, and the worker is not", 3, nil, []moment{{-1, -1, true}, {0, 1, true}, {30, 1, true}, look(1000), look(4100)}, []int{1}},
		{"without failure detection", 3, func(c *Config) { c.Detect = 0 }, []moment{{0, 1, true}, {30, 1, true}}, nil},
		{"where no process can join", 3, func(c *Config) { c.CanStart = false }, []moment{{0, 1, true}, {30, 1, true}}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := Config{Settings: Settings{Detect: detect}, CanStart: true}
			if c.config != nil {
				c.config(&config)
			}
			r := trainingOf(t, config, c.workers)
			for place := range c.workers {
				r.s.workers[place].heard = timing.History{Heard: r.now}
			}
			began := r.now
			for _, m := range c.moments {
				r.now = began.Add(time.Duration(m.ms) * time.Millisecond)
				if m.worker >= 0 {
					since := time.Duration(0)
					if at := r.s.workers[m.worker].stopped; m.stopped && !at.IsZero() {
						since = r.now.Sub(at)
					}
					r.effects = append(r.effects, r.s.Step(r.now, WorkerHalted{Worker: m.worker, Stopped: m.stopped, For: since})...)
				} else if m.stopped { // as a look shows that comes late
					r.effects = append(r.effects, r.s.Step(r.now, WatchTick{Due: r.now.Add(-detect)})...)
				} else if at := r.s.Alarm(); !at.IsZero() && !at.After(r.now) {
					r.effects = append(r.effects, r.s.Step(r.now, AlarmDue{})...)
				}
				clear(r.s.timers) // the others do not answer here
			}
			var fenced []int
			for _, e := range pick[FenceWorker](r.effects) {
				fenced = append(fenced, e.Worker)
			}
			slices.Sort(fenced)
			if !slices.Equal(fenced, c.fenced) || len(pick[Kill](r.effects)) > 0 {
				t.Errorf("fenced %v, want %v; killed %v; %s", fenced, c.fenced, pick[Kill](r.effects), r.kinds())
			}
		})
	}
}

// What people read of a worker that is stopped.
func TestHaltedInWords(t *testing.T) {
	for frozen, want := range map[bool][2]string{
		false: {"worker 1 is stopped by a signal", "worker 1 stopped"},
		true:  {"worker 1 is frozen: none of its threads runs", "worker 1 frozen"},
	} {
		r := trainingOf(t, Config{Settings: Settings{Detect: time.Second}, CanStart: true}, 3)
		r.s.workers[1].heard = timing.History{Heard: r.now}
		stopped := r.now
		r.s.Step(stopped.Add(timing.Halt), WorkerHalted{Worker: 1, Stopped: true, Frozen: frozen, For: timing.Halt})
		w := r.s.workers[1]
		if got := stoppedBy(r.s.death(w)); got != want[0] {
			t.Errorf("cause: %q", got)
		}
		if got := r.s.inWords(w, r.s.death(w)); got != want[1] {
			t.Errorf("summary: %q", got)
		}
		if d := r.s.autopsy(w, ""); !d.Died.Equal(stopped) || d.How != controller.Halted {
			t.Errorf("its recovery counts from %v by %v, want %v", d.Died, d.How, stopped)
		}
	}
}

// A silent worker stays as long as its host says that its process runs or waits for a processor, but not without end.
func TestSilentAndRunning(t *testing.T) {
	const detect = time.Second
	policy := timing.Of(detect)
	for _, c := range []struct {
		name           string
		until          time.Duration // its process runs
		atLeast, below time.Duration // when it is evicted
	}{
		{"never", 0, detect, detect + 2*timing.Heartbeat},
		{"not any more", 2 * time.Second, 2*time.Second + policy.Runs, 2*time.Second + policy.Runs + 2*timing.Heartbeat},
		{"always", 20 * time.Second, detect + policy.Spare, detect + policy.Spare + 2*timing.Heartbeat},
	} {
		r := trainingOf(t, Config{Settings: Settings{Detect: detect}, CanStart: true}, 3)
		began, w := r.now, r.s.workers[1]
		for place := range 3 {
			r.s.workers[place].heard = timing.History{Heard: began}
		}
		r.s.late.looks = timing.Looks{}
		for w.fault == nil && r.now.Sub(began) < 20*time.Second {
			r.now = r.now.Add(timing.Heartbeat)
			for _, place := range []int{0, 2} {
				r.s.Step(r.now, Received{place, control.Beat{}})
			}
			if r.now.Sub(began) <= c.until {
				r.s.Step(r.now, WorkerRuns{1})
			}
			r.s.Step(r.now, WatchTick{Due: r.now})
		}
		if after := r.now.Sub(began); after < c.atLeast || after >= c.below {
			t.Errorf("%s: evicted after %v, want %v", c.name, after, c.atLeast)
		}
	}
}

// A silent worker whose process runs has more time to answer a query, but not without end, and another one does not have it.
func TestSilentAndAsked(t *testing.T) {
	const detect = time.Second
	evicted := func(silent int) time.Duration {
		r := trainingOf(t, Config{Settings: Settings{Detect: detect}}, 4)
		r.feed(died(0)...)
		for _, place := range []int{1, 3} {
			r.feed(Received{place, control.Answer{Ballot: id.Ballot{Term: 1, Attempt: 1}, Report: control.Report{Plan: r.s.plan.Version}}})
		}
		began, tick := r.now, 50*time.Millisecond
		for r.now.Sub(began) < time.Minute && r.s.workers[2].fault == nil {
			r.now = r.now.Add(tick)
			for place := 1; place < 4; place++ {
				every := 2 * tick
				if place == silent {
					every = 6 * tick
				}
				if r.now.Sub(began)%every == 0 {
					r.s.Step(r.now, Received{place, control.Beat{}})
				}
			}
			if silent > 0 {
				r.s.Step(r.now, WorkerRuns{silent})
			}
			r.s.Step(r.now, WatchTick{Due: r.now})
			if at := r.s.Alarm(); !at.IsZero() && !at.After(r.now) {
				r.s.Step(r.now, AlarmDue{})
			}
		}
		return r.now.Sub(began)
	}
	usual := evicted(0)
	for _, silent := range []int{2, 3} {
		if got, most := evicted(silent), usual+timing.Of(detect).Spare+time.Second; got < usual || got > most {
			t.Errorf("where worker %d is silent, worker 2 is evicted after %v, want %v to %v", silent, got, usual, most)
		}
	}
}
