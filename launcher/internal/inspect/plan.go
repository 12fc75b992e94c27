package inspect

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/elastic"
	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

// cluster is what launcher plan is told of a job and its machines.
type cluster struct {
	Workers, Stages, Layers, Micros, Mirrors, PerHost, Params int

	LayerTime, Latency time.Duration
	OutputKB, MBs      float64
	Slow, Lose         []string
	Horizon            int
}

// NewPlan returns the command.
func NewPlan() *cobra.Command {
	var c cluster
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "plan [flags]",
		Short: "Predict plans and step time of a described cluster",
		Long: `plan makes the plans that a run on the described cluster would make: the first one, then
one for the slow workers, then one after each loss, and predicts a step under the last one
by simulation. All layers are equal; --layer-time is the forward time of one for a
micro-batch at full speed, and backward takes twice that.

In the picture, each line is a worker: f and b are forward and backward passes, u are
updates, and a dot is a bubble.`,
		Example: `  launcher plan --workers 8 --stages 2 --layers 16 --micro-batches 32
  launcher plan --workers 8 --stages 2 --layers 16 --micro-batches 32 --slow 3:0.5
  launcher plan --workers 32 --stages 4 --layers 32 --micro-batches 128 --lose 5 --lose 17 --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			w, err := c.ask()
			if err != nil {
				return err
			}
			return cli.Print(cmd.OutOrStdout(), w, asJSON, w.print)
		},
	}
	f := cmd.Flags()
	f.IntVar(&c.Workers, "workers", 4, "worker processes")
	f.IntVar(&c.Stages, "stages", 1, "pipeline stages")
	f.IntVar(&c.Layers, "layers", 8, "layers of the model")
	f.IntVar(&c.Micros, "micro-batches", 16, "micro-batches of a step")
	f.IntVar(&c.Mirrors, "mirrors", 1, "replicas of each shard besides the owner's")
	f.IntVar(&c.PerHost, "per-host", 0, "workers on each host (default all on one)")
	f.DurationVar(&c.LayerTime, "layer-time", 10*time.Millisecond, "forward time of a layer for a micro-batch")
	f.IntVar(&c.Params, "params", 1_000_000, "parameters of a layer")
	f.Float64Var(&c.OutputKB, "output", 256, "kilobytes a layer hands to the next for a micro-batch")
	f.Float64Var(&c.MBs, "bandwidth", 0, "megabytes per second of a host's network card (default: no limit)")
	f.DurationVar(&c.Latency, "latency", 0, "time of a small message")
	f.IntVar(&c.Horizon, "horizon", 0, "steps within which moving layers has to pay off (default 100)")
	f.StringSliceVar(&c.Slow, "slow", nil, "`W:F`: worker W runs at speed F, 0 < F <= 1; can be repeated")
	f.StringSliceVar(&c.Lose, "lose", nil, "`W`: worker W dies; can be repeated, and they die in this order")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// WhatIf is the answer.
type WhatIf struct {
	Plan     *elastic.Plan `json:"plan"`
	Reasons  []string      `json:"reasons"` // of all plans, in their order
	StepMS   float64       `json:"step_ms"`
	FirstMS  float64       `json:"first_step_ms"` // of the first plan, with no worker slow or lost
	IdealMS  float64       `json:"ideal_step_ms"` // the first, over the share of speed that is left
	Workers  []workerTime  `json:"workers"`
	Critical []leg         `json:"critical_path"`

	prediction elastic.Prediction
}

type workerTime struct {
	Worker   elastic.WorkerID `json:"worker"`
	Stages   []int            `json:"stages"`
	Speed    float64          `json:"speed"`
	BusyMS   float64          `json:"busy_ms"`
	BubbleMS float64          `json:"bubble_ms"`
	Bubble   float64          `json:"bubble"` // part of the step
}

type leg struct {
	Task    string           `json:"task"`
	Worker  elastic.WorkerID `json:"worker"`
	BeginMS float64          `json:"begin_ms"`
	EndMS   float64          `json:"end_ms"`
}

func inMS(d time.Duration) float64 { return math.Round(d.Seconds()*1e6) / 1e3 }

// limits of what is planned at once.
const (
	maxPlanned       = 4096
	maxPlannedPasses = 1 << 20
	maxPlannedCuts   = 1 << 26 // stages that a range of layers may be; each is weighed some twenty times
	maxPlannedSums   = 1 << 24 // gradients of a micro-batch that go to a shard; each takes some 100 bytes
)

// shardBlock is the least size of a shard, in parameters.
const shardBlock = 4096

// ask makes the plans. All faults of the flags come together, one a line.
func (c *cluster) ask() (*WhatIf, error) {
	var errs faults.List
	within := func(flag string, v, lo int) {
		errs.If(v < lo || v > maxPlanned, "--%s %d: it must be from %d to %d", flag, v, lo, maxPlanned)
	}
	within("workers", c.Workers, 1)
	within("stages", c.Stages, 1)
	within("layers", c.Layers, 1)
	within("micro-batches", c.Micros, 1)
	within("mirrors", c.Mirrors, 0)
	within("per-host", c.PerHost, 0)
	errs.If(c.Params < 0 || c.Params > 1<<40, "--params %d: it must be from 0 to %d", c.Params, 1<<40)
	errs.If(c.LayerTime <= 0 || c.LayerTime > time.Hour, "--layer-time %v: it must be positive and at most an hour", c.LayerTime)
	errs.If(c.Latency < 0 || c.Latency > time.Hour, "--latency %v: it must be from 0 to an hour", c.Latency)
	errs.If(!(c.MBs >= 0) || c.MBs > 1e9, "--bandwidth %v: it must be from 0 to 1e9", c.MBs)
	errs.If(!(c.OutputKB >= 0) || c.OutputKB > 1e9, "--output %v: it must be from 0 to 1e9", c.OutputKB)
	errs.If(c.Horizon < 0 || c.Horizon > math.MaxInt32, "--horizon %d: it must be from 1 to %d, or 0 for the default", c.Horizon, math.MaxInt32)
	slow, lost := make(map[elastic.WorkerID]float64), make(map[elastic.WorkerID]bool)
	worker := func(flag, whole, text string) (elastic.WorkerID, bool) {
		w, err := strconv.Atoi(text)
		if err != nil || w < 0 || w >= c.Workers {
			errs.Add(fmt.Errorf("--%s %s: the workers are 0 to %d", flag, whole, c.Workers-1))
			return 0, false
		}
		return elastic.WorkerID(w), true
	}
	for _, s := range c.Slow {
		text, speed, _ := strings.Cut(s, ":")
		w, ok := worker("slow", s, text)
		v, err := strconv.ParseFloat(speed, 64)
		if err != nil || !(v > 0 && v <= 1) {
			errs.Add(fmt.Errorf("--slow %s: it is WORKER:SPEED, with a speed above 0 and at most 1", faults.Value(s)))
		} else if ok {
			slow[w] = v
		}
	}
	var order []elastic.WorkerID
	for _, s := range c.Lose {
		if w, ok := worker("lose", s, s); ok {
			errs.If(lost[w], "--lose %s: it is lost already", s)
			lost[w] = true
			order = append(order, w)
		}
	}
	errs.If(c.Micros > 0 && c.Micros <= maxPlanned && c.Stages > maxPlannedPasses/c.Micros, "--stages %d --micro-batches %d: at most %d passes of a step can be simulated", c.Stages, c.Micros, maxPlannedPasses)
	if c.Layers > 0 && c.Layers <= maxPlanned && c.Stages <= maxPlanned {
		errs.If(c.Stages > maxPlannedCuts/(c.Layers*c.Layers), "--stages %d --layers %d: give at most %s for so many layers, or fewer layers: ways to cut them grow with their square",
			c.Stages, c.Layers, plan.Count(maxPlannedCuts/(c.Layers*c.Layers), "stage"))
	}
	if err := errs.Err(); err != nil {
		return nil, err
	}
	ranks := min((c.Workers+c.Stages-1)/c.Stages, c.Params/shardBlock+1)
	if sums := ranks * c.Layers * c.Micros; sums > maxPlannedSums {
		return nil, fmt.Errorf("--workers %d --layers %d --micro-batches %d: a step would add %d gradients to shards; give fewer, so that at most %d can be simulated",
			c.Workers, c.Layers, c.Micros, sums, maxPlannedSums)
	}

	run, err := elastic.Start(elastic.Cluster{
		Workers: c.Workers, PerHost: c.PerHost, Stages: c.Stages, Layers: c.Layers, MicroBatches: c.Micros, Mirrors: c.Mirrors,
		LayerParams: c.Params, LayerTime: c.LayerTime, LayerOutput: int64(c.OutputKB * 1e3),
		Latency: c.Latency, Bandwidth: c.MBs * 1e6, Horizon: c.Horizon,
	})
	if err != nil {
		return nil, err
	}
	first, err := run.Predict()
	if err != nil {
		return nil, cli.Fail(err)
	}
	if len(slow) > 0 {
		if err := run.Slow(slow); err != nil {
			return nil, cli.Fail(err)
		}
	}
	for _, w := range order {
		if err := run.Lose(w); err != nil {
			return nil, cli.Fail(err)
		}
	}
	r := &WhatIf{Plan: run.Plan(), Reasons: run.Reasons()}
	if r.prediction, err = run.Predict(); err != nil {
		return nil, cli.Fail(err)
	}
	speed := 0.0
	of := func(w elastic.WorkerID) float64 {
		if v, ok := slow[w]; ok {
			return v
		}
		return 1
	}
	for _, w := range r.prediction.Workers {
		speed += of(w.Worker)
		r.Workers = append(r.Workers, workerTime{w.Worker, w.Stages, of(w.Worker), inMS(w.Busy), inMS(w.Bubble), math.Round(1e3*float64(w.Bubble)/float64(r.prediction.Step)) / 1e3})
	}
	r.StepMS, r.FirstMS = inMS(r.prediction.Step), inMS(first.Step)
	r.IdealMS = inMS(time.Duration(float64(first.Step) * float64(c.Workers) / speed))
	for _, s := range r.prediction.Critical {
		r.Critical = append(r.Critical, leg{s.Name, s.Worker, inMS(s.Begin), inMS(s.End)})
	}
	return r, nil
}

// print renders the answer for a terminal of 80 columns.
func (r *WhatIf) print(out io.Writer) error {
	for _, why := range r.Reasons {
		fmt.Fprintf(out, "- %s\n", why)
	}
	fmt.Fprintf(out, "\n%v\n", r.Plan)
	fmt.Fprintf(out, "step %.1f ms", r.StepMS)
	if len(r.Reasons) > 1 {
		fmt.Fprintf(out, "; %.1f ms before, and %.1f ms would be ideal for the speed that is left (%.1f %% of it reached)",
			r.FirstMS, r.IdealMS, 100*r.IdealMS/r.StepMS)
	}
	fmt.Fprintf(out, "\n\nworker  stages  speed   busy ms  bubble ms\n")
	for _, w := range r.Workers {
		fmt.Fprintf(out, "%6d  %-6s  %5.2f  %8.1f  %9.1f (%.0f %%)\n", w.Worker, strings.Trim(fmt.Sprint(w.Stages), "[]"), w.Speed, w.BusyMS, w.BubbleMS, 100*w.Bubble)
	}
	fmt.Fprintf(out, "\ncritical path\n")
	for _, l := range r.prediction.Legs() {
		fmt.Fprintf(out, "%s\n", l)
	}
	fmt.Fprintln(out)
	for _, l := range r.prediction.Chart(72) {
		fmt.Fprintln(out, l)
	}
	return nil
}
