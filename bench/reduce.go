package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// reduce tells what the order of the gradient tree costs, in two parts. The
// first compares whole training steps with exact and with fast reduction, in
// worker processes of the default GPT; the second the engine's fast reduction
// with a bare ring reduce-scatter of the same shapes.
func reduce(args []string) error {
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
	b := trainingBench{dir: dir, steps: *steps}
	if err := b.build(); err != nil {
		return err
	}
	// The runs come first: a process begins with the peak of the one that starts
	// it, and this one is still small.
	//
	// Eight micro-batches a worker, aligned to the tree, and sixteen, unaligned.
	for _, c := range []struct{ workers, global int }{{4, 32}, {3, 48}} {
		if err := b.compare(c.workers, c.global, *pairs, *model); err != nil {
			return err
		}
	}
	for _, workers := range []int{2, 4} {
		if err := bandwidth(workers, *rounds); err != nil {
			return err
		}
	}
	return nil
}

// trainingBench runs the launcher.
type trainingBench struct {
	dir, root string
	steps     int
	runs      int
}

func (b *trainingBench) build() error {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return fmt.Errorf("go env GOMOD: %w", err)
	}
	b.root = filepath.Dir(strings.TrimSpace(string(out)))
	cmd := exec.Command("go", "build", "-o", b.dir+"/", "./launcher", "./examples/gpt")
	cmd.Dir = b.root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
}

// training is what one run took.
type training struct {
	ms    []float64 // of the steps that count
	bytes int64     // sent by all workers in the run, evaluation and collecting the model included
	peak  int64     // resident bytes of the largest worker
	cpu   float64   // seconds of processor time of the launcher and its workers
	hash  string
}

// run makes a run, with more variables in its environment.
func (b *trainingBench) run(workers int, flags, program []string, env ...string) (training, error) {
	b.runs++
	dir := filepath.Join(b.dir, fmt.Sprintf("run-%d", b.runs))
	args := append([]string{"run", "--plain", "--workers", fmt.Sprint(workers), "--threads", "1", "--run-dir", dir}, flags...)
	args = append(args, filepath.Join(b.dir, "gpt"), "--data", filepath.Join(b.root, "internal/testkit/exact/testdata/corpus"), "--steps", fmt.Sprint(b.steps))
	args = append(args, program...)
	cmd := exec.Command(filepath.Join(b.dir, "launcher"), args...)
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return training{}, fmt.Errorf("launcher %v: %w\n%s", args, err, out)
	}
	// What wait tells of the launcher covers the workers that it waited for.
	used := cmd.ProcessState.SysUsage().(*syscall.Rusage)
	t := training{peak: used.Maxrss << 10, cpu: (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()}
	raw, err := os.ReadFile(filepath.Join(dir, "summary.json"))
	if err != nil {
		return t, err
	}
	var sum rundir.Summary
	if err := json.Unmarshal(raw, &sum); err != nil {
		return t, err
	}
	for _, w := range sum.Workers {
		t.bytes += w.BytesSent
	}
	t.hash = sum.ParamsSHA256
	lines, err := os.Open(filepath.Join(dir, "metrics.jsonl"))
	if err != nil {
		return t, err
	}
	defer lines.Close()
	for s := bufio.NewScanner(lines); s.Scan(); {
		var m rundir.Metrics
		if err := json.Unmarshal(s.Bytes(), &m); err != nil {
			return t, err
		}
		if m.Step > 2 {
			t.ms = append(t.ms, m.MS)
		}
	}
	return t, os.RemoveAll(dir)
}

// compare runs exact and fast in turns; which of them is first changes with
// every pair.
func (b *trainingBench) compare(workers, global, pairs int, model string) error {
	fmt.Printf("\n%d workers x %d micro-batches of 1, GPT %s: ms of each step\n", workers, global/workers, model)
	program := append([]string{"--global-batch", fmt.Sprint(global), "--micro-batch", "1"}, strings.Fields(model)...)
	var ratios []float64
	var exact, fast training
	hash := ""
	for i := range pairs {
		for turn := range 2 {
			var err error
			if (turn == 0) == (i%2 == 0) {
				exact, err = b.run(workers, []string{"--reduction", "exact"}, program)
			} else {
				fast, err = b.run(workers, []string{"--reduction", "fast"}, program)
			}
			if err != nil {
				return err
			}
		}
		if hash != "" && exact.hash != hash {
			return fmt.Errorf("exact runs ended with params_sha256 %s and %s", hash, exact.hash)
		}
		hash = exact.hash
		ratios = append(ratios, median(exact.ms)/median(fast.ms))
		fmt.Printf("  pair %d  exact %s  fast %s\n", i, list(exact.ms), list(fast.ms))
		fmt.Printf("          exact %.1f MB sent in the run, peak %.1f MB;  fast %.1f MB, peak %.1f MB\n",
			float64(exact.bytes)/1e6, float64(exact.peak)/1e6, float64(fast.bytes)/1e6, float64(fast.peak)/1e6)
	}
	fmt.Printf("  time of an exact step by that of a fast one, median over pairs: %.3f of %s\n", median(ratios), fractions(ratios))
	return nil
}

func fractions(x []float64) string {
	s := ""
	for _, v := range x {
		s += fmt.Sprintf(" %.3f", v)
	}
	return s
}
