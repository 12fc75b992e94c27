package process

import (
	"maps"
	"testing"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// A worker learns that a sample is skipped also where the agent says so while the worker prepares to train.
func TestEarlyVerdicts(t *testing.T) {
	w := &Worker{}
	skip := func(sample uint64, skips int) {
		t.Helper()
		if err := w.verdicts.put(control.BadSample{Sample: sample, Skips: skips, Do: control.SkipSample}); err != nil {
			t.Fatal(err)
		}
	}
	skip(5, 0)
	skip(4, 0) // which Start has as well
	s, closeSamples := newSamples(w, &Job{Job: rundir.Job{GlobalBatch: 1}}, control.Start{SkipBad: true, Skipped: []uint64{4}})
	defer closeSamples()
	if err := w.verdicts.open(s); err != nil {
		t.Fatal(err)
	}
	skip(5, 1)
	if want := map[uint64]int{4: 1, 5: 2}; !maps.Equal(s.skips, want) {
		t.Errorf("skipped %v, want %v", s.skips, want)
	}
	// The leader that had sample 6 skipped is lost before it says so, and the next one asks for the sample behind it.
	waiting := s.ask(place{6, 0}, &SampleError{})
	if err := s.skipTo(place{6, 1}); err != nil || s.skips[6] != 1 {
		t.Errorf("%d samples are skipped (%v)", s.skips[6], err)
	}
	<-waiting.done
	s.read[7] = struct{}{}
	if s.skipTo(place{7, 1}) == nil {
		t.Error("a sample is skipped that was read")
	}
	w = &Worker{verdicts: verdicts{early: make([]control.BadSample, maxEarly)}}
	if w.verdicts.put(control.BadSample{}) == nil {
		t.Error("what comes early is not bounded")
	}
}
