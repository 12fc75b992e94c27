package demo

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/trainer"
)

// Job is the argument with which the launcher's own executable is the program that launcher demo trains.
const Job = "demo-job"

// RunJob trains a small GPT on sums. It ends the process.
func RunJob() {
	os.Args = slices.Delete(os.Args, 1, 2)
	trainer.Main(func(f *flag.FlagSet) func() (trainer.Job, error) {
		data := f.String("data", "", "train on this `FILE`")
		return func() (trainer.Job, error) {
			text, err := trainer.Text(*data)
			return trainer.Job{
				Model:       nn.GPT(nn.GPTConfig{Layers: 4, Width: 64, Heads: 4, Context: 64, Dropout: 0.1}),
				Data:        text,
				Optimizer:   trainer.AdamW{LR: trainer.Cosine(4e-3, 10), Beta2: 0.95, WeightDecay: 0.1},
				GlobalBatch: 32,
				MicroBatch:  2,
				Steps:       demoSteps,
				ClipNorm:    1,
				Seed:        1,
			}, err
		}
	})
}

// sums is a text of sums, "7+5=12" and so on. Each number follows from the one before, so every machine writes the same text.
func sums(lines int) string {
	var b strings.Builder
	x := uint32(1)
	next := func() uint32 {
		x = x*1664525 + 1013904223 // Numerical Recipes' generator: any that mixes will do
		return x >> 16 % 10
	}
	for range lines {
		p, q := next(), next()
		fmt.Fprintf(&b, "%d+%d=%d\n", p, q, p+q)
	}
	return b.String()
}
