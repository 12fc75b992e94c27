package trainer

import (
	"math"
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

func TestPeakOverride(t *testing.T) {
	for _, o := range []Optimizer{AdamW{LR: Cosine(1, 3)}, SGD{LR: Cosine(1, 3)}} {
		if s := o.withPeak(0.25).schedule(); s.Peak != 0.25 || s.Warmup != 3 || o.schedule().Peak != 1 {
			t.Errorf("%v: %v", o, s)
		}
	}
}
