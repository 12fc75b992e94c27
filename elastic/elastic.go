// Package elastic plans training on a described cluster and predicts its steps, as "launcher plan" does. It makes the plans
// that a run would make: the first one, one for slow workers, and one after each loss.
//
//	r, err := elastic.Start(elastic.Cluster{Workers: 8, Stages: 2, Layers: 16, MicroBatches: 32, Mirrors: 1, LayerTime: 10 * time.Millisecond})
//	...
//	err = r.Lose(3)
//	p, err := r.Predict()
//	fmt.Println(r.Plan(), p.Step)
//
// Planning is a pure function: the same calls give the same plans on every machine.
package elastic

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/plan/simulate"
)

// WorkerID names a worker. The workers of a [Cluster] count from 0.
type WorkerID = id.WorkerID

// Plan says which worker holds, runs, owns and mirrors what. Its JSON is that of plans.jsonl in a run directory.
type Plan struct {
	plan   plan.Plan
	layers []plan.Layer
}

// String renders the plan in several lines.
func (p *Plan) String() string { return p.plan.String() }

// MarshalJSON implements [json.Marshaler].
func (p *Plan) MarshalJSON() ([]byte, error) { return json.Marshal(&p.plan) }

// Stages returns the workers of each stage, in rank order.
func (p *Plan) Stages() (stages [][]WorkerID) {
	for _, s := range p.plan.Stages {
		stages = append(stages, slices.Clone(s.Workers))
	}
	return stages
}

// Validate checks the plan: every layer in one stage, every micro-batch routed once in each, every parameter owned once, and so
// on. The error lists all that is wrong.
func (p *Plan) Validate() error { return p.plan.Validate(p.layers) }

// Prediction is what a step under a plan is expected to be like.
type Prediction struct {
	Step     time.Duration
	Workers  []WorkerTime
	Critical []Task // the critical path, in order of time

	full simulate.Prediction
}

// WorkerTime is what a worker does in a step: the stages that it serves, and for how long it computes and waits.
type WorkerTime struct {
	Worker       WorkerID
	Stages       []int
	Busy, Bubble time.Duration
}

// Task is a task of a step, such as a forward pass of a micro-batch, and when it runs.
type Task struct {
	Name       string
	Worker     WorkerID
	Begin, End time.Duration
}

// Legs describes the critical path, a line for each run of tasks on one worker.
func (p *Prediction) Legs() []string { return p.full.Legs() }

// Chart draws the step, a line for each worker: f and b are forward and backward passes, u are updates, a dot is a bubble.
func (p *Prediction) Chart(width int) []string { return p.full.Chart(width) }

// Cluster describes a job of equal layers and the machines that it runs on.
type Cluster struct {
	Workers      int
	PerHost      int // workers on each host; 0: all on one
	Stages       int // of the first plan; 0 means 1
	Layers       int
	MicroBatches int // of a step
	Mirrors      int // of each shard, as far as there are workers

	LayerParams int           // parameters of a layer
	LayerTime   time.Duration // forward time of a layer for a micro-batch; backward takes twice that
	LayerOutput int64         // bytes that a layer hands to the next for a micro-batch

	Latency   time.Duration // of a small message
	Bandwidth float64       // of a host's network card, in bytes per second; 0: no limit
	Horizon   int           // steps within which moving layers has to pay off; 0 means 100
}

// Run is a run on a cluster: its plan changes with what happens to the workers.
type Run struct {
	current plan.Plan
	view    plan.View
	profile plan.Profile
	reasons []string
}

// Start makes the first plan. The error says what is impossible.
func Start(c Cluster) (*Run, error) {
	r := &Run{view: plan.View{Step: 1}, profile: plan.Profile{LinkSpeed: plan.LinkSpeed{Latency: c.Latency, Bandwidth: c.Bandwidth}, Horizon: c.Horizon}}
	for range c.Layers {
		r.profile.Layers = append(r.profile.Layers, plan.Layer{
			Tensors: []int{c.LayerParams}, Forward: c.LayerTime, Backward: 2 * c.LayerTime, Output: c.LayerOutput,
		})
	}
	for i := range c.Workers {
		w := plan.Worker{ID: WorkerID(i)}
		if c.PerHost > 0 {
			w.Host = fmt.Sprintf("host%d", i/c.PerHost)
		}
		r.view.Workers = append(r.view.Workers, w)
	}
	return r, r.next(planner.Event{Kind: planner.Start, Micros: c.MicroBatches, Stages: c.Stages, Mirrors: min(c.Mirrors, max(c.Workers-1, 0))})
}

// next makes the plans that events call for.
func (r *Run) next(events ...planner.Event) error {
	for _, e := range events {
		if e.Kind == planner.Protect && r.current.Mirrors == 0 {
			continue
		}
		p, reason, err := planner.Next(r.current, r.view, r.profile, e)
		if errors.Is(err, planner.ErrNoGain) {
			continue
		}
		if err != nil {
			return err
		}
		r.current, r.reasons = p, append(r.reasons, string(reason))
	}
	return nil
}

// Slow sets the speeds of workers, above 0, where 1 is full speed, and balances the work where that pays.
func (r *Run) Slow(speeds map[WorkerID]float64) error {
	r.profile.Speed = speeds
	return r.next(planner.Event{Kind: planner.Rebalance})
}

// Lose takes a worker away in the middle of a step: its work moves to others, its shards get mirrors again, and the work is
// balanced where that pays. The error says which shard is lost with it, if one is.
func (r *Run) Lose(w WorkerID) error {
	r.view.Workers = slices.DeleteFunc(slices.Clone(r.view.Workers), func(x plan.Worker) bool { return x.ID == w })
	r.view.Step++
	return r.next(planner.Event{Kind: planner.Lost}, planner.Event{Kind: planner.Protect}, planner.Event{Kind: planner.Rebalance})
}

// Plan returns the current plan.
func (r *Run) Plan() *Plan { return &Plan{r.current, r.profile.Layers} }

// Reasons returns why each plan so far was made, in one sentence each.
func (r *Run) Reasons() []string { return r.reasons }

// Predict simulates a step under the current plan.
func (r *Run) Predict() (p Prediction, err error) {
	if p.full, err = simulate.Predict(&r.current, r.profile); err != nil {
		return p, err
	}
	p.Step = p.full.Step
	for _, w := range p.full.Workers {
		p.Workers = append(p.Workers, WorkerTime{w.Worker, w.Stages, w.Busy, w.Bubble})
	}
	for _, s := range p.full.Critical {
		p.Critical = append(p.Critical, Task{s.Task.String(), s.Worker, s.Begin, s.End})
	}
	return p, nil
}
