package recovery

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/internal/compute/kernel"
)

// Versions compares this checkout with an older commit, turn by turn: step times of an undisturbed run (the shape of protect), the
// recoveries of a run with kills (the shape of survive), and the planner's benchmark. Both sides run the same job, and must end
// with the same parameters.
func Versions(args []string) error {
	f := flag.NewFlagSet("versions", flag.ExitOnError)
	base := f.String("base", "", "commit to compare with")
	pairs := f.Int("pairs", 10, "pairs of each kind")
	steps := f.Int("steps", 12, "steps of an undisturbed run, of which the first two warm up")
	planBase := f.String("plan-base", "./internal/plan", "package of the planner's benchmark in the base")
	planNew := f.String("plan", "./internal/plan/planner", "the same in this checkout")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *base == "" || *pairs < 1 || *steps < 3 {
		return fmt.Errorf("-base %q, -pairs %d, -steps %d: name a commit, and give at least 1 and 3", *base, *pairs, *steps)
	}
	now, err := lab.NewLab()
	if err != nil {
		return err
	}
	defer os.RemoveAll(now.Dir)
	old := &lab.Lab{Root: filepath.Join(now.Dir, "base"), Dir: filepath.Join(now.Dir, "base-bin")}
	if err := inFolder(now.Root, "git", "worktree", "add", "--detach", old.Root, *base); err != nil {
		return err
	}
	defer func() { _ = inFolder(now.Root, "git", "worktree", "remove", "--force", old.Root) }()
	if err := inFolder(old.Root, "go", "build", "-o", old.Dir+"/", "./launcher", "./examples/gpt"); err != nil {
		return err
	}
	fmt.Printf("%s, kernel path %v, %d cores; base %s; GPT of 4 layers, width 256, 8 heads, context 128\n",
		runtime.Version(), kernel.Active(), runtime.NumCPU(), *base)
	sides := [2]*lab.Lab{old, now}
	names := [2]string{"base", "now"}
	corpus := filepath.Join(now.Root, "internal/testkit/exact/testdata/corpus")
	for _, c := range []struct {
		what, flags, program string
		figure               func(o *lab.Outcome) ([]float64, error)
	}{
		{"ms of a step, 4 workers, undisturbed", "--workers 4 --threads 1", fmt.Sprintf("--steps %d", *steps), func(o *lab.Outcome) ([]float64, error) {
			return o.StepMS[2:], nil
		}},
		{"total_ms of a recovery, 8 workers in 2 stages, kills in steps 3, 5 and 7", "--workers 8 --stages 2 --threads 1 --chaos kill:1@3+90,kill:6@5/backward,kill:3@7+200",
			"--global-batch 32 --micro-batch 1 --steps 9", func(o *lab.Outcome) (total []float64, err error) {
				for _, r := range o.Sum.Recoveries {
					total = append(total, r.TotalMS)
				}
				if len(total) == 0 {
					err = fmt.Errorf("no recovery in %s", o.Dir)
				}
				return total, err
			}},
	} {
		fmt.Printf("\n%s\n", c.what)
		var all [2][]float64
		var medians []float64
		hash := ""
		for pair := range *pairs {
			var turn [2]float64
			for i := range 2 {
				side := (i + pair) % 2
				o, err := sides[side].Run(lab.Trial{Corpus: corpus, Flags: strings.Fields(c.flags), Program: strings.Fields(c.program), Limit: 10 * time.Minute})
				if err != nil {
					return err
				}
				if hash == "" {
					hash = o.Sum.ParamsSHA256
				}
				if o.Hung || o.Status != 0 || o.Sum.ParamsSHA256 != hash {
					return fmt.Errorf("%s: exit status %d, params_sha256 %s, want %s\n%s", names[side], o.Status, o.Sum.ParamsSHA256, hash, o.Output)
				}
				x, err := c.figure(&o)
				if err != nil {
					return err
				}
				fmt.Printf("  pair %2d  %-4s %s\n", pair, names[side], lab.List(x))
				all[side] = append(all[side], x...)
				turn[side] = lab.Median(x)
				if err := os.RemoveAll(o.Dir); err != nil {
					return err
				}
			}
			medians = append(medians, turn[1]/turn[0])
		}
		compareSides(all, medians)
	}

	fmt.Println("\nplanner, ms of a plan (go test -bench Loss)")
	var all [2]map[string][]float64
	for pair := range *pairs {
		for i := range 2 {
			side := (i + pair) % 2
			x, err := benchmarkPlanner(sides[side].Root, [2]string{*planBase, *planNew}[side])
			if err != nil {
				return err
			}
			if all[side] == nil {
				all[side] = make(map[string][]float64)
			}
			for name, ms := range x {
				all[side][name] = append(all[side][name], ms)
			}
		}
	}
	for name, was := range all[0] {
		is := all[1][name]
		if len(is) != len(was) {
			return fmt.Errorf("benchmark %s: %d and %d results", name, len(was), len(is))
		}
		fmt.Printf("  %s\n    base %s\n    now  %s\n", name, lab.List(was), lab.List(is))
		ratios := make([]float64, len(was))
		for i := range was {
			ratios[i] = is[i] / was[i]
		}
		compareSides([2][]float64{was, is}, ratios)
	}
	return nil
}

// compareSides prints medians, 95th percentiles and the bootstrap interval of the ratio of the latter.
func compareSides(all [2][]float64, pairs []float64) {
	fmt.Printf("  median: base %.2f, now %.2f, ratio of all %.3f, median over pairs %.3f of %s\n",
		lab.Median(all[0]), lab.Median(all[1]), lab.Median(all[1])/lab.Median(all[0]), lab.Median(pairs), lab.Fractions(pairs))
	fmt.Printf("  p95: base %.2f, now %.2f, ratio %.3f", lab.Quantile(all[0], 0.95), lab.Quantile(all[1], 0.95), lab.Quantile(all[1], 0.95)/lab.Quantile(all[0], 0.95))
	r := rand.New(rand.NewPCG(1, 1))
	draw := func(x []float64) float64 {
		y := make([]float64, len(x))
		for i := range y {
			y[i] = x[r.IntN(len(x))]
		}
		return lab.Quantile(y, 0.95)
	}
	ratios := make([]float64, 2000)
	for i := range ratios {
		ratios[i] = draw(all[1]) / draw(all[0])
	}
	fmt.Printf(", 95%% bootstrap interval of the ratio %.3f to %.3f\n", lab.Quantile(ratios, 0.025), lab.Quantile(ratios, 0.975))
}

var benchmarkLine = regexp.MustCompile(`(?m)^(Benchmark\S*Loss\S*)\s+\d+\s+([0-9.]+) ns/op`)

// benchmarkPlanner runs the planner's benchmark in a checkout.
func benchmarkPlanner(root, pkg string) (map[string]float64, error) {
	cmd := exec.Command("go", "test", "-run", "^$", "-bench", "Loss", "-benchtime", "20x", pkg)
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%v in %s: %w\n%s", cmd.Args, root, err, out)
	}
	ms := make(map[string]float64)
	for _, m := range benchmarkLine.FindAllStringSubmatch(string(out), -1) {
		ns, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			return nil, err
		}
		ms[m[1]] = ns / 1e6
	}
	if len(ms) == 0 {
		return nil, fmt.Errorf("%v in %s printed no benchmark:\n%s", cmd.Args, root, out)
	}
	return ms, nil
}

// inFolder runs a command.
func inFolder(dir, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return nil
}
