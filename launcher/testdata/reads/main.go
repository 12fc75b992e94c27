// Command reads trains a small language model on files, which it finds in both ways: by package data and by package trainer.
package main

import (
	"flag"

	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/trainer"
)

func main() {
	trainer.Main(func(f *flag.FlagSet) func() (trainer.Job, error) {
		pattern, held := f.String("data", "", "text to train on, a `PATTERN`"), f.String("held", "", "`FILE` to evaluate on")
		return func() (trainer.Job, error) {
			text, err := data.Text(*pattern)
			if err != nil {
				return trainer.Job{}, err
			}
			eval, err := trainer.TextFiles([]string{*held})
			if err != nil {
				return trainer.Job{}, err
			}
			return trainer.Job{
				Model: nn.GPT(nn.GPTConfig{Layers: 1, Width: 8, Heads: 1, Context: 8}), Data: text, Eval: eval,
				Optimizer: trainer.AdamW{LR: trainer.Constant(1e-3)}, GlobalBatch: 8, MicroBatch: 2, Steps: 150, EvalEvery: 50, EvalSamples: 4, Seed: 1,
			}, nil
		}
	})
}
