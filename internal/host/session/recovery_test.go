package session

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// ran is a session with what it did, fed with a second between events.
type ran struct {
	t       *testing.T
	s       *Session
	now     time.Time
	effects []Effect
}

// trainingOf returns a session of n workers in training, after a step.
func trainingOf(t *testing.T, cfg Config, n int) *ran {
	r := &ran{t: t, s: begin(cfg, n), now: time.Unix(0, 0)}
	r.feed(prepare(n)...)
	if first := sent[control.Order](r); len(first) != n {
		t.Fatalf("%d first orders", len(first))
	}
	r.feed(commit(n, 1)...)
	return r
}

func (r *ran) feed(events ...Event) {
	for _, e := range events {
		r.now = r.now.Add(time.Second)
		for todo := r.s.Step(r.now, e); len(todo) > 0; todo = todo[1:] {
			r.effects = append(r.effects, todo[0])
			if p, ok := todo[0].(Propose); ok { // the shell's part
				todo = append(todo[:1:1], append(r.s.Step(r.now, Agreed{p.Order.Plan.Version, r.now}), todo[1:]...)...)
			}
		}
	}
}

// sent returns the messages of one type with who got them, since it was last asked.
func sent[M control.Message](r *ran) map[int]M {
	all := make(map[int]M)
	r.effects = slices.DeleteFunc(r.effects, func(e Effect) bool {
		m, ok := e.(Send)
		if !ok {
			return false
		}
		if m, ok := m.Message.(M); ok {
			all[e.(Send).Worker] = m
			return true
		}
		return false
	})
	return all
}

func died(id int) []Event {
	return []Event{ConnClosed{id, fmt.Errorf("EOF")}, WorkerExited{id, Status{Code: -1, Text: "signal: killed"}}}
}

// answer is what workers say that have passed the commit of a step.
func (r *ran) answer(step int, version int) (asked []int) {
	queries := sent[control.Query](r)
	for _, w := range slices.Sorted(maps.Keys(queries)) {
		asked = append(asked, w)
		report := control.Report{Plan: id.Version{Generation: 1, N: version}, Passed: id.Point{Step: step}}
		r.feed(Received{w, control.Answer{Ballot: queries[w].Ballot, Report: report}})
	}
	return asked
}

// obey lets those that got an order apply it.
func (r *ran) obey() (o control.Order) {
	for id, m := range sent[control.Order](r) {
		o = m
		r.feed(Received{id, control.Applied{Ballot: o.Ballot, Version: o.Plan.Version}})
	}
	return o
}

func stepOf(id, n int, plan uint64) Event {
	m := committedStep(n)
	m.Plan = plan
	return Received{id, m}
}

func TestLoss(t *testing.T) {
	r := trainingOf(t, Config{}, 3)
	r.feed(stepOf(0, 2, 1)) // worker 0 was the only one to say so, and dies
	r.feed(died(0)...)
	if asked := r.answer(2, 1); !slices.Equal(asked, []int{1, 2}) {
		t.Fatalf("asked %v", asked)
	}
	o := r.obey()
	if o.Plan.Version.N != 2 || len(o.Plan.Workers) != 2 || len(o.Peers) != 2 || o.Peers[0].Addr != "127.0.0.1:4001" || o.Passed != (id.Point{Step: 2}) || o.Rollback {
		t.Errorf("order %+v", o)
	}
	r.feed(stepOf(2, 2, 1), stepOf(2, 3, 2), stepOf(1, 2, 2), stepOf(1, 3, 2))
	// The next one takes over what the first does.
	r.feed(Received{1, control.Output{Text: "x"}}, Received{1, doneAfter(3, "")}, Received{2, doneAfter(3, "")})
	r.feed(leave(1, 2)...)
	out := r.s.Outcome()
	if out.Err != nil || !r.s.Over() || out.Summary.WorkersLost != 1 || len(out.Summary.Recoveries) != 1 || len(r.s.reports.told) != 0 {
		t.Errorf("%v, %+v", out.Err, out.Summary)
	}
	var lines []string
	for _, m := range pick[WriteMetrics](r.effects) {
		lines = append(lines, fmt.Sprint(m.Metrics.Step, m.Metrics.Workers, m.Metrics.Plan))
	}
	if want := []string{"1 3 1", "2 3 1", "3 2 2"}; !slices.Equal(lines, want) {
		t.Errorf("metrics %v", lines)
	}
	var kinds []string
	for _, e := range pick[WriteEvent](r.effects) {
		if e.Event.Kind != "note" {
			kinds = append(kinds, e.Event.Kind)
		}
	}
	if got := strings.Join(kinds, " "); got != "start plan lost plan unprotected recovered end" {
		t.Errorf("events %s", got)
	}
}

func TestRollback(t *testing.T) {
	r := trainingOf(t, Config{Settings: Settings{Mirrors: -1}}, 2)
	r.feed(stepOf(0, 2, 1), stepOf(1, 2, 1))
	r.feed(died(1)...)
	r.answer(2, 1)
	if o := r.obey(); !o.Rollback || o.Passed != (id.Point{}) || o.Plan.FromStep != 1 {
		t.Fatalf("order %+v", o)
	}
	if r.s.records.last.Step != 0 {
		t.Errorf("at step %d", r.s.records.last.Step)
	}
	r.feed(stepOf(0, 3, 1)) // of before
	for n := range 3 {
		r.feed(stepOf(0, n+1, 2))
	}
	r.feed(Received{0, doneAfter(3, "")})
	r.feed(leave(0)...)
	out := r.s.Outcome()
	if out.Err != nil || out.Summary.Rollbacks != 1 || out.Summary.Steps != 3 {
		t.Errorf("%v, %+v", out.Err, out.Summary)
	}
	var lines []string
	for _, m := range pick[WriteMetrics](r.effects) {
		lines = append(lines, fmt.Sprint(m.Metrics.Step, m.Metrics.Plan))
	}
	if want := []string{"1 1", "2 1", "1 2", "2 2", "3 2"}; !slices.Equal(lines, want) {
		t.Errorf("metrics %v", lines)
	}
}

func TestTrouble(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  Config
		run  func(r *ran)
		want string // error; "" if it goes on
	}{
		{"one ends by a link, and its peer lives", Config{}, func(r *ran) {
			r.feed(Received{0, control.Failed{Kind: control.PeerLost, Text: "link broke"}})
			r.feed(leave(0)...)
			r.answer(1, 1)
			r.obey()
		}, ""},
		{"a fault because of a death that is heard of later", Config{}, func(r *ran) {
			r.feed(Received{0, control.Failed{Kind: control.Faulty, Text: "reset"}})
			r.feed(leave(0)...)
			r.feed(died(1)...)
			r.answer(1, 1)
			r.obey()
			r.feed(AlarmDue{})
		}, ""},
		{"too few", Config{Settings: Settings{MinWorkers: 2}}, func(r *ran) {
			r.feed(died(0)...)
			r.feed(died(1)...)
			r.answer(1, 1)
			r.now = r.s.Alarm()
			r.now = r.now.Add(-time.Second)
			r.feed(AlarmDue{})
		}, "1 of at least 2 workers are left, and no other came within 2m0s, at step 1 of 3"},
		{"an unknown plan", Config{}, func(r *ran) { r.feed(stepOf(1, 2, 7)) }, "worker 1 committed step 2 under plan 7, and plan 1 is live: was PROGRAM built from another version than the launcher?"},
		{"another loss than that of the dead", Config{}, func(r *ran) {
			r.feed(stepOf(0, 2, 1))
			r.feed(died(0)...)
			m := committedStep(2)
			m.Loss++
			r.feed(Received{1, m})
		}, "worker 1 reports another loss for step 2 than worker 0"},
		{"an uncaught panic", Config{}, func(r *ran) {
			r.feed(ConnClosed{2, fmt.Errorf("EOF")}, WorkerExited{2, Status{Code: 2, Text: "exit status 2", Panicked: true}})
		}, "worker 2 exited: exit status 2 after a panic, at step 1 of 3"},
		{"a panic", Config{}, func(r *ran) {
			r.feed(died(0)...)
			r.feed(Received{1, control.Failed{Kind: control.UserPanic, Text: "boom"}})
		}, "worker 1: boom"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := trainingOf(t, c.cfg, 3)
			c.run(r)
			if c.want == "" && (r.s.end.err != nil || r.s.ctl.Busy()) || c.want != "" && fmt.Sprint(r.s.end.err) != c.want {
				t.Errorf("%v, under way %v", r.s.end.err, r.s.ctl.Busy())
			}
		})
	}
}

// A worker that does not answer is ended; an agent that was itself held up evicts none.
func TestQueryTimer(t *testing.T) {
	r := trainingOf(t, Config{Settings: Settings{Detect: 4 * time.Second}}, 3)
	r.feed(died(0)...)
	at := r.s.Alarm()
	if at != r.now.Add(4*time.Second) {
		t.Fatalf("alarm at %v", at)
	}
	r.now = at.Add(time.Second / 2)
	r.feed(AlarmDue{})
	if len(pick[Kill](r.effects)) > 0 || r.s.Alarm() != r.now.Add(4*time.Second) {
		t.Fatal("a late agent blames workers")
	}
	late := func() {
		r.now = r.s.Alarm()
		for _, w := range []int{1, 2} {
			r.s.Step(r.now, Received{w, control.Beat{}})
		}
		r.feed(AlarmDue{})
	}
	for range timing.Hold/(4*time.Second) - 1 { // no worker answers: that may be the machine, and no other one is ready
		late()
		if k := pick[Kill](r.effects); len(k) > 0 {
			t.Fatalf("killed %v", k)
		}
	}
	late()
	if k := pick[Kill](r.effects); len(k) != 2 || r.s.Alarm() != r.now.Add(timing.Reap) {
		t.Errorf("killed %v", k)
	}
	// The session does not wait for workers that do not even exit when they are killed.
	r.feed(AlarmDue{})
	if want := "worker 2 has not answered within 4s; no worker is left, at step 1 of 3"; r.s.end.err == nil || r.s.end.err.Error() != want {
		t.Errorf("%v", r.s.end.err)
	}
}

// While answers come, while all heartbeats are late, and while the machine is crowded, a worker that does not answer is not evicted.
func TestQueryTimerWaitsForTheLate(t *testing.T) {
	ask := func() *ran {
		r := trainingOf(t, Config{Settings: Settings{Detect: 4 * time.Second}}, 4)
		r.feed(died(0)...)
		return r
	}
	fire := func(r *ran) { r.s.Step(r.s.Alarm(), AlarmDue{}) }
	answer := func(r *ran, place int) {
		r.feed(Received{place, control.Answer{Ballot: id.Ballot{Term: 1, Attempt: 1}, Report: control.Report{Plan: r.s.plan.Version}}})
	}
	r := ask()
	due := r.s.Alarm()
	answer(r, 1)
	answered := r.now
	answer(r, 1) // the same again
	if got := r.s.Alarm(); got != answered.Add(4*time.Second) || !got.After(due) {
		t.Errorf("after an answer at %v the others have until %v", answered, got)
	}

	// All heartbeats come 3 s late.
	r = ask()
	for range 10 {
		r.now = r.now.Add(3 * time.Second)
		for place := 1; place < 4; place++ {
			r.s.Step(r.now, Received{place, control.Beat{}})
		}
		r.s.Step(r.now, WatchTick{Due: r.now})
	}
	answer(r, 1)
	due = r.s.Alarm()
	if fire(r); r.s.workers[2].fault != nil || !r.s.Alarm().After(due) {
		t.Errorf("%v, due %v, now %v", r.s.workers[2].fault, due, r.s.Alarm())
	}
	if fire(r); r.s.workers[2].fault == nil || r.s.workers[1].fault != nil {
		t.Errorf("worker 1: %v, worker 2: %v", r.s.workers[1].fault, r.s.workers[2].fault)
	}

	// Heartbeats were in time until now, but many threads wait for each processor.
	r = ask()
	r.s.Step(r.now, WatchTick{Due: r.now, Crowd: 100})
	due = r.s.Alarm()
	if fire(r); r.s.workers[2].fault != nil || r.s.Alarm().Sub(due) < time.Second {
		t.Errorf("crowded: %v, due %v, now %v", r.s.workers[2].fault, due, r.s.Alarm())
	}
}

func TestStall(t *testing.T) {
	r := trainingOf(t, Config{}, 2)
	r.s.records.recent = append(r.s.records.recent, 10, 30, 20)
	r.feed(died(1)...)
	r.answer(1, 1)
	r.obey()
	r.feed(stepOf(0, 2, 2)) // takes 50 ms, as the one before those three
	if got := r.s.records.recoveries[0]; got.StallMS == nil || *got.StallMS != 20 || got.Step != 2 {
		t.Errorf("%+v", got)
	}
	for _, e := range pick[WriteEvent](r.effects) {
		if e.Event.Recovery != nil && e.Event.StallMS != nil {
			t.Errorf("the event says %v before the step is committed", *e.Event.StallMS)
		}
	}
	// Without a step before there is nothing to compare with; a stall that is known does not change when its step comes again.
	r.s.records.recent = nil
	r.s.records.recoveries = append(r.s.records.recoveries, rundir.Recovery{Step: 3})
	r.feed(stepOf(0, 3, 2))
	if got := r.s.records.recoveries[1]; got.StallMS != nil {
		t.Errorf("an unknown stall is %v", *got.StallMS)
	}
}

// A worker that leaves hands over and ends, and is not lost.
func TestLeave(t *testing.T) {
	r := trainingOf(t, Config{}, 3)
	r.feed(Received{1, control.Leave{}})
	if o := r.obey(); len(o.Plan.Workers) != 2 || o.Ballot != (id.Ballot{}) {
		t.Fatalf("order %+v", o)
	}
	if m := sent[control.Release](r); len(m) != 1 {
		t.Errorf("released %v", m)
	}
	r.feed(leave(1)...)
	for n := 2; n <= 3; n++ {
		r.feed(stepOf(0, n, 2), stepOf(2, n, 2))
	}
	r.feed(Received{0, doneAfter(3, "")}, Received{2, doneAfter(3, "")})
	r.feed(leave(0, 2)...)
	out := r.s.Outcome()
	if out.Err != nil || out.Summary.WorkersLost != 0 || len(out.Summary.Recoveries) != 0 || !r.s.Over() {
		t.Errorf("%v, %+v", out.Err, out.Summary)
	}
	kinds := ""
	for _, e := range pick[WriteEvent](r.effects) {
		if e.Event.Kind != "note" {
			kinds += e.Event.Kind + " "
		}
	}
	if kinds != "start plan plan unprotected left end " {
		t.Errorf("events %s", kinds)
	}
	// One that is slow to end does not hold up the end of the run.
	r = trainingOf(t, Config{}, 2)
	r.feed(Received{1, control.Leave{}})
	r.obey()
	r.feed(stepOf(0, 2, 2), stepOf(0, 3, 2), Received{0, doneAfter(3, "")})
	r.feed(leave(1, 0)...)
	if out := r.s.Outcome(); out.Err != nil || out.Summary == nil || !r.s.Over() {
		t.Errorf("%v, %+v", out.Err, out.Summary)
	}
	// All of them together end the run.
	r = trainingOf(t, Config{}, 2)
	r.feed(Received{1, control.Leave{}}, Received{0, control.Leave{}})
	if m := sent[control.Stop](r); len(m) != 2 || r.s.end.stop != Terminated {
		t.Errorf("stops %v", m)
	}
}

// Faults are handed on as they are, and a fault that was injected is not handed on again.
func TestChaosIsHandedOn(t *testing.T) {
	cfg := Config{Settings: Settings{Chaos: func(steps int) ([]string, error) {
		if steps != 3 {
			t.Errorf("a job of %d steps", steps)
		}
		return []string{"kill:0@1", "slow:1@2:0.5"}, nil
	}}}
	r := trainingOf(t, cfg, 2)
	starts := sent[control.Start](r)
	r.feed(FaultInjected{"kill:0@1"})
	for _, id := range []int{0, 1} {
		if got := fmt.Sprint(starts[id].Chaos); got != "[kill:0@1 slow:1@2:0.5]" {
			t.Errorf("worker %d gets %s", id, got)
		}
	}
	if got := fmt.Sprint(r.s.faults); got != "[slow:1@2:0.5]" {
		t.Errorf("left: %s", got)
	}
	cfg.Chaos = func(int) ([]string, error) { return nil, errors.Join(errors.New("one"), errors.New("two")) }
	s := begin(cfg, 2)
	for _, e := range prepare(2) {
		s.Step(time.Unix(0, 0), e)
	}
	if out := s.Outcome(); out.ExitStatus() != ExitUsage || out.Err.Error() != "one; two" {
		t.Errorf("%v", out.Err)
	}
}
