package planning

import (
	"cmp"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/simulate"
)

// Model holds the cost model of plans against steps as they are: it measures one run, predicts the
// steps of others, of other shapes, and compares. What the model takes from the run are the times of
// layers as plans are made with, and from its spans how long an update, a commit, a message
// and the way from one pass to the next take.
func Model(args []string) error {
	f := flag.NewFlagSet("model", flag.ExitOnError)
	layerMS := f.Float64("layer-ms", 4, "milliseconds of an emulated layer's forward pass")
	steps := f.Int("steps", 10, "steps of a run on emulated devices, of which the first three do not count")
	gptSteps := f.Int("gpt-steps", 60, "the same of the GPT")
	only := f.String("only", "", "emulated or gpt")
	_ = f.Parse(args)

	t, err := lab.NewTiming()
	if err != nil {
		return err
	}
	defer os.RemoveAll(t.Dir)
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	kinds := []modelled{
		{
			name: fmt.Sprintf("emulated devices, --layer-ms %v", *layerMS), bound: 0.10,
			fit: job{workers: 4, stages: 2, layers: 8, micros: 16},
			predict: []job{
				{1, 1, 4, 8}, {4, 1, 6, 30}, {5, 2, 12, 20}, {6, 3, 12, 24}, {8, 4, 16, 32}, {12, 4, 16, 36}, {16, 2, 16, 64},
			},
			run: func(j job) (lab.Timed, error) {
				return t.Emulated(still, j.workers, j.stages, j.layers, j.micros, *steps, *layerMS)
			},
		},
		{
			name: "GPT, one thread for each worker", bound: 0.25,
			fit:     job{workers: 2, stages: 2, layers: 4, micros: 8},
			predict: []job{{1, 1, 2, 4}, {1, 1, 3, 16}, {1, 1, 6, 8}, {2, 1, 4, 8}, {2, 1, 2, 24}, {2, 2, 2, 16}, {2, 2, 6, 16}},
			ends:    1,
			run: func(j job) (lab.Timed, error) {
				return t.Run(append([]string{"--workers", strconv.Itoa(j.workers), "--stages", strconv.Itoa(j.stages), "--threads", "1"}, still...), "gpt",
					"--data", filepath.Join(root, "internal/testkit/exact/testdata/corpus"), "--layers", strconv.Itoa(j.layers), "--width", "128", "--context", "64",
					"--global-batch", strconv.Itoa(2*j.micros), "--micro-batch", "2", "--steps", strconv.Itoa(*gptSteps), "--eval-every", "0")
			},
		},
	}
	fmt.Printf("%s, %d cores\n", runtime.Version(), runtime.NumCPU())
	for i, k := range kinds {
		if *only == "emulated" && i != 0 || *only == "gpt" && i != 1 {
			continue
		}
		if err := k.compare(); err != nil {
			return err
		}
	}
	return nil
}

// still are the flags of a run whose plan stays as it is.
var still = []string{"--reshape", "off"}

// job is the shape of a run.
type job struct{ workers, stages, layers, micros int }

func (j job) String() string {
	return fmt.Sprintf("%7d %6d %6d %13d", j.workers, j.stages, j.layers, j.micros)
}

// modelled is a kind of runs.
type modelled struct {
	name    string
	bound   float64 // of the error
	fit     job
	predict []job
	ends    int // layers of their own before and behind those that a job counts
	run     func(job) (lab.Timed, error)
}

func (k *modelled) compare() error {
	begin := func(i int, j job) {
		fmt.Fprintf(os.Stderr, "%s: run %d of %d, %d workers, %d stages, %d layers, %d micro-batches\n", k.name, i, 1+len(k.predict), j.workers, j.stages, j.layers, j.micros)
	}
	begin(1, k.fit)
	got, err := k.run(k.fit)
	if err != nil {
		return err
	}
	c, err := newCosts(&got, k.fit, k.ends)
	if err != nil {
		return err
	}
	fmt.Printf("\n%s; measured on this shape, and used for the others:\n%v\n", k.name, c)
	fmt.Printf("%7s %6s %6s %13s %11s %10s %12s %7s\n", "workers", "stages", "layers", "micro-batches", "measured ms", "fastest ms", "predicted ms", "error")
	worst := 0.0
	row := func(j job, r *lab.Timed) (float64, error) {
		ms, _ := r.Settled(1, len(r.Metrics), 3)
		is := lab.Median(ms)
		p, err := c.predict(r.Newest, j.layers)
		if err != nil {
			return 0, err
		}
		off := p.Seconds()*1e3/is - 1
		fmt.Printf("%v %11.1f %10.1f %12.1f %+6.1f%%", j, is, slices.Min(ms), p.Seconds()*1e3, 100*off)
		return math.Abs(off), nil
	}
	if _, err := row(k.fit, &got); err != nil {
		return err
	}
	fmt.Println("  the fit itself")
	for i, j := range k.predict {
		begin(2+i, j)
		r, err := k.run(j)
		if err != nil {
			return err
		}
		off, err := row(j, &r)
		if err != nil {
			return err
		}
		fmt.Println()
		worst = max(worst, off)
	}
	verdict := "within"
	if worst > k.bound {
		verdict = "NOT within"
	}
	fmt.Printf("worst error %.1f %%, %s %.0f %%\n", 100*worst, verdict, 100*k.bound)
	return nil
}

// costs is what a run tells of a kind of runs.
type costs struct {
	first, middle, last plan.Layer // first and last where a model has ends
	ends                int
	pass                time.Duration // from one pass to the next
	latency             time.Duration // of a boundary tensor
	commit              time.Duration // what a commit takes when the last worker has come
	updates             float64       // parameters that a worker checks and updates per second
}

func newCosts(r *lab.Timed, j job, ends int) (*costs, error) {
	prof := plan.Profile{Layers: make([]plan.Layer, j.layers+2*ends)}.With(r.Times())
	sizes := make([]int, len(prof.Layers))
	for _, s := range r.Newest.Shards {
		sizes[s.Layer] += s.Hi - s.Lo
	}
	for i, n := range sizes {
		prof.Layers[i].Tensors = []int{n}
	}
	blocks := prof.Layers[ends : len(prof.Layers)-ends]
	if slices.ContainsFunc(prof.Layers, func(l plan.Layer) bool { return l.Forward <= 0 || l.Backward <= 0 }) {
		return nil, fmt.Errorf("the run was too short to measure all of its layers: give more steps")
	}
	c := &costs{ends: ends, first: prof.Layers[0], middle: blocks[0], last: prof.Layers[len(prof.Layers)-1]}
	var forward, backward []float64
	for _, l := range blocks {
		forward, backward = append(forward, l.Forward.Seconds()), append(backward, l.Backward.Seconds())
	}
	c.middle.Forward, c.middle.Backward = inSeconds(lab.Median(forward)), inSeconds(lab.Median(backward))
	c.measure(r)
	return c, nil
}

func inSeconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// measure takes what it can from the spans of a run: the medians over its steps.
func (c *costs) measure(r *lab.Timed) {
	type at struct {
		trace  trace.ID
		worker int
	}
	own := make(map[at][]trace.Span) // what a worker computes in a step
	commits := make(map[trace.ID]float64)
	for _, s := range r.Spans {
		if s.Worker == trace.Agent {
			continue
		}
		took := s.End.Sub(s.Start).Seconds()
		switch s.Name {
		case trace.Forward, trace.Backward, trace.Check, trace.Update, trace.Arrive:
			own[at{s.Trace, s.Worker}] = append(own[at{s.Trace, s.Worker}], s)
		case trace.Commit:
			if was, ok := commits[s.Trace]; !ok || took < was {
				commits[s.Trace] = took // the last one waits for no other
			}
		}
	}
	var gaps, state, commit []float64
	holds := make(map[int]int) // parameters with state, by worker
	for _, s := range r.Newest.Shards {
		for _, w := range append([]id.WorkerID{s.Owner}, s.Mirrors...) {
			holds[int(w)] += s.Hi - s.Lo
		}
	}
	for k, spans := range own {
		slices.SortFunc(spans, func(a, b trace.Span) int { return cmp.Or(a.Start.Compare(b.Start), a.End.Compare(b.End)) })
		var took float64
		var before, arrived time.Time // the end of the pass before, the newest arrival
		for _, s := range spans {
			switch s.Name {
			case trace.Arrive:
				arrived = s.Start
			case trace.Forward, trace.Backward:
				// Where nothing had to come first, the gap is the worker's own.
				if !before.IsZero() && arrived.Before(before) {
					gaps = append(gaps, s.Start.Sub(before).Seconds())
				}
				before = s.End
			default:
				took += s.End.Sub(s.Start).Seconds()
			}
		}
		if n := holds[k.worker]; n > 0 && took > 0 {
			state = append(state, float64(n)/took)
		}
	}
	for _, took := range commits {
		commit = append(commit, took)
	}
	var latency []float64
	for _, l := range trace.Summarize(r.Spans).Links {
		latency = append(latency, l.MS/1e3)
	}
	or0 := func(all []float64) float64 {
		if len(all) == 0 {
			return 0
		}
		return lab.Median(all)
	}
	c.pass, c.commit, c.latency = inSeconds(or0(gaps)), inSeconds(or0(commit)), inSeconds(or0(latency))
	c.updates = or0(state)
}

// predict returns how long a step takes under a plan of a model with so many layers.
func (c *costs) predict(p *plan.Plan, layers int) (time.Duration, error) {
	prof := plan.Profile{LinkSpeed: plan.LinkSpeed{Latency: c.latency}, Updates: c.updates, Commit: c.commit}
	if c.ends > 0 {
		prof.Layers = append(prof.Layers, c.first)
	}
	for range layers {
		prof.Layers = append(prof.Layers, c.middle)
	}
	if c.ends > 0 {
		prof.Layers = append(prof.Layers, c.last)
	}
	for _, s := range p.Stages { // a stage is one pass
		prof.Layers[s.Lo].Forward += c.pass
		prof.Layers[s.Lo].Backward += c.pass
	}
	r, err := simulate.Predict(p, prof)
	return r.Step, err
}

func (c *costs) String() string {
	text := ""
	if c.ends > 0 {
		text = fmt.Sprintf("  first layer %v + %v, last %v + %v\n", c.first.Forward, c.first.Backward, c.last.Forward, c.last.Backward)
	}
	return text + fmt.Sprintf("  layer %v + %v, pass to pass %v, message %v, commit %v, %.1f million parameters checked and updated per second",
		c.middle.Forward, c.middle.Backward, c.pass, c.latency, c.commit, c.updates/1e6)
}
