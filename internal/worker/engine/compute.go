package engine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"runtime"
	"runtime/debug"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/pages"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/platform/progress"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/key"
	"github.com/soliton-train/soliton/internal/worker/meter"
	"github.com/soliton-train/soliton/internal/worker/order"
)

// lane computes one task after the other, in a goroutine, or those that may give way in another one.
type lane struct {
	tasks  chan func()
	spare  chan func() // nil where no thread yields
	meter  *meter.Thread
	waited time.Duration // in the task of the moment; of the lane's goroutine
}

// runCompute is a goroutine of a lane. It keeps its OS thread: on a busy machine, the other goroutines wait less for one of
// theirs then (bench control). And where they are to give way, that thread does.
func (e *Engine) runCompute(l *lane, tasks chan func()) {
	switch {
	case tasks == l.spare:
		platform.SpareThread()
	case e.c.Yield:
		platform.ComputeThread()
	default:
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
	}
	here, detach := l.meter.Attach()
	defer detach()
	for f := range tasks {
		here()
		f()
	}
}

// taskEnded ends a task of a lane, and brings what came of it.
type taskEnded struct {
	lane  int
	event core.Event // for the core
	err   error
	began time.Time
	ended time.Time

	name string // of the span
	of   Span
	take func() // takes what a task that has succeeded made
}

// start has a lane run f, whose end the loop is told. A panic in f is an error of the task.
func (e *Engine) start(lane int, end taskEnded, f func(end *taskEnded) error) {
	e.startIn(lane, e.lanes[lane].tasks, end, f)
}

// startPass is start for a pass, which may give way.
func (e *Engine) startPass(d *core.Run, end taskEnded, f func(end *taskEnded) error) {
	l := e.lanes[d.Lane]
	if d.Spare && l.spare != nil {
		e.startIn(d.Lane, l.spare, end, f)
	} else {
		e.startIn(d.Lane, l.tasks, end, f)
	}
}

func (e *Engine) startIn(lane int, tasks chan func(), end taskEnded, f func(end *taskEnded) error) {
	end.lane = lane
	task := func() {
		e.active.Add(1)
		defer e.active.Add(-1)
		e.compute(&end, func(end *taskEnded) error {
			end.began = e.now()
			end.of.Lane, end.of.Beside, e.lanes[lane].waited = lane, e.beside(), 0
			err := f(end)
			end.of.Beside, end.of.Waited = max(end.of.Beside, e.beside()), e.lanes[lane].waited
			end.ended = e.now()
			return err
		})
	}
	select {
	case tasks <- task:
	default:
		panic(fmt.Sprintf("engine: two tasks in lane %d", lane)) // the core has one at a time in each
	}
}

// startBeside has a goroutine of its own run f, beside the lanes. Where a plan waits for it, it does not give way.
func (e *Engine) startBeside(yield bool, end core.Event, f func() error, take func()) {
	e.tasks.Go(func() {
		if yield && e.c.Yield {
			platform.ComputeThread()
		}
		e.compute(&taskEnded{lane: len(e.lanes), event: end, take: take}, func(*taskEnded) error { return f() })
	})
}

// compute runs f and tells the loop of its end.
func (e *Engine) compute(end *taskEnded, f func(end *taskEnded) error) {
	kernel.Enter(e.c.Pool)
	defer func() {
		kernel.Leave(e.c.Pool)
		if v := recover(); v != nil {
			end.err = newPanic(v, end.lane)
		}
		e.mail.put(*end)
	}()
	end.err = f(end)
}

// beside returns how many lanes compute or read samples.
func (e *Engine) beside() int { return int(e.active.Load()) }

// panicError is a panic of a computing goroutine on its way to the caller of the operation, who panics with it.
type panicError struct{ *kernel.Panic }

func (*panicError) Error() string { return "panic" }

// newPanic keeps the lane and the stack of a panic.
func newPanic(v any, lane int) error {
	p, ok := v.(*kernel.Panic)
	if !ok {
		p = &kernel.Panic{Value: v, Stack: debug.Stack()}
	}
	p.Lane = lane
	return &panicError{p}
}

// endTask takes the end of a task.
func (e *Engine) endTask(x taskEnded) {
	if _, ok := x.event.(core.PassDone); ok {
		e.c.Progress.End(x.lane)
		if e.c.Pace != nil {
			e.c.Pace.End(x.lane, time.Now())
		}
	}
	if x.err != nil {
		e.core.Step(core.Failed{Err: x.err, Task: true, Panic: errors.As(x.err, new(*panicError))})
		return
	}
	if x.name != "" && e.c.Span != nil && e.core.Err() == nil {
		x.of.Name, x.of.Start, x.of.End = x.name, x.began, x.ended
		e.c.Span(x.of)
	}
	if x.take != nil {
		x.take()
	}
	e.core.Step(x.event)
}

// run begins a forward or backward pass.
func (e *Engine) run(d core.Run) {
	e.number = d.Step
	e.c.Progress.Begin(d.Lane, d.Step, progress.Pair(d.Task.Pair), d.Task.Kind == graph.Forward)
	if e.c.Pace != nil {
		e.c.Pace.Begin(d.Lane, d.Step, d.Task.Kind == graph.Forward, time.Now())
	}
	if d.Task.Kind == graph.Backward {
		e.phase(d.Step, trace.Backward)
		e.backward(d)
	} else {
		e.phase(d.Step, trace.Forward)
		e.forward(d)
	}
}

// forward begins a forward pass, with the loss in the last stage.
func (e *Engine) forward(d core.Run) {
	s, m := d.Task.Stage, d.Task.Micro
	w := e.newTask(d.Lane, d.Step, d.Task.Pair, d.Digests)
	e.works[d.Task.Pair] = w
	clock := e.lanes[d.Lane].meter
	w.micro.Ready = func(layer int) error {
		defer clock.Lap(layer)
		if err := e.ctx.Err(); err != nil || e.gates[layer].isOpen() {
			return err // an engine that ends drops the pass
		}
		began, resume := e.now(), clock.Hold()
		kernel.Leave(e.c.Pool)
		e.active.Add(-1)
		defer func() {
			e.active.Add(1)
			kernel.Enter(e.c.Pool)
			resume()
			e.waited(trace.Gather, began, d.Lane, layer)
		}()
		return e.gates[layer].wait(e.ctx)
	}
	lo, hi := e.plan.Stages[s].Lo, e.plan.Stages[s].Hi
	done := core.PassDone{Task: d.Task}
	e.startPass(&d, taskEnded{name: trace.Forward, of: Span{Stage: s, Micro: m, Layer: -1, First: lo, Peer: -1}}, func(end *taskEnded) error {
		clock.Begin(e.beside())
		defer func() { clock.End(meter.Forward, lo, hi, e.beside()) }()
		out, loss, err := w.forward(e)
		if err != nil {
			return err
		}
		if d.Learn {
			done.Within = w.stage.Shapes(w.pass)
		}
		if !w.last {
			out = e.keep(out)
			done.Made = out.Shape
			end.event, end.take = done, func() {
				e.forwards++
				e.reading += w.reading / e.atOnce(s)
				e.made[key.Tensor{Boundary: s + 1, Micro: m}] = out
			}
			return nil
		}
		suspect := -1
		if !finite(loss.Sum) { // the commit finds out why
			suspect = w.stage.Suspect(w.pass)
		}
		end.event, end.take = done, func() {
			e.forwards++
			e.reading += w.reading / e.atOnce(s)
			e.losses.Put(tree.Leaf(m), loss)
			if e.suspect < 0 {
				e.suspect = suspect
			}
		}
		return nil
	})
}

// backward begins a backward pass.
func (e *Engine) backward(d core.Run) {
	s, m, w := d.Task.Stage, d.Task.Micro, e.works[d.Task.Pair]
	e.takeGradient(w, d.Task.Pair)
	lo, hi, clock := e.plan.Stages[s].Lo, e.plan.Stages[s].Hi, e.lanes[d.Lane].meter
	tell := e.mail.leave // nothing can be reduced before the last passes of the stage
	if d.Soon {
		tell = e.mail.put
	}
	e.startPass(&d, taskEnded{
		event: core.PassDone{Task: d.Task}, name: trace.Backward, of: Span{Stage: s, Micro: m, Layer: -1, First: lo, Peer: -1},
	}, func(end *taskEnded) error {
		clock.Begin(e.beside())
		defer func() { clock.End(meter.Backward, lo, hi, e.beside()) }()
		din := w.backward(e, leaf{e, m, d.Lane, tell, d.Last})
		if s > 0 {
			din = e.keep(din)
		}
		end.take = func() {
			e.backwards++
			if w.witness != nil {
				e.spot[0] = w.witness.digests
			}
			if s > 0 {
				e.made[key.Tensor{Boundary: s, Micro: m, Back: true}] = din
			}
		}
		return nil
	})
}

// task is one micro-batch in one stage on this worker. It belongs to the lane that runs it.
type task struct {
	stage       Stage
	first, last bool // stage of the plan
	micro       Micro
	in          tensor.Tensor // but of the first stage
	batch       *batch        // in the first and the last stage
	reading     int64         // nanoseconds in which that was read, or waited for
	pass        Pass
	dout        tensor.Tensor // in the last stage, from the loss
	witness     *witness      // of a spot check
}

// newTask returns the task of a pair, whose passes make so many digests.
func (e *Engine) newTask(lane, step int, p graph.Pair, digests int) *task {
	w := &task{stage: e.stages[p.Stage], first: p.Stage == 0, last: p.Stage == len(e.plan.Stages)-1, micro: e.micro(lane, step, p)}
	w.micro.Took = e.lanes[lane].meter.Took
	if digests > 0 {
		w.witness = &witness{make([]uint32, 0, digests)}
		w.micro.Made = w.witness.tensor
	}
	if (w.first || w.last) && e.c.Ahead != nil {
		e.ahead.begin(readKey{step, p.Micro}, e.upcoming(step, p))
	}
	if !w.first {
		w.in = e.tensors[key.Tensor{Boundary: p.Stage, Micro: p.Micro}].t
	}
	return w
}

// takeGradient takes the gradient of the output from the stage behind, if there is one.
func (e *Engine) takeGradient(w *task, p graph.Pair) {
	if !w.last {
		w.dout = e.tensors[key.Tensor{Boundary: p.Stage + 1, Micro: p.Micro, Back: true}].t
	}
}

// forward runs the forward pass, and the loss in the last stage.
func (w *task) forward(e *Engine) (out tensor.Tensor, loss core.Measured, err error) {
	if w.first || w.last {
		if err := w.load(e); err != nil {
			return out, loss, err
		}
		w.witness.samples(w.batch, w.micro.Samples)
	}
	if w.first {
		w.in = w.batch.in
	}
	w.witness.tensor(w.in)
	if w.last {
		w.micro.Target, loss.Metrics = w.batch.target, e.measure(&w.micro)
	}
	if w.pass, out, err = w.stage.Forward(w.micro, w.in); err != nil || !w.last {
		return out, loss, err
	}
	loss.Sum, loss.Count, w.dout = w.stage.Loss(w.pass, w.batch.target)
	w.witness.loss(loss.Loss, w.dout)
	if w.dout.Len() != out.Len() {
		panic(fmt.Sprintf("the loss returned a gradient of shape %v for an output of shape %v", w.dout.Shape, out.Shape))
	}
	return out, loss, nil
}

// measure returns memory for the metrics of a micro-batch, which the loss sets.
func (e *Engine) measure(m *Micro) []core.Loss {
	metrics := make([]core.Loss, e.c.Metrics)
	m.Metric = func(i int, sum float64, count int64) { metrics[i] = core.Loss{Sum: sum, Count: count} }
	return metrics
}

// backward runs the backward pass, which ends the task.
func (w *task) backward(e *Engine, grads Gradients) (din tensor.Tensor) {
	pass := w.pass
	w.pass = nil
	if !w.last {
		w.witness.tensor(w.dout)
	}
	din = w.stage.Backward(pass, w.dout, w.witness.gradients(grads))
	w.leave(e)
	return din
}

// leave gives the samples of the task back.
func (w *task) leave(e *Engine) {
	if w.batch != nil {
		e.batches.put(w.batch)
		w.batch = nil
	}
}

// micro names the work of a pass.
func (e *Engine) micro(lane, step int, p graph.Pair) Micro {
	return Micro{
		Step: step, Index: p.Micro, Of: e.micros, First: p.Micro * e.c.MicroBatch, Samples: e.c.MicroBatch, Train: true, Lane: lane, Values: e.values,
	}
}

// read reads the samples of a micro-batch.
func (e *Engine) read(b *batch, m Micro, load func(i uint64, in, target tensor.Tensor) error) error {
	base := order.First(m.Step, e.c.GlobalBatch, m.First)
	if err := b.load(m.Samples, func(i int, in, target tensor.Tensor) error { return load(base+uint64(i), in, target) }); err != nil {
		return fmt.Errorf("step %d: %w", m.Step, err)
	}
	return nil
}

// keep returns a copy of a boundary tensor in memory of the pool: the memory of passes is used again before the commit.
func (e *Engine) keep(t tensor.Tensor) tensor.Tensor {
	if t.F == nil {
		return t
	}
	buf := e.free.get(len(t.F))
	pages.Copy(buf, t.F)
	return tensor.Of(buf, slices.Clone(t.Shape)...)
}

// dropPasses ends all passes without their backward pass, and gives up what passes have kept.
func (e *Engine) dropPasses() {
	for _, s := range e.stages {
		s.Forget()
	}
	for p, w := range e.works {
		if w.pass != nil {
			e.stages[p.Stage].Drop(w.pass)
		}
	}
	clear(e.works)
}

// leaf puts gradients into the trees, in a lane. While any is to come for a layer, only lanes look at its tree.
type leaf struct {
	e     *Engine
	index int // of the pass; -1 for none
	lane  int
	tell  func(any)
	last  bool
}

func (l leaf) Last() bool { return l.last }
func (l leaf) Lane() int  { return l.lane }

func (l leaf) Buffer(layer int) []float32 {
	l.e.lanes[l.lane].meter.Lap(layer)
	return l.e.free.get(len(l.e.c.Layers[layer].Params))
}

func (l leaf) Done(layer int, grad []float32) { l.Sum(layer, tree.Leaf(l.index), grad) }

func (l leaf) Sum(layer int, of tree.Node, grad []float32) {
	l.add(layer, of, grad)
	for m := of.Lo; m < of.Hi; m++ {
		l.tell(core.GradientDone{Layer: layer, Micro: m})
	}
}

func (l leaf) add(layer int, of tree.Node, grad []float32) {
	l.e.adding[layer].Lock()
	defer l.e.adding[layer].Unlock()
	switch {
	case !l.e.c.Fast:
		for _, g := range l.e.grads[layer].Put(of, grad) {
			l.e.free.put(g)
		}
	case l.e.plain[layer] == nil:
		l.e.plain[layer] = grad
	default:
		l.e.mergeGrads(l.e.plain[layer], grad)
	}
}

// handOver brings the gradients that passes of a stage have kept into the trees.
func (e *Engine) handOver(d core.HandOver) {
	stage := e.stages[d.Stage]
	e.start(0, taskEnded{event: core.HandedOver(d)}, func(*taskEnded) error {
		stage.HandOver(leaf{e, -1, 0, e.mail.put, true})
		return nil
	})
}

// say checks blocks and computes what this worker says in the commit. Where it may be one of a checkpoint, moments are checked, too: they are written as they
// are after the update.
func (e *Engine) say(d core.Say) {
	r := core.Record{LR: e.c.LR(d.Step), Stop: e.c.Stop(), Suspect: e.suspect, Spoiled: -1, Spot: slices.Concat(e.spot[:]...)}
	if e.c.Saving != nil {
		r.Saving = e.c.Saving(d.Step)
	}
	for _, n := range d.Nodes {
		loss, ok := e.losses.At(n)
		if !ok {
			panic("engine: commit of an incomplete step")
		}
		r.Losses = append(r.Losses, core.LossSum{Node: n, Loss: loss})
	}
	saves := r.Saving&(core.SavingWanted|core.SavingLast) != 0 || r.Stop != ""
	spans, shards := e.spans(), e.inOrder()
	scale := zero.NormScale(int64(e.c.GlobalBatch) * int64(e.c.Target.Len()))
	ctx, stop := context.WithCancel(e.ctx)
	e.jobStop = stop
	e.start(0, taskEnded{name: trace.Check, of: spanOf(-1, 0)}, func(end *taskEnded) error {
		defer stop()
		checked, err := e.check(ctx, spans, d.Tainted, saves)
		if err != nil {
			return err
		}
		for _, sh := range slices.Backward(shards) {
			if err := ctx.Err(); err != nil {
				return err
			}
			if !sh.owner {
				continue
			}
			s, err := sh.state.Squares(e.c.Pool, sh.total, scale)
			sum, fits := r.Squares.Add(s)
			if err != nil && !errors.Is(err, zero.ErrNonFinite) {
				return err
			}
			if err != nil || !fits {
				// NaN spreads from the layer it comes up in to the layers before, so the last layer is the one to name.
				r.Spoiled = max(r.Spoiled, sh.Layer)
				continue
			}
			r.Squares = sum
		}
		end.event = core.Said{Record: r, Checked: checked}
		return nil
	})
}

// operate does the work of an operation other than a step.
func (e *Engine) operate(d core.Operate) {
	ctx, stop := context.WithCancel(e.ctx)
	e.jobStop = stop
	r, v, spans := e.req, view{e.plan, maps.Clone(e.shards), e.core.Epoch(), d.Repair}, e.spans()
	e.start(0, taskEnded{}, func(end *taskEnded) error {
		defer stop()
		words, err := r.job(ctx, v)
		if err == nil && e.guard != nil {
			err = e.settle(ctx)
		}
		var checked []byte
		if err == nil {
			checked, err = e.check(ctx, spans, false, true)
		}
		switch {
		case err == nil:
			end.event = core.Answered{Said: append(checked, words...)}
		case passing(err):
			end.event, err = core.Answered{Broken: true}, nil
		}
		return err
	})
}

// settle waits until all parameters have arrived, in the computing goroutine.
func (e *Engine) settle(ctx context.Context) error {
	for l := range e.gates {
		if err := e.gates[l].wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// update applies a committed update to the shards. The loop is told of each that is done, so that its parameters are on their way
// under the updates of the others.
func (e *Engine) update(d core.Update) {
	e.former, e.c.Begin = nil, nil // nothing begins any more, and what it keeps is free
	for l := range e.c.Layers {
		if !e.serves(l) {
			e.c.Layers[l].Params = nil // what is held of it keeps its memory
		}
	}
	e.updating = d.Update.Step
	order, capture := e.inOrder(), e.capture(d)
	digests := make([][][]zero.Digest, len(order))
	for i, sh := range order {
		digests[i] = e.guard.of(sh.Range)
	}
	sources := e.sources(d.Copies)
	sent := e.sent
	e.sent = nil
	e.start(0, taskEnded{
		event: core.Updated{}, name: trace.Update, of: spanOf(-1, 0), take: func() {
			e.updated = time.Now()
			e.phase(e.updating, trace.Gather) // if it sends nothing
		},
	}, func(*taskEnded) error {
		if err := drain(e.ctx, sent); err != nil {
			return err
		}
		for i, sh := range order {
			if sh.state == nil {
				continue
			}
			sh.state.Update(e.c.Pool, sh.params, sh.total, d.Update, digests[i]...)
			e.mail.put(core.ShardUpdated{Range: sh.Range})
		}
		if len(d.Copies) > 0 {
			e.mail.put(copied{e.copyBases(d.Copies, sources, d.Update.Step)})
		}
		if capture != nil {
			return capture()
		}
		return nil
	})
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
