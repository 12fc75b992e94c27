package main

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/soliton-train/soliton/internal/compute/kernel"
)

// protect tells what mirrors and digests cost while nothing fails: whole training steps of
// the default GPT with them, and the same without. Runs take turns; the figure is the median
// over pairs of the ratio of a step's median time.
func protect(args []string) error {
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
	b := trainingBench{dir: dir, steps: *steps}
	if err := b.build(); err != nil {
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
		for i := range *pairs {
			var with, without training
			for turn := range 2 {
				into, flags := &with, flags
				if (turn == 0) != (i%2 == 0) {
					into, flags = &without, bare
				}
				var err error
				if *into, err = b.run(*workers, flags, program); err != nil {
					return err
				}
				if hash != "" && into.hash != hash {
					return fmt.Errorf("runs ended with params_sha256 %s and %s", hash, into.hash)
				}
				hash = into.hash
			}
			ratios = append(ratios, median(with.ms)/median(without.ms))
			fmt.Printf("  pair %d  with %s  without %s\n", i, list(with.ms), list(without.ms))
			fmt.Printf("          with %.1f MB sent in the run, %.2f s of processor time, peak %.1f MB;  without %.1f MB, %.2f s, %.1f MB\n",
				float64(with.bytes)/1e6, with.cpu, float64(with.peak)/1e6, float64(without.bytes)/1e6, without.cpu, float64(without.peak)/1e6)
		}
		fmt.Printf("  time of a step with them by that of one without, median over pairs: %.3f of %s\n", median(ratios), fractions(ratios))
	}
	return nil
}
