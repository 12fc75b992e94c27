package checkpoint

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// made returns a manifest of a step that was made so many minutes after the start; losses below 0 are not known.
func made(step, minutes int, loss, val float64) Manifest {
	m := Manifest{Step: step, Made: rundir.Time{Time: time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC).Add(time.Duration(minutes) * time.Minute)}}
	if loss >= 0 {
		m.Loss = &loss
	}
	if val >= 0 {
		m.ValLoss = &val
	}
	return m
}

func chosen(k Keep, all []Manifest) (steps []int) {
	for i, keep := range k.Choose(all) {
		if keep {
			steps = append(steps, all[i].Step)
		}
	}
	return steps
}

func TestKeep(t *testing.T) {
	all := []Manifest{ // newest first
		made(80, 170, 2.0, -1), made(70, 150, 1.1, 2.2), made(60, 125, 2.1, 2.0), made(50, 90, 2.2, -1),
		made(40, 65, 2.4, 1.9), made(30, 59, 2.5, -1), made(20, 30, 2.6, 2.5), made(10, 0, 3.0, -1), {Step: 5},
	}
	for _, c := range []struct {
		keep Keep
		want []int
	}{
		{Keep{}, []int{80, 70, 60}},
		{Keep{Newest: 1}, []int{80}},
		{Keep{Newest: 100}, []int{80, 70, 60, 50, 40, 30, 20, 10, 5}},
		{Keep{Newest: 1, Every: time.Hour}, []int{80, 60, 40, 10}}, // at 0, 65 and 125 minutes
		{Keep{Newest: 1, Best: "val_loss"}, []int{80, 40}},
		{Keep{Newest: 1, Best: "loss"}, []int{80, 70}},
		{Keep{Newest: 1, Best: "none"}, []int{80}},
		{Keep{Newest: 2, Every: 2 * time.Hour, Best: "val_loss"}, []int{80, 70, 60, 40, 10}},
	} {
		if got := chosen(c.keep, all); !slices.Equal(got, c.want) {
			t.Errorf("%+v keeps %v, want %v", c.keep, got, c.want)
		}
	}
	for _, k := range []Keep{{Every: time.Hour, Best: "val_loss"}, {}} {
		if got := chosen(k, nil); got != nil {
			t.Errorf("of no checkpoints, %+v keeps %v", k, got)
		}
	}
	err := Keep{Newest: -1, Every: -1, Best: "accuracy"}.Validate()
	if err == nil || len(strings.Split(err.Error(), "\n")) != 3 {
		t.Errorf("faults of a rule: %v", err)
	}
}

// Choosing after every checkpoint keeps what choosing once of all would keep by age and measure, and always the newest.
func TestKeepEachTime(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := Keep{Newest: rapid.IntRange(1, 4).Draw(t, "newest"), Every: time.Duration(rapid.IntRange(0, 90).Draw(t, "every")) * time.Minute, Best: rapid.SampledFrom([]string{"", "val_loss"}).Draw(t, "best")}
		var all, kept []Manifest
		now := 0
		for step := 1; step <= 20; step++ {
			now += rapid.IntRange(0, 40).Draw(t, "minutes")
			m := made(step, now, 1, float64(rapid.IntRange(-3, 30).Draw(t, "val")))
			all, kept = slices.Insert(all, 0, m), slices.Insert(kept, 0, m)
			var left []Manifest
			for i, keep := range k.Choose(kept) {
				if keep {
					left = append(left, kept[i])
				}
			}
			kept = left
		}
		var steps []int
		for _, m := range kept {
			steps = append(steps, m.Step)
		}
		if want := chosen(k, all); !slices.Equal(steps, want) {
			t.Fatalf("%+v: %v is left, and %v of all at once", k, steps, want)
		}
	})
}

// Prune keeps what the rule chooses.
func TestPruneByRule(t *testing.T) {
	dir := t.TempDir()
	for step := 1; step <= 5; step++ {
		m := writeParts(t, dir, step, 2, "sgd")
		m.Made = made(step, 40*step, 0, 0).Made
		val := []float64{3, 1, 2, 2, 2}[step-1]
		m.ValLoss = &val
		if err := Commit(dir, m); err != nil {
			t.Fatal(err)
		}
	}
	if err := Prune(t.Context(), dir, Keep{Newest: 1, Every: time.Hour, Best: "val_loss"}, 6); err != nil {
		t.Fatal(err)
	}
	if got := steps(t, dir); fmt.Sprint(got) != "[5 3 2 1]" {
		t.Errorf("steps %v are left", got)
	}
}
