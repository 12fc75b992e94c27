package training

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/pages"
)

// Protect tells what mirrors and digests cost while nothing fails: whole training steps of
// the default GPT with them, and the same without. Runs take turns; the figure is the median
// over pairs of the ratio of a step's median time. Beside it stands the bound that the memory sets.
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
	speed := streamed()
	fmt.Printf("all processors together read and write %.1f GB/s of memory\n", speed/1e9)
	for _, flags := range cases {
		fmt.Printf("\n%s against %s: ms of each step\n", strings.Join(flags, " "), strings.Join(bare, " "))
		var ratios, bounds []float64
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
			bounds = append(bounds, 1+protectedBytes(*workers)*float64(with.Parameters)/speed/(lab.Median(without.Ms)/1e3))
			row.Add(lab.Median(with.Ms), lab.Median(without.Ms))
			cpu.Add(with.CPU, without.CPU)
			fmt.Printf("  pair %d  with %s  without %s\n", i, lab.List(with.Ms), lab.List(without.Ms))
			fmt.Printf("          with %.1f MB sent in the run, %.2f s of processor time, peak %.1f MB;  without %.1f MB, %.2f s, %.1f MB\n",
				float64(with.Bytes)/1e6, with.CPU, float64(with.Peak)/1e6, float64(without.Bytes)/1e6, without.CPU, float64(without.Peak)/1e6)
		}
		rec.Add(row, cpu)
		fmt.Printf("  time of a step with them by that of one without, median over pairs: %.3f of %s\n", lab.Median(ratios), lab.Fractions(ratios))
		if len(flags) == 2 { // with both
			fmt.Printf("  bound by the bytes that they read and write: %.3f of %s\n", lab.Median(bounds), lab.Fractions(bounds))
		}
	}
	return nil
}

// protectedBytes returns how many bytes of memory one mirror and digests read and write for each parameter and step of AdamW, in one stage: the
// mirror applies the update (gradient, parameter and two moments are read, the last three written), and before the commit each holder
// of a block reads it again: owner and mirror the parameter and the moments, all others the parameter. The gradient that goes to the
// mirror takes the place of the parameter that it need not get.
func protectedBytes(workers int) float64 { return 4 * float64(4+3+2*3+workers-2) }

// streamed measures how many bytes of memory all processors read and write together in a second, the best of some tries.
func streamed() (best float64) {
	const n, passes = 16 << 20, 4
	cores := runtime.NumCPU()
	arrays := make([][]float32, 3*cores)
	for i := range arrays {
		arrays[i] = pages.Make(n)
	}
	for range 5 {
		began := time.Now()
		var all sync.WaitGroup
		for i := range cores {
			all.Go(func() {
				for range passes {
					kernel.Add(arrays[3*i], arrays[3*i+1], arrays[3*i+2])
				}
			})
		}
		all.Wait()
		best = max(best, float64(cores*passes*n*4*3)/time.Since(began).Seconds())
	}
	return best
}
