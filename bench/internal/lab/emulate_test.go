package lab

import (
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/plan/simulate"

	"pgregory.net/rapid"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
)

// No plan beats the bound, and where stages are equal there is one that meets it.
func TestLeast(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stages := rapid.IntRange(1, 4).Draw(t, "stages")
		layers, workers, micros := rapid.IntRange(stages, 8).Draw(t, "layers"), rapid.IntRange(stages, 10).Draw(t, "workers"), rapid.IntRange(1, 20).Draw(t, "micros")
		prof := plan.Profile{}
		for range layers {
			prof.Layers = append(prof.Layers, plan.Layer{Tensors: []int{1}, Forward: time.Millisecond, Backward: 2 * time.Millisecond})
		}
		var v plan.View
		for i := range workers {
			v.Workers = append(v.Workers, plan.Worker{ID: id.WorkerID(i)})
		}
		p, _, err := planner.Next(plan.Plan{}, v, prof, planner.Event{Stages: stages, Micros: micros})
		if err != nil {
			t.Fatal(err)
		}
		is, err := simulate.Predict(&p, prof)
		if err != nil {
			t.Fatal(err)
		}
		var l, w []int
		for _, s := range p.Stages {
			l, w = append(l, s.Hi-s.Lo), append(w, len(s.Workers))
		}
		bound, all := Least(l, w, micros), LeastOfAll(layers, workers, stages, micros, layers)
		if took := int(is.Step / (3 * time.Millisecond)); took < bound || bound < all {
			t.Fatalf("a step takes %d, the stages bound it to %d, and all plans are bound to %d\n%v", took, bound, all, &p)
		}
	})
	if got := Least([]int{8, 8, 8, 8}, []int{8, 8, 8, 8}, 128); got != 152 { // as launcher plan says, too
		t.Errorf("the bound is %d", got)
	}
}
