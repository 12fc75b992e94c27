package process

import (
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/worker/engine"
)

func TestTimeline(t *testing.T) {
	var log timeline
	add := func(name string, micro int) {
		began := time.Now()
		log.add(engine.Span{Name: name, Micro: micro, First: 3, Start: began, End: began.Add(time.Millisecond)})
	}
	step := func(n int) (control.Timeline, bool) {
		log.begin(n, time.Now())
		for m := range 2 {
			add(trace.Gather, -1)
			add(trace.Gather, -1)
			add(trace.Forward, m)
			add(trace.Reduce, -1)
			add(trace.Backward, m)
		}
		log.phase(n, trace.Commit)
		return log.end(n, time.Now().Add(time.Second))
	}
	if _, ok := step(4); ok {
		t.Error("a step is recorded that the agent did not ask for")
	}
	log.every.Store(2)
	if _, ok := step(5); ok {
		t.Error("step 5 is recorded, and 2 does not divide it")
	}
	got, ok := step(6)
	if !ok || got.Step != 6 || len(got.Passes) != 4 || got.Commit > got.End || got.Cut {
		t.Fatalf("%+v, %v", got, ok)
	}
	for i, p := range got.Passes {
		if back := i%2 == 1; p.Layer != 3 || p.Micro != i/2 || p.Backward != back || p.From < 0 || p.To-p.From < 999 || p.To > got.End || p.Wait > 0 == back {
			t.Errorf("pass %d is %+v", i, p)
		}
	}
	if got.Passes[0].Wait != 2000 {
		t.Errorf("a pass has waited %d us, want 2000", got.Passes[0].Wait)
	}
	// A pass after the end of the step, such as one of an evaluation, is not of the step.
	add(trace.Forward, 0)
	if got, ok := log.end(6, time.Now()); ok {
		t.Errorf("the step ends twice: %+v", got)
	}
	// The record says that it has no room for all passes.
	log.begin(10, time.Now())
	for m := range control.MaxPasses + 1 {
		add(trace.Forward, m)
	}
	if got, _ := log.end(10, time.Now()); len(got.Passes) != control.MaxPasses || !got.Cut {
		t.Errorf("%d passes are kept, cut is %v", len(got.Passes), got.Cut)
	}
}
