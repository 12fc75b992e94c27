package session

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/host/session/change"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
)

// savingOf is trainingOf with checkpoints every ten seconds.
func savingOf(t *testing.T, cfg Config, n int) *ran {
	t.Helper()
	return savingWith(t, cfg, n, func(*control.Ready) {})
}

// savingWith is savingOf with other jobs.
func savingWith(t *testing.T, cfg Config, n int, change func(*control.Ready)) *ran {
	t.Helper()
	cfg.RunDir, cfg.Shown, cfg.Command = "/runs/a", "runs/a", "./gpt"
	r := &ran{t: t, s: begin(cfg, n), now: time.Unix(0, 0)}
	for _, e := range prepare(n) {
		if m, ok := e.(Received); ok {
			if ready, ok := m.Message.(control.Ready); ok {
				ready.CheckpointEvery = 10 * time.Second
				ready.Layers = slices.Clone(ready.Layers)
				change(&ready)
				e = Received{m.Worker, ready}
			}
		}
		r.feed(e)
	}
	sent[control.Order](r) // the first
	r.feed(commit(n, 1)...)
	return r
}

func partOf(id, step, plan int) Event {
	file, _ := json.Marshal(checkpoint.File{Name: fmt.Sprintf("plan-1.%d-worker-%d.safetensors", plan, id), Size: 1})
	return Received{id, control.Saved{Step: step, Generation: 1, N: plan, Rule: "adamw", File: file}}
}

// notes returns the reasons of the events of a kind.
func (r *ran) notes(kind string) (all []string) {
	for _, e := range pick[WriteEvent](r.effects) {
		if e.Event.Kind == kind {
			all = append(all, e.Event.Reason)
		}
	}
	return all
}

func TestCheckpointIsAskedForAndMadeWhole(t *testing.T) {
	r := savingOf(t, Config{}, 2)
	r.now = r.s.Alarm()
	r.feed(AlarmDue{})
	if asked := sent[control.Save](r); len(asked) != 2 {
		t.Fatalf("asked %v", asked)
	}
	r.now = r.s.Alarm()
	if r.feed(AlarmDue{}); len(sent[control.Save](r)) > 0 {
		t.Error("asked again before the first one was made")
	}
	r.feed(partOf(0, 2, 1), partOf(1, 2, 1))
	if len(pick[CommitCheckpoint](r.effects)) > 0 {
		t.Error("a checkpoint of a step that is not in metrics.jsonl")
	}
	r.feed(commit(2, 2)...)
	made := pick[CommitCheckpoint](r.effects)
	if len(made) != 1 || made[0].Manifest.Step != 2 || len(made[0].Manifest.Files) != 2 || made[0].Manifest.Job != r.s.job.ID() || fmt.Sprint(made[0].Manifest.Layers) != "[10100 9000]" {
		t.Fatalf("made %+v", made)
	}
	r.feed(CheckpointCommitted{2, errors.New("disk full")}, CheckpointsPruned{})
	if got := r.notes("unsaved"); !strings.HasPrefix(got[len(got)-1], "no checkpoint of step 2: disk full; there is none since the start, ") {
		t.Errorf("%v", got)
	}
	r.now = r.s.Alarm()
	if r.feed(AlarmDue{}); len(sent[control.Save](r)) != 2 {
		t.Error("no other one is asked for")
	}
}

// Workers that save at multiples of a number of steps begin as if they were asked, and are asked again when a checkpoint is made.
func TestCheckpointsByStepsAreAskedForAgain(t *testing.T) {
	r := savingWith(t, Config{}, 2, func(ready *control.Ready) { ready.CheckpointEvery, ready.CheckpointSteps = time.Minute, 2 })
	sent[control.Save](r) // until the first part comes, that is repeated
	r.feed(commit(2, 2)...)
	r.feed(partOf(0, 2, 1), partOf(1, 2, 1))
	if len(pick[CommitCheckpoint](r.effects)) != 1 {
		t.Fatal("no checkpoint is made")
	}
	sent[control.Save](r)
	r.now = r.s.Alarm()
	if r.feed(AlarmDue{}); len(sent[control.Save](r)) > 0 {
		t.Error("asked again before the first one was made")
	}
	r.feed(CheckpointCommitted{2, nil}, CheckpointsPruned{})
	if asked := sent[control.Save](r); len(asked) != 2 {
		t.Errorf("asked %v after the first one was made", asked)
	}
}

// A manifest has what the records say of its step, and how the tensors are called.
func TestManifestHasTheLoss(t *testing.T) {
	r := savingWith(t, Config{}, 1, func(ready *control.Ready) {
		for i := range ready.Layers {
			l := &ready.Layers[i]
			for k, n := range l.Tensors {
				l.Names, l.Shapes = append(l.Names, fmt.Sprintf("layer%d.%d", i, k)), append(l.Shapes, []int{n})
			}
		}
	})
	r.feed(commit(1, 2)...)
	r.feed(partOf(0, 2, 1))
	made := pick[CommitCheckpoint](r.effects)
	if len(made) != 1 {
		t.Fatalf("made %+v", made)
	}
	m := made[0].Manifest
	if m.Loss == nil || *m.Loss != r.s.records.last.Loss || !m.Made.Equal(r.now) || len(m.Tensors) == 0 || m.Tensors[0].Name != "layer0.0" {
		t.Errorf("%+v", m)
	}
}

func TestStoppedRunWaitsForItsCheckpoint(t *testing.T) {
	r := savingOf(t, Config{}, 2)
	r.feed(StopAsked{Interrupt})
	r.feed(commit(2, 2)...)
	r.feed(partOf(0, 2, 1), partOf(1, 2, 1), Received{0, doneAfter(2, Interrupt)}, Received{1, doneAfter(2, Interrupt)})
	if len(sent[control.Release](r)) > 0 {
		t.Fatal("the workers may go before the checkpoint is on disk")
	}
	r.feed(CheckpointCommitted{2, nil}, CheckpointsPruned{})
	if len(sent[control.Release](r)) != 2 {
		t.Error("the workers may not go")
	}
	r.feed(leave(0, 1)...)
	out := r.s.Outcome()
	var text strings.Builder
	out.Report(&text, &text, "launcher")
	if want := "launcher: interrupted after step 2 of 3; to go on: launcher resume " + r.s.cfg.Shown + "\n"; text.String() != want {
		t.Errorf("%s, want %s", text.String(), want)
	}
}

func TestCheckpointOfTheDeadIsGivenUp(t *testing.T) {
	r := savingOf(t, Config{}, 2)
	r.feed(commit(2, 2)...)
	r.feed(partOf(0, 2, 1))
	r.feed(died(1)...)
	if notes := r.notes("unsaved"); len(r.s.checkpoints.parts) > 0 || !strings.Contains(strings.Join(notes, "\n"), "no checkpoint of step 2: worker 1 has gone") {
		t.Errorf("%v, %v", r.s.checkpoints.parts, notes)
	}
	r = savingOf(t, Config{}, 2)
	r.feed(commit(2, 2)...)
	r.feed(died(1)...)
	if r.feed(partOf(0, 2, 1)); len(r.s.checkpoints.parts) > 0 {
		t.Errorf("%v", r.s.checkpoints.parts)
	}
	r = savingOf(t, Config{}, 2)
	r.feed(commit(2, 2)...)
	r.feed(partOf(0, 2, 1), Received{1, control.Saved{Step: 2, Generation: 1, N: 1, Rule: "adamw", Err: "disk full"}})
	if notes := r.notes("unsaved"); len(r.s.checkpoints.parts) > 0 || !strings.Contains(strings.Join(notes, "\n"), "no checkpoint of step 2: worker 1: disk full") {
		t.Errorf("%v, %v", r.s.checkpoints.parts, notes)
	}
}

func TestRollbackToACheckpoint(t *testing.T) {
	r := savingOf(t, Config{Settings: Settings{Mirrors: -1}}, 2)
	r.feed(commit(2, 2)...)
	r.feed(partOf(0, 1, 1), partOf(1, 1, 1), CheckpointCommitted{1, nil}, CheckpointsPruned{}, partOf(0, 2, 1), partOf(1, 2, 1), CheckpointCommitted{2, nil}, CheckpointsPruned{})
	r.feed(died(1)...)
	r.answer(2, 1)
	check := pick[VerifyCheckpoint](r.effects)
	if len(check) != 1 || check[0].Propose.Order.From != r.s.cfg.RunDir || check[0].Propose.Order.Passed.Step != 2 {
		t.Fatalf("%+v", check)
	}
	// The newest is found to be damaged.
	r.feed(CheckpointVerified{Propose: check[0].Propose, Step: 1, Refused: []string{"x: altered; the checkpoint is not used"}})
	r.answer(2, 1)
	check = pick[VerifyCheckpoint](r.effects)
	if len(check) != 2 || check[1].Propose.Order.Passed.Step != 1 {
		t.Fatalf("%+v", check)
	}
	r.feed(CheckpointVerified{Propose: check[1].Propose, Step: 1})
	o := r.obey()
	if !o.Rollback || o.From != r.s.cfg.RunDir || o.Passed.Step != 1 {
		t.Fatalf("%+v", o)
	}
	for n := 2; n <= 3; n++ {
		r.feed(stepOf(0, n, uint64(o.Plan.Version.N)))
	}
	r.feed(Received{0, doneAfter(3, "")})
	r.feed(leave(0)...)
	if out := r.s.Outcome(); out.Err != nil || out.Summary.Rollbacks != 1 || out.Resume != "" {
		t.Errorf("%+v", out)
	}
}

// A rollback to the last step leaves nothing to be done: the summary has the loss of that step all the same.
func TestRollbackToTheLastStep(t *testing.T) {
	r := savingOf(t, Config{Settings: Settings{Mirrors: -1}}, 2)
	r.feed(commit(2, 2)...)
	r.feed(commit(2, 3)...)
	loss := r.s.records.last.Loss
	r.feed(partOf(0, 3, 1), partOf(1, 3, 1), CheckpointCommitted{3, nil}, CheckpointsPruned{})
	r.feed(died(1)...)
	r.answer(3, 1)
	check := pick[VerifyCheckpoint](r.effects)
	if len(check) != 1 || check[0].Propose.Order.Passed.Step != 3 {
		t.Fatalf("%+v", check)
	}
	r.feed(CheckpointVerified{Propose: check[0].Propose, Step: 3})
	if o := r.obey(); !o.Rollback {
		t.Fatalf("%+v", o)
	}
	done := doneAfter(3, "")
	done.Loss = 0 // it has run no step
	r.feed(Received{0, done})
	r.feed(leave(0)...)
	if out := r.s.Outcome(); out.Err != nil || out.Summary.Rollbacks != 1 || out.Summary.Loss != loss || loss == 0 {
		t.Errorf("%v, %+v, loss %v", out.Err, out.Summary, loss)
	}
}

func TestPartsThatCannotBe(t *testing.T) {
	for name, e := range map[string]Event{
		"unknown plan": partOf(0, 1, 7),
		"twice":        partOf(1, 1, 1),
		"step":         partOf(0, 9, 1),
		"no file":      Received{0, control.Saved{Step: 1, Generation: 1, N: 1, Rule: "adamw", File: []byte("x")}},
	} {
		r := savingOf(t, Config{}, 2)
		r.feed(partOf(1, 1, 1), e)
		if bad := new(ProtocolError); !errors.As(r.s.end.err, &bad) {
			t.Errorf("%s: %v", name, r.s.end.err)
		}
	}
}

// What has changed since a run ended is refused by name, unless it was asked for, and is written into the lineage.
func TestResumedRunUnderChange(t *testing.T) {
	for name, c := range map[string]struct {
		change  func(*control.Ready)
		allow   string // that is needed
		never   bool
		changed string // names in the lineage
	}{
		"nothing":        {change: func(r *control.Ready) { r.Job.ModelConfig, r.Job.Threads = json.RawMessage(`{"a":1}`), 7 }},
		"kernel":         {change: func(r *control.Ready) { r.Job.Kernel = "other" }},
		"seed":           {change: func(r *control.Ready) { r.Job.Seed++ }, allow: "seed", changed: "seed"},
		"program":        {change: func(r *control.Ready) { r.Job.ProgramSHA256 = "other" }, allow: "program", changed: "program"},
		"Go":             {change: func(r *control.Ready) { r.Job.GoVersion = "go1.99" }, allow: "program", changed: "program"},
		"data":           {change: func(r *control.Ready) { r.Job.DataSHA256 = "other" }, allow: "data", changed: "data"},
		"model":          {change: func(r *control.Ready) { r.Job.ModelConfig = json.RawMessage(`{"a":2}`) }, allow: "model", changed: "model"},
		"peak":           {change: func(r *control.Ready) { r.Job.Schedule = "linear(peak=2, warmup=3)" }, allow: "lr", changed: "lr"},
		"schedule":       {change: func(r *control.Ready) { r.Job.Schedule = "cosine(peak=1, warmup=3)" }, allow: "schedule", changed: "schedule"},
		"both":           {change: func(r *control.Ready) { r.Job.Schedule = "cosine(peak=2, warmup=3)" }, allow: "lr,schedule", changed: "lr,schedule"},
		"numbers":        {change: func(r *control.Ready) { r.Job.Optimizer = "adamw(eps=2)" }, allow: "optimizer", changed: "optimizer"},
		"rule":           {change: func(r *control.Ready) { r.Job.Optimizer = "sgd(momentum=0)" }, allow: "optimizer", never: true},
		"batch":          {change: func(r *control.Ready) { r.Job.GlobalBatch *= 2 }, allow: "batch", changed: "batch"},
		"clip":           {change: func(r *control.Ready) { r.Job.ClipNorm = 1 }, allow: "clip", changed: "clip"},
		"steps":          {change: func(r *control.Ready) { r.Job.Steps *= 2 }, changed: "steps"},
		"flags":          {change: func(r *control.Ready) { r.Job.Args = []string{"--x"} }, changed: "flags"},
		"parameters":     {change: func(r *control.Ready) { r.Job.Parameters++ }, allow: "model", never: true},
		"shape":          {change: func(r *control.Ready) { r.Layers[0].Shapes = [][]int{{2, 2}} }, allow: "model", never: true},
		"fewer tensors":  {change: func(r *control.Ready) { r.Layers[0].Names = nil }, allow: "model", never: true},
		"renamed tensor": {change: func(r *control.Ready) { r.Layers[0].Names = []string{"b"} }},
	} {
		ready := func() control.Ready {
			r := readyOf(0)
			r.Job.ModelConfig, r.Job.Schedule, r.Job.Optimizer = json.RawMessage("{\n  \"a\": 1\n}"), "linear(peak=1, warmup=3)", "adamw(eps=1)"
			r.Layers = []control.Layer{{Name: "a", Names: []string{"a"}, Shapes: [][]int{{4}}, Tensors: []int{4}}}
			return r
		}
		was, now := ready(), ready()
		c.change(&now)
		again := &Resume{Job: was.Job, Data: was.Data, Tensors: tensorsOf(was.Layers)}
		err := again.allows(now)
		var no *change.Refusal
		if errors.As(err, &no) != (c.allow != "") || no != nil && (no.Never != c.never || !c.never && !strings.Contains(err.Error(), "give --allow "+c.allow)) {
			t.Errorf("%s: %v", name, err)
		}
		again.Allow = strings.Split(c.allow, ",")
		if err := again.allows(now); (err != nil) != c.never {
			t.Errorf("%s, allowed: %v", name, err)
		}
		if c.never {
			continue
		}
		lineage, err := again.lineage(now, 1)
		var names []string
		for _, a := range lineage {
			for _, x := range a.Changed {
				names = append(names, x.Name)
			}
		}
		if err != nil || strings.Join(names, ",") != c.changed {
			t.Errorf("%s: %q, %v", name, names, err)
		}
	}
	done := &Resume{Job: readyOf(0).Job, Finished: true}
	if err := done.allows(readyOf(0)); err == nil || !strings.Contains(err.Error(), "steps are done; give --steps with more") {
		t.Errorf("%v", err)
	}
	if _, err := done.lineage(readyOf(0), done.Job.Steps+1); err == nil || !strings.Contains(err.Error(), "it continues after step") {
		t.Errorf("%v", err)
	}
}

// failedPart is partOf for a part that could not be written.
func failedPart(id, step int, why string) Event {
	return Received{id, control.Saved{Step: step, Generation: 1, N: 1, Rule: "adamw", Err: why}}
}

// A part that cannot be written ends its checkpoint, whichever part comes first, and the next one is asked for.
func TestCheckpointAfterOneThatFailed(t *testing.T) {
	for _, order := range [][2]int{{0, 1}, {1, 0}} {
		r := savingOf(t, Config{}, 2)
		r.now = r.s.Alarm()
		r.feed(AlarmDue{})
		r.feed(commit(2, 2)...)
		parts := []Event{failedPart(0, 2, "disk full"), partOf(1, 2, 1)}
		r.feed(parts[order[0]])
		if len(pick[DropCheckpoints](r.effects)) > 0 {
			t.Error("a checkpoint is dropped to which a worker may be writing")
		}
		r.feed(parts[order[1]])
		if got := pick[DropCheckpoints](r.effects); len(got) != 1 || got[0].Step != 2 {
			t.Errorf("%v: dropped %v", order, got)
		}
		sent[control.Save](r)
		r.now = r.s.Alarm()
		if r.feed(AlarmDue{}); len(sent[control.Save](r)) != 2 {
			t.Errorf("%v: no other one is asked for", order)
		}
	}
}

// Since when there is no checkpoint is said once for each cause, until there is one again.
func TestUnsaved(t *testing.T) {
	r := savingOf(t, Config{}, 2)
	began := r.s.checkpoints.made
	r.feed(commit(2, 2)...)
	shown := func() (all []view.Unsaved) {
		for _, e := range pick[Show](r.effects) {
			if u, ok := e.Event.(view.Unsaved); ok {
				all = append(all, u)
			}
		}
		return all
	}
	r.now = r.now.Add(time.Minute)
	r.feed(failedPart(0, 1, "disk full"), partOf(1, 1, 1))
	if got := shown(); len(got) != 1 || got[0] != (view.Unsaved{Since: began, Why: "worker 0: disk full"}) {
		t.Errorf("%+v", got)
	}
	if got := r.notes("unsaved"); len(got) != 1 {
		t.Errorf("%q", got)
	}
	r.effects = nil
	if r.feed(failedPart(0, 2, "disk full"), partOf(1, 2, 1)); len(shown())+len(r.notes("unsaved")) != 0 {
		t.Error("it is said again")
	}
	r.feed(partOf(0, 1, 1), partOf(1, 1, 1), CheckpointCommitted{1, nil}, CheckpointsPruned{})
	if got := shown(); len(got) != 1 || got[0] != (view.Unsaved{}) {
		t.Errorf("%+v", got)
	}
}
