package main

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/soliton-train/soliton/elastic/plan"
)

// losses lets workers of emulated devices die one after the other, and one become slow, and
// holds the throughput after each change against the ideal for what is left and against the best
// plan there is.
func losses(args []string) error {
	f := flag.NewFlagSet("losses", flag.ExitOnError)
	big := f.Float64("layer-ms", 5, "milliseconds of a layer's forward pass, with 32 workers")
	small := f.Float64("small-layer-ms", 3, "the same with 8 workers")
	steps := f.Int("steps", 7, "steps between two losses")
	only := f.String("only", "", "8 or 32: only the runs with so many workers")
	_ = f.Parse(args)

	t, err := newTiming()
	if err != nil {
		return err
	}
	defer os.RemoveAll(t.dir)
	const quiet = 6 // steps before the first change
	eight := struck{workers: 8, stages: 2, layers: 16, micros: 32, layerMS: *small, quiet: quiet, every: 20}
	many := struck{workers: 32, stages: 4, layers: 32, micros: 128, layerMS: *big, quiet: quiet, every: *steps}
	for i := range 8 { // two of each stage, none next to another
		many.lose = append(many.lose, 8*(i%4)+1+4*(i/4))
	}
	var runs []struck
	if *only != "32" {
		for _, r := range []struck{{reshape: "full", lose: []int{2}}, {reshape: "full", slow: 5, lose: nil}} {
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
	var clock deadline
	for _, r := range runs {
		clock.left += r.takes()
	}
	fmt.Printf("%s, %d cores. Emulated devices. A worker's share of time is that of the best integer plan's\n"+
		"bound, with the layers' times as measured in the run.\n", runtime.Version(), runtime.NumCPU())
	for _, r := range runs {
		clock.begin(r.String(), r.takes())
		if err := r.run(t); err != nil {
			return err
		}
	}
	return nil
}

// struck is a run to which something happens every few steps.
type struck struct {
	workers, stages, layers, micros int
	layerMS                         float64
	reshape                         string
	quiet, every                    int
	lose                            []int // workers, one after the other
	slow                            int   // instead: a worker that becomes half as fast
}

func (r *struck) String() string {
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
func (r *struck) changes() int { return max(len(r.lose), 1) }

// total is the number of steps.
func (r *struck) total() int { return r.quiet + r.changes()*r.every }

// takes is about how long the run takes.
func (r *struck) takes() time.Duration {
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
	return milliseconds(3*r.layerMS*float64(n)) + 4*time.Second
}

func (r *struck) run(t *timing) error {
	var harm []string
	for i, w := range r.lose {
		harm = append(harm, fmt.Sprintf("kill:%d@%d/backward", w, r.quiet+1+i*r.every))
	}
	if r.slow > 0 {
		harm = append(harm, fmt.Sprintf("slow:%d@%d:0.5", r.slow, r.quiet+1))
	}
	got, err := t.emulated([]string{"--reshape", r.reshape, "--chaos", strings.Join(harm, ",")}, r.workers, r.stages, r.layers, r.micros, r.total(), r.layerMS)
	if err != nil {
		return err
	}
	unit := layerTime(&got)
	fmt.Printf("\n%v, --layer-ms %v; %s\n", r, r.layerMS, busy(got.cores))
	fmt.Printf("a layer's passes took %.2f ms\n", unit)
	fmt.Printf("%7s %6s %9s %8s %9s %9s  %s\n", "workers", "steps", "ms", "of first", "of ideal", "of best", "stages: layers x workers")
	var baseline float64
	for i := range r.changes() + 1 {
		first, last := 1, r.quiet
		if i > 0 {
			first, last = r.quiet+1+(i-1)*r.every, r.quiet+i*r.every
		}
		ms, number := got.settled(first, last, 1)
		if len(ms) == 0 {
			fmt.Printf("%7s no step under one plan before the next change\n", "")
			continue
		}
		p := got.plans[number]
		took := median(ms)
		if i == 0 {
			baseline = took
		}
		left, name := float64(r.workers-i), fmt.Sprint(r.workers-i)
		if r.slow > 0 && i > 0 {
			left, name = float64(r.workers)-0.5, "1 slow"
		}
		fmt.Printf("%7s %6d %9.1f %8.3f %9.3f %9s  %s\n", name, len(ms), took, baseline/took, baseline/took*float64(r.workers)/left,
			r.ofBest(p, unit, took, i), shapeOf(p))
	}
	return nil
}

// ofBest is the time of the best plan that there can be, over that of a step. With the dataflow
// alone it has the stages of the run.
func (r *struck) ofBest(p *plan.Plan, unit, took float64, change int) string {
	if r.slow > 0 && change > 0 {
		return "" // the bound is for equal workers
	}
	n := 0
	if r.reshape == "full" {
		n = leastOfAll(r.layers, len(p.Workers), r.stages, r.micros)
	} else {
		var layers, workers []int
		for _, s := range p.Stages {
			layers, workers = append(layers, s.Hi-s.Lo), append(workers, len(s.Workers))
		}
		n = least(layers, workers, r.micros)
	}
	return fmt.Sprintf("%.3f", float64(n)*unit/took)
}

// layerTime is the median of what the workers measured of a layer, in milliseconds.
func layerTime(r *timed) float64 {
	var all []float64
	for _, w := range r.sum.Workers {
		for _, l := range w.Times {
			all = append(all, l.ForwardMS+l.BackwardMS)
		}
	}
	return median(all)
}

// shapeOf tells layers and workers of the stages.
func shapeOf(p *plan.Plan) string {
	var parts []string
	for _, s := range p.Stages {
		parts = append(parts, fmt.Sprintf("%dx%d", s.Hi-s.Lo, len(s.Workers)))
	}
	return strings.Join(parts, " ")
}
