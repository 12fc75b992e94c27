package engine

import (
	"context"
	"fmt"

	"github.com/soliton-train/soliton/comm"
	"github.com/soliton-train/soliton/elastic/graph"
	"github.com/soliton-train/soliton/elastic/plan"
	"github.com/soliton-train/soliton/internal/kernel"
	"github.com/soliton-train/soliton/internal/tensor"
	"github.com/soliton-train/soliton/internal/tree"
)

// stepState is a step until its commit.
type stepState struct {
	number int
	queue  *graph.Queue
	works  map[graph.Pair]*work
	left   []int // of each layer held: backward passes that are to come
	reduce int   // layers whose reduction goes on

	// Boundary tensors that this worker made or got are kept until the commit:
	// should their receiver be lost, another can have them.
	kept  [][]float32
	sends []*comm.Sending
}

// work is one micro-batch in one stage on this worker.
type work struct {
	batch *batch // in the first and the last stage
	in    tensor.Tensor
	pass  Pass
	dout  tensor.Tensor
}

// compute runs the passes routed to this worker, and leaves the complete
// gradients of the shards it owns and the sums of its losses.
func (e *Engine) compute(ctx context.Context, step int) error {
	if err := e.begin(ctx, step); err != nil {
		return err
	}
	st := e.step
	for st.queue.Left() > 0 || st.reduce > 0 {
		if err := e.deliver(); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if t, ok := st.queue.Next(); ok {
			if err := e.run(ctx, t); err != nil {
				return err
			}
			st.queue.Done(t)
			continue
		}
		if st.queue.Left() == 0 && st.reduce == 0 {
			break
		}
		select {
		case <-e.mail.signal:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// deliver handles what has come from other goroutines.
func (e *Engine) deliver() error {
	for _, f := range e.mail.take() {
		if err := f(); err != nil {
			return err
		}
	}
	return nil
}

// begin sets up a step: what runs here, and what will come from others.
func (e *Engine) begin(ctx context.Context, step int) error {
	// Parameters of the step before are still on their way under its name.
	e.c.Network.Advance(uint64(max(step-1, 0)))
	st := &stepState{
		number: step,
		queue:  graph.NewQueue(len(e.plan.Stages)),
		works:  make(map[graph.Pair]*work),
		left:   make([]int, len(e.c.Layers)),
	}
	e.step = st
	for s := range e.c.Stages {
		st.queue.SetLimit(s, e.plan.Limit(s, e.c.Self))
		mine := 0
		for m, w := range e.plan.Route[s] {
			p := pair(s, m)
			if w != e.c.Self || !e.plan.Runs(p, step) {
				continue
			}
			mine++
			st.works[p] = &work{}
			st.queue.Assign(p)
			if s == 0 {
				st.queue.Arrive(graph.Task{Kind: graph.Forward, Pair: pair(s, m)})
			}
		}
		for l := e.plan.Stages[s].Lo; l < e.plan.Stages[s].Hi; l++ {
			st.left[l] = mine
		}
		if s > 0 {
			if err := e.expectInputs(ctx, s); err != nil {
				return err
			}
		}
		if mine == 0 {
			for l := e.plan.Stages[s].Hi - 1; l >= e.plan.Stages[s].Lo; l-- {
				e.startReduce(ctx, l)
			}
		}
	}
	return nil
}

// shape is the shape of the input of a stage for one micro-batch, which the
// stage before tells before its first boundary tensor.
type shape struct {
	dims []int
	told bool // by this worker to the stage behind
	wait bool // being received
}

// maxDims bounds the dimensions of a boundary tensor.
const maxDims = 8

// shapeKey names the message with the shape of a stage's input. It belongs to
// the first step, whose keys last until the third begins.
func shapeKey(stage int) comm.Key {
	return comm.Key{Kind: comm.KindUser, Step: 1, Layer: int32(stage)}
}

// expectInputs makes room for the inputs of stage s that other workers make.
func (e *Engine) expectInputs(ctx context.Context, s int) error {
	sh := &e.shapes[s]
	if sh.dims != nil {
		if e.step == nil {
			return nil // between steps; the next one asks again
		}
		for m := range e.plan.Micros() {
			if w := e.step.works[pair(s, m)]; w != nil && e.plan.Route[s-1][m] != e.c.Self {
				e.expect(s, m, comm.Forward, sh.dims)
			}
		}
		return nil
	}
	if !sh.wait {
		sh.wait = true
		words := make([]int64, maxDims)
		r := e.c.Network.Expect(shapeKey(s), int64Bytes(words))
		r.OnDone(func() {
			e.mail.put(func() error {
				n, _, err := r.Wait(context.Background()) // it has ended
				if err != nil {
					return err
				}
				return e.learnShape(ctx, s, words[:n/8])
			})
		})
	}
	return nil
}

func (e *Engine) learnShape(ctx context.Context, s int, words []int64) error {
	size := 1
	for _, d := range words {
		if d < 1 || d > 1<<31 || size > 1<<34/int(d) {
			return fmt.Errorf("stage %d was told the shape %v for its input", s, words)
		}
		e.shapes[s].dims = append(e.shapes[s].dims, int(d))
		size *= int(d)
	}
	return e.expectInputs(ctx, s)
}

// tellShape tells the workers of stage s the shape of their input.
func (e *Engine) tellShape(s int, dims []int) error {
	if e.shapes[s].told {
		return nil
	}
	e.shapes[s].told = true
	if len(dims) > maxDims {
		return fmt.Errorf("the input of stage %d has %d dimensions; at most %d are supported", s, len(dims), maxDims)
	}
	words := make([]int64, len(dims))
	for i, d := range dims {
		words[i] = int64(d)
	}
	for _, w := range e.plan.Stages[s].Workers {
		if w != e.c.Self {
			e.step.sends = append(e.step.sends, e.c.Network.Post(e.session(w), shapeKey(s), int64Bytes(words), comm.Control))
		} else if e.shapes[s].dims == nil {
			e.shapes[s].dims = dims
		}
	}
	return nil
}

// boundaryKey names the tensor that crosses from stage b-1 to b, or back.
func boundaryKey(step, b, micro int, dir uint8) comm.Key {
	return comm.Key{Kind: comm.KindBoundary, Step: uint64(step), Layer: int32(b), Micro: int32(micro), Dir: dir}
}

// expect posts the receive of a boundary tensor.
func (e *Engine) expect(b, m int, dir uint8, dims []int) {
	st := e.step
	buf := e.free.get(tensor.Size(dims))
	st.kept = append(st.kept, buf)
	r := e.c.Network.Expect(boundaryKey(st.number, b, m, dir), comm.Bytes(buf))
	r.OnDone(func() {
		e.mail.put(func() error {
			n, from, err := r.Wait(context.Background()) // it has ended
			if err != nil {
				return err
			}
			if n != 4*len(buf) {
				return fmt.Errorf("step %d: worker %v sent %d bytes of a boundary tensor of %v", st.number, from, n, dims)
			}
			e.arrive(b, m, dir, tensor.Of(buf, dims...))
			return nil
		})
	})
}

// arrive hands a boundary tensor to the pass that waits for it.
func (e *Engine) arrive(b, m int, dir uint8, t tensor.Tensor) {
	if dir == comm.Forward {
		e.step.works[pair(b, m)].in = t
		e.step.queue.Arrive(graph.Task{Kind: graph.Forward, Pair: pair(b, m)})
		return
	}
	e.step.works[pair(b-1, m)].dout = t
	e.step.queue.Arrive(graph.Task{Kind: graph.Backward, Pair: pair(b-1, m)})
}

// pass sends a boundary tensor to the worker that goes on with it. It is
// copied, because the memory of passes is used again before the commit.
func (e *Engine) pass(b, m int, dir uint8, t tensor.Tensor) {
	st := e.step
	buf := e.free.get(len(t.F))
	copy(buf, t.F)
	st.kept = append(st.kept, buf)
	to := e.plan.Route[b][m]
	if dir == comm.Backward {
		to = e.plan.Route[b-1][m]
	}
	if to == e.c.Self {
		e.arrive(b, m, dir, tensor.Of(buf, t.Shape...))
		return
	}
	st.sends = append(st.sends, e.c.Network.Post(e.session(to), boundaryKey(st.number, b, m, dir), comm.Bytes(buf), comm.Bulk))
}

// run runs a forward or backward pass.
func (e *Engine) run(ctx context.Context, t graph.Task) error {
	w := e.step.works[pair(t.Stage, t.Micro)]
	if t.Kind == graph.Backward {
		return e.backward(ctx, t.Stage, t.Micro, w)
	}
	return e.forward(ctx, t.Stage, t.Micro, w)
}

func (e *Engine) forward(ctx context.Context, s, m int, w *work) error {
	st, stage, last := e.step, e.c.Stages[s], len(e.plan.Stages)-1
	micro := Micro{
		Step: st.number, Index: m, First: m * e.c.MicroBatch, Samples: e.c.MicroBatch, Train: true,
		Ready: func(layer int) error { return e.params[layer].wait(ctx) },
	}
	if s == 0 || s == last {
		w.batch = e.batch()
		base := uint64(st.number-1)*uint64(e.c.GlobalBatch) + uint64(micro.First)
		if err := w.batch.load(micro.Samples, func(i int, in, target tensor.Tensor) error {
			return e.c.Load(base+uint64(i), in, target)
		}); err != nil {
			return fmt.Errorf("step %d: %w", st.number, err)
		}
	}
	if s == 0 {
		w.in = w.batch.in
	}
	pass, out, err := stage.Forward(micro, w.in)
	if err != nil {
		return err
	}
	w.pass = pass
	e.Forwards++
	if s < last {
		if err := e.tellShape(s+1, out.Shape); err != nil {
			return err
		}
		if e.plan.Route[s+1][m] != e.c.Self {
			e.expect(s+1, m, comm.Backward, out.Shape)
		}
		e.pass(s+1, m, comm.Forward, out)
		return nil
	}
	sum, count, dout := stage.Loss(pass, w.batch.target)
	if !finite(sum) {
		return e.nonFinite(st.number, stage.Suspect(pass), "loss")
	}
	if dout.Len() != out.Len() {
		panic(fmt.Sprintf("the loss returned a gradient of shape %v for an output of shape %v", dout.Shape, out.Shape))
	}
	e.losses.Put(tree.Leaf(m), Loss{sum, count})
	w.dout = dout
	st.queue.Arrive(graph.Task{Kind: graph.Backward, Pair: pair(s, m)})
	return nil
}

func (e *Engine) backward(ctx context.Context, s, m int, w *work) error {
	pass := w.pass
	w.pass = nil
	din := e.c.Stages[s].Backward(pass, w.dout, leaf{e, ctx, m})
	e.Backwards++
	if w.batch != nil {
		e.batches = append(e.batches, w.batch)
		w.batch = nil
	}
	if s > 0 {
		e.pass(s, m, comm.Backward, din)
	}
	return nil
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

// leaf puts the gradients of one micro-batch into the trees.
type leaf struct {
	e     *Engine
	ctx   context.Context
	index int
}

func (l leaf) Buffer(layer int) []float32 { return l.e.free.get(len(l.e.c.Layers[layer].Params)) }

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
	if l.e.step.left[layer]--; l.e.step.left[layer] == 0 {
		l.e.startReduce(l.ctx, layer)
	}
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

// startReduce begins to bring the complete gradient of a layer to the owners
// of its shards, when this worker has run all its backward passes of it.
func (e *Engine) startReduce(ctx context.Context, layer int) {
	s := e.plan.StageOf(layer)
	if e.groups[s] == nil {
		return // the sum is complete here
	}
	var shards []int // of the layer, by index in the plan
	for i, sh := range e.plan.Shards {
		if sh.Layer == layer {
			shards = append(shards, i)
		}
	}
	if len(shards) == 0 {
		return
	}
	reduce := e.treeReduce
	if e.c.Fast {
		reduce = e.fastReduce
	}
	work := reduce(ctx, s, layer, shards)
	e.step.reduce++
	e.tasks.Go(func() {
		err := work()
		e.mail.put(func() error {
			e.step.reduce--
			for _, v := range e.grads[layer].Clear() {
				e.free.put(v)
			}
			if err == nil && e.c.Zero == 1 {
				e.share(s, shards)
			}
			return err
		})
	})
}

// treeReduce returns the reduction of a layer of stage s over the tree.
func (e *Engine) treeReduce(ctx context.Context, s, layer int, shards []int) func() error {
	t := comm.Tree{Micros: e.plan.Micros()}
	ranks := make(map[plan.WorkerID]int)
	for i, w := range e.plan.Stages[s].Workers {
		ranks[w] = i
		t.Nodes = append(t.Nodes, e.plan.Nodes(s, w, e.step.number))
	}
	for _, i := range shards {
		sh := e.plan.Shards[i]
		t.Shards = append(t.Shards, comm.TreeShard{Layer: sh.Layer, Lo: sh.Lo, Hi: sh.Hi, Owner: ranks[sh.Owner]})
	}
	sums, call := e.grads[layer], e.call(e.step.number, layer)
	return func() error {
		return e.groups[s].TreeReduce(ctx, call, t, func(shard int, n tree.Node) []float32 {
			v, _ := sums.At(n)
			return v[t.Shards[shard].Lo:t.Shards[shard].Hi]
		}, func(shard int) []float32 { return e.totals[shards[shard]] }, nil)
	}
}

// fastReduce returns the reduction of a layer of stage s without an order.
func (e *Engine) fastReduce(ctx context.Context, s, layer int, shards []int) func() error {
	if e.plain[layer] == nil { // nothing of it ran here
		e.plain[layer] = e.free.get(e.c.Layers[layer].Size())
		clear(e.plain[layer])
	}
	parts, err := e.parts(s, shards)
	sum, call := e.plain[layer], e.call(e.step.number, layer)
	return func() error {
		if err != nil {
			return err
		}
		return e.groups[s].ReduceScatter(ctx, call, sum, parts)
	}
}

// parts returns the borders of what the workers of stage s own of a layer, in
// the order of their ranks.
func (e *Engine) parts(s int, shards []int) ([]int, error) {
	parts := make([]int, 1, len(e.plan.Stages[s].Workers)+1)
	at := 0 // in shards
	for _, w := range e.plan.Stages[s].Workers {
		end := parts[len(parts)-1]
		for at < len(shards) && e.plan.Shards[shards[at]].Owner == w {
			end = e.plan.Shards[shards[at]].Hi
			at++
		}
		parts = append(parts, end)
	}
	if at < len(shards) {
		return nil, fmt.Errorf("fast reduction needs the shards of a layer in the order of their owners' ranks: %+v", e.plan.Shards[shards[at]])
	}
	return parts, nil
}

// share brings the complete gradients of shards from their owners to all
// workers of stage s.
func (e *Engine) share(s int, shards []int) {
	st := e.step
	for _, i := range shards {
		sh := e.plan.Shards[i]
		key := comm.Key{Kind: comm.KindGradient, Step: uint64(st.number), Layer: int32(sh.Layer), Lo: int64(sh.Lo), Hi: int64(sh.Hi), Node: tree.Root(e.plan.Micros())}
		data := comm.Bytes(e.total(i))
		if sh.Owner == e.c.Self {
			for _, w := range e.plan.Stages[s].Workers {
				if w != e.c.Self {
					st.sends = append(st.sends, e.c.Network.Post(e.session(w), key, data, comm.Bulk))
				}
			}
			continue
		}
		st.reduce++
		r := e.c.Network.Expect(key, data)
		r.OnDone(func() {
			e.mail.put(func() error {
				st.reduce--
				n, from, err := r.Wait(context.Background()) // it has ended
				if err == nil && n != len(data) {
					err = fmt.Errorf("step %d: worker %v sent %d bytes of a gradient of %d", st.number, from, n, len(data))
				}
				return err
			})
		})
	}
}
