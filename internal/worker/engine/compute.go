package engine

import (
	"fmt"
	"runtime/debug"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/platform/progress"
	"github.com/soliton-train/soliton/internal/worker/key"
	"github.com/soliton-train/soliton/internal/worker/meter"
)

// newPanic keeps the stack of a panic in the computing goroutine.
func newPanic(v any) error {
	if p, ok := v.(*kernel.Panic); ok {
		return &panicError{p}
	}
	return &panicError{&kernel.Panic{Value: v, Stack: debug.Stack()}}
}

// runPass begins a forward or backward pass.
func (e *Engine) runPass(t graph.Task) {
	w := e.step.works[t.Pair]
	e.c.Progress.Begin(e.step.number, progress.Pair(t.Pair), t.Kind == graph.Forward)
	if t.Kind == graph.Backward {
		e.phase(e.step.number, PhaseBackward)
		e.backward(t, w)
	} else {
		e.phase(e.step.number, PhaseForward)
		e.forward(t, w)
	}
}

// forward begins a forward pass, with the loss in the last stage.
func (e *Engine) forward(t graph.Task, w *task) {
	st, s, m := e.step, t.Stage, t.Micro
	stage, first, last := e.stages[s], s == 0, s == len(e.plan.Stages)-1
	micro := Micro{
		Step: st.number, Index: m, First: m * e.c.MicroBatch, Samples: e.c.MicroBatch, Train: true,
		Ready: func(layer int) error {
			defer e.c.Meter.Lap(layer)
			if e.arrivals[layer].there() {
				return nil
			}
			began, resume := e.now(), e.c.Meter.Hold()
			defer func() {
				resume()
				e.span(trace.Gather, began, spanOf(layer, 0))
			}()
			return e.arrivals[layer].wait(e.ctx)
		},
	}
	var in, out tensor.Tensor
	if !first {
		in = st.tensors[tensorID{s, m, comm.Forward}].t
	}
	var loss Loss
	var suspect int
	lo, hi := e.plan.Stages[s].Lo, e.plan.Stages[s].Hi
	var within [][]int
	learns := !e.knowsWithin(s)
	e.do(onPass, func() (err error) {
		e.c.Meter.Begin()
		defer func() { e.c.Meter.End(meter.Forward, lo, hi) }()
		if first || last {
			w.batch = e.batch()
			base := uint64(st.number-1)*uint64(e.c.GlobalBatch) + uint64(micro.First)
			if err := w.batch.load(micro.Samples, func(i int, in, target tensor.Tensor) error {
				return e.c.Load(base+uint64(i), in, target)
			}); err != nil {
				return fmt.Errorf("step %d: %w", st.number, err)
			}
		}
		if first {
			in = w.batch.in
		}
		w.pass, out, err = stage.Forward(micro, in)
		if err == nil && learns {
			within = stage.Shapes(w.pass)
		}
		if err != nil || !last {
			out = e.keep(out)
			return err
		}
		sum, count, dout := stage.Loss(w.pass, w.batch.target)
		if suspect = -1; !finite(sum) { // the commit finds out why
			suspect = stage.Suspect(w.pass)
		}
		if dout.Len() != out.Len() {
			panic(fmt.Sprintf("the loss returned a gradient of shape %v for an output of shape %v", dout.Shape, out.Shape))
		}
		w.dout, loss = dout, Loss{sum, count}
		return nil
	}, func(err error) {
		e.c.Progress.End()
		if err != nil {
			e.fail(err)
			return
		}
		e.forwards++
		e.computed(trace.Forward, Span{Stage: s, Micro: m, Layer: -1, Peer: -1})
		st.queue.Done(t)
		for i, dims := range within {
			e.knowShape(e.plan.Stages[s].Lo+1+i, dims)
		}
		if last {
			e.losses.Put(tree.Leaf(m), loss)
			if st.suspect < 0 {
				st.suspect = suspect
			}
			st.queue.Arrive(graph.BackwardOf(t.Pair))
			return
		}
		e.knowShape(e.plan.Stages[s].Hi, slices.Clone(out.Shape))
		e.made(tensorID{s + 1, m, comm.Forward}, out)
		e.want(tensorID{s + 1, m, comm.Backward})
	})
}

// keep returns a copy of a boundary tensor in memory of the pool.
func (e *Engine) keep(t tensor.Tensor) tensor.Tensor {
	if t.F == nil {
		return t
	}
	buf := e.free.get(len(t.F))
	copy(buf, t.F)
	return tensor.Of(buf, slices.Clone(t.Shape)...)
}

// backward begins a backward pass.
func (e *Engine) backward(t graph.Task, w *task) {
	st, s, m := e.step, t.Stage, t.Micro
	stage, dout := e.stages[s], w.dout
	if s < len(e.plan.Stages)-1 {
		dout = st.tensors[tensorID{s + 1, m, comm.Backward}].t
	}
	var din tensor.Tensor
	lo, hi := e.plan.Stages[s].Lo, e.plan.Stages[s].Hi
	tell := e.mail.leave // there is nothing to be done before the last
	if e.isLast(s, m) {
		tell = e.mail.put
	}
	e.do(onPass, func() error {
		e.c.Meter.Begin()
		defer func() { e.c.Meter.End(meter.Backward, lo, hi) }()
		pass := w.pass
		w.pass = nil
		din = stage.Backward(pass, dout, leaf{e, st, m, tell})
		if s > 0 {
			din = e.keep(din)
		}
		if w.batch != nil {
			e.batches = append(e.batches, w.batch)
			w.batch = nil
		}
		return nil
	}, func(err error) {
		e.c.Progress.End()
		e.backwards++
		e.computed(trace.Backward, Span{Stage: s, Micro: m, Layer: -1, Peer: -1})
		st.queue.Done(t)
		if s > 0 {
			e.made(tensorID{s, m, comm.Backward}, din)
		}
	})
}

// batch returns memory for the samples of a micro-batch.
func (e *Engine) batch() *batch {
	if n := len(e.batches); n > 0 {
		b := e.batches[n-1]
		e.batches = e.batches[:n-1]
		return b
	}
	return &batch{makeBatch(e.c.Input, e.c.MicroBatch), makeBatch(e.c.Target, e.c.MicroBatch)}
}

// leaf puts the gradients of one micro-batch into the trees, in the computing
// goroutine. While any is to come for a layer, nobody else looks at its tree.
type leaf struct {
	e     *Engine
	st    *stepState
	index int
	tell  func(func())
}

func (l leaf) Buffer(layer int) []float32 {
	l.e.c.Meter.Lap(layer)
	return l.e.free.get(len(l.e.c.Layers[layer].Params))
}

func (l leaf) Done(layer int, grad []float32) {
	switch {
	case !l.e.c.Fast:
		for _, g := range l.e.grads[layer].Put(tree.Leaf(l.index), grad) {
			l.e.free.put(g)
		}
	case l.e.plain[layer] == nil:
		l.e.plain[layer] = grad
	default:
		l.e.mergeGrads(l.e.plain[layer], grad)
	}
	l.tell(func() {
		if l.e.step == l.st {
			l.st.layers[layer].have[l.index] = true
		}
	})
}

// grainAdd is the number of elements whose addition is worth a thread.
const grainAdd = 16 << 10

func (e *Engine) mergeGrads(left, right []float32) []float32 {
	e.c.Pool.For(len(left), grainAdd, func(lo, hi int) {
		kernel.Add(left[lo:hi], left[lo:hi], right[lo:hi])
	})
	e.free.put(right)
	return left
}

// reduce begins the reductions of layers whose backward passes have all been
// run here, and that of layers that need none.
func (e *Engine) reduce() {
	if e.broken {
		return
	}
	for s := range e.stages {
		for l := e.plan.Stages[s].Hi - 1; l >= e.plan.Stages[s].Lo; l-- {
			if ls := e.step.layers[l]; !ls.reduced && e.through(s, ls) {
				ls.reduced = true
				e.phase(e.step.number, PhaseReduce)
				e.startReduce(s, l)
			}
		}
	}
}

// isLast reports whether all other micro-batches routed here are through a stage.
func (e *Engine) isLast(s, micro int) bool {
	top := e.step.layers[e.plan.Stages[s].Hi-1]
	for m, w := range e.plan.Route[s] {
		if w == e.c.Self.ID && m != micro && !top.have[m] && e.plan.Runs(graph.Pair{Stage: s, Micro: m}, e.step.number) {
			return false
		}
	}
	return true
}

// through reports whether all micro-batches routed here are through a layer.
func (e *Engine) through(s int, ls *layerState) bool {
	for m, w := range e.plan.Route[s] {
		if w == e.c.Self.ID && !ls.have[m] && e.plan.Runs(graph.Pair{Stage: s, Micro: m}, e.step.number) {
			return false
		}
	}
	return true
}

// startReduce begins to bring the complete gradient of a layer to the owners
// of its shards.
func (e *Engine) startReduce(s, layer int) {
	g := e.groups[s]
	if g == nil {
		total, ok := e.plain[layer], e.c.Fast
		if !ok {
			total, ok = e.grads[layer].Total()
		}
		for _, sh := range e.shards {
			if sh.Layer == layer && sh.reduces {
				if !ok {
					panic("engine: a gradient is complete and its sum is not")
				}
				sh.completed(e, total[sh.Lo:sh.Hi])
			}
		}
		return
	}
	var shards []plan.Shard
	var mine []*shard // nil where another worker reduces it
	for _, p := range e.plan.Shards {
		if p.Layer == layer {
			sh := e.shards[rangeOf(p)]
			if e.reducer(p) != e.c.Self.ID {
				sh = nil
			}
			shards, mine = append(shards, p), append(mine, sh)
		}
	}
	if len(shards) == 0 {
		return
	}
	if e.c.Fast {
		e.fastReduce(g, s, layer, shards, mine)
	} else {
		e.treeReduce(g, s, layer, shards, mine)
	}
}

// treeReduce reduces a layer of stage s over the tree.
func (e *Engine) treeReduce(g *comm.Group, s, layer int, shards []plan.Shard, mine []*shard) {
	t := comm.Tree{Micros: e.micros}
	ranks := make(map[id.WorkerID]int)
	for i, w := range e.plan.Stages[s].Workers {
		ranks[w] = i
		t.Nodes = append(t.Nodes, e.plan.Nodes(s, w, e.step.number))
	}
	for _, p := range shards {
		t.Shards = append(t.Shards, comm.TreeShard{Layer: p.Layer, Lo: p.Lo, Hi: p.Hi, Owner: ranks[e.reducer(p)]})
	}
	ctx, sums, call := e.opsCtx, e.grads[layer], key.Reduction(e.attempt(), e.plan.Version, layer)
	began := e.now()
	e.operate(func() error {
		return g.TreeReduce(ctx, call, t, func(shard int, n tree.Node) []float32 {
			v, _ := sums.At(n)
			return v[t.Shards[shard].Lo:t.Shards[shard].Hi]
		}, func(shard int) []float32 { return mine[shard].memory() }, nil)
	}, func() {
		e.span(trace.Reduce, began, spanOf(layer, 4*int64(e.c.Layers[layer].Size())))
		for _, sh := range mine {
			if sh != nil {
				sh.completed(e, sh.own)
			}
		}
	})
}

// fastReduce reduces a layer of stage s without an order.
func (e *Engine) fastReduce(g *comm.Group, s, layer int, shards []plan.Shard, mine []*shard) {
	if e.plain[layer] == nil { // nothing of it ran here
		e.plain[layer] = e.free.get(e.c.Layers[layer].Size())
		clear(e.plain[layer])
	}
	// In the order of ranks, which promotions may have changed. The reduction
	// spoils its operand, and may have to begin anew.
	parts, places := e.parts(s, shards)
	sum := e.free.get(len(e.plain[layer]))
	for i, p := range shards {
		copy(sum[places[i]:places[i]+p.Hi-p.Lo], e.plain[layer][p.Lo:p.Hi])
	}
	e.late = append(e.late, lateBuffer{sum, []<-chan struct{}{e.stepEnd()}})
	ctx, call := e.opsCtx, key.Reduction(e.attempt(), e.plan.Version, layer)
	began := e.now()
	e.operate(func() error { return g.ReduceScatter(ctx, call, sum, parts) }, func() {
		e.span(trace.Reduce, began, spanOf(layer, 4*int64(len(sum))))
		for i, sh := range mine {
			if sh != nil {
				sh.completed(e, sum[places[i]:places[i]+sh.Hi-sh.Lo])
			}
		}
	})
}

// parts returns the borders of what the workers of stage s reduce of a layer,
// by rank, and where each shard begins if all lie in that order.
func (e *Engine) parts(s int, shards []plan.Shard) (parts, places []int) {
	parts, places = []int{0}, make([]int, len(shards))
	at := 0
	for _, w := range e.plan.Stages[s].Workers {
		for i, p := range shards {
			if e.reducer(p) == w {
				places[i] = at
				at += p.Hi - p.Lo
			}
		}
		parts = append(parts, at)
	}
	return parts, places
}
