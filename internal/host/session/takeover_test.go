package session

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
)

// agreedBy returns what a session had agreed, as the next leader finds it.
func agreedBy(t *testing.T, effects []Effect) *Inherited {
	t.Helper()
	in := &Inherited{}
	for _, p := range pick[Propose](effects) {
		text, err := p.Order.Encode()
		if err != nil {
			t.Fatal(err)
		}
		o, err := control.ParseOrder(text)
		if err != nil {
			t.Fatal(err)
		}
		in.Add(o, p.Reason)
	}
	for _, e := range effects {
		switch e := e.(type) {
		case WriteJob:
			in.History.Job = e.Job
		case WritePlan:
			in.History.Plan = &e.Plan
		case WriteMetrics:
			in.History.Last = &e.Metrics
		case WriteEvent:
			switch {
			case e.Event.Kind == "lost":
				in.History.Lost++
				in.History.Unrecovered = append(in.History.Unrecovered, e.Event)
			case e.Event.Recovery != nil:
				in.History.Unrecovered = nil
				in.History.Recoveries = append(in.History.Recoveries, *e.Event.Recovery)
			}
		case WriteSummary:
			in.History.Summary = &e.Summary
		}
	}
	return in
}

// succeed returns the session of the next leader.
func (r *ran) succeed(cfg Config, n int, term uint64) *ran {
	cfg.Inherited, cfg.Term, cfg.Leader = agreedBy(r.t, r.effects), term, "host-1"
	next := &ran{t: r.t, s: begin(cfg, n), now: r.now}
	for id := range n {
		next.s.workers[id].who.Host = r.s.workers[id].who.Host
	}
	next.effects = next.s.Begin(next.now)
	return next
}

// told is what the agent of a worker tells a new leader: who it is, and steps.
func told(id int, steps ...Event) []Event {
	return append([]Event{helloOf(id), Received{id, readyOf(id)}}, steps...)
}

// lost is a worker whose host is gone.
func lost(id int, at time.Time) []Event {
	return []Event{ConnClosed{id, fmt.Errorf("EOF")}, WorkerExited{id, Status{Code: -1, Text: "host-0 was lost", Lost: at}}}
}

// The host of the leader dies with two of four workers: the next one asks the others, and goes on
// with plan, steps and numbers where the first had come to.
func TestTakeOver(t *testing.T) {
	const n = 4
	r := &ran{t: t, s: begin(Config{}, n), now: time.Unix(0, 0)}
	for id := range n {
		r.s.workers[id].who.Host = fmt.Sprintf("host-%d", id/2)
	}
	r.feed(prepare(n)...)
	sent[control.Order](r) // the first
	r.feed(commit(n, 1)...)
	r.feed(stepOf(0, 2, 1)) // only that worker has told
	next := r.succeed(Config{}, n, 5)
	next.feed(told(2, stepOf(2, 1, 1))...)
	next.feed(lost(0, next.now.Add(-time.Second))...)
	if len(sent[control.Query](next)) > 0 {
		t.Fatal("it asks before it knows of all")
	}
	next.feed(lost(1, next.now.Add(-time.Second))...)
	next.feed(told(3, stepOf(3, 1, 1), stepOf(3, 2, 1))...)
	if asked := next.answer(2, 1); !slices.Equal(asked[len(asked)-2:], []int{2, 3}) { // and 1, as its death comes second
		t.Fatalf("asked %v", asked)
	}
	o := next.obey()
	if o.Ballot.Term != 5 || o.Plan.Version.N != 2 || len(o.Plan.Workers) != 2 {
		t.Errorf("order %+v", o)
	}
	next.feed(stepOf(2, 2, 1), stepOf(2, 3, 2), stepOf(3, 3, 2))
	next.feed(Received{2, doneAfter(3, "")}, Received{3, doneAfter(3, "")})
	next.feed(leave(2, 3)...)
	out := next.s.Outcome()
	if out.Err != nil || !next.s.Over() || out.Summary.WorkersLost != 2 || len(out.Summary.Recoveries) != 1 || out.Summary.Recoveries[0].DiedAt != "host" {
		t.Errorf("%v, %+v", out.Err, out.Summary)
	}
	var steps []int
	for _, m := range append(pick[WriteMetrics](r.effects), pick[WriteMetrics](next.effects)...) {
		steps = append(steps, m.Metrics.Step)
	}
	if !slices.Equal(steps, []int{1, 2, 3}) {
		t.Errorf("metrics of steps %v", steps)
	}
	var plans []int
	for _, p := range append(pick[WritePlan](r.effects), pick[WritePlan](next.effects)...) {
		plans = append(plans, written(&p.Plan).N)
	}
	if !slices.Equal(plans, []int{1, 2}) {
		t.Errorf("plans %v", plans)
	}
}

// The leader is lost as it tells that samples are skipped. Its successor tells all workers before it asks them what they have.
func TestTakeOverSkips(t *testing.T) {
	const n = 4
	r := &ran{t: t, s: begin(Config{Settings: Settings{SkipBad: true}}, n), now: time.Unix(0, 0)}
	for id := range n {
		r.s.workers[id].who.Host = fmt.Sprintf("host-%d", id/2)
	}
	r.feed(prepare(n)...)
	sent[control.Order](r)
	r.feed(commit(n, 1)...)
	next := r.succeed(Config{Settings: Settings{SkipBad: true}, Skipped: []uint64{9, 17, 9}}, n, 5)
	next.feed(told(2, stepOf(2, 1, 1))...)
	next.feed(told(3, stepOf(3, 1, 1))...)
	next.feed(lost(0, next.now.Add(-time.Second))...)
	next.feed(lost(1, next.now.Add(-time.Second))...)
	var all []string
	for _, e := range pick[Send](next.effects) {
		switch m := e.Message.(type) {
		case control.BadSample:
			all = append(all, fmt.Sprintf("%d: %s %d.%d", e.Worker, m.Do, m.Sample, m.Skips))
		case control.Query:
			all = append(all, fmt.Sprintf("%d: query", e.Worker))
		}
	}
	for id := 2; id < n; id++ {
		first := []string{fmt.Sprintf("%d: skip 9.1", id), fmt.Sprintf("%d: skip 17.0", id), fmt.Sprintf("%d: query", id)}
		mine := slices.DeleteFunc(slices.Clone(all), func(x string) bool { return !strings.HasPrefix(x, first[0][:2]) })
		if !slices.Equal(mine[:min(3, len(mine))], first) {
			t.Errorf("worker %d is told %q, want %q", id, mine, first)
		}
	}
}

// A plan was agreed and no worker has heard of it; a worker that it does without is fenced.
func TestTakeOverAfterAgreement(t *testing.T) {
	const n = 3
	r := trainingOf(t, Config{}, n)
	r.feed(died(1)...)
	r.answer(1, 1)
	// The leader dies with the plan agreed, but not written down.
	var before []Effect
	for _, e := range r.effects {
		before = append(before, e)
		if p, ok := e.(Propose); ok && p.Order.Plan.Version.N == 2 {
			break
		}
	}
	r.effects = before
	next := r.succeed(Config{}, n, 5)
	if fenced := pick[Fence](next.effects); len(fenced) != 1 || fenced[0].Worker != 1 {
		t.Errorf("fenced %v", fenced)
	}
	next.feed(told(0, stepOf(0, 1, 1))...)
	next.feed(told(2, stepOf(2, 1, 1))...)
	if p := pick[WritePlan](next.effects); len(p) != 1 || written(&p[0].Plan).N != 2 || p[0].Plan.Event != "agreed" {
		t.Errorf("plans %+v", p)
	}
	if asked := next.answer(1, 1); !slices.Equal(asked, []int{0, 2}) {
		t.Fatalf("asked %v", asked)
	}
	if o := next.obey(); o.Plan.Version.N != 3 || len(o.Plan.Workers) != 2 {
		t.Errorf("order %+v", o)
	}
	// The leader before could not tell of the recovery.
	if all := next.s.records.recoveries; len(all) != 1 || all[0].Cause != "worker 1 exited: signal: killed" || all[0].DiedAt != "host" || all[0].TotalMS <= 0 {
		t.Errorf("recoveries %+v", all)
	}
	if kinds := next.kinds(); !strings.Contains(kinds, "recovered") {
		t.Error(kinds)
	}
}

// All is written, and only the ends of the workers are to be seen.
func TestTakeOverAtTheEnd(t *testing.T) {
	const n = 2
	r := trainingOf(t, Config{}, n)
	r.feed(commit(n, 2)...)
	r.feed(commit(n, 3)...)
	r.feed(Received{0, doneAfter(3, "")}, Received{1, doneAfter(3, "")})
	next := r.succeed(Config{}, n, 5)
	next.feed(told(0, stepOf(0, 3, 1))...)
	next.feed(told(1, stepOf(1, 3, 1), Received{1, doneAfter(3, "")})...)
	if len(sent[control.Release](next)) != n {
		t.Error("not all are released")
	}
	next.feed(leave(0, 1)...)
	if out := next.s.Outcome(); out.Err != nil || !next.s.Over() || out.Summary.ParamsSHA256 != "aa" {
		t.Errorf("%v, %+v", out.Err, out.Summary)
	}
}

// No worker is lost, and all are done before the order of the next leader is applied.
func TestTakeOverNearTheEnd(t *testing.T) {
	const n = 2
	r := trainingOf(t, Config{}, n)
	r.feed(commit(n, 2)...)
	r.feed(commit(n, 3)...)
	next := r.succeed(Config{}, n, 5)
	next.feed(told(0, stepOf(0, 3, 1), Received{0, doneAfter(3, "")})...)
	next.feed(told(1, stepOf(1, 3, 1), Received{1, doneAfter(3, "")})...)
	if asked := next.answer(3, 1); !slices.Equal(asked, []int{0, 1}) {
		t.Fatalf("asked %v", asked)
	}
	if len(sent[control.Release](next)) > 0 {
		t.Error("a worker is released that has an order to apply")
	}
	next.obey()
	if len(sent[control.Release](next)) != n {
		t.Error("not all are released")
	}
	next.feed(leave(0, 1)...)
	if out := next.s.Outcome(); out.Err != nil || !next.s.Over() || len(out.Summary.Recoveries) != 0 {
		t.Errorf("%v, %+v", out.Err, out.Summary)
	}
}

// A boundary plan that was agreed may be live: what workers answer decides.
func TestInheritPlans(t *testing.T) {
	v := func(n int) id.Version { return id.Version{Generation: 1, N: n} }
	order := func(n int, ballot uint64, rollback bool) control.Order {
		return control.Order{Ballot: id.Ballot{Attempt: ballot}, Plan: plan.Plan{Version: v(n)}, Rollback: rollback}
	}
	for _, c := range []struct {
		orders             []control.Order
		plan, live, coming int
		restart            int
	}{
		{[]control.Order{order(1, 0, false)}, 1, 0, 0, 0},
		{[]control.Order{order(1, 0, false), order(2, 0, false)}, 1, 0, 2, 0},
		{[]control.Order{order(1, 0, false), order(2, 0, false), order(3, 0, false)}, 2, 0, 3, 0},
		{[]control.Order{order(1, 0, false), order(2, 0, false), order(3, 1, false)}, 3, 3, 0, 0},
		{[]control.Order{order(1, 0, false), order(2, 1, true), order(3, 0, false)}, 2, 2, 3, 2},
		{[]control.Order{order(7, 1, false), order(8, 0, false), order(9, 0, false)}, 8, 7, 9, 0},
	} {
		s := New(Config{Workers: 1, Inherited: &Inherited{Orders: c.orders}}, make([]plan.Worker, 1))
		s.inheritPlans()
		version := func(o *control.Order) int {
			if o == nil {
				return 0
			}
			return o.Plan.Version.N
		}
		if s.plan.Version.N != c.plan || version(s.cfg.Inherited.live) != c.live || version(s.cfg.Inherited.coming) != c.coming || s.restart.version.N != c.restart {
			t.Errorf("%d orders: plan %v, live %d, coming %d, restart %v; want %+v", len(c.orders), s.plan.Version, version(s.cfg.Inherited.live), version(s.cfg.Inherited.coming), s.restart.version, c)
		}
	}
}

// A worker that has joined before its shards cannot go on without the one that has them, so that this one is the last.
func TestLastWithShards(t *testing.T) {
	workers := []plan.Worker{{ID: 0, Host: "host-0"}, {ID: 1, Host: "host-1"}}
	s := New(Config{Workers: 2, CanStart: true}, workers)
	s.plan = plan.Plan{Workers: workers, Shards: []plan.Shard{{Hi: 1}}}
	s.phase = training
	for _, w := range s.workers {
		w.state = working
	}
	if !s.isLast(s.workers[0]) || !s.helpless(s.workers[0]) || s.LastHost() != "host-0" {
		t.Error("the worker with all shards is not the last one")
	}
	if s.isLast(s.workers[1]) || s.helpless(s.workers[1]) {
		t.Error("the worker without shards is the last one")
	}
	s.plan.Shards[0].Mirrors = []id.WorkerID{1}
	if s.isLast(s.workers[0]) || s.helpless(s.workers[0]) || s.LastHost() != "" {
		t.Error("of two workers with shards one is the last")
	}
}

// A worker that joins or leaves with a boundary plan which may be live, and is not known to be, can be the last one.
func TestLastOfAComingPlan(t *testing.T) {
	workers := []plan.Worker{{ID: 0, Host: "host-0"}, {ID: 1, Host: "host-1"}}
	of := func(n int, workers []plan.Worker) (o control.Order) {
		o.Plan.Version, o.Plan.Workers = id.Version{Generation: 1, N: n}, workers
		return o
	}
	for name, orders := range map[string][]control.Order{"joins": {of(1, workers[:1]), of(2, workers)}, "leaves": {of(1, workers), of(2, workers[:1])}} {
		s := New(Config{Workers: 2, CanStart: true, Inherited: &Inherited{Orders: orders}}, workers)
		s.inheritPlans()
		s.phase = training
		for _, w := range s.workers {
			w.state = working
		}
		if s.isLast(s.workers[1]) || s.helpless(s.workers[0]) || s.LastHost() != "" {
			t.Errorf("%s: with two workers, one is the last", name)
		}
		s.workers[0].exitTo(reaped)
		if !s.isLast(s.workers[1]) || !s.helpless(s.workers[1]) || s.LastHost() != "host-1" {
			t.Errorf("%s: the last worker is not known", name)
		}
	}
}
