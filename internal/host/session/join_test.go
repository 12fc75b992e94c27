package session

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/timing"
)

// begun returns the workers that were to be started since it was last asked.
func (r *ran) begun() (all []plan.Worker) {
	r.effects = slices.DeleteFunc(r.effects, func(e Effect) bool {
		b, ok := e.(StartWorker)
		if ok {
			all = append(all, b.Worker)
		}
		return ok
	})
	return all
}

// kinds returns the kinds of the events so far.
func (r *ran) kinds() string {
	var kinds []string
	for _, e := range r.effects {
		if e, ok := e.(WriteEvent); ok {
			kinds = append(kinds, e.Event.Kind)
		}
	}
	return strings.Join(kinds, " ")
}

func joining(t *testing.T, n int, respawn bool) *ran {
	return trainingOf(t, Config{Settings: Settings{Respawn: respawn}, CanStart: true}, n)
}

func TestAddedWorkersGetAPart(t *testing.T) {
	r := joining(t, 2, false)
	r.feed(AddWorkers{2})
	ids := pick[AnswerAdd](r.effects)[0].IDs
	if all := r.begun(); !slices.Equal(ids, []int{2, 3}) || len(all) != 2 || all[1] != (plan.Worker{ID: 3}) {
		t.Fatalf("%v, %v", ids, all)
	}
	r.feed(WorkerStarted{plan.Worker{ID: 2}, nil}, WorkerStarted{plan.Worker{ID: 3}, errors.New("no room")})
	sent[control.Start](r)
	r.feed(Received{2, control.Hello{Protocol: control.Protocol, WorkerID: 2, PID: 9}}, Received{2, readyOf(2)})
	if start := sent[control.Start](r); len(start) != 1 || !start[2].Joins {
		t.Fatalf("starts: %v", start)
	}
	if fills := sent[control.Fill](r); len(fills) == 0 {
		t.Fatal("the controller does not know")
	}
	if kinds := r.kinds(); !strings.Contains(kinds, "refused") || r.s.phase == ending {
		t.Error(kinds)
	}
}

// Each worker has a connection of its own, so the first step of one that has joined may be heard before the others' steps before it.
func TestStepOfAJoinerComesFirst(t *testing.T) {
	r := joining(t, 2, false)
	r.feed(AddWorkers{1}, WorkerStarted{plan.Worker{ID: 2}, nil}, Received{2, control.Hello{Protocol: control.Protocol, WorkerID: 2}}, Received{2, readyOf(2)})
	before := len(pick[WriteMetrics](r.effects))
	r.feed(stepOf(2, 3, 1))
	if r.s.phase == ending || r.s.records.last.Step != 1 {
		t.Fatalf("after step %d: %v", r.s.records.last.Step, r.s.end.err)
	}
	r.feed(stepOf(0, 2, 1))
	if all := pick[WriteMetrics](r.effects)[before:]; r.s.end.err != nil || len(all) != 2 || all[0].Metrics.Step != 2 || all[1].Metrics.Step != 3 {
		t.Errorf("%v: %+v", r.s.end.err, all)
	}
	r.feed(stepOf(2, 9, 1)) // there is no such step
	if bad := new(ProtocolError); !errors.As(r.s.end.err, &bad) {
		t.Error(r.s.end.err)
	}
}

// Whatever is wrong with a worker that is to join, the run goes on.
func TestJoinerIsRefused(t *testing.T) {
	who := control.Hello{Protocol: control.Protocol, WorkerID: 2}
	other := readyOf(2)
	other.Job.Seed = 7
	for name, events := range map[string][]Event{
		"seed":       {Received{2, who}, Received{2, other}},
		"failed":     {Received{2, who}, Received{2, control.Failed{Kind: control.Usage, Text: "no"}}},
		"other ID":   {Received{2, control.Hello{Protocol: control.Protocol, WorkerID: 1}}},
		"no message": {ConnClosed{2, control.ErrFormat}},
		"too early":  {Received{2, who}, Received{2, control.Step{Step: 1}}},
	} {
		r := joining(t, 2, true)
		r.feed(AddWorkers{1}, WorkerStarted{plan.Worker{ID: 2}, nil})
		r.begun()
		r.feed(events...)
		r.feed(ConnClosed{2, errors.New("EOF")}, WorkerExited{2, Status{Code: -1, Text: "signal: killed"}})
		if r.s.phase == ending || r.s.workers[2].state != gone || !strings.Contains(r.kinds(), "refused") || r.s.records.lost != 0 {
			t.Errorf("%s: %v, %s", name, r.s.end.err, r.kinds())
		}
		if all := r.begun(); len(all) != 0 {
			t.Errorf("%s: another one is started: %v", name, all)
		}
	}
}

// A joiner that is evicted is lost, also when its exit is never seen.
func TestEvictedJoinerHasNotLeft(t *testing.T) {
	r := joining(t, 2, false)
	r.feed(AddWorkers{1}, WorkerStarted{plan.Worker{ID: 2}, nil}, Received{2, control.Hello{Protocol: control.Protocol, WorkerID: 2}}, Received{2, readyOf(2)})
	r.s.evict(r.s.workers[2], "worker 2 has not answered within 500ms")
	for r.s.workers[2].state != gone {
		r.now = r.s.Alarm()
		r.feed(AlarmDue{})
	}
	if kinds := r.kinds(); !strings.Contains(kinds, "lost") || strings.Contains(kinds, "left") {
		t.Error(kinds)
	}
}

func TestJoinerThatSaysNothing(t *testing.T) {
	r := joining(t, 2, false)
	r.feed(AddWorkers{1}, WorkerStarted{plan.Worker{ID: 2}, nil})
	at := r.s.Alarm()
	if want := r.now.Add(r.s.cfg.HelloTimeout); at != want {
		t.Fatalf("the alarm is at %v, want %v", at, want)
	}
	r.now = time.Unix(0, 0).Add(r.s.cfg.HelloTimeout) // the first workers would be late now; this one is not
	r.feed(AlarmDue{})
	if strings.Contains(r.kinds(), "refused") || r.s.phase == ending {
		t.Fatal(r.kinds(), r.s.end.err)
	}
	r.now = at.Add(-time.Second)
	r.feed(AlarmDue{})
	if !strings.Contains(r.kinds(), "refused") || r.s.phase == ending {
		t.Error(r.kinds())
	}
}

// What a worker says after it was evicted gives it no part: a plan that waits for it would keep all others from beginning.
func TestEvictedJoinerHasNoPart(t *testing.T) {
	silent := func(r *ran) {
		r.feed(Received{2, control.Hello{Protocol: control.Protocol, WorkerID: 2}})
		r.now = r.now.Add(10 * r.s.cfg.Detect)
		r.feed(Received{0, control.Beat{}}, Received{1, control.Beat{}}, WatchTick{Due: r.now})
	}
	late := func(r *ran) {
		r.now = r.s.Alarm()
		r.feed(AlarmDue{}, Received{2, control.Hello{Protocol: control.Protocol, WorkerID: 2}})
	}
	for name, evict := range map[string]func(*ran){"silent": silent, "late": late} {
		r := trainingOf(t, Config{Settings: Settings{Detect: time.Minute}, CanStart: true}, 2)
		r.feed(AddWorkers{2}, WorkerStarted{plan.Worker{ID: 2}, nil})
		evict(r)
		if r.s.workers[2].fault == nil || r.s.phase != training {
			t.Fatalf("%s: worker 2 is not evicted, %v", name, r.s.phase)
		}
		sent[control.Start](r)
		r.feed(Received{2, readyOf(2)})
		if starts, fills := sent[control.Start](r), sent[control.Fill](r); len(starts)+len(fills) > 0 {
			t.Errorf("%s: a worker that was evicted joins: %v, %v", name, starts, fills)
		}
		r.feed(WorkerStarted{plan.Worker{ID: 3}, nil}, Received{3, control.Hello{Protocol: control.Protocol, WorkerID: 3}}, Received{3, readyOf(3)})
		for place, fill := range sent[control.Fill](r) {
			for _, p := range fill.Peers {
				if place == 2 || p.Worker.ID == 2 {
					t.Fatalf("%s: the plan counts on worker 2: %v", name, fill)
				}
			}
			r.feed(Received{place, control.Level{ID: fill.ID, Step: 1}})
		}
		if orders := sent[control.Order](r); len(orders) == 0 {
			t.Errorf("%s: the next worker does not join", name)
		}
	}
}

func TestAddIsRefused(t *testing.T) {
	for name, r := range map[string]*ran{"alone": trainingOf(t, Config{}, 2), "many": joining(t, 2, false)} {
		n := MaxWorkers
		if name == "alone" {
			n = 1
		}
		r.feed(AddWorkers{n})
		if refusal := pick[AnswerAdd](r.effects)[0].Refusal; refusal == "" || len(r.begun()) > 0 {
			t.Errorf("%s: %q", name, refusal)
		}
	}
}

// A run that waits for workers is not over while one is being started, and has failed when that fails.
func TestLastWorkerExitsWhileAnotherStarts(t *testing.T) {
	r := trainingOf(t, Config{Settings: Settings{MinWorkers: 2}, CanStart: true}, 2)
	r.feed(died(1)...)
	r.answer(1, 1)
	if !strings.Contains(r.kinds(), "hold") {
		t.Fatal(r.kinds())
	}
	r.feed(AddWorkers{1})
	r.feed(died(0)...)
	if r.s.phase != ending && r.s.Over() {
		t.Fatalf("over without a verdict: %+v", r.s.Outcome())
	}
	r.feed(WorkerStarted{plan.Worker{ID: 2}, errors.New("no room")})
	if out := r.s.Outcome(); !r.s.Over() || out.Err == nil || out.Summary == nil {
		t.Errorf("over %v, %+v", r.s.Over(), out)
	}
}

// A worker that misses heartbeats is fenced: the run continues without it, and its process joins when it is heard again, or is killed
// when it is not. The only worker that can continue the run gets the grace period before it is killed.
func TestFence(t *testing.T) {
	detect := 4 * time.Second
	grace := timing.Of(detect).Grace
	silent := func(n int, heard ...int) (*ran, time.Duration) { // after which the others are 100 ms on
		r := trainingOf(t, Config{Settings: Settings{Detect: detect}, CanStart: true}, n)
		look := func(heard ...int) {
			r.now = r.now.Add(100 * time.Millisecond)
			for _, place := range heard {
				r.effects = append(r.effects, r.s.Step(r.now, Received{place, control.Beat{}})...)
			}
			r.effects = append(r.effects, r.s.Step(r.now, WatchTick{Due: r.now})...)
		}
		for range 300 { // they are heard regularly
			look([]int{0, 1, 2}[:n]...)
		}
		began := r.now
		for len(pick[FenceWorker](r.effects))+len(pick[Kill](r.effects)) == 0 && r.now.Sub(began) < 2*grace {
			look(heard...)
		}
		return r, r.now.Sub(began)
	}

	r, after := silent(3, 0, 2)
	fence := FenceWorker{1, plan.Worker{ID: 1, Incarnation: 1}}
	if got := pick[FenceWorker](r.effects); !slices.Equal(got, []FenceWorker{fence}) || after > detect+200*time.Millisecond {
		t.Fatalf("after %v: %v, %s", after, got, r.kinds())
	}
	if w := r.s.workers[1]; w.state != gone || w.exit != fenced || r.s.records.lost != 1 || len(sent[control.Query](r)) != 2 {
		t.Fatalf("worker 1: %v, %v", w.state, w.exit)
	}
	r.feed(Fenced{1, fence.As})
	hello := control.Hello{Protocol: control.Protocol, WorkerID: 1, Incarnation: 1}
	r.feed(Received{3, hello}, Received{3, readyOf(1)})
	if start := sent[control.Start](r); !start[3].Joins {
		t.Errorf("%v to the worker that is heard again", start)
	}
	if kills := pick[Kill](r.effects); len(kills) != 0 {
		t.Errorf("kills %v", kills)
	}

	r, _ = silent(3, 0, 2)
	r.feed(Fenced{1, fence.As})
	clear(r.s.timers) // the others do not answer here
	if until := r.s.workers[3].hello; until != r.now.Add(grace) {
		t.Errorf("it is awaited for %v", until.Sub(r.now))
	}
	r.now = r.s.workers[3].hello
	r.feed(AlarmDue{})
	if kills := pick[Kill](r.effects); !slices.Equal(kills, []Kill{{Worker: 3}}) {
		t.Errorf("after the grace period: %v", kills)
	}
	r.feed(ConnClosed{3, nil}, WorkerExited{3, Status{Code: -1, Text: "signal: killed"}})
	if r.s.phase != training || r.s.records.lost != 1 {
		t.Errorf("%v, %d lost", r.s.phase, r.s.records.lost)
	}

	r, after = silent(1)
	if kills := pick[Kill](r.effects); !slices.Equal(kills, []Kill{{Worker: 0}}) || after < grace {
		t.Errorf("the only worker, after %v: %v", after, kills)
	}
}

// A worker that has come back as the run ends is killed, as it has no part in it. However long its process takes to go, or if it
// never does, the run has succeeded.
func TestFencedAtTheEnd(t *testing.T) {
	for name, after := range map[string][]Event{
		"goes late":              {AlarmDue{}, AlarmDue{}, WorkerExited{2, Status{Code: -1, Text: "signal: killed"}}, AlarmDue{}, AlarmDue{}},
		"closes its connection":  {ConnClosed{2, nil}, AlarmDue{}, AlarmDue{}, WorkerExited{2, Status{Code: -1, Text: "signal: killed"}}},
		"never goes":             {AlarmDue{}, AlarmDue{}, AlarmDue{}},
		"closes, and never goes": {ConnClosed{2, nil}, AlarmDue{}, AlarmDue{}, AlarmDue{}},
	} {
		for _, heard := range []bool{false, true} {
			if heard && name == "never goes" {
				continue // it may be busy at its end, and is killed when it misses heartbeats
			}
			t.Run(fmt.Sprintf("%s, heard=%t", name, heard), func(t *testing.T) {
				r := trainingOf(t, Config{CanStart: true}, 2)
				r.feed(AddWorkers{1})
				who := pick[StartWorker](r.effects)[0].Worker
				r.feed(WorkerStarted{who, nil})
				if heard {
					r.feed(Received{2, control.Hello{Protocol: control.Protocol, WorkerID: 2, Incarnation: who.Incarnation}}, Received{2, readyOf(2)})
				}
				for step := 2; step <= 3; step++ {
					r.feed(stepOf(0, step, 1), stepOf(1, step, 1))
				}
				r.feed(Received{0, doneAfter(3, "")}, Received{1, doneAfter(3, "")})
				if r.s.phase != finished {
					t.Fatalf("%v", r.s.phase)
				}
				r.feed(leave(0, 1)...)
				r.feed(after...)
				if out := r.s.Outcome(); !r.s.Over() || out.Err != nil {
					t.Errorf("over %v, %v", r.s.Over(), out.Err)
				}
			})
		}
	}
}
