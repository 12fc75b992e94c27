package session

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

func helloOf(id int) Event {
	return Received{id, control.Hello{Protocol: control.Protocol, WorkerID: id}}
}

func readyOf(id int) control.Ready {
	r := ready
	r.Data = slices.Clone(ready.Data)
	r.Addr = fmt.Sprintf("127.0.0.1:%d", 4000+id)
	r.Layers = []control.Layer{{Name: "a", Tensors: []int{10_000, 100}}, {Name: "b", Tensors: []int{9_000}}}
	return r
}

// many feeds events to a session of n workers, a second apart.
func many(t *testing.T, cfg Config, n int, events ...Event) (*Session, []Effect) {
	t.Helper()
	s := begin(cfg, n)
	var effects []Effect
	for i, e := range events {
		if s.Over() {
			t.Fatalf("over before event %d, %T", i, e)
		}
		effects = append(effects, agreeing(s, time.Unix(int64(i), 0), e)...)
	}
	return s, effects
}

// pick returns the effects of one type.
func pick[E any](effects []Effect) (all []E) {
	for _, e := range effects {
		if e, ok := e.(E); ok {
			all = append(all, e)
		}
	}
	return all
}

// prepare is the way of n workers to training.
func prepare(n int) (events []Event) {
	for id := range n {
		events = append(events, helloOf(id))
	}
	for id := range n {
		events = append(events, Received{id, readyOf(id)})
	}
	return events
}

func commit(n, step int) (events []Event) {
	for id := range n {
		m := committedStep(step)
		m.MS, m.Forwards, m.Backwards = float64(50+id), int64(step*(id+1)), int64(step)
		events = append(events, Received{id, m})
	}
	return events
}

// leave is the end of workers.
func leave(ids ...int) (events []Event) {
	for _, id := range ids {
		events = append(events, ConnClosed{id, errors.New("EOF")}, WorkerExited{id, Status{Code: 0, Text: "exit status 0"}})
	}
	return events
}

func TestManyWorkersToTheEnd(t *testing.T) {
	const n = 3
	events := prepare(n)
	for step := range 3 {
		events = append(events, commit(n, step+1)...)
	}
	for id := range n {
		d := doneAfter(3, "")
		d.Worker = rundir.Worker{ID: 9, Stages: []int{id % 2}, Forwards: int64(10 * id), BytesSent: 7}
		events = append(events, Received{id, d})
	}
	events = append(events, Received{0, control.Output{Text: "x"}})
	s, effects := many(t, Config{Settings: Settings{Stages: 2}}, n, append(events, leave(2, 0, 1)...)...)
	if !s.Over() || s.Outcome().Err != nil {
		t.Fatalf("over %v, %v", s.Over(), s.Outcome().Err)
	}

	var metrics []string
	for _, m := range pick[WriteMetrics](effects) {
		metrics = append(metrics, fmt.Sprint(m.Metrics.Step, m.Metrics.MS, m.Metrics.Workers, m.Metrics.Plan))
	}
	if want := []string{"1 50 3 1", "2 50 3 1", "3 50 3 1"}; !slices.Equal(metrics, want) {
		t.Errorf("metrics %v, want %v", metrics, want)
	}
	if len(s.reports.told) != 0 {
		t.Errorf("%d steps are kept", len(s.reports.told))
	}
	sum := s.Outcome().Summary
	if sum.WorkersStarted != n || sum.WorkersLost != 0 || len(sum.Workers) != n || sum.Workers[2].ID != 2 || sum.Workers[2].Forwards != 20 || sum.Workers[1].BytesSent != 7 {
		t.Errorf("summary %+v", sum)
	}
	if n := len(pick[WriteSummary](effects)); n != 1 {
		t.Errorf("%d summaries", n)
	}

	// All were given one valid plan and all addresses, and it was written down with its reason.
	var starts []control.Start
	var orders []control.Order
	for i, e := range pick[Send](effects) {
		if i >= 2*n {
			if e.Worker != i-2*n || e.Message != (control.Release{}) {
				t.Errorf("message %d went to worker %d: %v", i, e.Worker, e.Message)
			}
			continue
		}
		if e.Worker != i/2 {
			t.Errorf("message %d went to worker %d", i, e.Worker)
		}
		if i%2 == 0 {
			starts = append(starts, e.Message.(control.Start))
		} else {
			orders = append(orders, e.Message.(control.Order))
		}
	}
	if len(starts) != n || len(orders) != n || !reflect.DeepEqual(starts[0], starts[n-1]) || !reflect.DeepEqual(orders[0], orders[n-1]) || starts[0].Joins {
		t.Fatalf("starts %+v, orders %+v", starts, orders)
	}
	p := orders[0].Plan
	err := p.Validate([]plan.Layer{{Tensors: []int{10_000, 100}}, {Tensors: []int{9_000}}})
	if err != nil || len(p.Stages) != 2 || len(p.Workers) != n || p.Micros() != 8 {
		t.Errorf("plan %v\n%v", &p, err)
	}
	want := []control.Peer{{Worker: plan.Worker{ID: 0}, Addr: "127.0.0.1:4000"}, {Worker: plan.Worker{ID: 1}, Addr: "127.0.0.1:4001"}, {Worker: plan.Worker{ID: 2}, Addr: "127.0.0.1:4002"}}
	if !reflect.DeepEqual(orders[0].Peers, want) {
		t.Errorf("peers %+v", orders[0].Peers)
	}
	planText, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	plans := pick[WritePlan](effects)
	if len(plans) != 1 || plans[0].Plan.Event != "start" || plans[0].Plan.Reason != "first plan: 3 workers in 2 stages, 8 micro-batches per step" || string(plans[0].Plan.Plan) != string(planText) {
		t.Errorf("plans.jsonl: %+v", plans)
	}
	if s.job.Workers != n || s.job.Stages != 2 {
		t.Errorf("job.json: %+v", s.job)
	}
	rows := pick[Show](effects)
	begin := rows[slices.IndexFunc(rows, func(s Show) bool { _, ok := s.Event.(view.Begin); return ok })].Event.(view.Begin)
	if len(begin.Workers) != n || len(begin.Workers[2].Stages) != 1 || begin.Reason == "" {
		t.Errorf("begin: %+v", begin)
	}
}

func TestManyWorkersInTrouble(t *testing.T) {
	killed := func(id int) []Event {
		return []Event{ConnClosed{id, errors.New("EOF")}, WorkerExited{id, Status{Code: -1, Text: "signal: killed"}}}
	}
	with := func(base []Event, more ...any) (all []Event) {
		all = slices.Clone(base)
		for _, m := range more {
			if es, ok := m.([]Event); ok {
				all = append(all, es...)
			} else {
				all = append(all, m)
			}
		}
		return all
	}
	changed := func(id int, change func(*control.Ready)) Event {
		r := readyOf(id)
		change(&r)
		return Received{id, r}
	}
	step := func(id int, change func(*control.Step)) Event {
		m := committedStep(1)
		change(&m)
		return Received{id, m}
	}
	failure := func(id int, kind control.FailKind, text string) Event {
		return Received{id, control.Failed{Kind: kind, Text: text, Step: 2}}
	}
	two, hellos := prepare(2), prepare(2)[:2]
	trained := with(prepare(3), commit(3, 1))
	val := 2.0
	const none = "; no worker is left"
	const same = ": all workers must run the same PROGRAM on the same data"

	for _, c := range []struct {
		name    string
		workers int
		events  []Event
		err     string
		exit    int
		kills   string // who is killed
		stopped string // "-" for no summary
	}{
		{"all killed", 3, with(trained, killed(2), killed(0), killed(1)), "worker 1 exited: signal: killed, at step 1 of 3" + none, 1, "", "worker 1 exited: signal: killed"},
		{"killed before training", 2, with(hellos, killed(1), killed(0)), "worker 0 exited: signal: killed, before training began", 1, "", "-"},
		{"all exit well too early", 2, with(two, leave(1, 0)), "worker 0 exited: exit status 0, at step 0 of 3" + none, 1, "", "worker 0 exited: exit status 0"},
		{"peers end first", 3, with(trained, failure(0, control.PeerLost, "worker 2 is gone"), leave(0), failure(1, control.PeerLost, "reset"), leave(1), killed(2)),
			"worker 2 exited: signal: killed, at step 1 of 3" + none, 1, "", "*"},
		{"own fault, and a link", 2, with(two, failure(0, control.PeerLost, "link broke"), failure(1, control.Faulty, "disk full"), later(time.Second)), "worker 1: disk full", 1, "0 1", "*"},
		{"all end by a link", 2, with(two, failure(0, control.PeerLost, "x"), failure(1, control.PeerLost, "y"), leave(0, 1)), "worker 1: y", 1, "", "*"},
		{"a fault of one", 2, with(two, failure(1, control.Faulty, "disk full"), leave(1), later(3*time.Second)), "worker 1: disk full", 1, "0", "*"},
		{"all have a fault", 2, with(two, failure(1, control.Faulty, "disk full"), failure(0, control.Faulty, "disk full, too"), leave(1)), "worker 1: disk full", 1, "0", "*"},
		{"a panic is first hand", 2, with(two, failure(0, control.PeerLost, "link broke"), failure(1, control.UserPanic, "boom")), "worker 1: boom", 1, "0 1", "*"},
		{"wrong usage from all", 2, with(hellos, failure(1, control.Usage, "--steps 0: give at least 1"), failure(0, control.Usage, "--steps 0: give at least 1")), "--steps 0: give at least 1", 2, "0 1", "-"},
		{"not finite", 2, with(two, failure(1, control.NonFinite, "loss is NaN in step 1")), "loss is NaN in step 1", 1, "0 1", "*"},

		{"another seed", 2, with(hellos, Received{0, readyOf(0)}, changed(1, func(r *control.Ready) { r.Job.Seed = 7 })), "worker 1 has another seed than worker 0 (7, not 0)" + same, 1, "0 1", "-"},
		{"another program", 2, with(hellos, Received{0, readyOf(0)}, changed(1, func(r *control.Ready) { r.Job.ProgramSHA256, r.Job.Steps = "f00", 9 })), "worker 1 has another program_sha256 than worker 0" + same, 1, "0 1", "-"},
		{"other flags", 2, with(hellos, Received{0, readyOf(0)}, changed(1, func(r *control.Ready) { r.Job.Args = []string{"--x"} })), "worker 1 has another args than worker 0 ([--x], not [])" + same, 1, "0 1", "-"},
		{"other data", 2, with(hellos, Received{0, readyOf(0)}, changed(1, func(r *control.Ready) { r.Job.DataSHA256 = "ee"; r.Data[0].Size = 1 })), "worker 1 has another data_sha256 than worker 0 (file a)" + same, 1, "0 1", "-"},
		{"other model", 2, with(hellos, Received{0, readyOf(0)}, changed(1, func(r *control.Ready) { r.Job.ModelConfig = []byte(`{"width": 8}`) })), `worker 1 has another model_config than worker 0 ({"width": 8}, not null)` + same, 1, "0 1", "-"},
		{"other versions", 2, with(hellos, changed(0, func(r *control.Ready) { r.Job.ModelConfig = []byte(`{"a": 1, "torch": "2.1"}`) }), changed(1, func(r *control.Ready) { r.Job.ModelConfig = []byte(`{"a": 1, "torch": "1.13"}`) })), `worker 1 has another model_config than worker 0 (torch: "1.13", not "2.1")` + same, 1, "0 1", "-"},
		{"other layers", 2, with(hellos, Received{0, readyOf(0)}, changed(1, func(r *control.Ready) { r.Layers[1].Tensors[0]++ })), "worker 1 has another layers than worker 0 (layer 1)" + same, 1, "0 1", "-"},
		{"no address", 2, with(hellos, changed(1, func(r *control.Ready) { r.Addr = "" })), "worker 1 sent no address where others could reach it, before training" + ": was PROGRAM built from another version than the launcher?", 1, "0 1", "-"},

		{"another loss", 3, with(prepare(3), step(0, func(*control.Step) {}), step(2, func(m *control.Step) { m.Loss = math.Nextafter(m.Loss, 0) })), "worker 2 reports another loss for step 1 than worker 0", 1, "0 1 2", "*"},
		{"another norm", 2, with(two, step(1, func(*control.Step) {}), step(0, func(m *control.Step) { m.GradNorm = 3 })), "worker 0 reports another grad_norm for step 1 than worker 1", 1, "0 1", "*"},
		{"an evaluation of one", 2, with(two, step(0, func(m *control.Step) { m.ValLoss = &val }), step(1, func(*control.Step) {})), "worker 1 reports another val_loss for step 1 than worker 0", 1, "0 1", "*"},
		{"another hash", 2, with(two, commit(2, 1), commit(2, 2), commit(2, 3), Received{0, doneAfter(3, "")}, Received{1, func() control.Done { d := doneAfter(3, ""); d.ParamsSHA256 = "ff"; return d }()}), "worker 1 reports another params_sha256 for the end than worker 0", 1, "0 1", "*"},
		{"output of another", 2, with(two, Received{1, control.Output{Text: "x"}}), "worker 1 sent output, which is for worker 0 to do at step 0 of 3: was PROGRAM built from another version than the launcher?", 1, "0 1", "*"},

		{"interrupt", 2, with(two, commit(2, 1), StopAsked{Interrupt}, commit(2, 2), Received{1, doneAfter(2, Interrupt)}, Received{0, doneAfter(2, Interrupt)}, leave(0, 1)), "interrupted after step 2 of 3", 130, "", "interrupt"},
		{"interrupt twice", 2, with(two, commit(2, 1), StopAsked{Interrupt}, Received{1, doneAfter(1, Interrupt)}, StopAsked{Interrupt}), "interrupted at step 1 of 3; the step under way is lost", 130, "0 1", "interrupt"},
		{"killed after its end", 2, with(two, commit(2, 1), commit(2, 2), commit(2, 3), Received{0, doneAfter(3, "")}, Received{1, doneAfter(3, "")}, killed(0), leave(1)), "<nil>", 0, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			var last time.Time
			s := begin(Config{}, c.workers)
			var effects []Effect
			for i, e := range c.events {
				last = time.Unix(int64(i), 0)
				if l, ok := e.(later); ok {
					last, e = l.at(last)
				}
				effects = append(effects, s.Step(last, e)...)
			}
			out := s.Outcome()
			if got := fmt.Sprint(out.Err); got != c.err || out.ExitStatus() != c.exit {
				t.Errorf("exit status %d, %s", out.ExitStatus(), got)
			}
			var kills []string
			for _, k := range pick[Kill](effects) {
				kills = append(kills, fmt.Sprint(k.Worker))
			}
			if got := strings.Join(kills, " "); got != c.kills {
				t.Errorf("killed %q, want %q", got, c.kills)
			}
			if sum := out.Summary; (sum == nil) != (c.stopped == "-") || sum != nil && c.stopped != "*" && sum.StoppedBy != c.stopped {
				t.Errorf("summary %+v", sum)
			}
			for id := range s.workers {
				s.Step(last, ConnClosed{id, nil})
				s.Step(last, WorkerExited{id, Status{Code: -1, Text: "signal: killed"}})
			}
			if !s.Over() {
				t.Error("not over when all are gone")
			}
		})
	}
}

func TestStagesAboveLayersOrWorkersAreWrongUsage(t *testing.T) {
	for _, c := range []struct{ workers, stages int }{{2, 3}, {4, 3}} {
		s, _ := many(t, Config{Settings: Settings{Stages: c.stages}}, c.workers, prepare(c.workers)...)
		out := s.Outcome()
		var flag *planner.FlagError
		if !errors.As(out.Err, &flag) || out.ExitStatus() != ExitUsage || out.Summary != nil {
			t.Fatalf("%v: %v", c, out.Err)
		}
		if text := out.Err.Error(); !strings.Contains(text, "--stages") || strings.Contains(text, "\n") {
			t.Errorf("%v: %s", c, text)
		}
	}
	events := []Event{helloOf(0), Received{0, func() control.Ready { r := readyOf(0); r.Job.GlobalBatch = 1 << 30; return r }()}}
	if s, _ := many(t, Config{}, 1, events...); s.Outcome().ExitStatus() != ExitUsage || !strings.Contains(s.Outcome().Err.Error(), "--micro-batch 1: ") {
		t.Errorf("a plan without end: %v", s.Outcome().Err)
	}
}

// Steps of workers may come in any mixture; the files know no difference.
func TestStepsInAnyOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const n, steps = 4, 3
		s := begin(Config{}, n)
		for _, e := range prepare(n) {
			s.Step(time.Unix(0, 0), e)
		}
		at := make([]int, n)
		var wrote []int
		for {
			var open []int
			for id := range n {
				if at[id] < steps {
					open = append(open, id)
				}
			}
			if open == nil {
				break
			}
			id := rapid.SampledFrom(open).Draw(t, "worker")
			at[id]++
			for _, m := range pick[WriteMetrics](s.Step(time.Unix(1, 0), commit(n, at[id])[id])) {
				wrote = append(wrote, m.Metrics.Step)
			}
		}
		if s.end.err != nil || !slices.Equal(wrote, []int{1, 2, 3}) || len(s.reports.told) != 0 {
			t.Fatalf("%v, wrote %v, keeps %d", s.end.err, wrote, len(s.reports.told))
		}
	})
}

// A worker that was stopped before training, before or after its Hello, is left out like one that was killed.
func TestStoppedBeforeTraining(t *testing.T) {
	at := func(ms int) time.Time { return time.Unix(1000, 0).Add(time.Duration(ms) * time.Millisecond) }
	for _, first := range [][]Event{nil, prepare(2)[1:2]} {
		s := New(Config{Settings: Settings{Detect: time.Second}, CanStart: true, Workers: 2}, []plan.Worker{{ID: 0}, {ID: 1}})
		s.Begin(at(0))
		s.Step(at(10), Received{0, hello})
		for _, e := range first {
			s.Step(at(10), e)
		}
		s.Step(at(500), WorkerHalted{Worker: 1, Stopped: true, For: 400 * time.Millisecond})
		for ms := 100; ms <= 31000; ms += 100 {
			s.Step(at(ms), Received{0, control.Beat{}})
			s.Step(at(ms), WatchTick{Due: at(ms)})
			s.Step(at(ms), AlarmDue{})
		}
		if s.end.err != nil || !s.workers[1].killed {
			t.Fatalf("Hello %v: %v, killed %v", first != nil, s.end.err, s.workers[1].killed)
		}
		s.Step(at(31100), WorkerExited{1, Status{Code: -1, Text: "signal: killed"}})
		s.Step(at(31100), ConnClosed{1, io.EOF})
		if s.end.err != nil || s.workers[1].state != gone {
			t.Errorf("Hello %v: %v", first != nil, s.end.err)
		}
	}
}

func TestWatch(t *testing.T) {
	base := time.Unix(0, 0)
	at := func(ms int) time.Time { return base.Add(time.Duration(ms) * time.Millisecond) }
	start := func() *Session {
		s := begin(Config{Settings: Settings{Detect: 4 * time.Second}}, 2)
		for _, e := range prepare(2) {
			s.Step(base, e)
		}
		return s
	}
	beat := func(s *Session, place, from, to int) {
		for ms := from; ms <= to; ms += 100 {
			s.Step(at(ms), Received{place, control.Note{}}) // any message counts as a heartbeat
		}
	}
	s := start()
	beat(s, 0, 0, 4000)
	s.Step(at(4000), WatchTick{Due: at(4000)})
	if s.workers[1].fault != nil || s.phase == ending {
		t.Errorf("silent for exactly the budget: %v", s.workers[1].fault)
	}
	s.Step(at(4060), WatchTick{Due: at(4060)})
	if s.workers[0].fault != nil || s.workers[1].fault == nil || s.phase == ending {
		t.Errorf("worker 0: %v, worker 1: %v", s.workers[0].fault, s.workers[1].fault)
	}
	for _, id := range []int{1, 0} {
		s.Step(at(4100), ConnClosed{id, nil})
		s.Step(at(4100), WorkerExited{id, Status{Code: -1, Text: "signal: killed"}})
		if id == 1 {
			s.Step(at(8060), WatchTick{Due: at(8060)})
		}
	}
	want := &SilentError{Worker: 0, Workers: 2, For: 4 * time.Second, Steps: 3}
	if !reflect.DeepEqual(s.end.err, want) || s.end.err.Error() != "worker 0 has been silent for 4s, at step 0 of 3; no worker is left" || s.records.summary.WorkersLost != 2 {
		t.Errorf("got %v, %+v", s.end.err, s.records.summary)
	}

	// Late by more than a quarter of the budget, the agent was not listening.
	s = start()
	s.Step(at(15000), WatchTick{Due: at(13900)})
	beat(s, 1, 15000, 19100)
	s.Step(at(18900), WatchTick{Due: at(18900)})
	if s.workers[0].fault != nil {
		t.Errorf("a frozen agent blames its workers: %v", s.workers[0].fault)
	}
	s.Step(at(19100), WatchTick{Due: at(19100)})
	if s.workers[0].fault == nil {
		t.Error("silence after the restart of the watch is not noticed")
	}

	// A worker is expected to beat from its Hello on, even if it never has; a worker that is gone is not watched.
	s = begin(Config{Settings: Settings{Detect: 4 * time.Second}}, 1)
	s.Step(at(27000), WatchTick{Due: at(27000)})
	s.Step(at(27000), Received{0, hello})
	s.Step(at(32000), WatchTick{Due: at(32000)})
	if s.phase == ending {
		t.Errorf("a worker that is new: %v", s.end.err)
	}
	s.Step(at(66900), WatchTick{Due: at(66900)}) // ten times the timeout is allowed before training
	if s.phase == ending {
		t.Errorf("a worker that begins slowly: %v", s.end.err)
	}
	s.Step(at(67100), WatchTick{Due: at(67100)})
	s.Step(at(67200), WorkerExited{0, Status{Code: -1, Text: "signal: killed"}})
	s.Step(at(67200), ConnClosed{0, io.EOF})
	if !errors.As(s.end.err, new(*SilentError)) {
		t.Errorf("a worker that never beat: %v", s.end.err)
	}
	s = start()
	s.Step(at(30), WorkerExited{0, Status{Code: -1, Text: "signal: killed"}})
	beat(s, 1, 100, 4500)
	s.Step(at(4500), WatchTick{Due: at(4500)})
	if s.phase == ending || s.workers[0].fault != nil {
		t.Errorf("a worker that has ended is blamed for silence: %v", s.end.err)
	}
}
