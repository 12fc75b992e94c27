package training

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/internal/compute/kernel"
)

// Reduce tells what the order of the gradient tree costs, in two parts. The
// first compares whole training steps with exact and with fast reduction, in
// worker processes of the default GPT; the second the engine's fast reduction
// with a bare ring reduce-scatter of the same shapes.
func Reduce(args []string, rec *report.Recorder) error {
	f := flag.NewFlagSet("reduce", flag.ExitOnError)
	rounds := f.Int("rounds", 40, "reductions of each kind")
	pairs := f.Int("pairs", 7, "pairs of runs, one exact and one fast")
	steps := f.Int("steps", 8, "steps of a run, of which the first two warm up")
	model := f.String("model", "", "flags of examples/gpt, such as \"--layers 2 --width 64\"")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *steps < 3 || *rounds < 1 || *pairs < 1 {
		return fmt.Errorf("--steps %d, --rounds %d, --pairs %d: give at least 3, 1 and 1", *steps, *rounds, *pairs)
	}
	fmt.Printf("%s, kernel path %v, GOMAXPROCS %d\n", runtime.Version(), kernel.Active(), runtime.GOMAXPROCS(0))
	dir, err := os.MkdirTemp("", "soliton-bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	b := lab.TrainingBench{Dir: dir, Steps: *steps}
	if err := b.Build(); err != nil {
		return err
	}
	// The runs come first: a process begins with the peak of the one that starts
	// it, and this one is still small.
	//
	// Eight micro-batches a worker, aligned to the tree, and sixteen, unaligned.
	for _, c := range []struct{ workers, global int }{{4, 32}, {3, 48}} {
		if err := compareReductions(&b, c.workers, c.global, *pairs, *model, rec); err != nil {
			return err
		}
	}
	for _, workers := range []int{2, 4} {
		if err := bandwidth(workers, *rounds, rec); err != nil {
			return err
		}
	}
	return nil
}

func compareReductions(b *lab.TrainingBench, workers, global, pairs int, model string, rec *report.Recorder) error {
	fmt.Printf("\n%d workers x %d micro-batches of 1, GPT %s: ms of each step\n", workers, global/workers, model)
	program := append([]string{"--global-batch", fmt.Sprint(global), "--micro-batch", "1"}, strings.Fields(model)...)
	var ratios []float64
	var exact, fast lab.Training
	row := report.Row{
		Comparison: "reduce", Case: fmt.Sprintf("step of the GPT %s, %d micro-batches of 1 each", model, global/workers), Workers: workers, Threads: 1,
		Ours: "exact", Theirs: "fast", Unit: "ms", Kind: report.Cost, Goal: 1.01,
	}
	hash := ""
	for i := range pairs {
		for turn := range 2 {
			var err error
			if (turn == 0) == (i%2 == 0) {
				exact, err = b.Run(workers, []string{"--reduction", "exact"}, program)
			} else {
				fast, err = b.Run(workers, []string{"--reduction", "fast"}, program)
			}
			if err != nil {
				return err
			}
		}
		if hash != "" && exact.Hash != hash {
			return fmt.Errorf("exact runs ended with params_sha256 %s and %s", hash, exact.Hash)
		}
		hash = exact.Hash
		ratios = append(ratios, lab.Median(exact.Ms)/lab.Median(fast.Ms))
		row.Add(lab.Median(exact.Ms), lab.Median(fast.Ms))
		fmt.Printf("  pair %d  exact %s  fast %s\n", i, lab.List(exact.Ms), lab.List(fast.Ms))
		fmt.Printf("          exact %.1f MB sent in the run, peak %.1f MB;  fast %.1f MB, peak %.1f MB\n",
			float64(exact.Bytes)/1e6, float64(exact.Peak)/1e6, float64(fast.Bytes)/1e6, float64(fast.Peak)/1e6)
	}
	rec.Add(row)
	fmt.Printf("  time of an exact step by that of a fast one, median over pairs: %.3f of %s\n", lab.Median(ratios), lab.Fractions(ratios))
	return nil
}
