package session

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// withCalls returns a session of n workers whose program has OnStep, before the first step.
func withCalls(t *testing.T, cfg Config, n int) *ran {
	r := &ran{t: t, s: begin(cfg, n), now: time.Unix(0, 0)}
	for _, e := range prepare(n) {
		r.feed(withOnStep(e))
	}
	return r
}

func withOnStep(e Event) Event {
	if m, ok := e.(Received); ok {
		if ready, ok := m.Message.(control.Ready); ok {
			ready.OnStep = true
			return Received{m.Worker, ready}
		}
	}
	return e
}

// calls returns what workers were told of OnStep since it was last asked, as "worker: after step, to call".
func (r *ran) calls() (all []string) {
	for id, m := range sent[control.Deliver](r) {
		text := ""
		if m.Step != nil {
			text = " " + string(rune('0'+m.Step.Step))
		}
		if m.Again {
			text += " again"
		}
		all = append(all, string(rune('0'+id))+": after "+string(rune('0'+m.After))+text)
	}
	slices.Sort(all)
	return all
}

func (r *ran) records() (steps []int) {
	for _, e := range pick[WriteDelivery](r.effects) {
		steps = append(steps, e.Delivery.Step)
	}
	return steps
}

// index returns where an effect is, -1 if nowhere.
func index(effects []Effect, is func(Effect) bool) int { return slices.IndexFunc(effects, is) }

// One worker is told before it trains that it makes the calls; another one goes on when it has died in one. The run ends after
// the last call.
func TestDeliveries(t *testing.T) {
	r := withCalls(t, Config{}, 3)
	appointed := index(r.effects, func(e Effect) bool { _, ok := e.(WriteDelivery); return ok })
	told := index(r.effects, func(e Effect) bool { s, ok := e.(Send); _, is := s.Message.(control.Deliver); return ok && is })
	started := index(r.effects, func(e Effect) bool { s, ok := e.(Send); _, is := s.Message.(control.Start); return ok && is })
	if appointed < 0 || told < appointed || started < told {
		t.Errorf("written at %d, told at %d, started at %d", appointed, told, started)
	}
	sent[control.Order](r)
	want := func(calls ...string) {
		t.Helper()
		if got := r.calls(); !slices.Equal(got, calls) {
			t.Fatalf("told %q, want %q", got, calls)
		}
	}
	want("0: after 0")
	r.feed(commit(3, 1)...)
	want("0: after 0 1")
	r.feed(Received{0, control.Delivered{Step: 1, Files: []rundir.LineFile{{Path: "a", Size: 7}}}})
	want()
	r.feed(stepOf(1, 2, 1))
	want("0: after 1 2")
	r.feed(died(0)...)
	want("1: after 1 2 again")
	r.answer(2, 1)
	r.obey()
	r.feed(stepOf(2, 2, 1), Received{1, control.Delivered{Step: 2}})
	r.feed(stepOf(1, 3, 2), stepOf(2, 3, 2))
	want("1: after 2 3")
	r.feed(Received{1, doneAfter(3, "")}, Received{2, doneAfter(3, "")})
	if len(pick[WriteSummary](r.effects)) > 0 {
		t.Error("the run ends before the last call")
	}
	r.feed(died(1)...)
	want("2: after 2 3 again")
	r.answer(3, 2)
	r.feed(Received{2, control.Delivered{Step: 3}})
	if got := r.records(); !slices.Equal(got, []int{0, 1, 1, 2, 2, 3}) {
		t.Errorf("the records are of steps %v", got)
	}
}

// The worker of a leader that is gone keeps its call; the numbers of a step that is due come from the files.
func TestInheritedDeliveries(t *testing.T) {
	const n = 3
	for _, dead := range []bool{false, true} {
		r := withCalls(t, Config{}, n)
		sent[control.Order](r)
		r.feed(commit(n, 1)...)
		in := r.effects
		next := func() *ran {
			cfg := Config{Inherited: agreedBy(t, in), Term: 5, Leader: "host-1"}
			records := pick[WriteDelivery](in)
			cfg.Inherited.History.Calls = rundir.Calls{Newest: &records[len(records)-1].Delivery, Due: []rundir.Metrics{*cfg.Inherited.History.Last}}
			next := &ran{t: t, s: begin(cfg, n), now: r.now}
			next.effects = next.s.Begin(next.now)
			return next
		}()
		for id := range n {
			if id == 0 && dead {
				next.feed(died(0)...)
				continue
			}
			for _, e := range told(id, stepOf(id, 1, 1)) {
				next.feed(withOnStep(e))
			}
		}
		want := "0: after 0 1"
		if dead {
			want = "1: after 0 1 again"
		}
		if got := next.calls(); !slices.Equal(got, []string{want}) {
			t.Errorf("told %q, want %q", got, want)
		}
	}
}

// A run that is resumed calls first for what may have been called for, and not for steps that it repeats.
func TestResumedDeliveries(t *testing.T) {
	job := ready.Job
	resume := &Resume{Job: job, Data: ready.Data, Step: 1, Calls: rundir.Calls{
		Newest: &rundir.Delivery{Step: 1, Files: []rundir.LineFile{{Path: "a", Size: 7}}}, Due: []rundir.Metrics{{Step: 2, Loss: 2}},
	}}
	r := withCalls(t, Config{Settings: Settings{Resume: resume}, RunDir: "/runs/a", Shown: "runs/a"}, 2)
	sent[control.Order](r)
	if got := r.calls(); !slices.Equal(got, []string{"0: after 1 2 again"}) {
		t.Fatalf("told %q", got)
	}
	r.feed(Received{0, control.Delivered{Step: 2}})
	r.feed(commit(2, 2)...)
	if got := r.calls(); len(got) != 0 {
		t.Errorf("told %q of a step that is repeated", got)
	}
	r.feed(commit(2, 3)...)
	if got := r.calls(); !slices.Equal(got, []string{"0: after 2 3"}) {
		t.Errorf("told %q", got)
	}
}

// A worker that cannot read a sample is done without; when another one cannot either, the run ends with their reason.
func TestUnreadableSample(t *testing.T) {
	fail := func(id, step int) Event {
		return Received{id, control.Failed{Kind: control.NoSample, Text: "sample 7: input/output error", Step: step}}
	}
	r := trainingOf(t, Config{}, 3)
	r.feed(fail(1, 2))
	r.feed(died(1)...)
	if asked := r.answer(1, 1); len(asked) != 2 || r.s.end.err != nil {
		t.Fatalf("asked %v after %v", asked, r.s.end.err)
	}
	r.obey()
	r.feed(fail(0, 2))
	if err := r.s.end.err; err == nil || !strings.Contains(err.Error(), "worker 0: sample 7: input/output error") {
		t.Errorf("error %v", err)
	}
	r = trainingOf(t, Config{}, 1)
	r.feed(fail(0, 2))
	if r.s.end.err == nil {
		t.Error("a lone worker fails, and the run goes on")
	}
	r = trainingOf(t, Config{}, 3)
	r.feed(fail(1, 2))
	r.feed(died(1)...)
	r.answer(1, 1)
	r.obey()
	r.feed(stepOf(0, 2, 2), stepOf(2, 2, 2), fail(0, 3))
	r.feed(died(0)...)
	if r.s.end.err != nil {
		t.Errorf("another step: error %v", r.s.end.err)
	}
}

// A run that is to stop does not wait for what becomes of samples that cannot be read: where the data are gone, one follows the other.
func TestStopUnread(t *testing.T) {
	unread := Received{0, control.Unread{Sample: 7, Index: 7, Step: 2, Text: "sample 7: EOF"}}
	for _, events := range [][]Event{{unread, StopAsked{Terminated}}, {StopAsked{Terminated}, unread}} {
		r := trainingOf(t, Config{Settings: Settings{SkipBad: true}}, 2)
		r.feed(events...)
		want := "terminated at step 1 of 3 without a checkpoint, since step 2 needs a sample that cannot be read: sample 7: EOF; there is no checkpoint"
		if err := r.s.end.err; err == nil || err.Error() != want {
			t.Errorf("%v: error %v, want %q", events, err, want)
		}
	}
}

// A run that is resumed skips no sample in steps that were committed before, unless it is another one from there on.
func TestCommittedSamplesOfResumedRun(t *testing.T) {
	for _, x := range []struct {
		changed bool
		step    int // which needs the sample
		fails   bool
	}{{false, 2, true}, {false, 3, false}, {true, 2, false}} {
		was := readyOf(0)
		again := &Resume{Job: was.Job, Data: was.Data, Tensors: tensorsOf(was.Layers), Committed: 2, Allow: []string{"program"}}
		again.Job.Program = filepath.Base(again.Job.Program) // as job.json has it, and workers of tests do not
		if x.changed {
			again.Job.Steps++
		}
		r := trainingOf(t, Config{Settings: Settings{Resume: again, SkipBad: true}, RunDir: "/runs/a", Shown: "runs/a"}, 2)
		r.feed(Received{0, control.Unread{Sample: 7, Index: 7, Step: x.step, Text: "sample 7: bad sector"}})
		var told []string
		for _, m := range sent[control.BadSample](r) {
			told = append(told, m.Do)
		}
		if want := map[bool]string{true: control.FailSample, false: control.TrySample}[x.fails]; !slices.Equal(told, []string{want}) {
			t.Errorf("%+v: told %q, want %q", x, told, want)
		}
		if !x.fails {
			continue
		}
		for id := range 2 {
			r.feed(Received{id, control.Failed{Kind: control.NoSample, Text: "sample 7: bad sector", Step: x.step}})
			r.feed(Received{1, control.Unread{Sample: 7, Index: 7, Step: x.step, Text: "sample 7: bad sector"}})
		}
		if err := r.s.end.err; err == nil || !strings.Contains(err.Error(), fmt.Sprintf("bad sector; step %d was committed with this sample before", x.step)) {
			t.Errorf("%+v: error %v", x, err)
		}
	}
}
