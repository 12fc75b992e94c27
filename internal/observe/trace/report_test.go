package trace

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"
)

// example is a step of two workers in two stages, struck by a loss of a third.
func example() []Span {
	run := RunOf("job", time.Unix(1, 0))
	zero := time.Unix(1000, 0)
	at := func(ms int) time.Time { return zero.Add(time.Duration(ms) * time.Millisecond) }
	step, recovery := run.Root(Step, 1), run.Root(Recovery, 1, 1)
	second := run.Root(Recovery, 1, 2)
	part := func(w int) Context { return Context{step.Trace, SpanID{1, byte(w)}} }
	about := func(stage, micro int) []Attr { return []Attr{{KeyStage, stage}, {KeyMicro, micro}} }
	spans := []Span{
		{Context: step, Name: Step, Worker: Agent, Start: at(0), End: at(100), Attrs: []Attr{{KeyStep, 1}}},
		{Context: recovery, Name: Recovery, Worker: Agent, Start: at(50), End: at(60), Attrs: []Attr{{KeyCause, "worker 2 exited"}, {KeyStep, 1}, {KeyPlan, "1.2"}}},
		{Context: second, Name: Recovery, Worker: Agent, Start: at(55), End: at(60), Links: []Link{{recovery, Interrupted}}, Attrs: []Attr{{KeySuperseded, true}}},
		{Context: run.Root(Recovery, 1, 3), Name: Relief, Worker: Agent, Start: at(70), End: at(74), Attrs: []Attr{{KeyCause, "worker 1 is late"}, {KeyStep, 1}}},
		{Context: Context{Trace: run.Root(Recovery, 1, 3).Trace}, Parent: run.Root(Recovery, 1, 3).Span, Name: Phases[1], Worker: Agent, Start: at(70), End: at(70)},
		{Context: Context{Trace: recovery.Trace}, Parent: recovery.Span, Name: Last, Worker: 2, Start: at(40), End: at(50)},
	}
	for i, ms := range []int{50, 56, 57, 58, 59, 60} {
		end := 60
		if i < 5 {
			end = []int{56, 57, 58, 59, 60}[i]
		}
		spans = append(spans, Span{Context: Context{Trace: recovery.Trace}, Parent: recovery.Span, Name: Phases[i], Worker: Agent, Start: at(ms), End: at(end)})
	}
	for w := range 2 {
		spans = append(spans, Span{Context: part(w), Parent: step.Span, Name: Step, Worker: w, Start: at(0), End: at(100)})
	}
	// The passes of worker 1 are below its stage.
	stage := Context{step.Trace, SpanID{2, 1}}
	spans = append(spans, Span{Context: stage, Parent: part(1).Span, Name: Stage, Worker: 1, Start: at(35), End: at(75), Attrs: []Attr{{KeyStage, 1}}})
	add := func(w int, name string, from, to int, attrs []Attr) {
		parent := part(w).Span
		if w == 1 && (name == Forward || name == Backward) {
			parent = stage.Span
		}
		spans = append(spans, Span{Context: Context{Trace: step.Trace}, Parent: parent, Name: name, Worker: w, Start: at(from), End: at(to), Attrs: attrs})
	}
	add(0, Forward, 0, 30, about(0, 0))
	add(0, Gather, 5, 10, nil) // within it
	add(0, Transfer, 30, 31, append(about(1, 0), Attr{KeyPeer, 1}))
	add(1, Arrive, 34, 34, append(about(1, 0), Attr{KeyPeer, 0}, Attr{KeyBytes, 64}))
	add(1, Forward, 35, 55, about(1, 0))
	add(1, Backward, 55, 75, about(1, 0))
	add(0, Backward, 80, 90, about(0, 0))
	add(0, Reduce, 85, 95, []Attr{{KeyLayer, 0}})
	add(0, Commit, 96, 120, nil) // beyond the step's end
	return spans
}

func TestSummarize(t *testing.T) {
	r := Summarize(example())
	if len(r.Recoveries) != 2 || r.Recoveries[0].TotalMS != 10 || r.Recoveries[0].Cause != "worker 2 exited" || r.Recoveries[0].Phases[0] != (PhaseReport{"detect", 0, 6}) {
		t.Errorf("%+v", r.Recoveries)
	}
	if r.Recoveries[1].After != r.Recoveries[0].Trace || !r.Recoveries[1].Superseded || r.Recoveries[0].Superseded {
		t.Errorf("%+v is not after the other", r.Recoveries[1])
	}
	if len(r.Reliefs) != 1 || r.Reliefs[0].TotalMS != 4 || r.Reliefs[0].Cause != "worker 1 is late" {
		t.Errorf("%+v", r.Reliefs)
	}
	want := []WorkerReport{
		{ID: 0, Steps: 1, StepMS: 100, ComputeMS: 35, CommitMS: 4, TransferMS: 11, WaitMS: 50},
		{ID: 1, Steps: 1, StepMS: 100, ComputeMS: 40, WaitMS: 60},
	}
	if r.Steps != 1 || len(r.Workers) != 2 || r.Workers[0] != want[0] || r.Workers[1] != want[1] || *r.SlowestWorker != 1 {
		t.Errorf("%d steps, %+v, want %+v", r.Steps, r.Workers, want)
	}
	if r.SlowestLink == nil || *r.SlowestLink != (LinkReport{From: 0, To: 1, Count: 1, Bytes: 64, MS: 4}) {
		t.Errorf("%+v", r.Links)
	}
	if r := Summarize(nil); r.SlowestWorker != nil || r.SlowestLink != nil || r.Recoveries == nil {
		t.Errorf("of nothing: %+v", r)
	}
}

// The Chrome trace event format: what each kind of event must have, slices of a track that lie within each
// other or apart, and flows that begin and end within slices.
func TestPerfetto(t *testing.T) {
	var b bytes.Buffer
	if err := Perfetto(&b, example()); err != nil {
		t.Fatal(err)
	}
	var file struct {
		DisplayTimeUnit string
		TraceEvents     []struct {
			Ph, Name, ID, BP, S string
			TS, Dur             *float64
			PID, TID            *int
			Args                map[string]any
		}
	}
	if err := json.Unmarshal(b.Bytes(), &file); err != nil {
		t.Fatalf("%v\n%s", err, b.String())
	}
	type span struct{ from, to float64 }
	tracks := make(map[[2]int][]span)
	names := make(map[int]string)
	flows := make(map[string][2]int)
	begun := make(map[string]int)
	marks := 0
	for _, e := range file.TraceEvents {
		if e.PID == nil || e.TID == nil || e.TS == nil || e.Name == "" {
			t.Fatalf("%+v lacks something", e)
		}
		track := [2]int{*e.PID, *e.TID}
		switch e.Ph {
		case "M":
			if e.Name == "process_name" {
				names[*e.PID], _ = e.Args["name"].(string)
			}
		case "X":
			now := span{*e.TS, *e.TS + *e.Dur}
			for _, was := range tracks[track] {
				if now.from < was.to && now.to > was.to {
					t.Errorf("%s on track %v overlaps another slice", e.Name, track)
				}
			}
			tracks[track] = append(tracks[track], now)
		case "b":
			begun[e.ID]++
		case "e":
			begun[e.ID]--
		case "s":
			flows[e.ID] = [2]int{*e.PID, 0}
		case "f":
			if from, ok := flows[e.ID]; !ok || from[0] == *e.PID || e.BP != "e" {
				t.Errorf("flow %s ends on track %v", e.ID, track)
			}
		case "i":
			if marks++; e.S != "g" {
				t.Errorf("%+v", e)
			}
		default:
			t.Errorf("event of kind %q", e.Ph)
		}
	}
	if names[0] != "agent" || names[1] != "worker 0" || names[3] != "worker 2" || len(flows) != 2 || marks != 4 {
		t.Errorf("tracks %v, %d flows, %d marks", names, len(flows), marks)
	}
	for id, n := range begun {
		if n != 0 {
			t.Errorf("%s is begun %d times more than ended", id, n)
		}
	}
}
