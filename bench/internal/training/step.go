package training

import (
	"context"
	"flag"
	"fmt"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/peers"
	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

// Step compares whole training steps with PyTorch: the GPT of 4 layers, width
// 256, 8 heads and context 128, batch 8, AdamW, one thread each, turn by turn.
// Ours has exact reduction and the gradient's norm in it.
func Step(args []string, rec *report.Recorder) error {
	f := flag.NewFlagSet("step", flag.ExitOnError)
	rounds := f.Int("rounds", 8, "turns of each side")
	length := f.Int("steps", 5, "steps of a turn")
	if err := f.Parse(args); err != nil {
		return err
	}
	peer, err := peers.StartPeer("torch_step.py", "OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1")
	if err != nil {
		return err
	}
	defer peer.Close()
	fmt.Printf("peer: %s\nours: kernel path %v, one thread, exact reduction\n", peer.Hello, kernel.Active())
	for _, dropout := range []float64{0, 0.1} {
		for _, micro := range []int{8, 2} {
			fmt.Printf("\nbatch 8 x 128, micro-batch %d, dropout %g: ms of each step\n", micro, dropout)
			var ours, theirs, ratios []float64
			const tokens = 8 * 128
			row := report.Row{
				Comparison: "step", Case: fmt.Sprintf("GPT, batch 8 x 128, micro-batch %d, dropout %g", micro, dropout), Workers: 1, Threads: 1,
				Ours: "Soliton", Theirs: "PyTorch", Unit: "tokens/s", Kind: report.Rate, Goal: 1.3,
			}
			err := oursByTurns(micro, dropout, *rounds, *length, func(round int, o []float64) error {
				p, err := peer.Ask("8 %d %d %g", micro, *length, dropout)
				if err != nil {
					return err
				}
				fmt.Printf("  turn %d  ours %s  PyTorch %s\n", round, lab.List(o), lab.List(p))
				if round > 0 { // the first turn warms up
					ours, theirs = append(ours, o...), append(theirs, p...)
					ratios = append(ratios, lab.Median(p)/lab.Median(o))
					row.Add(1e3*tokens/lab.Median(o), 1e3*tokens/lab.Median(p))
				}
				return nil
			})
			if err != nil {
				return err
			}
			rec.Add(row)
			fmt.Printf("  median ms: ours %.1f, PyTorch %.1f; tokens/s: ours %.0f, PyTorch %.0f; ratio of tokens/s, median over turns: %.3f\n",
				lab.Median(ours), lab.Median(theirs), 1e3*tokens/lab.Median(ours), 1e3*tokens/lab.Median(theirs), lab.Median(ratios))
		}
	}
	return nil
}

// randomTokens is a data set of random bytes.
type randomTokens struct{}

func (randomTokens) Len() int { return 1 << 20 }

func (randomTokens) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	draw := rng.New(uint64(s.Index), rng.Place{})
	for j := range in.I {
		in.I[j], target.I[j] = int32(draw.IntN(256)), int32(draw.IntN(256))
	}
	return nil
}

// oursByTurns trains and calls turn with the milliseconds of every step of
// each of rounds+1 turns; while turn runs, training waits.
func oursByTurns(micro int, dropout float64, rounds, length int, turn func(round int, ms []float64) error) error {
	var ms []float64
	last := time.Now()
	_, err := trainer.Run(context.Background(), trainer.Job{
		Model:       nn.GPT(nn.GPTConfig{Dropout: dropout}),
		Data:        randomTokens{},
		Optimizer:   trainer.AdamW{LR: trainer.Constant(1e-3), WeightDecay: 0.1},
		GlobalBatch: 8, MicroBatch: micro, Steps: (rounds + 1) * length, Seed: 1, Threads: 1,
		OnStep: func(s trainer.StepInfo) error {
			ms = append(ms, float64(time.Since(last).Nanoseconds())/1e6)
			if s.Step%length == 0 {
				if err := turn(s.Step/length-1, ms); err != nil {
					return err
				}
				ms = nil
			}
			last = time.Now()
			return nil
		},
	})
	return err
}
