// Command alike trains on samples that are all the same, so that a step depends on the state only.
package main

import (
	"flag"

	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/trainer"
)

type points struct{}

func (points) Len() int { return 40 }

func (points) Sample(_ trainer.Sample, in, target trainer.Tensor) error {
	in.F[0], in.F[1], target.I[0] = 0.5, -1, 1
	return nil
}

func main() {
	trainer.Main(func(f *flag.FlagSet) func() (trainer.Job, error) {
		sgd := f.Bool("sgd", false, "train by SGD in place of AdamW")
		return func() (trainer.Job, error) {
			job := trainer.Job{
				Model: nn.Classifier(nn.ClassifierConfig{Inputs: 2, Hidden: []int{8, 8}, Classes: 2}), Data: points{},
				Optimizer:   trainer.AdamW{LR: trainer.Constant(0.01), WeightDecay: 0.1},
				GlobalBatch: 8, MicroBatch: 2, Steps: 9,
			}
			if *sgd {
				job.Optimizer = trainer.SGD{LR: trainer.Constant(0.05), Momentum: 0.9}
			}
			return job, nil
		}
	})
}
