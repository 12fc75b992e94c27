package engine

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/soliton-train/soliton/internal/kernel"
	"github.com/soliton-train/soliton/internal/tensor"
	"github.com/soliton-train/soliton/internal/tree"
	"github.com/soliton-train/soliton/zero"
)

// Layer describes the parameters of one layer.
type Layer struct {
	Name    string
	Tensors []zero.Tensor
	Params  []float32 // all tensors, one after the other; the engine updates them
}

// Load fills in and target, tensors without the sample dimension, with sample
// i of the run, which counts on over steps and epochs.
type Load func(i uint64, in, target tensor.Tensor) error

// Config describes a job to the engine. Every field is needed.
type Config struct {
	Stage         Stage
	Layers        []Layer
	Input, Target tensor.Spec
	GlobalBatch   int // samples of a step
	MicroBatch    int // samples of a micro-batch; divides GlobalBatch
	Rule          zero.Rule
	LR            func(step int) float64
	ClipNorm      float64 // largest norm of the mean gradient; 0: no limit
	Load          Load
	Pool          *kernel.Pool
}

// Engine executes steps.
type Engine struct {
	c         Config
	shards    []*zero.Shard
	normScale int
	batch     *batch

	grads  []*tree.Sums[[]float32] // of each layer
	losses *tree.Sums[Loss]
	free   map[int][][]float32 // gradient buffers by size, the newest last

	// Forwards and Backwards count passes of training.
	Forwards, Backwards int64
}

// batch is memory for the samples of one micro-batch.
type batch struct{ in, target tensor.Tensor }

// New returns an engine before its first step.
func New(c Config) (*Engine, error) {
	e := &Engine{
		c:         c,
		normScale: zero.NormScale(int64(c.GlobalBatch) * int64(c.Target.Len())),
		batch:     &batch{makeBatch(c.Input, c.MicroBatch), makeBatch(c.Target, c.MicroBatch)},
		free:      make(map[int][][]float32),
	}
	if c.GlobalBatch%c.MicroBatch != 0 {
		return nil, fmt.Errorf("engine: micro-batch %d does not divide global batch %d", c.MicroBatch, c.GlobalBatch)
	}
	m := c.GlobalBatch / c.MicroBatch
	for i, l := range c.Layers {
		s, err := zero.NewShard(c.Rule, zero.Range{Layer: i, Lo: 0, Hi: len(l.Params)}, l.Tensors)
		if err != nil {
			return nil, err
		}
		e.shards = append(e.shards, s)
		e.grads = append(e.grads, tree.NewSums(m, e.mergeGrads))
	}
	e.losses = tree.NewSums(m, Loss.add)
	return e, nil
}

func makeBatch(s tensor.Spec, samples int) tensor.Tensor {
	shape := append([]int{samples}, s.Shape...)
	if s.Kind == tensor.Int32 {
		return tensor.NewInt(shape...)
	}
	return tensor.New(shape...)
}

// Loss is a sum of losses over some targets.
type Loss struct {
	Sum   float64
	Count int64
}

func (l Loss) add(o Loss) Loss { return Loss{l.Sum + o.Sum, l.Count + o.Count} }

// Mean returns the mean loss, NaN over no targets.
func (l Loss) Mean() float64 { return l.Sum / float64(l.Count) }

// Result is what a committed step gives.
type Result struct {
	Step     int
	Loss     float64 // mean over the targets
	Targets  int64
	LR       float64
	GradNorm float64 // norm of the gradient of the mean loss, before clipping
}

// Step executes a step, numbered from 1. Steps must be executed in order.
func (e *Engine) Step(ctx context.Context, step int) (Result, error) {
	if err := e.compute(ctx, step); err != nil {
		e.discard()
		return Result{}, err
	}
	r, u, err := e.commit(step)
	if err != nil {
		e.discard()
		return Result{}, err
	}
	e.update(u)
	return r, nil
}

// compute runs all micro-batches forward and backward, and leaves complete
// sums of gradients and losses.
func (e *Engine) compute(ctx context.Context, step int) error {
	for i := range e.c.GlobalBatch / e.c.MicroBatch {
		if err := ctx.Err(); err != nil {
			return err
		}
		m := Micro{Step: step, Index: i, First: i * e.c.MicroBatch, Samples: e.c.MicroBatch, Train: true}
		if err := e.run(m); err != nil {
			return err
		}
	}
	return nil
}

// run runs one micro-batch forward and backward.
func (e *Engine) run(m Micro) error {
	base := uint64(m.Step-1)*uint64(e.c.GlobalBatch) + uint64(m.First)
	if err := e.batch.load(m.Samples, func(i int, in, target tensor.Tensor) error {
		return e.c.Load(base+uint64(i), in, target)
	}); err != nil {
		return fmt.Errorf("step %d: %w", m.Step, err)
	}
	pass, _ := e.c.Stage.Forward(m, e.batch.in)
	e.Forwards++
	sum, count, dout := e.c.Stage.Loss(pass, e.batch.target)
	if !finite(sum) {
		suspect := e.c.Stage.Suspect(pass)
		e.c.Stage.Drop(pass)
		return e.nonFinite(m.Step, suspect, "loss")
	}
	e.losses.Put(tree.Leaf(m.Index), Loss{sum, count})
	e.c.Stage.Backward(pass, dout, leaf{e, m.Index})
	e.Backwards++
	return nil
}

// load fills the first n samples of b.
func (b *batch) load(n int, sample func(i int, in, target tensor.Tensor) error) error {
	for i := range n {
		if err := sample(i, row(b.in, i), row(b.target, i)); err != nil {
			return err
		}
	}
	return nil
}

// row returns sample i of t.
func row(t tensor.Tensor, i int) tensor.Tensor {
	r := tensor.Tensor{Shape: t.Shape[1:]}
	n := tensor.Size(r.Shape)
	if t.I != nil {
		r.I = t.I[i*n : (i+1)*n : (i+1)*n]
	} else {
		r.F = t.F[i*n : (i+1)*n : (i+1)*n]
	}
	return r
}

// head returns the first n samples of t.
func head(t tensor.Tensor, n int) tensor.Tensor {
	size := n * tensor.Size(t.Shape[1:])
	h := tensor.Tensor{Shape: append([]int{n}, t.Shape[1:]...)}
	if t.I != nil {
		h.I = t.I[:size]
	} else {
		h.F = t.F[:size]
	}
	return h
}

// leaf puts the gradients of one micro-batch into the trees.
type leaf struct {
	e     *Engine
	index int
}

func (l leaf) Buffer(layer int) []float32 {
	n := len(l.e.c.Layers[layer].Params)
	if f := l.e.free[n]; len(f) > 0 {
		l.e.free[n] = f[:len(f)-1]
		return f[len(f)-1]
	}
	return make([]float32, n)
}

func (l leaf) Done(layer int, grad []float32) {
	for _, g := range l.e.grads[layer].Put(tree.Leaf(l.index), grad) {
		l.e.release(g)
	}
}

func (e *Engine) release(g []float32) { e.free[len(g)] = append(e.free[len(g)], g) }

// grainAdd is the number of elements whose addition is worth a thread.
const grainAdd = 16 << 10

func (e *Engine) mergeGrads(left, right []float32) []float32 {
	e.c.Pool.For(len(left), grainAdd, func(lo, hi int) {
		kernel.Add(left[lo:hi], left[lo:hi], right[lo:hi])
	})
	e.release(right)
	return left
}

// discard gives up the step in flight.
func (e *Engine) discard() {
	e.losses.Clear()
	for _, s := range e.grads {
		for _, g := range s.Clear() {
			e.release(g)
		}
	}
}

// update holds what the commit has decided.
type update struct {
	grads [][]float32
	zero  zero.Update
}

// commit takes the complete sums and decides the update, without changing
// any state of the model.
func (e *Engine) commit(step int) (Result, update, error) {
	loss, ok := e.losses.Take()
	if !ok {
		panic("engine: commit of an incomplete step")
	}
	if loss.Count < 1 {
		return Result{}, update{}, fmt.Errorf("step %d: the loss counted no target, so it has no mean", step)
	}
	if !finite(loss.Sum) {
		return Result{}, update{}, e.nonFinite(step, -1, "loss")
	}
	u := update{grads: make([][]float32, len(e.shards))}
	var squares zero.Fixed
	// NaN spreads from the layer it comes up in to the layers before, so the
	// last layer is looked at first.
	for i := len(e.shards) - 1; i >= 0; i-- {
		if u.grads[i], ok = e.grads[i].Total(); !ok {
			panic("engine: commit of an incomplete step")
		}
		s, err := e.shards[i].Squares(e.c.Pool, u.grads[i], e.normScale)
		if sum, fits := squares.Add(s); err == nil && fits {
			squares = sum
			continue
		}
		if err == nil || errors.Is(err, zero.ErrNonFinite) {
			err = e.nonFinite(step, i, "gradient")
		}
		return Result{}, update{}, err
	}
	norm := zero.Norm(squares, e.normScale) / float64(loss.Count)
	factor := 1.0
	if clip := e.c.ClipNorm; clip > 0 {
		factor = min(1, clip/(norm+1e-6))
	}
	lr := e.c.LR(step)
	u.zero = zero.Update{Step: step, LR: float32(lr), GradScale: float32(factor / float64(loss.Count))}
	r := Result{Step: step, Loss: loss.Mean(), Targets: loss.Count, LR: lr, GradNorm: norm}
	return r, u, nil
}

// update applies a committed update.
func (e *Engine) update(u update) {
	for i, s := range e.shards {
		s.Update(e.c.Pool, e.c.Layers[i].Params, u.grads[i], u.zero)
		e.grads[i].Take()
		e.release(u.grads[i])
	}
}

// Moments returns the optimizer's numbers for the parameters of a layer.
func (e *Engine) Moments(layer int) [][]float32 { return e.shards[layer].Moments }

// Evaluate returns the loss over n samples, without training: what layers
// such as dropout do differently. The samples form micro-batches in order, the
// last of which may be short, and their losses are added over the tree.
func (e *Engine) Evaluate(ctx context.Context, step, n int, sample func(i int, in, target tensor.Tensor) error) (Loss, error) {
	micro := e.c.MicroBatch
	losses := tree.NewSums((n+micro-1)/micro, Loss.add)
	for first := 0; first < n; first += micro {
		if err := ctx.Err(); err != nil {
			return Loss{}, err
		}
		m := Micro{Step: step, Index: first / micro, First: first, Samples: min(micro, n-first)}
		if err := e.batch.load(m.Samples, func(i int, in, target tensor.Tensor) error {
			return sample(first+i, in, target)
		}); err != nil {
			return Loss{}, err
		}
		pass, _ := e.c.Stage.Forward(m, head(e.batch.in, m.Samples))
		sum, count, _ := e.c.Stage.Loss(pass, head(e.batch.target, m.Samples))
		suspect := -1
		if !finite(sum) {
			suspect = e.c.Stage.Suspect(pass)
		}
		e.c.Stage.Drop(pass)
		if !finite(sum) {
			return Loss{}, e.nonFinite(step, suspect, "loss of the evaluation")
		}
		losses.Put(tree.Leaf(m.Index), Loss{sum, count})
	}
	total, _ := losses.Total()
	if total.Count < 1 {
		return Loss{}, fmt.Errorf("step %d: the evaluation counted no target, so its loss has no mean", step)
	}
	return total, nil
}

// nonFinite makes the error; layer may be -1.
func (e *Engine) nonFinite(step, layer int, what string) error {
	err := &NonFiniteError{Step: step, What: what}
	if layer >= 0 {
		err.Layer = e.c.Layers[layer].Name
	}
	return err
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
