// Command audit counts the samples that a run commits. Its model has parameters for each sample, whose gradient is 1 in a step that
// has the sample. With momentum 1/2, a parameter that begins at 0 ends as the sum of 2 - 2^-(steps-s) over the steps s of its sample,
// so it says which they were. The loss is the mean number of a step's samples.
package main

import (
	"flag"

	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/trainer"
)

// stride spreads the samples over shards.
const (
	samples = 57
	stride  = 512
)

// numbered is a data set whose samples are their own numbers.
type numbered struct{ n, base int }

func (d numbered) Len() int { return d.n }

func (d numbered) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	in.I[0], target.I[0] = int32(d.base+s.Index), int32(d.base+s.Index)
	return nil
}

// count has a parameter for each sample, and passes the numbers on.
type count struct{}

func (count) Params() []trainer.Param {
	return []trainer.Param{{Name: "count", Shape: []int{samples * stride}, NoDecay: true}}
}

func (count) Forward(c *trainer.Context, _ []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	out := c.Tensor(in.Shape...)
	for i := range out.F {
		out.F[i] = float32(at(in, i))
	}
	return out, in
}

func (count) Backward(c *trainer.Context, _ []trainer.Tensor, stash any, dout trainer.Tensor, dp []trainer.Tensor) (din trainer.Tensor) {
	in := stash.(trainer.Tensor)
	clear(dp[0].F)
	for i, d := range dout.F {
		dp[0].F[at(in, i)*stride] += d
	}
	if in.I != nil {
		return din
	}
	din = c.Tensor(in.Shape...)
	copy(din.F, dout.F)
	return din
}

// at returns the number of a sample, of the input or of a layer's output.
func at(x trainer.Tensor, i int) int {
	if x.I != nil {
		return int(x.I[i])
	}
	return int(x.F[i])
}

// number is the sum of the numbers of samples, whose inputs and targets must be the same.
type number struct{}

func (number) Loss(c *trainer.Context, out, target trainer.Tensor) (sum float64, n int64, dout trainer.Tensor) {
	dout = c.Tensor(out.Shape...)
	for i, x := range out.F {
		if int32(x) != target.I[i] {
			panic("the target is of another sample")
		}
		sum += float64(x)
		dout.F[i] = -1 // of descent
	}
	return sum, int64(len(out.F)), dout
}

func main() {
	trainer.Main(func(*flag.FlagSet) func() (trainer.Job, error) {
		return func() (trainer.Job, error) {
			one := trainer.Spec{Shape: []int{1}, Kind: trainer.Int32}
			return trainer.Job{
				Model: trainer.Model{Name: "audit", Input: one, Target: one, Layers: []trainer.Layer{count{}, count{}, count{}}, Loss: number{}},
				Data: data.Mix{Seed: 5, Parts: []data.Part{
					{Data: numbered{31, 0}, Weight: 0.5}, {Data: numbered{7, 31}, Weight: 0.3}, {Data: numbered{19, 38}, Weight: 0.2},
				}, Samples: 41},
				Optimizer:   trainer.SGD{LR: trainer.Constant(1), Momentum: 0.5},
				GlobalBatch: 8, MicroBatch: 1, Steps: 20, Seed: 9,
			}, nil
		}
	})
}
