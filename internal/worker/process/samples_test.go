package process

import (
	"maps"
	"testing"

	"github.com/soliton-train/soliton/internal/net/control"
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
	s, closeSamples := newSamples(w, &Job{}, control.Start{SkipBad: true, Skipped: []uint64{4}})
	defer closeSamples()
	if err := w.verdicts.open(s); err != nil {
		t.Fatal(err)
	}
	skip(5, 1)
	if want := map[uint64]int{4: 1, 5: 2}; !maps.Equal(s.skips, want) {
		t.Errorf("skipped %v, want %v", s.skips, want)
	}
	w = &Worker{verdicts: verdicts{early: make([]control.BadSample, maxEarly)}}
	if w.verdicts.put(control.BadSample{}) == nil {
		t.Error("what comes early is not bounded")
	}
}
