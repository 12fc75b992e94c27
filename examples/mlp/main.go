// Command mlp trains a small classifier on points of interleaved spirals,
// which it draws itself: a job that takes seconds and needs no files.
//
//	go run ./launcher run ./examples/mlp
package main

import (
	"flag"
	"fmt"
	"math"

	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

// spirals is a data set of points in the plane: arm k of the spiral is class
// k. Point i is drawn from its own random stream, so it is the same on
// every worker, and different seeds give different points.
type spirals struct {
	n, arms int
	seed    uint64
}

func (s spirals) Len() int { return s.n }

func (s spirals) Sample(p trainer.Sample, in, target trainer.Tensor) error {
	draw := rng.New(s.seed, rng.Place{Sample: uint32(p.Index)})
	arm := draw.IntN(s.arms)
	r := 0.1 + float64(0.9*draw.Float64())
	angle := float64(4*r) + float64(2*math.Pi*float64(arm))/float64(s.arms)
	x, y := direction(angle)
	in.F[0] = float32(float64(r*x) + float64(0.02*draw.Normal()))
	in.F[1] = float32(float64(r*y) + float64(0.02*draw.Normal()))
	target.I[0] = int32(arm)
	return nil
}

// direction returns cos and sin of an angle by many small rotations. Unlike
// those of package math, whose last bits differ between kinds of CPUs, they
// are the same everywhere, and so is the data.
func direction(angle float64) (x, y float64) {
	const parts = 1 << 10
	a := angle / parts
	c, s := 1-float64(a*a)/2, a-float64(a*a*a)/6
	x, y = 1, 0
	for range parts {
		x, y = float64(x*c)-float64(y*s), float64(x*s)+float64(y*c)
	}
	r := math.Sqrt(float64(x*x) + float64(y*y))
	return x / r, y / r
}

// accuracy returns the part of the points of d that net puts in their class.
func accuracy(net *trainer.Net, d spirals) float64 {
	right := 0
	in, target := trainer.NewTensor(trainer.Float32, 1, 2), trainer.NewTensor(trainer.Int32, 1)
	for i := range d.n {
		if err := d.Sample(trainer.Sample{Index: i}, in, target); err != nil {
			panic(err) // these samples are computed
		}
		out := net.Forward(in)
		best := 0
		for k, x := range out.F {
			if x > out.F[best] {
				best = k
			}
		}
		if best == int(target.I[0]) {
			right++
		}
	}
	return float64(right) / float64(d.n)
}

func main() {
	trainer.Main(func(f *flag.FlagSet) func() (trainer.Job, error) {
		arms := f.Int("arms", 3, "arms of the spiral, which are the classes")
		hidden := f.Int("hidden", 64, "width of the two hidden layers")
		dropout := f.Float64("dropout", 0, "probability of dropout after each hidden layer")
		return func() (trainer.Job, error) {
			if *arms < 2 {
				return trainer.Job{}, fmt.Errorf("--arms is %d; give at least 2", *arms)
			}
			test := spirals{n: 500, arms: *arms, seed: 2}
			model := nn.Classifier(nn.ClassifierConfig{
				Inputs: 2, Hidden: []int{*hidden, *hidden}, Classes: *arms, Dropout: *dropout,
			})
			model.Metrics = []trainer.Metric{nn.Accuracy()}
			return trainer.Job{
				Model:       model,
				Data:        spirals{n: 4000, arms: *arms, seed: 1},
				Eval:        test,
				Optimizer:   trainer.AdamW{LR: trainer.Cosine(0.02, 20)},
				GlobalBatch: 64, MicroBatch: 16, Steps: 300, ClipNorm: 1, EvalEvery: 100, EvalSamples: -1,
				OnEnd: func(e trainer.End) error {
					_, err := fmt.Fprintf(e.Out, "%.1f%% of unseen points are put in their class\n", 100*accuracy(e.Net, test))
					return err
				},
			}, nil
		}
	})
}
