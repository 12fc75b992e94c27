package session

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/gossip"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/timing"
)

// weighing is a session of 3 workers that are heard at time 0, with a budget of 4 s.
func weighing(t *testing.T) (s *Session, at func(ms int) time.Time) {
	r := trainingOf(t, Config{Settings: Settings{Detect: 4 * time.Second}}, 3)
	began := r.now
	at = func(ms int) time.Time { return began.Add(time.Duration(ms) * time.Millisecond) }
	for w := range 3 {
		r.s.workers[w].pid, r.s.workers[w].heard = 1000+w, timing.History{Heard: began}
		r.s.Step(at(0), Received{w, control.Beat{}})
		r.s.Step(at(0), Gossip{Worker: plan.Worker{ID: id.WorkerID(w)}, State: gossip.StateAlive})
	}
	return r.s, at
}

// Only the time for which heartbeats are missing evicts a worker; what the ring says becomes part of the cause.
func TestSuspicionIsWeighed(t *testing.T) {
	suspect := func(state gossip.State) Gossip {
		return Gossip{Worker: plan.Worker{ID: 1}, State: state, By: "worker 2"}
	}
	type moment struct {
		ms int
		e  Event
	}
	tick := WatchTick{}
	for _, c := range []struct {
		name    string
		moments []moment
		killed  int // at which of them; -1: not at all
		text    string
	}{
		{"silent, and not suspected", []moment{{2100, tick}, {3900, tick}, {4100, tick}}, 2, "worker 1 has been silent for 4s"},
		{"silent and suspected", []moment{{500, suspect(gossip.StateSuspect)}, {3900, tick}, {4100, tick}}, 2, "worker 1 has been silent for 4s, and worker 2 cannot reach it"},
		{"silent and called dead", []moment{{900, suspect(gossip.StateSuspect)}, {1400, suspect(gossip.StateDead)}, {3900, tick}, {4100, tick}}, 3, "worker 1 has been silent for 4s, and worker 2 cannot reach it"},
		{"suspected, and beats", []moment{{500, suspect(gossip.StateSuspect)}, {600, Received{1, control.Beat{}}}, {1500, suspect(gossip.StateDead)}, {4500, tick}}, -1, ""},
		{"refuted", []moment{{500, suspect(gossip.StateSuspect)}, {1000, Gossip{Worker: plan.Worker{ID: 1}, State: gossip.StateAlive}}, {4100, tick}}, 2, "worker 1 has been silent for 4s"},
		{"another life is suspected", []moment{{500, Gossip{Worker: plan.Worker{ID: 1, Incarnation: 1}, State: gossip.StateDead, By: "worker 2"}}, {4100, tick}}, 1, "worker 1 has been silent for 4s"},
		{"silent on a crowded machine", []moment{{4100, WatchTick{Crowd: 100}}, {5400, WatchTick{Crowd: 100}}, {5600, WatchTick{Crowd: 100}}}, 2, "worker 1 has been silent for 5.49s"},
		{"silent until it is not crowded", []moment{{4100, WatchTick{Crowd: 100}}, {4200, tick}}, 1, "worker 1 has been silent for 4s"},
		{"the agent was held up", []moment{{500, suspect(gossip.StateSuspect)}, {5000, WatchTick{Due: time.Unix(0, 0)}}, {8900, tick}}, -1, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, at := weighing(t)
			killed, ms := -1, 0
			for i, m := range c.moments {
				for ; ms <= m.ms; ms += 100 {
					s.Step(at(ms), Received{0, control.Beat{}})
					s.Step(at(ms), Received{2, control.Beat{}})
				}
				if w, ok := m.e.(WatchTick); ok {
					if w.Due.IsZero() {
						w.Due = at(m.ms)
					}
					m.e = w
				}
				if len(pick[Kill](s.Step(at(m.ms), m.e))) > 0 {
					killed = i
					break
				}
			}
			if killed != c.killed {
				t.Fatalf("killed at moment %d, want %d", killed, c.killed)
			}
			if killed >= 0 {
				var silent *SilentError
				if err := s.death(s.workers[1]); !errors.As(err, &silent) || silent.cause() != c.text {
					t.Errorf("%v, want %q", err, c.text)
				}
			}
		})
	}
}

// A time in which no worker is heard is noted, and evicts none.
func TestAllStopped(t *testing.T) {
	s, at := weighing(t)
	var notes []string
	look := func(ms int) {
		for _, e := range pick[WriteEvent](s.Step(at(ms), WatchTick{Due: at(ms)})) {
			notes = append(notes, e.Event.Reason)
		}
	}
	for ms := 250; ms <= 60000; ms += 250 {
		look(ms)
	}
	for place := range 3 {
		s.Step(at(60000+500*place), Received{place, control.Beat{}})
		look(60000 + 500*place)
	}
	for place := range s.workers {
		if err := s.workers[place].fault; err != nil {
			t.Errorf("worker %d: %v", place, err)
		}
	}
	if want := []string{"no worker has been heard for 4s: all of them are stopped, or the machine is; none is evicted"}; !slices.Equal(notes, want) {
		t.Errorf("%q, want %q", notes, want)
	}
}

// The ring and the agent differ: that is noted once, and evicts no worker. What the ring says goes on
// to the controller, for links that break.
func TestRingDiffers(t *testing.T) {
	s, at := weighing(t)
	notes := 0
	for i := range 3 {
		now := at(1000 * (i + 1))
		for id := range 3 {
			s.Step(now, Received{id, control.Beat{}})
		}
		for _, state := range []gossip.State{gossip.StateSuspect, gossip.StateDead, gossip.StateAlive} {
			e := Gossip{Worker: plan.Worker{ID: 1}, State: state}
			if state != gossip.StateAlive {
				e.By = "worker 2"
			}
			effects := s.Step(now, e)
			notes += len(pick[WriteEvent](effects))
			if len(pick[Kill](effects)) > 0 {
				t.Fatalf("killed for %v", state)
			}
			if got := pick[WriteWorkers](effects); len(got) != 1 || got[0].Alive[1].Ring != state.String() {
				t.Errorf("workers.json says %+v, want %v", got, state)
			}
		}
	}
	if notes != 1 {
		t.Errorf("%d notes, want one", notes)
	}
}

func TestNotInTheRing(t *testing.T) {
	s := begin(Config{Settings: Settings{Detect: time.Second}}, 3)
	s.cfg.Ring = control.Ring{Seeds: []string{"127.0.0.1:1"}, Key: []byte("0123456789abcdef"), Detect: time.Second}
	now := time.Unix(0, 0)
	for _, e := range prepare(3) {
		for _, e := range s.Step(now, e) {
			if p, ok := e.(Propose); ok {
				for id, m := range pick[Send](s.Step(now, Agreed{p.Order.Plan.Version, now})) {
					if _, ok := m.Message.(control.Order); ok {
						continue
					}
					if start, ok := m.Message.(control.Start); !ok || start.Ring.Seeds[0] != "127.0.0.1:1" || strings.Contains(fmt.Sprintf("%v %+v %#v %s %x", start, start, start, start.Ring.Key, start.Ring.Key), "0123456789") {
						t.Errorf("worker %d is sent %+v", id, m.Message)
					}
				}
			}
		}
	}
	for _, id := range []id.WorkerID{0, 2} {
		s.Step(now, Gossip{Worker: plan.Worker{ID: id}, State: gossip.StateAlive})
	}
	var notes []string
	for i := range 20 {
		now = now.Add(time.Second)
		for id := range 3 {
			s.Step(now, Received{id, control.Beat{}})
		}
		for _, e := range pick[WriteEvent](s.Step(now, WatchTick{Due: now})) {
			notes = append(notes, fmt.Sprint(i, " ", e.Event.Reason))
		}
	}
	if want := []string{"9 not in the gossip ring: [1]; what becomes of these workers their agents alone say"}; !slices.Equal(notes, want) {
		t.Errorf("%q, want %q", notes, want)
	}
}

// The first time that memory of a worker is altered is written down, and the
// second ends it, where others can go on.
func TestRepaired(t *testing.T) {
	for _, workers := range []int{1, 3} {
		r := trainingOf(t, Config{}, workers)
		layer := r.s.workers[0].ready.Layers[0].Name
		tell := func(step, try int) {
			r.feed(Received{0, control.Repaired{Step: step, Try: try, Layer: layer, Block: 2, Target: "moment"}})
		}
		tell(2, 1)
		tell(2, 1) // another block, found together with it
		if kills := pick[Kill](r.effects); len(kills) > 0 {
			t.Errorf("killed for one time: %v", kills)
		}
		tell(2, 2)
		kills := pick[Kill](r.effects)
		if evicted := len(kills) == 1 && kills[0].Worker == 0; evicted != (workers > 1) {
			t.Errorf("%d workers: kills %v", workers, kills)
		}
		said := 0
		for _, e := range pick[WriteEvent](r.effects) {
			if e.Event.Kind == "repaired" {
				said++
				if e.Event.Worker != 0 || e.Event.Repair == nil || e.Event.Repair.Layer != layer || e.Event.Repair.Block != 2 || e.Event.Repair.Target != "moment" ||
					!strings.Contains(e.Event.Reason, "step 2") {
					t.Errorf("%+v", e.Event)
				}
			}
		}
		if said != 3 {
			t.Errorf("%d lines", said)
		}
	}
}

func TestRepairedHostile(t *testing.T) {
	layer := trainingOf(t, Config{}, 1).s.workers[0].ready.Layers[0].Name
	for _, m := range []control.Repaired{
		{Layer: layer, Target: "other"}, {Layer: layer, Block: -1, Target: "own"}, {Layer: "no such layer", Target: "own"},
	} {
		r := trainingOf(t, Config{}, 2)
		r.feed(Received{0, m})
		var wrong *ProtocolError
		if !errors.As(r.s.end.err, &wrong) {
			t.Errorf("%+v: %v", m, r.s.end.err)
		}
	}
}

// A worker whose state no other has ends like one that is killed; alone it
// is the run that ends.
func TestCorruptIsALoss(t *testing.T) {
	r := trainingOf(t, Config{}, 3)
	r.feed(Received{1, control.Failed{Kind: control.Corrupt, Text: "altered", Step: 2}})
	r.feed(died(1)...)
	if asked := r.answer(1, 1); len(asked) != 2 || r.s.end.err != nil {
		t.Errorf("asked %v after %v", asked, r.s.end.err)
	}
	r = trainingOf(t, Config{}, 1)
	r.feed(Received{0, control.Failed{Kind: control.Corrupt, Text: "altered", Step: 2}})
	if r.s.end.err == nil || !strings.Contains(r.s.end.err.Error(), "altered") {
		t.Errorf("error %v", r.s.end.err)
	}
	// No other worker can continue without a lone one, but a checkpoint.
	r = savingOf(t, Config{}, 1)
	r.now = r.s.Alarm()
	r.feed(AlarmDue{}, partOf(0, 2, 1))
	r.feed(commit(1, 2)...)
	r.feed(CheckpointCommitted{2, nil}, Received{0, control.Failed{Kind: control.Corrupt, Text: "altered", Step: 3}})
	if out := r.s.Outcome(); out.Err == nil || out.Resume != r.s.cfg.Shown {
		t.Errorf("%v, to go on: %q", out.Err, out.Resume)
	}
}

// calling is a heartbeat of a worker that runs a call for so long.
func calling(worker int, kind control.CallKind, number uint64, seconds float64) Event {
	call := &control.Call{Kind: kind, Number: number, For: int64(seconds * 1e9)}
	if kind == control.CallSample {
		call.Sample = 17
	}
	return Received{worker, control.Beat{Call: call}}
}

// A call that does not return is reported, then its worker evicted; where that helps no other worker, the run waits for it.
func TestCallsAreWatched(t *testing.T) {
	const sample, forward = control.CallSample, control.CallForward
	lost := func(worker int) []Event {
		return []Event{ConnClosed{worker, errors.New("EOF")}, WorkerExited{worker, Status{Code: 2, Text: "exit status 2"}}}
	}
	idle := func(worker int) Event { return Received{worker, control.Beat{}} }
	waited := calling(1, sample, 1, 600)
	waited.(Received).Message.(control.Beat).Call.Waited = 550e9
	for _, c := range []struct {
		name   string
		cfg    Settings
		events []Event
		want   []string // events of these kinds
		killed string   // workers, with + where they write their stacks
		err    error
	}{
		{"returns", Settings{}, []Event{calling(1, sample, 1, 11.9), idle(1), calling(1, sample, 2, 12), calling(1, sample, 3, 0.1)},
			[]string{"blocked worker 1: Sample(17) has not returned for 12 s", "returned worker 1: Sample(17) has returned after 12 s"}, "", nil},
		{"never returns", Settings{}, []Event{calling(1, forward, 1, 13), calling(1, forward, 1, 59), calling(1, forward, 1, 60), calling(1, forward, 1, 61)},
			[]string{`blocked worker 1: Forward of layer "a" has not returned for 13 s`, `evict worker 1: Forward of layer "a" has not returned for 60 s; its stacks are in its log`}, "1+", nil},
		{"takes as long as it does", Settings{}, []Event{calling(1, sample, 1, 50), idle(1), calling(2, sample, 1, 240), calling(2, sample, 1, 250)},
			[]string{"blocked worker 1: Sample(17) has not returned for 50 s", "returned worker 1: Sample(17) has returned after 50 s",
				"blocked worker 2: Sample(17) has not returned for 240 s", "evict worker 2: Sample(17) has not returned for 250 s; its stacks are in its log"}, "2+", nil},
		{"waits for a processor", Settings{}, []Event{waited}, []string{"blocked worker 1: Sample(17) has not returned for 600 s"}, "", nil},
		{"another timeout", Settings{CallTimeout: 5 * time.Second}, []Event{calling(1, sample, 1, 1), calling(1, sample, 1, 5)},
			[]string{"blocked worker 1: Sample(17) has not returned for 1 s", "evict worker 1: Sample(17) has not returned for 5 s; its stacks are in its log"}, "1+", nil},
		{"no timeout", Settings{CallTimeout: -1}, []Event{calling(1, sample, 1, 13), calling(1, sample, 1, 1e6)}, []string{"blocked worker 1: Sample(17) has not returned for 13 s"}, "", nil},
		{"all", Settings{}, []Event{calling(0, sample, 1, 12), calling(1, sample, 1, 12), calling(2, sample, 1, 12), calling(0, sample, 1, 60), calling(1, sample, 1, 60)},
			[]string{"blocked worker 0: Sample(17) has not returned for 12 s", "blocked worker 1: Sample(17) has not returned for 12 s", "blocked worker 2: Sample(17) has not returned for 12 s",
				"hold worker 0: Sample(17) has not returned for 60 s, and no other worker can do its work: the run waits until it returns; Ctrl-C or launcher stop ends the run"}, "", nil},
		{"too few for an eviction", Settings{MinWorkers: 3}, []Event{calling(1, sample, 1, 60)},
			[]string{"blocked worker 1: Sample(17) has not returned for 60 s",
				"hold worker 1: Sample(17) has not returned for 60 s, and no other worker can do its work: the run waits until it returns; Ctrl-C or launcher stop ends the run"}, "", nil},
		{"the same call elsewhere", Settings{}, append(append([]Event{calling(1, sample, 1, 60)}, lost(1)...), calling(2, sample, 1, 60)),
			[]string{"blocked worker 1: Sample(17) has not returned for 60 s", "evict worker 1: Sample(17) has not returned for 60 s; its stacks are in its log",
				"blocked worker 2: Sample(17) has not returned for 60 s",
				"hold worker 2: Sample(17) has not returned for 60 s, and worker 1 was evicted for the same call: the run waits until it returns; Ctrl-C or launcher stop ends the run"}, "1+", nil},
		{"stop", Settings{}, []Event{calling(1, sample, 1, 13), StopAsked{Interrupt}, calling(1, sample, 1, 14)},
			[]string{"blocked worker 1: Sample(17) has not returned for 13 s", "evict worker 1: Sample(17) has not returned for 14 s; its stacks are in its log"}, "1+", nil},
		{"stop before", Settings{CallTimeout: -1}, []Event{StopAsked{Interrupt}, calling(1, sample, 1, 11), calling(1, sample, 1, 12)},
			[]string{"blocked worker 1: Sample(17) has not returned for 12 s", "evict worker 1: Sample(17) has not returned for 12 s; its stacks are in its log"}, "1+", nil},
		{"stop with all blocked", Settings{}, []Event{calling(0, sample, 1, 12), calling(1, sample, 1, 12), calling(2, sample, 1, 12), StopAsked{Interrupt}, calling(2, sample, 1, 13)},
			[]string{"blocked worker 0: Sample(17) has not returned for 12 s", "blocked worker 1: Sample(17) has not returned for 12 s", "blocked worker 2: Sample(17) has not returned for 12 s"}, "012",
			&StoppedError{Reason: Interrupt, Step: 1, Steps: 3, AtOnce: true, Blocked: "worker 2: Sample(17) has not returned for 13 s"}},
		{"no such call", Settings{}, []Event{calling(1, control.CallOnEnd+1, 1, 1)}, nil, "012", &ProtocolError{1, "told of a call that cannot be at step 1 of 3"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := trainingOf(t, Config{Settings: c.cfg}, 3)
			r.effects = nil
			r.feed(c.events...)
			var got []string
			for _, e := range pick[WriteEvent](r.effects) {
				if k := eventKind(e.Event.Kind); k == eventBlocked || k == eventReturned || k == eventEvict || k == eventHold {
					got = append(got, e.Event.Kind+" "+e.Event.Reason)
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("%q, want %q", got, c.want)
			}
			killed := ""
			for _, k := range pick[Kill](r.effects) {
				killed += fmt.Sprint(k.Worker)
				if k.Stacks {
					killed += "+"
				}
			}
			if killed != c.killed {
				t.Errorf("killed %s, want %s", killed, c.killed)
			}
			if err := r.s.Outcome().Err; fmt.Sprint(err) != fmt.Sprint(c.err) {
				t.Errorf("%v, want %v", err, c.err)
			}
		})
	}
}

// Before training a call may take ten times as long, and workers.json names it meanwhile.
func TestCallsBeforeTraining(t *testing.T) {
	s := begin(Config{}, 2)
	var effects []Effect
	for i, e := range []Event{helloOf(0), helloOf(1), calling(1, control.CallJob, 1, 60), calling(1, control.CallJob, 1, 599)} {
		effects = s.Step(time.Unix(int64(i), 0), e)
		if i == 2 {
			all := pick[WriteWorkers](effects)
			if len(all) != 1 || all[0].Alive == nil && len(pick[WriteEvent](effects)) > 0 {
				t.Errorf("%+v", effects)
			}
		}
	}
	if len(effects) > 0 {
		t.Errorf("%+v after 599 s", effects)
	}
	effects = s.Step(time.Unix(4, 0), calling(1, control.CallJob, 1, 600))
	want := &BlockedError{Worker: 1, Call: "the job", For: 600 * time.Second}
	if err := s.Outcome().Err; fmt.Sprint(err) != want.Error() || s.Outcome().Lost != 1 {
		t.Errorf("%v", err)
	}
	if got := fmt.Sprint(pick[Kill](effects)); got != "[{0 false} {1 true}]" {
		t.Errorf("killed %s", got)
	}
}

// A run that holds for lack of workers stops at once: no commit would come.
func TestStopWhileHolding(t *testing.T) {
	r := trainingOf(t, Config{Settings: Settings{MinWorkers: 2}}, 2)
	r.feed(ConnClosed{1, errors.New("EOF")}, WorkerExited{1, Status{Code: -1, Text: "signal: killed"}})
	for _, q := range sent[control.Query](r) {
		r.feed(Received{0, control.Answer{Ballot: q.Ballot, Report: control.Report{Plan: r.s.plan.Version, Passed: id.Point{Step: 1}}}})
	}
	if !r.s.ctl.Holding() {
		t.Fatal("it does not hold")
	}
	r.feed(StopAsked{Interrupt})
	if err := r.s.Outcome().Err; fmt.Sprint(err) != "interrupted at step 1 of 3; the step under way is lost" {
		t.Error(err)
	}
}

// The first rejected connections are written down at once, more ever more rarely, and what waits at the end of the run.
func TestRejectedConnections(t *testing.T) {
	s, at := weighing(t)
	written := func(ms int, e Event) (lines []string) {
		for _, x := range s.Step(at(ms), e) {
			if w, ok := x.(WriteEvent); ok && w.Event.Kind == string(eventRejected) {
				lines = append(lines, w.Event.Reason)
			}
		}
		return lines
	}
	for _, c := range []struct {
		ms     int
		counts []int64
		want   string
	}{
		{0, nil, ""},
		{100, []int64{1, 0, 3}, "the agent of a has rejected 4 connections so far: 1 no secret, 3 crowded out"},
		{200, []int64{1, 0, 3}, ""},
		{300, []int64{2, 0, 3}, ""},
		{1100, []int64{2, 0, 3}, "the agent of a has rejected 5 connections so far: 2 no secret, 3 crowded out"},
		{3000, []int64{2, 1, 3}, ""},
		{3100, []int64{2, 1, 4}, "the agent of a has rejected 7 connections so far: 2 no secret, 1 silent, 4 crowded out"},
		{1e6, []int64{3, 1, 4}, "the agent of a has rejected 8 connections so far: 3 no secret, 1 silent, 4 crowded out"},
		{1e6 + 1000, []int64{3, 1, 5}, "the agent of a has rejected 9 connections so far: 3 no secret, 1 silent, 5 crowded out"},
		{1e6 + 1001, make([]int64, 100), ""},
	} {
		if got := strings.Join(written(c.ms, Rejected{"a", c.counts}), "; "); got != c.want {
			t.Errorf("after %d ms: %q, not %q", c.ms, got, c.want)
		}
	}
	if got := written(1e6, Received{1, control.Beat{Rejected: []int64{0, 0, 0, 1}}}); len(got) != 1 || got[0] != "worker 1 has rejected 1 connection so far: 1 outdated" {
		t.Errorf("of a worker: %q", got)
	}
	s.Step(at(1e6+1001), Rejected{"a", []int64{9}})
	s.out.take()
	s.lastRejections()
	if got := s.out.take(); len(got) != 1 {
		t.Errorf("at the end: %v", got)
	}
}

// The run continues without a worker whose call does not return while all others wait for it, and only then.
func TestSuspended(t *testing.T) {
	const detect = 2 * time.Second
	waiting, runs := &control.Pace{Step: 2}, &control.Pace{Step: 2, Left: 1, Running: 1}
	forward := func(at time.Duration) *control.Call {
		return &control.Call{Kind: control.CallForward, Number: 3, For: int64(at)}
	}
	sample := func(at time.Duration) *control.Call {
		return &control.Call{Kind: control.CallSample, Sample: 7, Number: 3, For: int64(at)}
	}
	type beats [3]control.Beat // of the workers
	late := beats{{Pace: waiting}, {Pace: runs, Call: forward(detect)}, {Pace: waiting}}
	with := func(change func(b *beats)) beats {
		b := late
		change(&b)
		return b
	}
	for _, c := range []struct {
		name   string
		config func(*Config)
		before beats // it was as long in another call, which returned
		beats  beats
		fenced bool
	}{
		{"all others wait", nil, beats{}, late, true},
		{"for a sample", nil, beats{}, with(func(b *beats) { b[1].Call = sample(detect + timing.SampleRetries()) }), true},
		{"for a sample that may be read again", nil, beats{}, with(func(b *beats) { b[1].Call = sample(detect + timing.SampleRetries() - 1) }), false},
		{"not long enough", nil, beats{}, with(func(b *beats) { b[1].Call = forward(detect - 1) }), false},
		{"another works", nil, beats{}, with(func(b *beats) { b[2].Pace = runs }), false},
		{"another is in a call as well", func(c *Config) { c.Mirrors = 2 }, beats{}, with(func(b *beats) { b[2] = control.Beat{Pace: runs, Call: forward(detect)} }), true},
		{"another is in a call as well, which alone holds some of the same", nil, beats{}, with(func(b *beats) { b[2] = control.Beat{Pace: runs, Call: forward(detect)} }), false},
		{"what it holds is on no other", func(c *Config) { c.Mirrors = -1 }, beats{}, late, false},
		{"another is in another step", nil, beats{}, with(func(b *beats) { b[2].Pace = &control.Pace{Step: 3} }), false},
		{"another is in none", nil, beats{}, with(func(b *beats) { b[2].Pace = nil }), false},
		{"a call of OnStep", nil, beats{}, with(func(b *beats) { b[1].Call = &control.Call{Kind: control.CallOnStep, For: int64(detect)} }), false},
		{"such calls take long", nil, with(func(b *beats) { b[1].Call = forward(detect / 2) }), late, false},
		{"without failure detection", func(c *Config) { c.Detect = 0 }, beats{}, late, false},
		{"calls may take for ever", func(c *Config) { c.CallTimeout = -1 }, beats{}, late, false},
		{"where no process can join", func(c *Config) { c.CanStart = false }, beats{}, late, false},
		{"too few would be left", func(c *Config) { c.MinWorkers = 3 }, beats{}, late, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := Config{Settings: Settings{Detect: detect}, CanStart: true}
			if c.config != nil {
				c.config(&config)
			}
			r := trainingOf(t, config, 3)
			for place := range 3 {
				r.s.workers[place].heard = timing.History{Heard: r.now}
			}
			for _, told := range []beats{c.before, {}, c.beats} {
				for _, place := range []int{0, 2, 1} {
					r.now = r.now.Add(time.Millisecond)
					r.effects = append(r.effects, r.s.Step(r.now, Received{place, told[place]})...)
				}
			}
			fenced := pick[FenceWorker](r.effects)
			if c.fenced != (len(fenced) == 1 && fenced[0].Worker == 1) || !c.fenced && len(fenced) > 0 {
				t.Errorf("fenced: %v", fenced)
			}
		})
	}
}
