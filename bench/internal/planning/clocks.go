// Package planning measures plans: throughput after losses, the cost model, layers that move, and clocks.
package planning

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/internal/dvfs"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/simulate"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Clocks lets 8 workers of emulated devices in 2 stages lose one, and holds what the governor makes of the plan
// that is left against the best clocks there are. Dataflow alone is rebalanced: with the graph dimension, too, next to
// nothing is left for clocks in this case (--reshape full shows it).
func Clocks(args []string) error {
	f := flag.NewFlagSet("clocks", flag.ExitOnError)
	ms := f.Float64("layer-ms", 2, "forward time of a layer")
	steps := f.Int("steps", 64, "steps of each run")
	reshape := f.String("reshape", "dataflow", "as of launcher run")
	_ = f.Parse(args)
	dir, err := os.MkdirTemp("", "soliton-clocks")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if out, err := exec.Command("go", "build", "-o", dir+"/", "./launcher", "./examples/emulated").CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	const layers = 16
	train := func(mode string) (o lab.Outcome, err error) {
		o.Dir = filepath.Join(dir, "run-"+mode)
		out, err := exec.Command(filepath.Join(dir, "launcher"), "run", "--plain", "--workers", "8", "--stages", "2", "--reshape", *reshape,
			"--clocks", mode, "--chaos", "kill:2@2", "--run-dir", o.Dir, filepath.Join(dir, "emulated"),
			"--layers", strconv.Itoa(layers), "--layer-ms", fmt.Sprint(*ms), "--global-batch", "32", "--steps", strconv.Itoa(*steps)).CombinedOutput()
		if err != nil {
			return o, fmt.Errorf("%w\n%s", err, out)
		}
		return o, o.Read()
	}
	off, err := train("off")
	if err != nil {
		return err
	}
	on, err := train("emulated")
	if err != nil {
		return err
	}
	fmt.Printf("emulated devices: 8 workers in 2 stages, %d layers of %v ms, 32 micro-batches, worker 2 killed in step 2, reshape %s\n", layers, *ms, *reshape)
	fmt.Printf("bits with clocks and without are the same: %v\n", on.Sum.ParamsSHA256 == off.Sum.ParamsSHA256 && slices.Equal(on.Metrics, off.Metrics))

	// The clocks of the newest plan.
	newest := on.Plans[len(on.Plans)-1]
	p, err := plan.Parse(newest.Plan)
	if err != nil {
		return err
	}
	set := make(map[int]int) // MHz of each worker
	var first, last, end *rundir.Event
	for i, e := range on.Events {
		if e.Kind != "clocks" || e.Plan != uint64(p.Version.N) {
			continue
		}
		fmt.Printf("  after step %d: %s\n", e.AfterStep, e.Reason)
		if end = &on.Events[i]; e.AfterStep == *steps {
			continue // put back
		}
		if last = &on.Events[i]; first == nil {
			first = last
		}
		for _, c := range e.Clocks {
			set[c.Workers[0]] = c.MHz
		}
	}
	if last == nil || end == last {
		return errors.New("no clock was set under the last plan: give more --steps")
	}
	times, err := lab.Lines[rundir.Metrics](on.Dir, "metrics.jsonl")
	if err != nil {
		return err
	}
	between := func(from, to int) (all []float64, onePlan bool) {
		onePlan = true
		for _, m := range times {
			if m.Step > from && m.Step <= to {
				all, onePlan = append(all, m.MS), onePlan && m.Plan == uint64(p.Version.N)
			}
		}
		return all, onePlan
	}
	before, same := between(first.SinceStep, first.AfterStep)
	after, _ := between(last.AfterStep, *steps)
	fmt.Printf("measured step: %.1f ms (median of %d) -> %.1f ms (of %d), %+.2f %%; the fastest quarter %.1f -> %.1f ms, %+.2f %%\n", lab.Quantile(before, 0.5), len(before), lab.Quantile(after, 0.5), len(after),
		100*(lab.Quantile(after, 0.5)/lab.Quantile(before, 0.5)-1), lab.Quantile(before, 0.25), lab.Quantile(after, 0.25), 100*(lab.Quantile(after, 0.25)/lab.Quantile(before, 0.25)-1))
	if same {
		was, is := first.Joules/float64(first.AfterStep-first.SinceStep), (end.Joules-last.Joules)/float64(*steps-last.AfterStep)
		fmt.Printf("emulated energy of a step: %.3f -> %.3f, %+.1f %%\n", was, is, 100*(is/was-1))
	}
	return exhaust(&p, *ms, layers, set)
}

// exhaust holds clocks against all others, in the simulator.
func exhaust(p *plan.Plan, ms float64, layers int, set map[int]int) error {
	prof := plan.Profile{Speed: make(map[id.WorkerID]float64)}
	forward := time.Duration(ms * float64(time.Millisecond))
	for range layers {
		prof.Layers = append(prof.Layers, plan.Layer{Tensors: []int{1}, Forward: forward, Backward: 2 * forward})
	}
	const low, high, tolerance = 700, 1400, 0.005
	grid, power := dvfs.Grid(low, high, 50), dvfs.DefaultPower(high)
	busy := make([]float64, len(p.Workers))
	for s, st := range p.Stages {
		for _, w := range p.Route[s] {
			i := slices.IndexFunc(p.Workers, func(x plan.Worker) bool { return x.ID == w })
			busy[i] += float64(st.Hi-st.Lo) * 3 * forward.Seconds()
		}
	}
	var failed error
	step := func(mhz []int) float64 {
		for i, w := range p.Workers {
			prof.Speed[w.ID] = float64(mhz[i]) / high
		}
		t, err := simulate.Typical(p, prof)
		failed = errors.Join(failed, err)
		return t.Seconds()
	}
	mhz := slices.Repeat([]int{high}, len(p.Workers))
	fastest := step(mhz)
	draws := func(i, f int) float64 {
		b := busy[i] * high / float64(f)
		return power.Busy(f)*b + power.Idle()*(fastest-b)
	}
	limit := fastest * (1 + tolerance)
	full, chosen := 0.0, 0.0
	ours := slices.Clone(mhz)
	options, least := make([][]int, len(mhz)), make([]float64, len(mhz)+1)
	for i := len(mhz) - 1; i >= 0; i-- {
		if f, ok := set[int(p.Workers[i].ID)]; ok {
			ours[i] = f
		}
		full, chosen = full+draws(i, high), chosen+draws(i, ours[i])
		for _, f := range grid {
			if busy[i]*high/float64(f) <= limit {
				options[i] = append(options[i], f)
			}
		}
		slices.SortFunc(options[i], func(a, b int) int { return cmp.Compare(draws(i, a), draws(i, b)) })
		least[i] = least[i+1] + draws(i, options[i][0])
	}
	took := step(ours)
	// All that draw less than the governor's are tried, but where time runs out.
	best, tried, whole := math.Inf(1), 0, true
	if took <= limit {
		best = chosen
	}
	end := time.Now().Add(time.Minute)
	var walk func(i int, sum float64)
	walk = func(i int, sum float64) {
		for _, f := range options[i] {
			next := sum + draws(i, f)
			if next+least[i+1] >= best*(1-1e-9) {
				return
			}
			if !time.Now().Before(end) {
				whole = false
				return
			}
			if mhz[i] = f; i+1 < len(mhz) {
				walk(i+1, next)
			} else if tried++; step(mhz) <= limit {
				best = next
			}
		}
		mhz[i] = high
	}
	walk(0, 0)
	if failed != nil {
		return failed
	}
	bound := ""
	if !whole {
		bound = " (not all: a minute was over)"
	}
	fmt.Printf("simulated: step %+.2f %%, energy %+.2f %% of full clocks; the best of all settings%s, %d simulated, %+.2f %%; fraction of its saving %.3f\n",
		100*(took/fastest-1), 100*(chosen/full-1), bound, tried, 100*(best/full-1), (full-chosen)/(full-best))
	return nil
}
