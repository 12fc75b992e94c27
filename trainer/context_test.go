package trainer_test

import (
	"slices"
	"testing"

	"github.com/soliton-train/soliton/trainer"
)

// Layers may draw random numbers on several threads, and nest loops.
func TestForNestsAndDraws(t *testing.T) {
	const samples, columns = 17, 50
	draw := func(threads int) []float32 {
		c, release := trainer.NewContext(trainer.Call{Seed: 3, Step: 1, Samples: samples, Threads: threads, Train: true})
		defer release()
		x := c.Tensor(samples, columns)
		c.For(samples, func(lo, hi int) {
			for i := lo; i < hi; i++ {
				s := c.Rand(i, 2)
				first := s.Float32()
				c.For(columns, func(lo, hi int) {
					for j := lo; j < hi; j++ {
						x.F[i*columns+j] = first + float32(j)
					}
				})
			}
		})
		return x.F
	}
	want := draw(1)
	if got := draw(4); !slices.Equal(got, want) || want[0] == want[columns] {
		t.Error("what is drawn on 4 threads is not what is drawn on one")
	}
}
