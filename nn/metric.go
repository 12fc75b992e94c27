package nn

import (
	"sync/atomic"

	"github.com/soliton-train/soliton/trainer"
)

// Accuracy is the share of targets that are the class with the largest output: of equal ones, the first. Rows and targets are as for
// [CrossEntropy].
func Accuracy() trainer.Metric {
	return trainer.Metric{Name: "accuracy", Of: func(c *trainer.Context, out, target trainer.Tensor) (sum float64, count int64) {
		var right, all atomic.Int64
		classes := out.Cols()
		c.For(out.Rows(), func(lo, hi int) {
			var r, n int64
			for row := lo; row < hi; row++ {
				if target.I[row] < 0 {
					continue
				}
				n++
				best, scores := 0, out.F[row*classes:][:classes]
				for k, x := range scores {
					if x > scores[best] {
						best = k
					}
				}
				if best == int(target.I[row]) {
					r++
				}
			}
			right.Add(r) // whole numbers: their order does not count
			all.Add(n)
		})
		return float64(right.Load()), all.Load()
	}}
}
