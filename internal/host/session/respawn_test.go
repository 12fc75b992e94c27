package session

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/timing"
)

// start lets the processes start that were asked for, as far as they say Ready, and returns their places.
func (r *ran) start() (places []int) {
	for _, who := range r.begun() {
		r.feed(WorkerStarted{who, nil})
		place := len(r.s.workers) - 1
		r.feed(Received{place, control.Hello{Protocol: control.Protocol, WorkerID: int(who.ID), Incarnation: who.Incarnation}}, Received{place, readyOf(int(who.ID))})
		places = append(places, place)
	}
	return places
}

// wait lets the time pass until the next alarm.
func (r *ran) wait() {
	if at := r.s.Alarm().Add(-time.Second); at.After(r.now) { // feed adds it
		r.now = at
	}
	r.feed(AlarmDue{})
}

// fresh answers queries as workers do that have never had a plan.
func (r *ran) fresh() {
	for place, q := range sent[control.Query](r) {
		r.feed(Received{place, control.Answer{Ballot: q.Ballot}})
	}
}

// All workers are killed at once: their replacements roll the run back, and train it to its end.
func TestAllWorkersAreReplaced(t *testing.T) {
	r := joining(t, 2, true)
	r.feed(slices.Concat(died(0), died(1))...)
	if r.s.phase != training || r.s.Over() {
		t.Fatalf("%v: %v", r.s.phase, r.s.end.err)
	}
	r.wait()
	places := r.start()
	if len(places) != 2 {
		t.Fatalf("started: %v", places)
	}
	r.fresh()
	first := r.obey()
	if !first.Rollback || first.Passed != (id.Point{}) || len(first.Plan.Workers) == 0 {
		t.Fatalf("order %+v", first)
	}
	place := r.s.find(first.Plan.Workers[0]).place
	for step := range 3 {
		r.feed(stepOf(place, step+1, uint64(first.Plan.Version.N)))
	}
	if r.s.end.err != nil || r.s.records.last.Step != 3 || r.s.records.rollbacks != 1 || r.s.records.lost != 2 {
		t.Errorf("%v, step %d, %d rollbacks, %d lost", r.s.end.err, r.s.records.last.Step, r.s.records.rollbacks, r.s.records.lost)
	}
	if !strings.Contains(r.kinds(), "hold") || !strings.Contains(r.kinds(), "recovered") {
		t.Error(r.kinds())
	}
}

// The last workers are lost with a host that does not answer: the run waits for it. Where its agent has exited, or the user stops the run, it
// ends. A worker that starts is waited for as well.
func TestLastHostIsLost(t *testing.T) {
	begin := func(t *testing.T) *ran {
		r := joining(t, 2, false)
		for _, w := range r.s.workers {
			w.who.Host = "b"
		}
		return r
	}
	goes := func(id int, exited bool) []Event {
		all := lost(id, time.Unix(0, 0))
		e := all[1].(WorkerExited)
		e.Status.Gone = exited
		return []Event{all[0], e}
	}
	t.Run("it is back", func(t *testing.T) {
		r := begin(t)
		r.feed(slices.Concat(goes(0, false), goes(1, false))...)
		if r.s.phase != training || r.s.Over() || !strings.Contains(r.kinds(), "hold") {
			t.Fatalf("%v, over %v: %v, %v", r.s.phase, r.s.Over(), r.s.end.err, r.kinds())
		}
		r.feed(HostBack{"b", 0})
		if places := r.start(); len(places) != 2 {
			t.Fatalf("started: %v", places)
		}
		r.fresh()
		if o := r.obey(); !o.Rollback || len(o.Plan.Workers) == 0 || r.s.records.rollbacks != 1 {
			t.Errorf("order %+v", o)
		}
	})
	t.Run("it does not come", func(t *testing.T) {
		r := begin(t)
		r.feed(slices.Concat(goes(0, false), goes(1, false))...)
		if at := r.s.Alarm(); at.Sub(r.now) > timing.Hold {
			t.Fatalf("it waits until %v", at)
		}
		r.now = r.now.Add(timing.Hold)
		r.feed(AlarmDue{})
		if out := r.s.Outcome(); !r.s.Over() || out.Err == nil {
			t.Errorf("over %v, %+v", r.s.Over(), out)
		}
	})
	t.Run("its agent has exited", func(t *testing.T) {
		r := begin(t)
		r.feed(slices.Concat(goes(0, true), goes(1, true))...)
		if out := r.s.Outcome(); !r.s.Over() || out.Err == nil || !strings.Contains(out.Err.Error(), "no worker is left") {
			t.Errorf("over %v, %+v", r.s.Over(), out)
		}
	})
	t.Run("the run is stopped", func(t *testing.T) {
		r := begin(t)
		r.feed(slices.Concat(goes(0, false), goes(1, false), []Event{StopAsked{Interrupt}})...)
		if out := r.s.Outcome(); !r.s.Over() || out.ExitStatus() != ExitInterrupted {
			t.Errorf("over %v, %+v", r.s.Over(), out)
		}
	})
	t.Run("another one starts", func(t *testing.T) {
		r := begin(t)
		r.feed(AddWorkers{1}, WorkerStarted{plan.Worker{ID: 2, Host: "a"}, nil})
		r.feed(slices.Concat(goes(0, true), goes(1, true))...)
		if r.s.phase != training || r.s.Over() {
			t.Fatalf("%v, over %v: %v", r.s.phase, r.s.Over(), r.s.end.err)
		}
		r.feed(died(2)...)
		if out := r.s.Outcome(); !r.s.Over() || out.Err == nil {
			t.Errorf("over %v, %+v", r.s.Over(), out)
		}
	})
}

// Without --respawn a run without workers ends, and names what it can be resumed from.
func TestAllWorkersAreLost(t *testing.T) {
	r := trainingOf(t, Config{CanStart: true, RunDir: "/runs/a", Shown: "runs/a"}, 2)
	r.s.checkpoints.newest = 1
	r.feed(slices.Concat(died(0), died(1))...)
	if out := r.s.Outcome(); !r.s.Over() || out.Resume != "runs/a" || out.Err == nil || out.Err.Error() != "worker 1 exited: signal: killed, at step 1 of 3; no worker is left" {
		t.Errorf("%+v", out)
	}
}

// Replacements that commit nothing are replaced after growing pauses, as long as the run lives.
func TestReplacementsPause(t *testing.T) {
	r := joining(t, 3, true)
	r.feed(died(1)...)
	var pauses []time.Duration
	for n := range 10 {
		pauses = append(pauses, r.s.Alarm().Sub(r.now))
		r.wait()
		all := r.begun()
		if len(all) != 1 || all[0] != (plan.Worker{ID: 1, Incarnation: n + 1}) {
			t.Fatalf("%v is started after %d replacements", all, n)
		}
		r.feed(WorkerStarted{all[0], nil})
		r.feed(died(len(r.s.workers) - 1)...)
	}
	longest := timing.MaxRespawns * timing.RespawnPause
	if r.s.phase == ending || pauses[0] != timing.RespawnStart || pauses[1] != timing.RespawnPause || pauses[2] != 2*timing.RespawnPause || pauses[9] != longest {
		t.Errorf("pauses %v, %v", pauses, r.s.end.err)
	}
}

// A worker that is killed before the first plan is replaced, and the program is not blamed.
func TestKilledBeforeTraining(t *testing.T) {
	for name, said := range map[string][]Event{
		"before its hello": {helloOf(0), Received{0, readyOf(0)}},
		"before its job":   {helloOf(0), Received{0, readyOf(0)}, helloOf(1)},
		"after its job":    {helloOf(0), helloOf(1), Received{1, readyOf(1)}, Received{0, control.Beat{}}},
	} {
		for _, respawn := range []bool{true, false} {
			r := &ran{t: t, s: begin(Config{Settings: Settings{Respawn: respawn}, CanStart: true}, 2), now: time.Unix(0, 0)}
			r.feed(append(said, died(1)...)...)
			if !respawn {
				if r.s.workers[0].state < prepared {
					r.feed(Received{0, readyOf(0)})
				}
				order := sent[control.Order](r)
				if len(order) != 1 || !slices.Equal(order[0].Plan.Workers, []plan.Worker{{ID: 0}}) || r.s.records.lost != 1 || !strings.Contains(r.kinds(), "lost") {
					t.Errorf("%s: orders %v, %d lost, %s, %v", name, order, r.s.records.lost, r.kinds(), r.s.end.err)
				}
				continue
			}
			if r.s.phase != starting {
				t.Fatalf("%s: %v, %v", name, r.s.phase, r.s.end.err)
			}
			if place := r.start(); !slices.Equal(place, []int{2}) {
				t.Fatalf("%s: places %v", name, place)
			}
			if r.s.workers[0].state < prepared {
				r.feed(Received{0, readyOf(0)})
			}
			order := sent[control.Order](r)
			if len(order) != 2 || !slices.Equal(order[2].Plan.Workers, []plan.Worker{{ID: 0}, {ID: 1, Incarnation: 1}}) {
				t.Fatalf("%s: orders %v", name, order)
			}
			r.feed(stepOf(2, 1, 1), stepOf(0, 1, 1))
			if r.s.end.err != nil || r.s.records.lost != 1 || !strings.Contains(r.kinds(), "lost") {
				t.Errorf("%s: %v, %s", name, r.s.end.err, r.kinds())
			}
			if w := r.s.roster.begin(1, ""); w.Incarnation != 2 {
				t.Errorf("%s: the next one is %v", name, w)
			}
		}
	}
}

// Where too few are left for the stages or the least number of workers, the run ends.
func TestTooFewBeforeTraining(t *testing.T) {
	for flag, c := range map[string]Settings{"--stages": {Stages: 2}, "--min-workers": {MinWorkers: 2}} {
		r := &ran{t: t, s: begin(Config{Settings: c, CanStart: true}, 2), now: time.Unix(0, 0)}
		r.feed(append([]Event{helloOf(0), Received{0, readyOf(0)}}, died(1)...)...)
		if err := r.s.end.err; err == nil || err.Error() != "worker 1 exited: signal: killed, before training began: 1 worker left, and "+flag+" is 2; with --respawn it would be replaced" {
			t.Errorf("%s: %v", flag, err)
		}
	}
}

// Before training, a worker that is killed again and again ends the run, as one does that exits by itself.
func TestRespawnBeforeTrainingEnds(t *testing.T) {
	for want, status := range map[int]Status{maxFirstTries: {Code: -1, Text: "signal: killed"}, 0: {Code: 3, Text: "exit status 3"}} {
		r := &ran{t: t, s: begin(Config{Settings: Settings{Respawn: true}, CanStart: true}, 2), now: time.Unix(0, 0)}
		r.feed(helloOf(0))
		n := 0
		for place := 1; r.s.phase == starting; place = len(r.s.workers) - 1 {
			r.feed(ConnClosed{place, errors.New("EOF")}, WorkerExited{place, status})
			if r.s.phase != starting {
				break
			}
			all := r.begun()
			if len(all) == 0 {
				r.now = r.s.Alarm()
				r.feed(AlarmDue{})
				all = r.begun()
			}
			n++
			r.feed(WorkerStarted{all[0], nil})
		}
		if n != want || r.s.end.err == nil {
			t.Errorf("%v: %d replacements, %v", status, n, r.s.end.err)
		}
	}
}

// Where all workers are silent they were stopped together, and none is blamed. They get their time once one is heard again.
func TestAllWorkersAreStopped(t *testing.T) {
	r := trainingOf(t, Config{Settings: Settings{Detect: 4 * time.Second}}, 3)
	began := r.now.Add(31 * time.Second)
	look := func(ms int, heard ...int) []Kill {
		at := began.Add(time.Duration(ms) * time.Millisecond)
		var effects []Effect
		for _, w := range heard {
			effects = append(effects, r.s.Step(at, Received{w, control.Beat{}})...)
		}
		return pick[Kill](append(effects, r.s.Step(at, WatchTick{Due: at})...))
	}
	for ms := -30_000; ms <= 0; ms += 100 { // they are heard regularly
		look(ms, 0, 1, 2)
	}
	for ms := 250; ms < 60_000; ms += 250 {
		if k := look(ms); len(k) > 0 {
			t.Fatalf("%v after %d ms", k, ms)
		}
	}
	if k := look(60_000, 1); len(k) > 0 {
		t.Fatalf("%v as worker 1 is heard again", k)
	}
	for ms := 60_100; ms < 63_700; ms += 100 {
		if k := look(ms, 1, 2); len(k) > 0 {
			t.Fatalf("%v as workers 1 and 2 are heard again", k)
		}
	}
	if k := look(63_800, 1, 2); len(k) != 1 || k[0].Worker != 0 {
		t.Fatalf("%v, want worker 0, which is not heard again", k)
	}
	// All the same, a run does not wait for ever.
	killed := 0
	for ms := 64_000; ms < 200_000; ms += 250 {
		k := look(ms)
		if killed += len(k); len(k) > 0 && ms < 63_800+int(timing.Hold.Milliseconds()) {
			t.Fatalf("%v after %d ms", k, ms)
		}
	}
	if killed != 2 {
		t.Errorf("%d workers are killed", killed)
	}
}

// A run that holds without any worker ends when it is asked to stop.
func TestStopWithoutWorkers(t *testing.T) {
	r := joining(t, 1, true)
	r.feed(died(0)...)
	r.wait()
	all := r.begun()
	r.feed(WorkerStarted{all[0], nil})
	r.feed(died(1)...) // the next one starts after a pause
	if r.s.Over() {
		t.Fatal(r.s.end.err)
	}
	r.feed(StopAsked{Interrupt})
	if out := r.s.Outcome(); !r.s.Over() || out.ExitStatus() != ExitInterrupted {
		t.Errorf("over %v, %+v", r.s.Over(), out)
	}
}
