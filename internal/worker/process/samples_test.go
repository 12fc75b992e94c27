package process

import (
	"errors"
	"maps"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/tensor"
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

// What a pass gets of a place in the run is the sample that the ledger has there, whatever the agent says while it waits and reads.
func TestSampleIsThatOfTheLedger(t *testing.T) {
	const sample = 3
	var s *samples
	loads, during := 0, func() error { return nil }
	j := &Job{Job: rundir.Job{GlobalBatch: 1}, Index: func(i uint64, skips int) int { return int(i) + skips }}
	j.Input.Kind, j.Input.Shape, j.Target = tensor.Int32, []int{1}, j.Input
	j.Load = func(_ *Calls, i uint64, skips int, in, _ tensor.Tensor) error {
		loads++
		if in.I[0] = int32(j.Index(i, skips)); skips == 0 {
			return during()
		}
		return nil
	}
	in := tensor.Make(tensor.Int32, 1)
	load := func() int {
		t.Helper()
		if err := s.load(t.Context(), 0, sample, in, tensor.Tensor{}); err != nil {
			t.Fatal(err)
		}
		return int(in.I[0])
	}
	skip := func() error {
		if err := s.told(control.BadSample{Sample: sample, Do: control.SkipSample}); err != nil {
			t.Error(err)
		}
		return nil
	}
	again := func(f func() error) {
		var closeSamples func()
		s, closeSamples = newSamples(&Worker{calls: new(Calls)}, j, control.Start{SkipBad: true})
		t.Cleanup(closeSamples)
		loads, during = 0, f
	}
	unreadable := &SampleError{Index: sample, Tries: 1, Err: errors.New("bad sector")}

	// A try for another worker fails, and the agent hears so, while a pass waits for its turn; then the sample could be read.
	again(func() error { return nil })
	s.ask(place{sample, 0}, unreadable)
	if err := s.readFor(nil, place{sample, 0}, in, tensor.Tensor{}); !errors.Is(err, errElsewhere) || loads > 0 || len(s.read) > 0 {
		t.Errorf("%v after %d reads of a sample that the agent is asked about", err, loads)
	}
	_ = skip()
	if err := s.readFor(nil, place{sample, 0}, in, tensor.Tensor{}); !errors.Is(err, errElsewhere) || loads > 0 || len(s.read) > 0 {
		t.Errorf("%v after %d reads of a sample that is skipped", err, loads)
	}
	// The agent skips a sample that this worker could not read before a rollback, and can now.
	again(skip)
	if got := load(); got != sample+1 || loads != 2 {
		t.Errorf("sample %d after %d reads, the first of which is of a sample that is skipped meanwhile", got, loads)
	}
	// The same, where it cannot be read: the question is settled, and must not be opened again.
	again(func() error { return errors.Join(skip(), unreadable) })
	if got := load(); got != sample+1 || len(s.open) > 0 {
		t.Errorf("sample %d, and %d open questions", got, len(s.open))
	}
	again(func() error { return errors.Join(skip(), unreadable) })
	if err := s.try(place{sample, 0}); err != nil || loads != 1 || len(s.open) > 0 {
		t.Errorf("%v, and %d open questions after %d reads", err, len(s.open), loads)
	}
	if err := s.try(place{sample, 0}); err != nil || loads != 1 || len(s.open) > 0 {
		t.Errorf("%v, and %d open questions after %d reads", err, len(s.open), loads)
	}
	// A sample that this worker has read is good.
	again(func() error { return nil })
	if got := load(); got != sample {
		t.Errorf("sample %d", got)
	}
	during = func() error { return unreadable }
	if err := s.load(t.Context(), 0, sample, in, tensor.Tensor{}); !errors.Is(err, unreadable) || len(s.open) > 0 {
		t.Errorf("%v, and %d open questions", err, len(s.open))
	}
}
