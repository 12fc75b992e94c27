// Command outside is a user's program: a layer of its own, made of the public kernels, and data with augmentation.
package main

import (
	"flag"
	"math"

	"github.com/soliton-train/soliton/kernel"
	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

// memory lets each row of its input attend to learned slots: softmax(x·Kᵀ/√width)·V.
type memory struct{ width, slots int }

func (m memory) Params() []trainer.Param {
	shape, init := []int{m.slots, m.width}, trainer.Normal(0.5)
	return []trainer.Param{{Name: "key", Shape: shape, Init: init}, {Name: "value", Shape: shape, Init: init}}
}

func (m memory) scale() float32 { return float32(1 / math.Sqrt(float64(m.width))) }

type stash struct{ in, probs trainer.Tensor }

func (m memory) Forward(c *trainer.Context, p []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	rows := in.Rows()
	out, probs := c.Tensor(in.Shape...), c.Tensor(rows, m.slots)
	kernel.MatMul(c.Pool(), matrix(probs), matrix(in), matrix(p[0]).T())
	c.For(rows, func(lo, hi int) {
		for r := lo; r < hi; r++ {
			row := probs.F[r*m.slots:][:m.slots]
			kernel.Softmax(row, row, m.scale())
		}
	})
	kernel.MatMul(c.Pool(), matrix(out), matrix(probs), matrix(p[1]))
	return out, stash{in, probs}
}

func (m memory) Backward(c *trainer.Context, p []trainer.Tensor, s any, dout trainer.Tensor, dp []trainer.Tensor) trainer.Tensor {
	in, probs := s.(stash).in, s.(stash).probs
	rows := in.Rows()
	din, dscores := c.Tensor(in.Shape...), c.Tensor(rows, m.slots)
	kernel.MatMul(c.Pool(), matrix(dp[1]), matrix(probs).T(), matrix(dout))
	kernel.MatMul(c.Pool(), matrix(dscores), matrix(dout), matrix(p[1]).T())
	c.For(rows, func(lo, hi int) {
		for r := lo; r < hi; r++ {
			d := dscores.F[r*m.slots:][:m.slots]
			kernel.SoftmaxBackward(d, probs.F[r*m.slots:][:m.slots], d, m.scale())
		}
	})
	kernel.MatMul(c.Pool(), matrix(dp[0]), matrix(dscores).T(), matrix(in))
	kernel.MatMul(c.Pool(), matrix(din), matrix(dscores), matrix(p[0]))
	return din
}

func matrix(x trainer.Tensor) kernel.Mat { return kernel.Matrix(x.F, x.Rows(), x.Cols()) }

// points are random; the class of one is the quadrant of its first two elements. In training they are moved a little.
type points struct{}

func (points) Len() int { return 500 }

func (points) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	draw := rng.New(1, rng.Place{Sample: uint32(s.Index)})
	for i := range in.F {
		in.F[i] = float32(draw.Normal())
	}
	target.I[0] = 0
	for i, x := range in.F[:2] {
		if x > 0 {
			target.I[0] += 1 << i
		}
	}
	if s.Train {
		for i := range in.F {
			in.F[i] += 0.1 * s.Rand.Float32()
		}
	}
	return nil
}

func main() {
	trainer.Main(func(*flag.FlagSet) func() (trainer.Job, error) {
		return func() (trainer.Job, error) {
			return trainer.Job{
				Model: trainer.Model{
					Name: "outside", Input: trainer.Spec{Shape: []int{8}}, Target: trainer.Spec{Shape: []int{1}, Kind: trainer.Int32},
					Layers: []trainer.Layer{
						nn.Linear{In: 8, Out: 24}, nn.Residual(nn.LayerNorm{Width: 24}, memory{24, 10}, nn.Dropout{Prob: 0.1}),
						nn.Residual(nn.LayerNorm{Width: 24}, memory{24, 10}), nn.Linear{In: 24, Out: 4},
					},
					Loss: nn.CrossEntropy{},
				},
				Data: points{}, Optimizer: trainer.AdamW{LR: trainer.Constant(0.01)},
				GlobalBatch: 32, MicroBatch: 4, Steps: 40, ClipNorm: 1,
			}, nil
		}
	})
}
