package rundir

import (
	"encoding/json"
	"slices"
	"testing"
)

// stepsAndBatch is what differs in these tests.
func stepsAndBatch(was, is Job) (all []Change) {
	if was.Steps != is.Steps {
		all = append(all, Change{Name: "steps"})
	}
	if was.GlobalBatch != is.GlobalBatch {
		all = append(all, Change{Name: "batch"})
	}
	return all
}

// resumed returns the job as which j is resumed after a step.
func resumed(t *testing.T, j Job, step int, now Job) Job {
	t.Helper()
	lineage, err := j.Resumed(step, now, stepsAndBatch)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(Job{Steps: now.Steps, GlobalBatch: now.GlobalBatch, Lineage: lineage})
	if err != nil {
		t.Fatal(err)
	}
	var again Job
	if err := json.Unmarshal(text, &again); err != nil {
		t.Fatal(err)
	}
	return again.Plain()
}

// A run that is resumed as another job keeps what it was, and its checkpoints.
func TestLineage(t *testing.T) {
	first := Job{Steps: 10, GlobalBatch: 8}.Plain()
	if again := resumed(t, first, 4, first); again.Lineage != nil || again.ID() != first.ID() || again.Floor() != 0 || again.Shift() != 0 {
		t.Errorf("resumed unchanged: %+v", again)
	}
	long := resumed(t, first, 10, Job{Steps: 20, GlobalBatch: 8})
	wide := resumed(t, long, 15, Job{Steps: 20, GlobalBatch: 2})
	if wide.Floor() != 15 || long.ID() == first.ID() || wide.ID() == long.ID() || len(wide.Lineage) != 2 {
		t.Fatalf("%+v", wide)
	}
	for i, want := range []Era{{first.ID(), 0, 10}, {long.ID(), 10, 15}} {
		if got := wide.Eras()[i]; got != want {
			t.Errorf("era %d is %+v, want %+v", i, got, want)
		}
		if was, err := wide.Lineage[i].Description(); err != nil || was.Steps == 0 {
			t.Errorf("ancestor %d: %+v, %v", i, was, err)
		}
	}
	for _, c := range []struct {
		job                   string
		step                  int
		readable, rollsBackTo bool
	}{
		{first.ID(), 10, true, false}, {first.ID(), 11, false, false}, {long.ID(), 10, false, false}, {long.ID(), 14, true, false},
		{long.ID(), 15, true, true}, {long.ID(), 16, false, false}, {wide.ID(), 15, false, false}, {wide.ID(), 16, true, true}, {"other", 16, false, false},
	} {
		if got := wide.Eras().Has(c.job, c.step); got != c.readable {
			t.Errorf("%+v: %v", c, got)
		}
		if got := wide.Rollback().Has(c.job, c.step); got != c.rollsBackTo {
			t.Errorf("rollback to %+v: %v", c, got)
		}
	}
	// 15 steps of 8 samples come before step 16, whose first sample would be number 30 with 2 a step.
	if first := uint64(15*2) + wide.Shift(); first != 120 {
		t.Errorf("step 16 begins with sample %d, want 120", first)
	}
	if !wide.Descends(first.ID()) || first.Descends(wide.ID()) {
		t.Error("who descends from whom")
	}

	// A checkpoint that cannot be used sends the run back behind a change: what counts no more is no part of the lineage.
	if again := resumed(t, wide, 15, Job{Steps: 20, GlobalBatch: 2}); again.ID() != wide.ID() {
		t.Errorf("resumed where it was changed: %+v", again.Eras())
	}
	if again := resumed(t, wide, 12, Job{Steps: 20, GlobalBatch: 8}); again.ID() != long.ID() || !slices.EqualFunc(again.Lineage, long.Lineage, func(a, b Ancestor) bool { return a.ID == b.ID && a.Until == b.Until }) {
		t.Errorf("resumed as it was: %+v", again.Eras())
	}
	if again := resumed(t, wide, 7, Job{Steps: 20, GlobalBatch: 2}); len(again.Lineage) != 1 || again.Lineage[0].ID != first.ID() || again.Lineage[0].Until != 7 || len(again.Lineage[0].Changed) != 2 {
		t.Errorf("resumed before it was changed: %+v", again.Eras())
	}
}
