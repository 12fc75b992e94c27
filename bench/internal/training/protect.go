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

// Protect tells what mirrors and digests cost while nothing fails: whole training steps of
// the default GPT with them, and the same without. Runs take turns; the figure is the median
// over pairs of the ratio of a step's median time.
func Protect(args []string, rec *report.Recorder) error {
	f := flag.NewFlagSet("protect", flag.ExitOnError)
	pairs := f.Int("pairs", 7, "pairs of runs of each kind")
	steps := f.Int("steps", 12, "steps of a run, of which the first two warm up")
	workers := f.Int("workers", 4, "worker processes, of one compute thread each")
	parts := f.Bool("parts", false, "also what each of the two costs without the other")
	model := f.String("model", "", "flags of examples/gpt, such as \"--layers 2 --width 64\"")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *steps < 3 || *pairs < 1 || *workers < 2 {
		return fmt.Errorf("--steps %d, --pairs %d, --workers %d: give at least 3, 1 and 2", *steps, *pairs, *workers)
	}
	fmt.Printf("%s, kernel path %v, %d cores; %d workers, GPT %s\n", runtime.Version(), kernel.Active(), runtime.NumCPU(), *workers, *model)
	dir, err := os.MkdirTemp("", "soliton-bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	b := lab.TrainingBench{Dir: dir, Steps: *steps}
	if err := b.Build(); err != nil {
		return err
	}
	bare := []string{"--mirrors", "0", "--digests=false"}
	cases := [][]string{{"--mirrors", "1"}}
	if *parts {
		cases = append(cases, []string{"--mirrors", "1", "--digests=false"}, []string{"--mirrors", "0"})
	}
	program := strings.Fields(*model)
	hash := ""
	for _, flags := range cases {
		fmt.Printf("\n%s against %s: ms of each step\n", strings.Join(flags, " "), strings.Join(bare, " "))
		var ratios []float64
		row := report.Row{
			Comparison: "protect", Case: strings.TrimSpace("step of the GPT " + *model), Workers: *workers, Threads: 1,
			Ours: strings.Join(flags, " "), Theirs: strings.Join(bare, " "), Unit: "ms", Kind: report.Cost, Goal: 1.01,
		}
		cpu := row
		cpu.Case, cpu.Unit = strings.TrimSpace("processor time of a run of the GPT "+*model), "s"
		for i := range *pairs {
			var with, without lab.Training
			for turn := range 2 {
				into, flags := &with, flags
				if (turn == 0) != (i%2 == 0) {
					into, flags = &without, bare
				}
				var err error
				if *into, err = b.Run(*workers, flags, program); err != nil {
					return err
				}
				if hash != "" && into.Hash != hash {
					return fmt.Errorf("runs ended with params_sha256 %s and %s", hash, into.Hash)
				}
				hash = into.Hash
			}
			ratios = append(ratios, lab.Median(with.Ms)/lab.Median(without.Ms))
			row.Add(lab.Median(with.Ms), lab.Median(without.Ms))
			cpu.Add(with.CPU, without.CPU)
			fmt.Printf("  pair %d  with %s  without %s\n", i, lab.List(with.Ms), lab.List(without.Ms))
			fmt.Printf("          with %.1f MB sent in the run, %.2f s of processor time, peak %.1f MB;  without %.1f MB, %.2f s, %.1f MB\n",
				float64(with.Bytes)/1e6, with.CPU, float64(with.Peak)/1e6, float64(without.Bytes)/1e6, without.CPU, float64(without.Peak)/1e6)
		}
		rec.Add(row, cpu)
		fmt.Printf("  time of a step with them by that of one without, median over pairs: %.3f of %s\n", lab.Median(ratios), lab.Fractions(ratios))
	}
	return nil
}
