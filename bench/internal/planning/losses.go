package planning

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/simulate"
)

// Losses lets workers of emulated devices die one after the other, and one become slow, and
// holds the throughput after each change against the ideal for what is left and against the best
// plan there is.
func Losses(args []string) error {
	f := flag.NewFlagSet("losses", flag.ExitOnError)
	big := f.Float64("layer-ms", 5, "milliseconds of a layer's forward pass, with 32 workers")
	small := f.Float64("small-layer-ms", 3, "the same with 8 workers")
	steps := f.Int("steps", 6, "steps between two losses")
	only := f.String("only", "", "8 or 32: only the runs with so many workers")
	_ = f.Parse(args)

	t, err := lab.NewTiming()
	if err != nil {
		return err
	}
	defer os.RemoveAll(t.Dir)
	const quiet = 5 // steps before the first change
	eight := disturbed{workers: 8, stages: 2, layers: 16, micros: 32, layerMS: *small, quiet: quiet, every: 20}
	many := disturbed{workers: 32, stages: 4, layers: 32, micros: 128, layerMS: *big, quiet: quiet, every: *steps}
	for i := range 8 { // two of each stage, none next to another
		many.lose = append(many.lose, 8*(i%4)+1+4*(i/4))
	}
	var runs []disturbed
	if *only != "32" {
		for _, r := range []disturbed{{reshape: "full", lose: []int{2}}, {reshape: "full", slow: 5, lose: nil}} {
			e := eight
			e.reshape, e.lose, e.slow = r.reshape, r.lose, r.slow
			runs = append(runs, e)
		}
	}
	if *only != "8" {
		for _, reshape := range []string{"dataflow", "full"} {
			m := many
			m.reshape = reshape
			runs = append(runs, m)
		}
	}
	var clock lab.Deadline
	for _, r := range runs {
		clock.Left += r.takes()
	}
	fmt.Printf(`%s, %d cores. Emulated devices.
of first: throughput, over that before the first change
of ideal: the same, over the share of workers or speed that is left
of best:  throughput, over that of the best plan that the simulator finds for what is left
of bound: throughput, over a bound of all plans and all orders of tasks for what is left
`, runtime.Version(), runtime.NumCPU())
	for _, r := range runs {
		clock.Begin(r.String(), r.takes())
		if err := r.run(t); err != nil {
			return err
		}
	}
	return nil
}

// disturbed is a run with a fault every few steps.
type disturbed struct {
	workers, stages, layers, micros int
	layerMS                         float64
	reshape                         string
	quiet, every                    int
	lose                            []int // workers, one after the other
	slow                            int   // instead: a worker that becomes half as fast
}

func (r *disturbed) String() string {
	what := fmt.Sprintf("%d workers in %d stages, %d layers, %d micro-batches, ", r.workers, r.stages, r.layers, r.micros)
	if r.slow > 0 {
		return what + fmt.Sprintf("worker %d at half speed", r.slow)
	}
	what += fmt.Sprintf("%d lost one after the other, ", len(r.lose))
	if r.reshape == "dataflow" {
		return what + "dataflow alone"
	}
	return what + "dataflow and graph"
}

// changes is the number of changes.
func (r *disturbed) changes() int { return max(len(r.lose), 1) }

// total is the number of steps.
func (r *disturbed) total() int { return r.quiet + r.changes()*r.every }

// takes is about how long the run takes.
func (r *disturbed) takes() time.Duration {
	n := 0
	for i := range r.changes() + 1 {
		steps := r.every
		if i == 0 {
			steps = r.quiet
		}
		lost := 0
		if r.slow == 0 {
			lost = i
		}
		n += steps * (r.layers*r.micros/(r.workers-lost) + r.layers)
	}
	return lab.Milliseconds(3*r.layerMS*float64(n)) + 4*time.Second
}

func (r *disturbed) run(t *lab.Timing) error {
	var chaos []string
	for i, w := range r.lose {
		chaos = append(chaos, fmt.Sprintf("kill:%d@%d/backward", w, r.quiet+1+i*r.every))
	}
	if r.slow > 0 {
		chaos = append(chaos, fmt.Sprintf("slow:%d@%d:0.5", r.slow, r.quiet+1))
	}
	got, err := t.Emulated([]string{"--reshape", r.reshape, "--chaos", strings.Join(chaos, ",")}, r.workers, r.stages, r.layers, r.micros, r.total(), r.layerMS)
	if err != nil {
		return err
	}
	if got.Sum.WorkersLost != len(r.lose) || got.Sum.Rollbacks > 0 {
		return fmt.Errorf("%v: %d workers were lost and the run went back %d times: something else disturbs the machine", r, got.Sum.WorkersLost, got.Sum.Rollbacks)
	}
	measured := layerTime(&got)
	if measured.Forward == 0 {
		return errors.New("the run was too short to measure layers: give more --steps")
	}
	// A device takes its time exactly, in the mean: what one task is late, the next is shorter by.
	forward := lab.Milliseconds(r.layerMS)
	layer := plan.Layer{Tensors: []int{1}, Forward: forward, Backward: 2 * forward}
	fmt.Printf("\n%v, --layer-ms %v; %s\n", r, r.layerMS, lab.Busy(got.Cores))
	fmt.Printf("by its workers, a layer took %v forward and %v backward; the bits are %.16s\n", measured.Forward, measured.Backward, got.Sum.ParamsSHA256)
	fmt.Printf("%7s %6s %9s %8s %9s %9s %9s  %s\n", "workers", "steps", "ms", "of first", "of ideal", "of best", "of bound", "stages: layers x workers")
	var baseline float64
	for i := range r.changes() + 1 {
		first, last := 1, r.quiet
		if i > 0 {
			first, last = r.quiet+1+(i-1)*r.every, r.quiet+i*r.every
		}
		ms, number := got.Settled(first, last, 1)
		if len(ms) == 0 {
			fmt.Printf("%7s no step under one plan before the next change\n", "")
			continue
		}
		p := got.Plans[number]
		took := lab.Median(ms)
		if i == 0 {
			baseline = took
		}
		left, name := float64(r.workers-i), fmt.Sprint(r.workers-i)
		if r.slow > 0 && i > 0 {
			left, name = float64(r.workers)-0.5, "1 slow"
		}
		fmt.Printf("%7s %6d %9.1f %8.3f %9.3f", name, len(ms), took, baseline/took, baseline/took*float64(r.workers)/left)
		if r.slow > 0 && i > 0 { // the others are for equal workers
			fmt.Printf(" %9s %9s  %s\n", "", "", shapeOf(p))
			continue
		}
		step, bound, err := r.best(p, layer)
		if err != nil {
			return err
		}
		fmt.Printf(" %9.3f %9.3f  %s\n", step.Seconds()*1e3/took, bound.Seconds()*1e3/took, shapeOf(p))
	}
	return nil
}

// best returns the shortest step with the workers that are left: that of the plan by the simulator, or,
// where the run may change the stages, of a better plan; and the bound of all plans and of all
// orders of tasks. With the dataflow alone, both are of the stages of the run. No stage gets more than twice the mean of the layers,
// which is what the planner does.
func (r *disturbed) best(p *plan.Plan, layer plan.Layer) (step, bound time.Duration, err error) {
	prediction, err := simulate.Predict(p, plan.Profile{Layers: slices.Repeat([]plan.Layer{layer}, r.layers)})
	if err != nil {
		return 0, 0, err
	}
	step = prediction.Step
	n := 0
	if r.reshape == "full" {
		most := 2 * r.layers / r.stages
		n = lab.LeastOfAll(r.layers, len(p.Workers), r.stages, r.micros, most)
		other, err := lab.BestOf(r.layers, len(p.Workers), r.stages, r.micros, most, layer)
		if err != nil {
			return 0, 0, err
		}
		step = min(step, other)
	} else {
		var layers, workers []int
		for _, s := range p.Stages {
			layers, workers = append(layers, s.Hi-s.Lo), append(workers, len(s.Workers))
		}
		n = lab.Least(layers, workers, r.micros)
	}
	return step, time.Duration(n) * (layer.Forward + layer.Backward), nil
}

// layerTime returns the medians of what the workers measured of a layer.
func layerTime(r *lab.Timed) plan.Layer {
	var forward, backward []float64
	for _, w := range r.Sum.Workers {
		for _, l := range w.Times {
			forward, backward = append(forward, l.ForwardMS), append(backward, l.BackwardMS)
		}
	}
	if len(forward) == 0 {
		return plan.Layer{}
	}
	return plan.Layer{Tensors: []int{1}, Forward: lab.Milliseconds(lab.Median(forward)), Backward: lab.Milliseconds(lab.Median(backward))}
}

// shapeOf tells layers and workers of the stages.
func shapeOf(p *plan.Plan) string {
	var parts []string
	for _, s := range p.Stages {
		parts = append(parts, fmt.Sprintf("%dx%d", s.Hi-s.Lo, len(s.Workers)))
	}
	return strings.Join(parts, " ")
}
