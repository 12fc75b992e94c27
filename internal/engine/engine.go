package engine

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"

	"github.com/soliton-train/soliton/comm"
	"github.com/soliton-train/soliton/elastic/graph"
	"github.com/soliton-train/soliton/elastic/plan"
	"github.com/soliton-train/soliton/internal/kernel"
	"github.com/soliton-train/soliton/internal/tensor"
	"github.com/soliton-train/soliton/internal/tree"
	"github.com/soliton-train/soliton/zero"
)

// Layer describes the parameters of one layer.
type Layer struct {
	Name    string
	Tensors []zero.Tensor
	// Params holds all tensors, one after the other, if a stage of this worker
	// has the layer, else it is nil. The engine updates them.
	Params []float32
}

// Size returns the number of parameters.
func (l Layer) Size() (n int) {
	for _, t := range l.Tensors {
		n += t.Size
	}
	return n
}

// Load fills in and target, tensors without the sample dimension, with sample
// i of the run, which counts on over steps and epochs.
type Load func(i uint64, in, target tensor.Tensor) error

// Config describes a job, and a worker's part in it, to the engine. Every
// field is needed but Fast and Zero.
type Config struct {
	Plan *plan.Plan    // valid
	Self plan.WorkerID // a worker of the plan
	// Network has admitted all workers of the plan.
	Network *comm.Endpoint

	Stages        map[int]Stage // those of the plan that this worker serves
	Layers        []Layer       // of the whole model
	Input, Target tensor.Spec
	GlobalBatch   int // samples of a step
	MicroBatch    int // samples of a micro-batch; divides GlobalBatch
	Rule          zero.Rule
	LR            func(step int) float64 // the same bits on every worker
	ClipNorm      float64                // largest norm of the mean gradient; 0: no limit
	Load          Load
	Pool          *kernel.Pool
	// Fast adds gradients up in the order in which they come, with a plain
	// reduce-scatter between the workers of a stage, instead of over the tree. The
	// results of all workers still agree, but their last bits depend on the plan
	// and on chance.
	Fast bool
	// Zero is the stage of ZeRO, 1 or 2; 0 means 2. In stage 2 the complete
	// gradient of a shard is at its owner only, in stage 1 at all workers of its
	// stage. The bits are the same.
	Zero int
	// Stop returns why this worker was asked to end the run, in at most 24
	// bytes, or "". The commit brings all workers to end after the same step.
	Stop func() string
}

// Engine executes a worker's part of the steps.
type Engine struct {
	c         Config
	plan      *plan.Plan
	version   comm.Version
	rank      int // of this worker in plan.Workers
	everyone  *comm.Group
	groups    map[int]*comm.Group // of the stages this worker serves with others
	shards    []*zero.Shard       // by index in the plan; nil where another worker owns it
	totals    [][]float32         // the complete gradient of each shard that this worker gets from others
	normScale int

	grads   []*tree.Sums[[]float32] // of each layer that this worker holds
	plain   [][]float32             // the same where reduction is fast: one sum, nil before the first gradient
	losses  *tree.Sums[Loss]
	free    pool
	batches []*batch // not in use

	shapes []shape // of the input of each stage
	mail   mailbox
	tasks  sync.WaitGroup // goroutines of reductions

	step   *stepState
	params []arrivals      // of each layer: parameters on their way from their owners
	sent   []*comm.Sending // parameters on their way to others

	// Forwards and Backwards count passes of training.
	Forwards, Backwards int64
}

// New returns an engine before its first step. It links the worker with those
// the plan brings it together with, so it returns when they are there.
func New(ctx context.Context, c Config) (*Engine, error) {
	if c.GlobalBatch%c.MicroBatch != 0 || c.Plan.Micros() != c.GlobalBatch/c.MicroBatch {
		return nil, fmt.Errorf("engine: micro-batches of %d of a global batch of %d are not the %d of the plan", c.MicroBatch, c.GlobalBatch, c.Plan.Micros())
	}
	e := &Engine{
		c:         c,
		plan:      c.Plan,
		version:   comm.Version{Generation: uint64(c.Plan.Version.Generation), N: uint64(c.Plan.Version.N)},
		groups:    make(map[int]*comm.Group),
		normScale: zero.NormScale(int64(c.GlobalBatch) * int64(c.Target.Len())),
		grads:     make([]*tree.Sums[[]float32], len(c.Layers)),
		plain:     make([][]float32, len(c.Layers)),
		losses:    tree.NewSums(c.Plan.Micros(), Loss.add),
		shapes:    make([]shape, len(c.Plan.Stages)),
		params:    make([]arrivals, len(c.Layers)),
		mail:      newMailbox(),
	}
	for i, w := range c.Plan.Workers {
		if w.ID == c.Self {
			e.rank = i
		}
	}
	for s := range c.Stages {
		for l := c.Plan.Stages[s].Lo; l < c.Plan.Stages[s].Hi; l++ {
			e.grads[l] = tree.NewSums(c.Plan.Micros(), e.mergeGrads)
		}
	}
	e.shards = make([]*zero.Shard, len(c.Plan.Shards))
	e.totals = make([][]float32, len(c.Plan.Shards))
	for i, sh := range c.Plan.Shards {
		stage := c.Plan.StageOf(sh.Layer)
		if c.Stages[stage] != nil && len(c.Plan.Stages[stage].Workers) > 1 && !c.Fast && (sh.Owner == c.Self || c.Zero == 1) {
			e.totals[i] = make([]float32, sh.Hi-sh.Lo)
		}
		if sh.Owner != c.Self {
			continue
		}
		var err error
		if e.shards[i], err = zero.NewShard(c.Rule, zero.Range{Layer: sh.Layer, Lo: sh.Lo, Hi: sh.Hi}, c.Layers[sh.Layer].Tensors); err != nil {
			return nil, err
		}
	}
	return e, e.join(ctx)
}

// join makes the groups: of all workers, and of the stages this worker serves
// with others.
func (e *Engine) join(ctx context.Context) error {
	group := func(id uint16, members []plan.WorkerID) (*comm.Group, error) {
		g, err := e.c.Network.NewGroup(id)
		if err != nil {
			return nil, err
		}
		sessions := make([]comm.Session, len(members))
		for i, m := range members {
			sessions[i] = e.session(m)
		}
		_, err = g.Edit(ctx, e.version, sessions)
		return g, err
	}
	all := make([]plan.WorkerID, len(e.plan.Workers))
	for i, w := range e.plan.Workers {
		all[i] = w.ID
	}
	var err error
	if e.everyone, err = group(0, all); err != nil {
		return err
	}
	for s := range e.c.Stages {
		if members := e.plan.Stages[s].Workers; len(members) > 1 {
			if e.groups[s], err = group(uint16(1+s), members); err != nil {
				return err
			}
		}
	}
	return nil
}

// session returns the session of a worker of the plan.
func (e *Engine) session(id plan.WorkerID) comm.Session {
	w, _ := e.plan.Worker(id)
	return comm.Session{Worker: comm.WorkerID(w.ID), Incarnation: uint32(w.Incarnation)}
}

func (e *Engine) call(step int, tag int) comm.Call {
	return comm.Call{Version: e.version, Step: uint64(step), Tag: uint16(tag), Priority: comm.Bulk}
}

// Loss is a sum of losses over some targets.
type Loss struct {
	Sum   float64
	Count int64
}

func (l Loss) add(o Loss) Loss { return Loss{l.Sum + o.Sum, l.Count + o.Count} }

// Mean returns the mean loss, NaN over no targets.
func (l Loss) Mean() float64 { return l.Sum / float64(l.Count) }

// Result is what a committed step gives, the same on every worker.
type Result struct {
	Step     int
	Loss     float64 // mean over the targets
	Targets  int64
	LR       float64
	GradNorm float64 // norm of the gradient of the mean loss, before clipping
	Stop     string  // why a worker was asked to end the run, "" if none was
}

// Step executes a step, numbered from 1. Steps must be executed in order.
// After an error of a step of several workers no other can be executed.
func (e *Engine) Step(ctx context.Context, step int) (Result, error) {
	ctx, cancel := context.WithCancel(ctx)
	err := e.compute(ctx, step)
	if err != nil {
		cancel() // reductions end
	}
	e.tasks.Wait()
	defer cancel()
	if err != nil {
		e.discard()
		return Result{}, err
	}
	r, u, err := e.commit(ctx, step)
	if err != nil {
		e.discard()
		return Result{}, err
	}
	return r, e.update(ctx, step, u)
}

// discard gives up the step in flight.
func (e *Engine) discard() {
	e.losses.Clear()
	e.clearGrads()
	for s, st := range e.c.Stages {
		for p, w := range e.step.works {
			if p.Stage == s && w.pass != nil {
				st.Drop(w.pass)
			}
		}
	}
	e.step = nil
}

// clearGrads gives the memory of all sums of gradients back.
func (e *Engine) clearGrads() {
	for l, sums := range e.grads {
		if sums != nil {
			for _, g := range sums.Clear() {
				e.free.put(g)
			}
		}
		if e.plain[l] != nil {
			e.free.put(e.plain[l])
			e.plain[l] = nil
		}
	}
}

// Close ends the engine after its last step, together with those of all other
// workers: it returns when nobody needs anything of this worker any more, so
// that the network can be closed.
func (e *Engine) Close(ctx context.Context, step int) error {
	if err := e.settle(ctx); err != nil {
		return err
	}
	// Our part in all operations of the groups is done. Without them, a link
	// that goes down as another worker leaves is no event: members of a group
	// would tell each other, and cut a link that a worker has just left off
	// before all that came over it was read.
	err := e.everyone.Close()
	for _, g := range e.groups {
		err = errors.Join(err, g.Close())
	}
	if err != nil {
		return err
	}
	// Others may still be in an operation, which a lost link would end. So
	// everyone says to the first worker that it is done, and leaves when that one
	// has heard it from all.
	first := e.plan.Workers[0].ID
	key := func(phase, rank int) comm.Key {
		return comm.Key{Kind: comm.KindUser, Step: uint64(step), Layer: int32(phase), Micro: int32(rank)}
	}
	const done, leave = -1, -2
	if e.c.Self != first {
		if err := e.c.Network.Send(ctx, e.session(first), key(done, e.rank), nil, comm.Control); err != nil {
			return err
		}
		if _, _, err := e.c.Network.Receive(ctx, key(leave, 0), nil); err != nil {
			return err
		}
	} else {
		for rank := 1; rank < len(e.plan.Workers); rank++ {
			if _, _, err := e.c.Network.Receive(ctx, key(done, rank), nil); err != nil {
				return err
			}
		}
		for _, w := range e.plan.Workers[1:] {
			if err := e.c.Network.Send(ctx, e.session(w.ID), key(leave, 0), nil, comm.Control); err != nil {
				return err
			}
		}
	}
	return nil
}

// Moments returns the optimizer's numbers for an owned shard of the plan, nil
// for others.
func (e *Engine) Moments(shard int) [][]float32 {
	if e.shards[shard] == nil {
		return nil
	}
	return e.shards[shard].Moments
}

// StateBytes returns the bytes of the optimizer's numbers that this worker
// holds.
func (e *Engine) StateBytes() (n int64) {
	for _, s := range e.shards {
		if s != nil {
			for _, m := range s.Moments {
				n += 4 * int64(len(m))
			}
		}
	}
	return n
}

// nonFinite makes the error of a number that is not finite; layer may be -1.
func (e *Engine) nonFinite(step, layer int, what string) error {
	err := &NonFiniteError{Step: step, What: what}
	if layer >= 0 {
		err.Layer = e.c.Layers[layer].Name
	}
	return err
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

// pair names the work on a micro-batch in a stage.
func pair(stage, micro int) graph.Pair { return graph.Pair{Stage: stage, Micro: micro} }
