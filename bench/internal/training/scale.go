package training

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/peers"
	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/internal/compute/kernel"
)

// layout is runs at the same time, their workers, the threads of each, and the samples of a micro-batch.
type layout struct{ runs, workers, threads, micro int }

// Scale trains a GPT with one worker, several, and one of two threads, and with two ranks of DistributedDataParallel over Gloo, which two workers are compared with,
// both at the micro-batch that is the fastest for them. Two and eight runs of one worker at the same time say what the processors can do when
// nothing is exchanged. All take turns.
func Scale(args []string, rec *report.Recorder) error {
	f := flag.NewFlagSet("scale", flag.ExitOnError)
	turns := f.Int("turns", 3, "turns of each side")
	steps := f.Int("steps", 8, "steps of a turn, of which the first two warm up")
	batch := f.Int("batch", 32, "samples of a step, a multiple of 16")
	layers := f.Int("layers", 4, "blocks of the GPT")
	width := f.Int("width", 256, "its width, a multiple of 8")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *turns < 1 || *steps < 3 || *batch < 16 || *batch%16 != 0 || *layers < 1 || *width < 8 || *width%8 != 0 {
		return errors.New("-turns, -layers: give at least 1; -steps at least 3; -batch a multiple of 16; -width a multiple of 8")
	}
	if runtime.NumCPU() < 2 {
		return errors.New("it takes two cores")
	}
	dir, err := os.MkdirTemp("", "soliton-bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	b := lab.TrainingBench{Dir: dir, Steps: *steps}
	if err := b.Build(); err != nil {
		return err
	}
	fmt.Printf("%s, kernel path %v, %d cores; GPT of %d layers, width %d, batch %d x 128\n", runtime.Version(), kernel.Active(), runtime.NumCPU(), *layers, *width, *batch)
	rate := func(ms []float64) float64 { return 1e3 * 128 * float64(*batch) / lab.Median(ms) }

	ddp, err := peers.StartPeer("torch_gpt_ddp.py", "OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1")
	micro := 0 // of ddp
	if err != nil {
		fmt.Printf("no DistributedDataParallel: %v\n", err)
	} else {
		defer ddp.Close()
		fmt.Printf("peer: %s\n", ddp.Hello)
	}
	theirs := func(micro int) (float64, error) {
		ms, err := ddp.Ask("2 %d %d %d %d %d", *batch, micro, *steps, *layers, *width)
		if err != nil {
			return 0, err
		}
		if len(ms) != *steps {
			return 0, fmt.Errorf("the peer answers with %d steps of %d", len(ms), *steps)
		}
		return rate(ms[2:]), nil
	}
	hashes := make(map[int]string) // by micro-batch
	ours := func(l layout) (float64, error) {
		sides, errs := make([]lab.Training, l.runs), make([]error, l.runs)
		var together sync.WaitGroup
		for i := range sides {
			together.Go(func() {
				sides[i], errs[i] = b.Run(l.workers, []string{"--threads", strconv.Itoa(l.threads)}, []string{
					"--layers", strconv.Itoa(*layers), "--width", strconv.Itoa(*width), "--global-batch", strconv.Itoa(*batch), "--micro-batch", strconv.Itoa(l.micro), "--dropout", "0.1",
				})
			})
		}
		together.Wait()
		if err := errors.Join(errs...); err != nil {
			return 0, err
		}
		sum := 0.0
		for _, t := range sides {
			if hash := hashes[l.micro]; hash != "" && t.Hash != hash {
				return 0, fmt.Errorf("runs ended with params_sha256 %s and %s", hash, t.Hash)
			}
			hashes[l.micro] = t.Hash
			sum += rate(t.Ms)
		}
		return sum, nil
	}
	pair := layout{1, 2, 1, 2} // at the fastest micro-batch
	if ddp != nil {
		fastest, best := 0.0, 0.0
		for _, m := range []int{2, 4, 8, *batch / 2} {
			r, err := theirs(m)
			if err != nil {
				return err
			}
			own, err := ours(layout{1, 2, 1, m})
			if err != nil {
				return err
			}
			fmt.Printf("  with micro-batches of %d: %.0f tokens/s, 2 workers %.0f\n", m, r, own)
			if r > fastest {
				micro, fastest = m, r
			}
			if own > best {
				pair.micro, best = m, own
			}
		}
	}

	layouts := []layout{{1, 1, 1, 2}, {1, 2, 1, 2}, {1, 4, 1, 2}, {1, 8, 1, 2}, {1, 1, 2, 2}, {2, 1, 1, 2}, {8, 1, 1, 2}}
	if !slices.Contains(layouts, pair) {
		layouts = append(layouts, pair)
	}
	took := make(map[layout][]float64)
	var peer []float64
	fmt.Println("\ntokens/s")
	for turn := range *turns {
		for i := range layouts {
			l := layouts[(turn+i)%len(layouts)]
			r, err := ours(l)
			if err != nil {
				return err
			}
			took[l] = append(took[l], r)
			fmt.Printf("  turn %d  %d x %d workers of %d threads, micro-batches of %2d  %8.0f\n", turn, l.runs, l.workers, l.threads, l.micro, r)
		}
		if ddp != nil {
			r, err := theirs(micro)
			if err != nil {
				return err
			}
			peer = append(peer, r)
			fmt.Printf("  turn %d  DistributedDataParallel, 2 ranks  %8.0f\n", turn, r)
		}
	}
	one, two, apart, crowd := took[layouts[0]], took[layouts[1]], took[layouts[5]], took[layouts[6]]
	twice := make([]float64, len(one))
	for i, x := range one {
		twice[i] = 2 * x
	}
	for _, c := range []struct {
		layout
		theirs string
		rates  []float64
		goal   float64
	}{
		{layouts[1], "twice 1 worker", twice, 0.97}, {layouts[5], "twice 1 worker", twice, 0}, {layouts[1], "2 runs of 1 worker at once", apart, 0},
		{layouts[4], "2 workers, 1 thread", two, 0.95}, {layouts[2], "2 workers, 1 thread", two, 0},
		{layouts[3], "2 workers, 1 thread", two, 0.95}, {layouts[6], "2 runs of 1 worker at once", apart, 0}, {layouts[3], "8 runs of 1 worker at once", crowd, 0}, {pair, "DistributedDataParallel, 2 ranks", peer, 1.3},
	} {
		row := report.Row{
			Comparison: "scale", Case: fmt.Sprintf("GPT of %d layers, width %d, batch %d x 128", *layers, *width, *batch), Workers: c.workers, Threads: c.threads,
			Ours: "Soliton", Theirs: c.theirs, Unit: "tokens/s", Kind: report.Rate, Goal: c.goal,
		}
		switch {
		case c.runs > 1:
			row.Ours = fmt.Sprintf("%d runs of 1 worker at once", c.runs)
		case c.layout == pair && c.goal == 1.3:
			row.Ours, row.Theirs = "Soliton, its best micro-batch", c.theirs+", its best micro-batch"
		}
		for i, r := range c.rates {
			row.Add(took[c.layout][i], r)
		}
		rec.Add(row)
		if len(c.rates) > 0 {
			fmt.Printf("  %d x %d workers of %d threads, micro-batches of %d, by %s: median %.3f\n", c.runs, c.workers, c.threads, c.micro, c.theirs, row.OfRatio().Median)
		}
	}
	return nil
}
