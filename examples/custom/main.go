// Command custom shows what a program brings of its own: a layer with a
// derivative, a data set, and a callback that writes a CSV file.
//
//	go run ./launcher run ./examples/custom --csv loss.csv
package main

import (
	"flag"

	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

// slopes is max(x, 0) + slope·min(x, 0) with a slope for each column that is
// learned (K. He and others, "Delving deep into rectifiers", 2015).
type slopes struct{ width int }

func (l slopes) Params() []trainer.Param {
	return []trainer.Param{{Name: "slope", Shape: []int{l.width}, Init: trainer.Init{Kind: trainer.InitConstant, Scale: 0.25}, NoDecay: true}}
}

func (l slopes) Forward(c *trainer.Context, p []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	out := c.Tensor(in.Shape...)
	for i, x := range in.F {
		out.F[i] = x
		if x < 0 {
			out.F[i] = x * p[0].F[i%l.width]
		}
	}
	return out, in // Backward needs the input
}

func (l slopes) Backward(c *trainer.Context, p []trainer.Tensor, stash any, dout trainer.Tensor, dp []trainer.Tensor) trainer.Tensor {
	in, din := stash.(trainer.Tensor), c.Tensor(dout.Shape...)
	clear(dp[0].F) // gradients arrive with any content
	for i, d := range dout.F {
		din.F[i] = d
		if x, k := in.F[i], i%l.width; x < 0 {
			din.F[i] = d * p[0].F[k]
			dp[0].F[k] += float32(d * x) // the conversion keeps builds from fusing the two operations
		}
	}
	return din
}

// rings is a data set of points in a square, whose class is the ring around
// the centre that they lie in.
type rings struct {
	n    int
	seed uint64
}

func (r rings) Len() int { return r.n }

func (r rings) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	draw := rng.New(r.seed, rng.Place{Sample: uint32(s.Index)}) // sample i is the same whenever it is asked for
	x, y := 2*draw.Float32()-1, 2*draw.Float32()-1
	in.F[0], in.F[1] = x, y
	target.I[0] = int32(2*(float32(x*x)+float32(y*y))) % 2
	return nil
}

func main() {
	trainer.Main(func(f *flag.FlagSet) func() (trainer.Job, error) {
		path := f.String("csv", "", "write the loss of every step to `FILE`")
		return func() (trainer.Job, error) {
			job := trainer.Job{
				Model: trainer.Model{
					Name:  "rings",
					Input: trainer.Spec{Shape: []int{2}}, Target: trainer.Spec{Shape: []int{1}, Kind: trainer.Int32},
					Layers: []trainer.Layer{nn.Linear{In: 2, Out: 32}, slopes{32}, nn.Linear{In: 32, Out: 32}, slopes{32}, nn.Linear{In: 32, Out: 2}},
					Loss:   nn.CrossEntropy{}, Metrics: []trainer.Metric{nn.Accuracy()},
				},
				Data: rings{n: 4000, seed: 1}, Eval: rings{n: 500, seed: 2},
				Optimizer:   trainer.AdamW{LR: trainer.Linear(0.02, 10)},
				GlobalBatch: 64, MicroBatch: 32, Steps: 1000,
			}
			if *path == "" {
				return job, nil
			}
			csv := trainer.LineWriter{Path: *path, Header: "step,loss"}
			job.OnStep = func(s trainer.StepInfo) error { return csv.Printf(s, "%d,%v", s.Step, s.Loss) }
			return job, nil
		}
	})
}
