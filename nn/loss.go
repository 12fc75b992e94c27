package nn

import (
	"github.com/soliton-train/soliton/kernel"
	"github.com/soliton-train/soliton/trainer"
)

// CrossEntropy is −log softmax(out)[target], summed over all rows of out,
// [..., classes]. Targets are int32, one for each row; a row whose target is
// −1 does not count.
type CrossEntropy struct{}

// Loss implements [trainer.Loss].
func (CrossEntropy) Loss(c *trainer.Context, out, target trainer.Tensor) (sum float64, count int64, dout trainer.Tensor) {
	if c.Train() {
		dout = like(c, out)
	}
	sum, count = kernel.CrossEntropy(c.Pool(), dout.F, out.F, target.I, out.Rows(), out.Cols())
	return sum, count, dout
}
