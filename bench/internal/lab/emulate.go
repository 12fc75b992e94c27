// Package lab runs the launcher for the benchmarks, and reads what its runs leave.
package lab

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/soliton-train/soliton/internal/plan/simulate"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Timing runs programs to see how long their steps take.
type Timing struct {
	Dir  string // of the binaries and the runs
	runs int
}

// NewTiming builds the programs.
func NewTiming() (*Timing, error) {
	dir, err := os.MkdirTemp("", "soliton-bench")
	if err != nil {
		return nil, err
	}
	if out, err := exec.Command("go", "build", "-o", dir+"/", "./launcher", "./examples/gpt", "./examples/emulated").CombinedOutput(); err != nil {
		return nil, errors.Join(fmt.Errorf("go build: %w\n%s", err, out), os.RemoveAll(dir))
	}
	return &Timing{Dir: dir}, nil
}

// Timed is what a run took.
type Timed struct {
	Metrics []rundir.Metrics
	Plans   map[uint64]*plan.Plan // by number
	Newest  *plan.Plan
	events  []rundir.Event
	Sum     rundir.Summary
	Spans   []trace.Span
	Cores   float64 // that all of its processes kept busy, in the mean
}

// Run trains with the program, which is gpt or emulated.
func (t *Timing) Run(flags []string, program string, args ...string) (r Timed, err error) {
	t.runs++
	dir := filepath.Join(t.Dir, fmt.Sprintf("run-%d", t.runs))
	all := append([]string{"run", "--plain", "--run-dir", dir}, flags...)
	cmd := exec.Command(filepath.Join(t.Dir, "launcher"), append(append(all, filepath.Join(t.Dir, program)), args...)...)
	began := time.Now()
	if out, err := cmd.CombinedOutput(); err != nil {
		return r, fmt.Errorf("%v: %w\n%s", cmd.Args, err, out)
	}
	r.Cores = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds() / time.Since(began).Seconds()
	if r.Metrics, err = Lines[rundir.Metrics](dir, "metrics.jsonl"); err != nil {
		return r, err
	}
	if r.events, err = Lines[rundir.Event](dir, "events.jsonl"); err != nil {
		return r, err
	}
	plans, err := Lines[rundir.Plan](dir, "plans.jsonl")
	if err != nil {
		return r, err
	}
	r.Plans = make(map[uint64]*plan.Plan)
	for _, line := range plans {
		p := new(plan.Plan)
		if err := json.Unmarshal(line.Plan, p); err != nil {
			return r, fmt.Errorf("plans.jsonl: %w", err)
		}
		r.Plans[uint64(p.Version.N)], r.Newest = p, p
	}
	raw, err := os.ReadFile(filepath.Join(dir, "summary.json"))
	if err == nil {
		err = json.Unmarshal(raw, &r.Sum)
	}
	if err != nil {
		return r, err
	}
	f, err := os.Open(filepath.Join(dir, "traces.jsonl"))
	if err != nil {
		return r, err
	}
	defer f.Close()
	if err := trace.Read(f, func(s trace.Span) { r.Spans = append(r.Spans, s) }); err != nil {
		return r, fmt.Errorf("traces.jsonl: %w", err)
	}
	return r, os.RemoveAll(dir)
}

// Settled returns the times of steps first to last that ran under one plan, the newest with
// more than skip of them, without the first skip; in milliseconds.
func (r *Timed) Settled(first, last, skip int) (ms []float64, under uint64) {
	steps := make(map[uint64][]float64)
	for _, m := range r.Metrics {
		if m.Step >= first && m.Step <= last {
			steps[m.Plan] = append(steps[m.Plan], m.MS)
		}
	}
	for number, list := range steps {
		if len(list) > skip && number >= under {
			ms, under = list[skip:], number
		}
	}
	return ms, under
}

// Times returns what the workers measured, as a profile takes it.
func (r *Timed) Times() map[id.WorkerID]plan.Times {
	all := make(map[id.WorkerID]plan.Times)
	for _, w := range r.Sum.Workers {
		var t plan.Times
		for _, l := range w.Times {
			t.Layers = append(t.Layers, plan.LayerTime{Layer: l.Layer, Forward: Milliseconds(l.ForwardMS), Backward: Milliseconds(l.BackwardMS)})
		}
		all[id.WorkerID(w.ID)] = t
	}
	return all
}

// Milliseconds returns a duration.
func Milliseconds(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

// Emulated makes a run on emulated devices.
func (t *Timing) Emulated(flags []string, workers, stages, layers, micros, steps int, layerMS float64) (Timed, error) {
	// A death is found by its end at once; silence on a busy machine is not to be taken for one.
	all := append([]string{"--workers", strconv.Itoa(workers), "--stages", strconv.Itoa(stages), "--threads", "1", "--detect", "10s"}, flags...)
	return t.Run(all, "emulated", "--layers", strconv.Itoa(layers), "--layer-ms", fmt.Sprint(layerMS),
		"--global-batch", strconv.Itoa(micros), "--micro-batch", "1", "--steps", strconv.Itoa(steps))
}

// Busy tells of the machine, and warns where it was busier than emulated devices bear.
func Busy(cores float64) string {
	if cores > emulatedCores {
		return fmt.Sprintf("%.2f cores busy, TOO MANY: give more --layer-ms", cores)
	}
	return fmt.Sprintf("%.2f cores busy", cores)
}

// emulatedCores is how many of two cores the processes of emulated devices may keep busy, so
// that what they wait for comes in time.
const emulatedCores = 1.0

// Deadline tells how much time is left of a bench whose parts take about as long as they say.
type Deadline struct{ Left time.Duration }

// Begin prints how long something takes, and takes that off.
func (d *Deadline) Begin(what string, takes time.Duration) {
	fmt.Fprintf(os.Stderr, "%s: about %v, %v left in all\n", what, takes.Round(time.Second), d.Left.Round(time.Second))
	d.Left = max(0, d.Left-takes)
}

// partition calls f with every way to write n as a sum of so many positive numbers, of which
// none is greater than most. f must not keep the slice.
func partition(n, parts, most int, f func([]int)) {
	list := make([]int, parts)
	var fill func(i, left int)
	fill = func(i, left int) {
		if i == parts-1 {
			if left >= 1 && left <= most {
				list[i] = left
				f(list)
			}
			return
		}
		for k := 1; k <= min(most, left-(parts-1-i)); k++ {
			list[i] = k
			fill(i+1, left-k)
		}
	}
	fill(0, n)
}

// Least returns the least time that a step can take with so many layers and workers in each
// stage, in units of the passes of one micro-batch through one layer: of some worker of a stage
// with the most micro-batches, the first comes after a forward pass through the stages before, and
// the backward passes through these follow its last; in between it has all its own work to do,
// and its micro-batches go through the stages behind. No order of tasks is faster.
func Least(layers, workers []int, micros int) int {
	before, most, all := 0, 0, 0
	for _, l := range layers {
		all += l
	}
	for s, l := range layers {
		n := (micros + workers[s] - 1) / workers[s]
		most = max(most, before+max(n*l, all-before))
		before += l
	}
	return most
}

// LeastOfAll returns the least of all plans in which every worker serves one stage, and no
// stage has more than so many layers.
func LeastOfAll(layers, workers, stages, micros, most int) (lowest int) {
	partition(layers, stages, most, func(l []int) {
		partition(workers, stages, workers, func(w []int) {
			if t := Least(l, w, micros); lowest == 0 || t < lowest {
				lowest = t
			}
		})
	})
	return lowest
}

// tried is how many shapes bestOf simulates.
const tried = 16

// BestOf returns the shortest step that the simulator finds for equal workers and equal layers:
// all shapes in which every worker serves one stage are measured in closed form, and the best
// of them simulated with routes as the planner makes them.
func BestOf(layers, workers, stages, micros, most int, layer plan.Layer) (time.Duration, error) {
	type shape struct {
		layers, workers []int
		slowest         int
	}
	var list []shape
	partition(layers, stages, most, func(l []int) {
		partition(workers, stages, workers, func(w []int) {
			slowest := 0
			for s := range l {
				slowest = max(slowest, ((micros+w[s]-1)/w[s]-1)*l[s])
			}
			if len(list) == tried && slowest >= list[tried-1].slowest {
				return
			}
			i, _ := slices.BinarySearchFunc(list, slowest+1, func(x shape, t int) int { return cmp.Compare(x.slowest, t) })
			list = slices.Insert(list, i, shape{slices.Clone(l), slices.Clone(w), slowest})
			list = list[:min(len(list), tried)]
		})
	})
	prof := plan.Profile{Layers: slices.Repeat([]plan.Layer{layer}, layers)}
	var v plan.View
	for i := range workers {
		v.Workers = append(v.Workers, plan.Worker{ID: id.WorkerID(i)})
	}
	var best time.Duration
	for _, c := range list {
		p := plan.Plan{Version: id.Version{Generation: 1, N: 1}, FromStep: 1, Workers: v.Workers}
		layer, worker := 0, 0
		for s := range c.layers {
			st := plan.Stage{Lo: layer, Hi: layer + c.layers[s]}
			for range c.workers[s] {
				st.Workers = append(st.Workers, id.WorkerID(worker))
				worker++
			}
			layer = st.Hi
			p.Stages = append(p.Stages, st)
			// All to one worker is as bad as can be, so any other route is a gain.
			p.Route = append(p.Route, slices.Repeat(st.Workers[:1], micros))
			for l := st.Lo; l < st.Hi; l++ {
				p.Shards = append(p.Shards, plan.Shard{Layer: l, Hi: prof.Layers[l].Size(), Owner: st.Workers[0]})
			}
		}
		routed, _, err := planner.Next(p, v, prof, planner.Event{Kind: planner.Rebalance, Fixed: true})
		if errors.Is(err, planner.ErrNoGain) {
			routed, err = p, nil // one worker each
		}
		if err != nil {
			return 0, err
		}
		is, err := simulate.Predict(&routed, prof)
		if err != nil {
			return 0, err
		}
		if best == 0 || is.Step < best {
			best = is.Step
		}
	}
	return best, nil
}
