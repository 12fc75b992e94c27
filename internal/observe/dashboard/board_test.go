package dashboard

import (
	"encoding/json"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

var epoch = time.Unix(1000, 0)

// begin has workers 0 and 1 in stage 0 and worker 2 in stage 1.
func begin() view.Begin {
	return view.Begin{
		Job: rundir.Job{Program: "gpt", Steps: 100}, RunDir: "runs/x", Reason: "first plan",
		Workers: []rundir.Worker{{ID: 0, Stages: []int{0}}, {ID: 1, Stages: []int{0}}, {ID: 2, Stages: []int{1}, Layers: []int{2, 3}}},
		Stages:  []view.Stage{{Lo: 0, Hi: 2, Workers: []int{0, 1}}, {Lo: 2, Hi: 4, Workers: []int{2}}},
	}
}

func step(n int, loss float64) view.Step {
	return view.Step{Step: n, Loss: loss, Tokens: 100, MS: 50, Plan: 1}
}

func end(steps int) view.End {
	return view.End{Summary: rundir.Summary{Steps: steps, Seconds: 5, ParamsSHA256: "abc"}}
}

func change(kind string, worker int, reason string) view.Change {
	return view.Change{Kind: kind, Worker: worker, Reason: reason, Plan: 2}
}

func after(events ...view.Event) *board {
	b := newBoard()
	for i, e := range events {
		b.add(epoch.Add(time.Duration(i)*time.Second), e)
	}
	return &b
}

func TestStates(t *testing.T) {
	recovered := view.Change{Kind: "recovered", Worker: -1, Reason: "2 workers on", Recovery: &rundir.Recovery{Step: 2, TotalMS: 9}}
	for _, c := range []struct {
		events []view.Event
		state  string
		note   string
	}{
		{[]view.Event{view.Note("reading data")}, starting, "reading data"},
		{[]view.Event{begin()}, training, ""},
		{[]view.Event{begin(), change("lost", 1, "killed")}, recovering, ""},
		{[]view.Event{begin(), change("lost", 7, "it had no part yet")}, training, ""},
		{[]view.Event{begin(), change("lost", 1, "killed"), recovered}, training, ""},
		{[]view.Event{begin(), view.Stopping{Reason: "interrupt"}, change("lost", 1, "killed"), recovered}, stopping, "interrupt"},
		{[]view.Event{begin(), step(1, 4), end(100)}, done, ""},
		{[]view.Event{begin(), step(1, 4), view.End{Summary: rundir.Summary{Steps: 1, StoppedBy: "interrupt"}}}, stopped, "interrupt"},
		{[]view.Event{begin(), change("failed", -1, "no worker is left"), view.End{Summary: rundir.Summary{StoppedBy: "no worker"}}}, failed, "no worker is left"},
	} {
		if b := after(c.events...); b.run.State != c.state || b.run.Note != c.note {
			t.Errorf("after %v: %s, %q; want %s, %q", c.events, b.run.State, b.run.Note, c.state, c.note)
		}
	}
}

func TestWorkers(t *testing.T) {
	all := view.Plan{
		Reason: "told once more by another leader", Workers: []rundir.Worker{{ID: 0, Stages: []int{0}}, {ID: 1, Stages: []int{1}}, {ID: 2, Stages: []int{1}}},
		Stages: []view.Stage{{Lo: 0, Hi: 2, Workers: []int{0}}, {Lo: 2, Hi: 4, Workers: []int{1, 2}}},
	}
	b := after(begin(), change("lost", 1, "worker 1 exited"), all, view.Plan{
		Reason: "without worker 1", Workers: []rundir.Worker{{ID: 0, Stages: []int{0, 1}}, {ID: 2, Stages: []int{1}}},
		Stages: []view.Stage{{Lo: 0, Hi: 2, Workers: []int{0}}, {Lo: 2, Hi: 4, Workers: []int{0, 2}}},
	}, view.Worker{ID: 1, State: "lost"})
	if w := b.workers[1]; w.Gone != "worker 1 exited" || len(w.Stages) != 0 {
		t.Errorf("who is lost is %+v", w)
	}
	if w := b.workers[0]; w.Gone != "" || !slices.Equal(w.Stages, []int{0, 1}) {
		t.Errorf("who stays is %+v", w)
	}
	for _, state := range []string{view.Begins, view.Awaited} {
		b.add(epoch, view.Worker{ID: 1, State: state})
		if w := b.workers[1]; w.Gone != "" || w.State != state {
			t.Errorf("a worker that is to join is %+v", w)
		}
		b.add(epoch, change("lost", 1, "worker 1 exited"))
	}
	for i := range 3 * maxGone {
		b.add(epoch, view.Worker{ID: 10 + i, State: view.Begins})
		b.add(epoch, change("left", 10+i, "has left"))
	}
	if len(b.workers) > 3+maxGone {
		t.Errorf("%d workers are kept", len(b.workers))
	}
}

func TestCurveIsBounded(t *testing.T) {
	b := after(begin())
	sum := 0.0
	for i := range 5000 {
		b.add(epoch, step(i+1, float64(i)))
		sum += float64(i)
	}
	if n := len(b.points); n >= maxPoints || n < maxPoints/2 {
		t.Errorf("%d points", n)
	}
	first, last := b.points[0], b.points[len(b.points)-1]
	if first.Step != b.merged || last.Step > 5000 || last.Step < 5000-b.merged || first.Loss != float64(b.merged-1)/2 {
		t.Errorf("points from %+v to %+v, %d steps each", first, last, b.merged)
	}
}

func TestRollback(t *testing.T) {
	b := after(begin(), step(1, 5), step(2, 4), step(3, 3), step(2, 4.5))
	if len(b.points) != 2 || b.points[1].Loss != 4.5 || b.run.Step != 2 {
		t.Errorf("%+v, step %d", b.points, b.run.Step)
	}
}

// TestSince: whatever happens and whenever a page asks, what it has pieced together is what there is.
func TestSince(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := newBoard()
		b.add(epoch, begin())
		var c seen
		var page frame
		var events []eventLine
		take := func() {
			f, _ := b.since(epoch, &c)
			if f.Run != nil {
				page.Run = f.Run
			}
			if f.Reset {
				page.Points = nil
			}
			page.Points = append(page.Points, f.Points...)
			if f.Workers != nil {
				page.Workers = f.Workers
			}
			events = append(events, f.Events...)
			if f.Timeline != nil {
				page.Timeline = f.Timeline
			}
		}
		n := 0
		for range rapid.IntRange(1, 200).Draw(t, "events") {
			switch rapid.IntRange(0, 9).Draw(t, "what") {
			case 0:
				n = rapid.IntRange(0, n).Draw(t, "back")
			case 1:
				b.add(epoch, change("note", -1, "something"))
			case 2:
				b.add(epoch, view.Worker{ID: rapid.IntRange(0, 5).Draw(t, "worker"), State: view.Begins})
			case 3:
				b.add(epoch, view.Timeline{ID: rapid.IntRange(0, 2).Draw(t, "worker"), Timeline: control.Timeline{Step: n, End: 5}})
			case 4:
				take()
			case 5:
				for range 600 {
					n++
					b.add(epoch, step(n, 1))
				}
			default:
				n++
				b.add(epoch, step(n, float64(n)))
			}
		}
		take()
		whole, _ := b.since(epoch, new(seen))
		for name, two := range map[string][2]any{
			"run": {page.Run, whole.Run}, "points": {page.Points, whole.Points}, "workers": {page.Workers, whole.Workers},
			"events": {events[max(0, len(events)-maxEvents):], whole.Events}, "timeline": {page.Timeline, whole.Timeline},
		} {
			if a, b := text(two[0]), text(two[1]); a != b && len(a)+len(b) > len("null[]") {
				t.Fatalf("%s: the page has %s, and there is %s", name, a, b)
			}
		}
		if _, news := b.since(epoch, &c); news {
			t.Fatal("there is news after all was told")
		}
	})
}

func text(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func TestTimeline(t *testing.T) {
	pass := func(layer, micro int, from, to int64) control.Pass {
		return control.Pass{Layer: layer, Micro: micro, From: from, To: to}
	}
	b := after(begin(),
		view.Timeline{ID: 0, Timeline: control.Timeline{Step: 8, Began: 1000, Commit: 80, End: 100, Passes: []control.Pass{pass(0, 0, 10, 50)}}},
		view.Timeline{ID: 2, Timeline: control.Timeline{Step: 8, Began: 990, Commit: 85, End: 105, Passes: []control.Pass{pass(2, 0, 20, 40)}}})
	if b.timeline != nil {
		t.Error("a step is shown that not all have told of")
	}
	b.add(epoch, view.Timeline{ID: 1, Timeline: control.Timeline{Step: 8, Began: 1005, End: 90}})
	if b.timeline == nil {
		t.Fatal("a step that all have told of is not shown")
	}
	tl := *b.timeline
	if tl.Step != 8 || tl.Began != 990 || len(tl.Workers) != 3 {
		t.Fatalf("%+v", tl)
	}
	// All times count from the beginning of who was first.
	if w := tl.Workers[0]; w.ID != 0 || w.From != 10 || w.Commit != 90 || w.End != 110 || w.Spans[0] != (span{Stage: 0, From: 20, To: 60}) {
		t.Errorf("worker 0: %+v", w)
	}
	if w := tl.Workers[2]; w.ID != 2 || w.From != 0 || w.Spans[0] != (span{Stage: 1, From: 20, To: 40}) {
		t.Errorf("worker 2: %+v", w)
	}
	if w := b.workers[0]; w.PassMS != 0.04 || w.Busy != 0.4 {
		t.Errorf("worker 0 runs at %v ms, %v busy", w.PassMS, w.Busy)
	}
	// One that is silent does not keep a step from being shown for ever.
	b.add(epoch, view.Timeline{ID: 0, Timeline: control.Timeline{Step: 16, Began: 2000, End: 100}})
	b.add(epoch, view.Timeline{ID: 0, Timeline: control.Timeline{Step: 24, Began: 3000, End: 100}})
	if b.timeline.Step != 16 {
		t.Errorf("step %d is shown", b.timeline.Step)
	}
	// A timeline that comes late, is of no worker, or is not valid is left out.
	b.add(epoch, view.Timeline{ID: 1, Timeline: control.Timeline{Step: 16, Began: 2000, End: 100}})
	b.add(epoch, view.Timeline{ID: 77, Timeline: control.Timeline{Step: 24, Began: 2000, End: 100}})
	b.add(epoch, view.Timeline{ID: 1, Timeline: control.Timeline{Step: 24, Began: 2000}})
	if len(b.partial.Workers) != 1 || b.partial.Step != 24 {
		t.Errorf("%+v", b.partial)
	}
}
