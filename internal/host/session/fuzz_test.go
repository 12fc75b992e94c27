package session

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/gossip"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/platform/progress"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// FuzzSession lets a script drive a session together with all that is around it: workers that obey, a log, files, faults, messages that
// no worker should send, and leaders that replace each other. Whatever comes in whatever order, a session does not panic, sends
// nothing to a worker that is gone, reports steps in their order, and once faults end the run ends.
func FuzzSession(f *testing.F) {
	for seed := range uint64(8) {
		f.Add(scriptOf(seed))
	}
	f.Fuzz(func(t *testing.T, script []byte) { drive(t, script, newCoverage()) })
}

// Random runs take every transition of the tables, and see every event and every message of a worker.
func TestRandomRuns(t *testing.T) {
	c := newCoverage()
	for seed := range uint64(1500) {
		drive(t, scriptOf(seed), c)
	}
	t.Logf("%d runs ended, %d of them on request", c.finished, c.stuck)
	if c.stuck > c.finished/10 {
		t.Errorf("%d runs of %d came to a halt", c.stuck, c.finished)
	}
	for title, rows := range tables(t) {
		for _, row := range rows {
			if !c.seen[title+" "+row] {
				t.Errorf("%s: no run takes %q", title, row)
			}
		}
	}
	for _, e := range []any{
		Received{}, ConnClosed{}, WorkerExited{}, WorkerHalted{}, WorkerRuns{}, WorkerStarted{}, Fenced{}, Gossip{}, FaultStamped{}, FaultInjected{}, StopAsked{}, AddWorkers{}, WatchAsked{},
		HostBack{}, Rejected{}, AlarmDue{}, WatchTick{}, Agreed{}, Balanced{}, FileFailed{}, DirRemoved{},
		CheckpointCommitted{}, CheckpointsPruned{}, Archived{}, CheckpointVerified{}, ClocksSet{}, Metered{},
		control.Hello{}, control.Beat{}, control.Note{}, control.Ready{}, control.Step{}, control.Output{}, control.Done{}, control.Timeline{}, control.Spans{},
		control.Repaired{}, control.Saved{}, control.Answer{}, control.Applied{}, control.LinkLost{}, control.Leave{}, control.Level{}, control.Failed{},
		Send{}, Kill{}, Fence{}, FenceWorker{}, StartWorker{}, Propose{}, WriteJob{}, WritePlan{}, WriteMetrics{}, WriteEvent{},
		WriteSummary{}, WriteWorkers{}, CommitCheckpoint{}, VerifyCheckpoint{}, ArchiveCheckpoint{}, Show{}, CloseView{}, Output{}, AnswerAdd{}, BeginTrace{}, WriteSpans{},
		Measure{}, ObserveStep{}, ReleaseClocks{}, DeviceUsed{},
	} {
		if name := fmt.Sprintf("%T", e); !c.seen[name] {
			t.Errorf("no run sees %s", name)
		}
	}
}

// scriptOf is a script that is long enough for recoveries.
func scriptOf(seed uint64) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	script := make([]byte, 40+r.IntN(900))
	for i := range script {
		script[i] = byte(r.Uint32())
	}
	if seed%4 != 0 { // nothing hostile
		script[0] &^= 1
	}
	return script
}

// coverage is what runs have seen.
type coverage struct {
	seen            map[string]bool
	finished, stuck int
}

func newCoverage() *coverage { return &coverage{seen: make(map[string]bool)} }

func (c *coverage) saw(x any) { c.seen[fmt.Sprintf("%T", x)] = true }

// world is a session with all that is around it.
type world struct {
	t      *testing.T
	c      *coverage
	cfg    Config
	s      *Session
	now    time.Time
	actors []*actor // by place
	todo   []Event  // what shell and log have to tell
	done   []Effect // since the run began
	logged []Propose
	step   int // newest in metrics.jsonl
}

// actor is a worker that obeys.
type actor struct {
	who       plan.Worker
	said      []control.Message // on its way
	early     []control.Message // what it was told before Start
	committed []control.Step    // all that it has ever said
	alive     bool
	halted    bool // its host has told that it is stopped
	started   bool
	sealed    bool // it has answered a query
	saving    bool
	plan      id.Version
	step      int
	stop      string
	end       *control.Done
	released  bool
}

const worldSteps = 12

func drive(t *testing.T, script []byte, c *coverage) {
	next := func() (b byte) {
		if len(script) > 0 {
			b, script = script[0], script[1:]
		}
		return b
	}
	head := next()
	hostile := head&1 != 0
	n := 1 + int(next()%4)
	options := next()
	w := &world{t: t, c: c, now: time.Unix(1000, 0)}
	w.cfg = Config{
		Settings: Settings{
			Detect: time.Second, Respawn: options&1 != 0, Command: "./gpt", Mirrors: int(options>>1&1) - 1, Stages: 1 + int(options>>2&1)*min(1, n-1),
		},
		Workers: n, Telemetry: options&8 != 0, CanStart: true, Clocks: ClockKind(options >> 4 % 3), Term: uint64(options >> 6 & 1), Leader: "host-0",
	}
	if options&128 == 0 {
		w.cfg.RunDir, w.cfg.Shown = "/runs/a", "runs/a"
		if head&8 != 0 {
			w.cfg.Checkpoints = "s3://a/b"
		}
	}
	w.cfg.Settings = w.cfg.Settings.WithDefaults(n)
	var workers []plan.Worker
	for i := range n {
		who := plan.Worker{ID: id.WorkerID(i), Host: fmt.Sprintf("host-%d", i%2)}
		workers = append(workers, who)
		w.actors = append(w.actors, newActor(who))
	}
	if head&2 != 0 {
		w.cfg.Ring.Seeds = []string{"127.0.0.1:1"}
	} else {
		w.cfg.NoRing = "there is no gossip ring: no port"
	}
	if head&4 != 0 {
		w.cfg.First = id.Version{Generation: 1, N: 1}
	}
	w.s = New(w.cfg, workers)
	w.react(w.s.Begin(w.now))
	for len(script) > 0 && !w.s.Over() {
		w.turn(next(), next(), hostile)
	}
	w.settle()
}

func newActor(who plan.Worker) *actor {
	r := ready
	r.Data, r.Job.Steps, r.CheckpointEvery = slices.Clone(ready.Data), worldSteps, 20*time.Millisecond
	r.Addr = fmt.Sprintf("127.0.0.1:%d", 4000+100*who.Incarnation+int(who.ID))
	r.Layers = []control.Layer{{Name: "a", Tensors: []int{100, 10}}, {Name: "b", Tensors: []int{90}}}
	a := &actor{who: who, alive: true}
	a.said = []control.Message{control.Hello{Protocol: control.Protocol, WorkerID: int(who.ID), Incarnation: who.Incarnation, PID: 100 + int(who.ID)}, r}
	return a
}

// turn does one thing.
func (w *world) turn(op, arg byte, hostile bool) {
	w.now = w.now.Add(time.Duration(arg%16) * time.Millisecond)
	place := int(arg) % len(w.actors)
	a := w.actors[place]
	switch op % 32 {
	case 0, 1, 2, 3, 4, 5, 6, 7, 8, 9:
		w.hear(place)
	case 10, 11, 12, 13:
		w.deliver()
	case 14:
		w.crash(place, arg)
	case 15:
		w.now = w.now.Add(time.Duration(arg) * time.Millisecond)
		due := w.now
		if arg%8 == 0 {
			due = due.Add(-time.Second)
		}
		w.beats(arg&1 != 0, place)
		w.do(WatchTick{Due: due})
	case 16:
		w.alarm()
	case 17:
		w.do(AddWorkers{1})
	case 18:
		if arg%16 == 0 {
			w.do(StopAsked{[]Reason{Interrupt, Terminated}[arg>>3&1]})
		}
	case 19:
		other := w.actors[int(arg>>4)%len(w.actors)].who
		a.say(control.LinkLost{Peer: id.Session{Worker: other.ID, Incarnation: other.Incarnation}})
	case 20:
		if arg%8 == 0 {
			a.say(control.Leave{})
		}
	case 21:
		w.do(Gossip{a.who, []gossip.State{gossip.StateAlive, gossip.StateSuspect, gossip.StateDead}[arg>>4%3], []string{"", "worker 1"}[min(1, arg>>4%3)]})
	case 22:
		w.do([]Event{WatchAsked{arg&16 != 0}, HostBack{a.who.Host, int(arg >> 6)}, FaultStamped{place, 0, w.now}, FaultStamped{-1, int(a.who.ID), w.now}, FaultInjected{"kill:0"}, Metered{[]trace.Device{{}}}, Rejected{a.who.Host, []int64{int64(arg), 0, -1}}}[arg>>4%7])
	case 23:
		if w.cfg.Clocks != NoClocks {
			e := ClocksSet{Reason: "why", Lowered: map[id.WorkerID]float64{a.who.ID: 2}, Shares: map[id.WorkerID]float64{a.who.ID: 0.5}, Raised: []id.WorkerID{0}}
			if arg&16 == 0 {
				e.Settings = []rundir.Clock{{Device: "x", MHz: 700}}
			}
			w.do(e)
		}
	case 24:
		w.alarm()
	case 25:
		if (arg%8 == 0 || w.s.phase == finished) && len(w.logged) > 0 && w.cfg.Term > 0 {
			w.takeover()
		}
	case 26:
		layers := []control.LayerTime{{Layer: 0, Forward: 1e6, Backward: 2e6}, {Layer: 1, Forward: 1e6, Backward: int64(arg) * 1e5}}
		a.say(control.Beat{Step: max(1, a.step), Layers: layers, Links: []control.LinkTime{{To: int(arg % 4), Bytes: 1000, Busy: 1e6}}, Over: 1e9, Available: int64(arg) << 20})
	case 27:
		a.say(control.Note{Text: "reads"})
		a.say(control.Timeline{Step: a.step})
		at := max(1, a.step)
		a.say(control.Spans{Step: at, Plan: uint64(a.plan.N), Spans: []control.Span{{Name: trace.Forward, Start: w.now.UnixNano(), Took: 10, Stage: 0, Micro: 1, Layer: -1, Peer: -1}, {Name: trace.Reduce, Start: w.now.UnixNano(), Took: 10, Stage: -1}}, Links: []control.Traffic{{Worker: 0, Sent: 9}}})
	case 28:
		if arg%4 != 0 {
			break
		}
		a.say(control.Repaired{Step: a.step, Try: int(arg >> 6), Layer: "a", Block: 0, Target: string([]repairTarget{repairOwn, repairMirror, repairDiffer, repairPassed}[arg>>4%4])})
	case 29, 30:
		if hostile && a.alive {
			m := w.hostile(a, op>>5^arg)
			w.do(Received{place, m})
		}
	case 31:
		switch {
		case hostile && arg%16 == 0:
			w.do(FileFailed{errors.New("no space")})
		case arg%16 == 1:
			w.do(DirRemoved{errors.New("it was removed"), arg&16 > 0})
		}
	}
}

// hostile is a message that is wrong, or comes at the wrong time.
func (w *world) hostile(a *actor, arg byte) control.Message {
	many := []control.Message{
		control.Hello{}, ready, control.Step{Step: 3, Plan: 99}, control.Step{Step: a.step, Plan: uint64(a.plan.N)}, control.Step{Step: a.step + 1, Loss: math.NaN()},
		control.Output{Text: "x"}, control.Done{Steps: 1}, control.Done{Steps: worldSteps, ParamsSHA256: "cc"}, control.Timeline{}, control.Spans{Step: -1}, control.Spans{Trace: "x"},
		control.Repaired{Layer: "z"}, control.Saved{Step: 1}, control.Saved{Step: a.step, Generation: a.plan.Generation, N: a.plan.N, Err: "full"},
		control.Answer{}, control.Answer{Ballot: id.Ballot{Term: 1, Attempt: 1}}, control.Applied{Version: id.Version{N: 77}}, control.LinkLost{Peer: id.Session{Worker: 1 << 40}}, control.Level{ID: id.Fill{N: 7}}, control.Leave{},
		control.Failed{Kind: control.Faulty}, control.Failed{Kind: control.PeerLost}, control.Failed{Kind: control.Corrupt}, control.Failed{Kind: control.UserPanic, Text: "boom"},
		control.Failed{Kind: control.Usage}, control.Failed{Kind: control.Help, Text: "usage"}, control.Start{}, control.Beat{Step: 1, Layers: []control.LayerTime{{Layer: -1}}},
	}
	return many[int(arg)%len(many)]
}

// do lets the session take in an event.
func (w *world) do(e Event) {
	w.c.saw(e)
	if r, ok := e.(Received); ok {
		w.c.saw(r.Message)
	}
	run := w.s.phase
	type states struct {
		worker workerState
		exit   exitState
	}
	var was []states
	for i := range w.s.workers {
		was = append(was, states{w.s.workers[i].state, w.s.workers[i].exit})
	}
	if started, ok := e.(WorkerStarted); ok && started.Err == nil {
		w.actors = append(w.actors, newActor(started.Worker))
	}
	if f, ok := e.(Fenced); ok {
		w.actors = append(w.actors, newActor(f.As))
		if w.now.UnixMilli()%3 == 0 {
			w.actors[len(w.actors)-1].said = nil // it does not continue
		}
	}
	effects := w.s.Step(w.now, e)
	w.note("Run", run, w.s.phase)
	for i, x := range was {
		w.note("Worker", x.worker, w.s.workers[i].state)
		w.note("Process", x.exit, w.s.workers[i].exit)
	}
	w.react(effects)
}

func (w *world) note(title string, from, to fmt.Stringer) {
	if from != to {
		w.c.seen[fmt.Sprintf("%s %v %v", title, from, to)] = true
	}
}

// react does what the session wants, and checks it.
func (w *world) react(effects []Effect) {
	w.done = append(w.done, effects...)
	for _, e := range effects {
		w.c.saw(e)
		switch e := e.(type) {
		case Send:
			if w.s.workers[e.Worker].state != gone { // it may have been lost in the same step
				w.obey(w.actors[e.Worker], e.Message)
			}
		case Kill:
			w.kill(e.Worker)
		case Fence:
			w.kill(e.Worker)
		case Propose:
			w.todo = append(w.todo, Agreed{e.Order.Plan.Version, w.now})
			w.logged = append(w.logged, e)
		case VerifyCheckpoint:
			v := CheckpointVerified{Propose: e.Propose, Step: e.Propose.Order.Passed.Step}
			if w.now.UnixMilli()%3 == 0 {
				v.Step, v.Refused = 0, []string{"it is truncated"}
			}
			w.todo = append(w.todo, v)
		case Balance:
			w.todo = append(w.todo, Balanced{e.Make()})
		case FenceWorker:
			w.actors[e.Worker].alive, w.actors[e.Worker].said = false, nil
			w.todo = append(w.todo, Fenced(e))
		case StartWorker:
			started := WorkerStarted{Worker: e.Worker}
			if e.Worker.Incarnation == 5 {
				started.Err = errors.New("no memory")
			}
			w.todo = append(w.todo, started)
		case CommitCheckpoint:
			w.todo = append(w.todo, CheckpointCommitted{Step: e.Manifest.Step}, CheckpointsPruned{})
		case ArchiveCheckpoint:
			said := Archived{Step: e.Step}
			if e.Step%2 == 1 {
				said.Err = errors.New("it does not answer")
			}
			w.todo = append(w.todo, said)
		case WriteMetrics:
			if e.Metrics.Step != w.step+1 {
				w.t.Fatalf("step %d follows step %d in metrics.jsonl", e.Metrics.Step, w.step)
			}
			w.step = e.Metrics.Step
		case WriteEvent:
			if e.Event.Kind == string(eventRollback) {
				w.step = w.s.restart.step
			}
		case WriteSummary:
			if w.s.records.summary == nil {
				w.t.Fatal("a summary is written that the outcome lacks")
			}
		}
	}
}

func (w *world) kill(place int) {
	if a := w.actors[place]; a.alive {
		if a.alive, a.said = false, nil; w.now.UnixMilli()%4 == 0 {
			return // its process does not end
		}
		w.todo = append(w.todo, ConnClosed{Worker: place}, WorkerExited{place, Status{Code: -1, Text: "signal: killed"}})
	}
}

// crash ends a worker from outside; what it has said may still arrive.
func (w *world) crash(place int, arg byte) {
	a := w.actors[place]
	if !a.alive {
		return
	}
	status := Status{Code: -1, Text: "signal: killed", Progress: progress.State{Step: a.step + 1, Running: &progress.Pair{}, Begun: []progress.Pair{{}}}}
	switch arg >> 4 % 4 {
	case 1:
		status.Lost = w.now
	case 2:
		status.Code, status.Fault = -1, true
	}
	for arg&8 != 0 && a.alive && len(a.said) > 0 {
		w.hear(place)
	}
	if !a.alive {
		return
	}
	a.alive, a.said = false, nil
	if arg&4 != 0 {
		w.do(WorkerExited{place, status})
		w.todo = append(w.todo, ConnClosed{Worker: place})
		return
	}
	w.do(ConnClosed{Worker: place})
	w.todo = append(w.todo, WorkerExited{place, status})
}

// deliver lets shell and log tell the next thing.
func (w *world) deliver() {
	if len(w.todo) > 0 {
		e := w.todo[0]
		w.todo = w.todo[1:]
		w.do(e)
	}
}

func (w *world) alarm() {
	if at := w.s.Alarm(); !at.IsZero() {
		if at.After(w.now) {
			w.now = at
		}
		w.do(AlarmDue{})
	}
}

// beats lets all workers be heard, but one if it is frozen.
func (w *world) beats(frozen bool, place int) {
	for i, a := range w.actors {
		if halted := frozen && i == place && a.who.ID%2 == 0; a.alive && halted != a.halted { // else its host does not tell
			a.halted = halted
			w.do(WorkerHalted{Worker: i, Stopped: halted, Frozen: a.who.ID%4 == 0, For: time.Duration(w.now.UnixMilli()%2) * timing.Halt})
		}
		if a.alive && frozen && i == place && a.who.ID%4 == 1 {
			w.do(WorkerRuns{i})
		}
		if a.alive && len(a.said) == 0 && (!frozen || i != place) {
			w.do(Received{i, control.Beat{}})
		}
	}
}

// hear lets what a worker has said arrive; one that has said nothing takes a step.
func (w *world) hear(place int) {
	a := w.actors[place]
	if !a.alive {
		return
	}
	if len(a.said) == 0 && a.released {
		if w.s.collects(w.s.workers[place]) {
			w.do(Received{place, control.Output{Text: "bye"}})
		}
		a.alive = false
		w.todo = append(w.todo, ConnClosed{Worker: place}, WorkerExited{place, Status{Text: "exit status 0"}})
		return
	}
	if len(a.said) == 0 {
		w.advance(a)
	}
	if len(a.said) > 0 {
		m := a.said[0]
		a.said = a.said[1:]
		w.do(Received{place, m})
	}
}

func (a *actor) say(m ...control.Message) {
	if a.alive {
		a.said = append(a.said, m...)
	}
}

// advance lets a worker commit its next step, if it may.
func (w *world) advance(a *actor) {
	p := w.s.known[uint64(a.plan.N)]
	in, ok := p.Worker(a.who.ID)
	if !a.started || a.sealed || a.end != nil || !ok || in.Incarnation != a.who.Incarnation {
		return
	}
	for _, x := range w.actors { // all of a plan commit together
		if in, ok := p.Worker(x.who.ID); ok && in.Incarnation == x.who.Incarnation && (x.step < a.step || !x.alive && x.step <= a.step || x.sealed) {
			return
		}
	}
	if a.step == worldSteps || a.stop != "" {
		a.finish(w)
		return
	}
	a.commit(w)
}

func (a *actor) commit(w *world) {
	a.step++
	m := control.Step{Step: a.step, Loss: 1 / float64(a.step), LR: 0.1, GradNorm: 1, Tokens: 100, MS: 5, Time: w.now, Plan: uint64(a.plan.N), Compute: 1e6}
	a.committed = append(a.committed, m)
	a.say(m, control.Beat{Step: a.step, Layers: []control.LayerTime{{Layer: 0, Forward: 1e6, Backward: 2e6}, {Layer: 1, Forward: 1e6, Backward: 2e6}}})
	if p := w.s.known[uint64(a.plan.N)]; a.saving && slices.Contains(ownersOf(&p), a.who.ID) {
		file, _ := json.Marshal(checkpoint.File{Name: "x", Size: 1})
		a.say(control.Saved{Step: a.step, Generation: a.plan.Generation, N: a.plan.N, Rule: "adamw", File: file})
	}
	a.saving = false
}

func (a *actor) finish(w *world) {
	if a.step < worldSteps && a.stop == "" {
		return
	}
	by := a.stop
	if a.step == worldSteps {
		by = ""
	}
	a.end = &control.Done{Steps: a.step, Loss: 1 / float64(max(1, a.step)), ParamsSHA256: "aa", StateSHA256: "bb", StoppedBy: by, Plan: uint64(a.plan.N)}
	a.say(*a.end)
}

// begin starts a worker's training.
func (a *actor) begin(w *world) {
	a.started = true
	for _, m := range a.early {
		w.obey(a, m)
	}
}

// obey does what a worker is told.
func (w *world) obey(a *actor, m control.Message) {
	if !a.alive {
		return
	}
	switch m.(type) {
	case control.Query, control.Order, control.Fill, control.Save, control.Stop:
		if o, ok := m.(control.Order); !a.started && !(ok && o.Ballot == id.Ballot{}) {
			a.early = append(a.early, m)
			return
		}
	}
	switch m := m.(type) {
	case control.Start:
		if !a.started && m.Joins {
			a.begin(w)
		}
	case control.Query:
		a.sealed = true
		a.say(control.Answer{Ballot: m.Ballot, Report: control.Report{Plan: a.plan, Holds: a.plan, Passed: id.Point{Step: a.step}}})
	case control.Order:
		o := m
		if !a.started { // the first one
			a.plan, a.step = o.Plan.Version, o.Passed.Step
			a.begin(w)
			return
		}
		in, member := o.Plan.Worker(a.who.ID)
		member = member && in.Incarnation == a.who.Incarnation
		switch {
		case o.Rollback:
			a.step, a.end = o.Passed.Step, nil
		case member && a.plan == (id.Version{}): // it joins
			a.step = o.Passed.Step
			for _, x := range w.actors {
				if in, ok := o.Plan.Worker(x.who.ID); ok && in == x.who && x != a {
					a.step = max(a.step, x.step)
				}
			}
		}
		for a.step < o.Passed.Step && a.plan != (id.Version{}) {
			a.commit(w)
		}
		if o.Ballot != (id.Ballot{}) {
			a.sealed = false
		}
		a.plan = o.Plan.Version
		a.say(control.Applied{Ballot: o.Ballot, Version: a.plan})
	case control.Fill:
		a.say(control.Level{ID: m.ID, Step: w.step})
	case control.Save:
		a.saving = true
	case control.Stop:
		a.stop = m.Reason
	case control.Release:
		a.released = true
	}
}

// takeover has another leader continue the run.
func (w *world) takeover() {
	in := &Inherited{}
	for _, p := range w.logged {
		in.Add(p.Order, p.Reason)
	}
	w.history(&in.History)
	in.Saved = w.s.checkpoints.newest
	w.cfg.Term++
	w.cfg.Leader, w.cfg.Inherited = "host-1", in
	members := in.Members()
	known := make(map[id.Session]*actor)
	for _, a := range w.actors {
		known[id.Session{Worker: a.who.ID, Incarnation: a.who.Incarnation}] = a
	}
	var workers []plan.Worker
	for _, a := range w.actors[:w.cfg.Workers] {
		workers = append(workers, a.who)
	}
	for _, m := range members {
		if !slices.ContainsFunc(workers, func(x plan.Worker) bool { return x.ID == m.ID && x.Incarnation == m.Incarnation }) {
			workers = append(workers, m)
		}
	}
	w.actors, w.todo = nil, nil
	for _, who := range workers {
		a := known[id.Session{Worker: who.ID, Incarnation: who.Incarnation}]
		if a == nil {
			w.t.Fatalf("no actor is %v", who)
		}
		w.actors = append(w.actors, a)
	}
	w.s = New(w.cfg, workers)
	effects := w.s.Begin(w.now)
	for i := range w.s.workers {
		w.note("Process", running, w.s.workers[i].exit)
		w.note("Worker", connecting, w.s.workers[i].state)
	}
	w.react(effects)
	for place, a := range w.actors {
		told := newActor(a.who).said
		if last := in.History.Last; last != nil {
			for i, m := range a.committed {
				if m.Plan > last.Plan || m.Plan == last.Plan && m.Step > last.Step || i == len(a.committed)-1 {
					told = append(told, m)
				}
			}
		}
		if a.end != nil {
			told = append(told, *a.end)
		}
		switch {
		case !a.alive:
			w.todo = append(w.todo, ConnClosed{Worker: place}, WorkerExited{place, Status{Code: -1, Text: "host-0 was lost", Lost: w.now}})
		case a.plan == id.Version{} && len(a.said) > 0:
			if _, ok := a.said[0].(control.Hello); ok {
				continue // it says all that itself
			}
			fallthrough
		default:
			a.said = told
		}
	}
}

// history is what the run directory tells.
func (w *world) history(h *rundir.History) {
	h.Started, h.JoinedBy, h.Away = make(map[int]int), make(map[int]uint64), make(map[int]string)
	joining := make(map[int]bool)
	for _, e := range w.done {
		switch e := e.(type) {
		case WriteJob:
			h.Job = e.Job
		case WritePlan:
			h.Plan = &e.Plan
		case WriteMetrics:
			h.Last = &e.Metrics
			h.Tokens += e.Metrics.Tokens
			h.MS += e.Metrics.MS
		case WriteSummary:
			h.Summary = &e.Summary
		case WriteEvent:
			switch eventKind(e.Event.Kind) {
			case eventBegin:
				h.Started[e.Event.Worker]++
				joining[e.Event.Worker] = true
			case eventJoined:
				h.Joined++
				h.JoinedBy[e.Event.Worker] = e.Event.Plan
				joining[e.Event.Worker] = false
			case eventLost:
				h.Lost++
				fallthrough
			case eventLeft, eventRefused:
				joining[e.Event.Worker] = false
			case eventRollback:
				h.Rollbacks++
			}
			if e.Event.Recovery != nil {
				h.Recoveries = append(h.Recoveries, *e.Event.Recovery)
			}
		}
	}
	for _, worker := range slices.Sorted(maps.Keys(joining)) {
		if joining[worker] {
			h.Joining = append(h.Joining, worker)
		}
	}
}

// settle ends all faults: everything that is under way arrives, and the run ends. These actors let a boundary plan go live when
// they hear of it, and not together, so that some runs come to a halt; these are ended.
func (w *world) settle() {
	for round := range 1000 {
		if w.s.Over() {
			w.c.finished++
			break
		}
		if round == 500 {
			w.c.stuck++
			w.do(StopAsked{Interrupt})
			w.do(StopAsked{Interrupt})
		}
		w.now = w.now.Add(10 * time.Millisecond)
		for range min(len(w.todo), 100) {
			w.deliver()
		}
		for place := range w.actors {
			if !w.s.Over() {
				w.hear(place)
			}
		}
		if at := w.s.Alarm(); !at.IsZero() && !at.After(w.now) {
			w.do(AlarmDue{})
		}
		w.beats(false, 0)
		w.do(WatchTick{Due: w.now})
	}
	out := w.s.Outcome()
	if !w.s.Over() {
		w.t.Fatalf("the run does not end: %v, step %d, plan %v, busy %v, outcome %+v", w.s.phase, w.step, w.s.plan.Version, w.s.ctl != nil && w.s.ctl.Busy(), out)
	}
	if out.Err == nil && out.Help == "" && (out.Summary == nil || out.Summary.Steps != worldSteps) {
		w.t.Fatalf("%v: outcome %+v, %+v", w.s.phase, out, out.Summary)
	}
}
