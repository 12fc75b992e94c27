package trainer

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
)

func TestSchedules(t *testing.T) {
	tenth := Cosine(1, 4)
	tenth.Final = 0.1
	for _, c := range []struct {
		s    Schedule
		want []float64 // of 12 steps
	}{
		{Constant(0.5), []float64{.5, .5, .5, .5, .5, .5, .5, .5, .5, .5, .5, .5}},
		{Linear(1, 4), []float64{.25, .5, .75, 1, 1, .875, .75, .625, .5, .375, .25, .125}},
		{Linear(1, 0), []float64{1, 11. / 12, 10. / 12, 9. / 12, 8. / 12, 7. / 12, 6. / 12, 5. / 12, 4. / 12, 3. / 12, 2. / 12, 1. / 12}},
		{Cosine(2, 4), []float64{.5, 1, 1.5, 2, 2, 1 + math.Cos(math.Pi/8), 1 + math.Cos(math.Pi/4), 1 + math.Cos(3*math.Pi/8), 1,
			1 - math.Cos(3*math.Pi/8), 1 - math.Cos(math.Pi/4), 1 - math.Cos(math.Pi/8)}},
		{Table(3, 1, 2), []float64{3, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2}},
		{tenth, []float64{.25, .5, .75, 1, 1, -1, -1, -1, .55, -1, -1, -1}},
		{Linear(1, 20), []float64{.05, .1, .15, .2, .25, .3, .35, .4, .45, .5, .55, .6}}, // warm-up only
	} {
		for i, want := range c.want {
			if got := c.s.At(i+1, len(c.want)); want >= 0 && math.Abs(got-want) > 1e-12 {
				t.Errorf("%v at step %d is %v, want %v", c.s, i+1, got, want)
			}
		}
	}
}

func TestTable(t *testing.T) {
	s := Table(1, 4, 2)
	s.Peak = 2
	if s = s.since(Table(1, 4, 2)); !slices.Equal(s.Rates, []float64{0.5, 2, 1}) {
		t.Errorf("with another peak: %v", s.Rates)
	}
	if a, b := Table(1, 2).String(), Table(1, 3).String(); a == b {
		t.Errorf("two tables are both %s", a)
	}
	for text, s := range map[string]Schedule{
		"without rates":                Table(),
		"has a rate for step 2":        Table(1, -1),
		"not finite":                   Table(math.Inf(1)),
		"has the peak 0":               Table(0, 0),
		"is a table with Warmup":       {Kind: TableSchedule, Rates: []float64{1}, Peak: 1, Warmup: 3},
		"has the unknown kind 4; use ": {Kind: TableSchedule + 1, Peak: 1},
	} {
		if f := s.faults("LR"); len(f) == 0 || !strings.Contains(fmt.Sprint(f), text) {
			t.Errorf("faults %v, want one with %q", f, text)
		}
	}
}

func TestScheduleOverride(t *testing.T) {
	for _, o := range []Optimizer{AdamW{LR: Cosine(1, 3)}, SGD{LR: Cosine(1, 3)}} {
		if s := o.withSchedule(Linear(0.25, 3)).schedule(); s.String() != Linear(0.25, 3).String() || o.schedule().String() != Cosine(1, 3).String() {
			t.Errorf("%v: %v", o, s)
		}
	}
}

// A schedule with a length of its own does not depend on that of the job, and its last rate stays.
func TestScheduleOfItsOwnLength(t *testing.T) {
	for _, s := range []Schedule{Linear(1, 2), {Kind: CosineSchedule, Peak: 1, Warmup: 2, Final: 0.1}} {
		long := s
		long.Steps = 12
		for step := 1; step <= 20; step++ {
			want := s.At(min(step, 13), 12)
			for _, steps := range []int{step, 12, 400} {
				if got := long.At(step, steps); got != want {
					t.Errorf("%v at step %d of %d is %v, want %v", long, step, steps, got, want)
				}
			}
		}
		if f := (Schedule{Peak: 1, Steps: -1}).faults("LR"); len(f) != 1 || s.String() == long.String() {
			t.Errorf("%v, %v, %v", f, s, long)
		}
	}
}
