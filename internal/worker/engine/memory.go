package engine

import (
	"bytes"
	"context"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/pages"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// memory is what the shell holds for the core, which knows it by name.
type memory struct {
	plan   *plan.Plan // that memory is for; no workers before the first
	stages map[int]Stage
	shards map[id.Range]*shard
	former []*shard // handed over; kept until the next commit, for a recovery before it
	gates  []gate   // of each layer

	initial struct { // as it is where the run begins
		shards map[id.Range]*shard
		stages map[[2]int]Stage // by layers
	}
	beginning sync.Mutex // held while first values are made

	// Of the step:
	number   int // of it
	updating int // step whose update goes on
	tensors  map[key.Tensor]*boundary
	made     map[key.Tensor]tensor.Tensor // by the pass that has just ended
	works    map[graph.Pair]*task
	grads    []*tree.Sums[[]float32] // of each layer that this worker holds
	plain    [][]float32             // the same where reduction is fast: one sum, nil before the first gradient
	losses   *tree.Sums[core.Measured]
	scratch  [][]float32
	spot     [2][]uint32 // digests of the first and the second run of a spot check, where they were here
	suspect  int         // a layer that may have caused a loss that is not finite, -1 if there is none

	blocks   map[blockArray][]float32
	incoming map[id.Range]*incoming
	bases    map[core.Transfer][]float32
	copies   bool // bases are being copied, so that memory of those which are sent is of use
	spares   pool // such memory

	free    pool
	late    []lateBuffer
	loans   []loan // what gradients are sent out of
	batches batches
	adding  []sync.Mutex // held while gradients of a layer are added
}

func (m *memory) init(c *Config, micros int, merge func(left, right []float32) []float32) {
	m.plan = new(plan.Plan)
	m.stages = make(map[int]Stage)
	m.shards = make(map[id.Range]*shard)
	m.gates = make([]gate, len(c.Layers))
	m.initial.shards, m.initial.stages = make(map[id.Range]*shard), make(map[[2]int]Stage)
	m.tensors, m.made = make(map[key.Tensor]*boundary), make(map[key.Tensor]tensor.Tensor)
	m.works = make(map[graph.Pair]*task)
	m.grads, m.plain = make([]*tree.Sums[[]float32], len(c.Layers)), make([][]float32, len(c.Layers))
	m.adding = make([]sync.Mutex, len(c.Layers))
	m.batches.make = func() *batch { return &batch{makeBatch(c.Input, c.MicroBatch), makeBatch(c.Target, c.MicroBatch)} }
	m.losses = tree.NewSums(micros, core.Measured.Add)
	m.blocks, m.incoming = make(map[blockArray][]float32), make(map[id.Range]*incoming)
}

// gradientMemory makes sure that sh.own is memory that no earlier gradient is being sent out of. It is not of the pool, which may be memory of a process
// beside this one and cannot be collected: a shard that goes takes its memory with it.
func (e *Engine) gradientMemory(sh *shard) {
	if sh.own == nil || e.lent(sh.own) {
		sh.own = pages.Make(sh.Hi - sh.Lo)
	}
}

// loan is an array that a gradient is sent out of, to a worker that will hold its shard. No commit waits for that, so the array may be
// needed again before it is sent. It is a whole array: a shard's own, a sum of the tree, or what a fast reduction works on.
type loan struct {
	array *float32 // its first element
	until *comm.Sending
}

// lend takes note that a part of an array is being sent.
func (e *Engine) lend(array []float32, s *comm.Sending) {
	e.loans = append(e.loans, loan{&array[0], s})
}

func (l loan) ended() bool { return ended(l.until) }

// lent reports whether an array is still being sent.
func (e *Engine) lent(array []float32) bool {
	return slices.ContainsFunc(e.loans, func(l loan) bool { return len(array) > 0 && l.array == &array[0] && !l.ended() })
}

// giveBack puts an array into the pool once it is not being sent any more.
func (e *Engine) giveBack(array []float32) {
	if !e.lent(array) {
		e.free.put(array)
		return
	}
	late := lateBuffer{buf: array}
	for _, l := range e.loans {
		if l.array == &array[0] {
			late.until = append(late.until, l.until.Done())
		}
	}
	e.late = append(e.late, late)
}

// boundary is the memory of a boundary tensor.
type boundary struct {
	t      tensor.Tensor   // t.F is of the engine's pool
	recv   *comm.Receiving // into it
	sends  []*comm.Sending
	digest []byte
}

// blockArray names an array of a block that is repaired.
type blockArray struct {
	block id.Range
	array int
}

// keepTensor keeps the tensor that a pass has made, in place of one that was expected.
func (e *Engine) keepTensor(d core.Keep) {
	if b := e.tensors[d.Tensor]; b != nil {
		e.cancelReceive(d.Cancel, false)
		e.late = append(e.late, lateBuffer{b.t.F, []<-chan struct{}{b.recv.Done()}})
	}
	e.tensors[d.Tensor] = &boundary{t: e.made[d.Tensor]}
	delete(e.made, d.Tensor)
}

// compare compares a tensor with a digest, or with the one that a pass has made.
func (e *Engine) compare(d core.Compare) bool {
	b := e.tensors[d.Tensor]
	if d.Digest != nil {
		return bytes.Equal(b.digestBytes(), d.Digest)
	}
	made := e.made[d.Tensor]
	delete(e.made, d.Tensor)
	defer e.free.put(made.F)
	return e.guard == nil || zero.DigestOf(b.t.F) == zero.DigestOf(made.F)
}

// clear gives up the memory of the step.
func (e *Engine) clear() {
	for l, sums := range e.grads {
		if sums != nil {
			for _, g := range sums.Clear() {
				e.giveBack(g)
			}
		}
		if e.plain[l] != nil {
			e.giveBack(e.plain[l])
			e.plain[l] = nil
		}
	}
	e.losses.Clear()
	for _, x := range e.scratch {
		e.giveBack(x)
	}
	e.scratch = nil
	// A receiver that had a tensor already may not have said so yet.
	for _, b := range e.tensors {
		l := lateBuffer{buf: b.t.F}
		for _, s := range b.sends {
			l.until = append(l.until, s.Done())
		}
		if b.recv != nil {
			b.recv.Cancel(errClosed)
			l.until = append(l.until, b.recv.Done())
		}
		e.late = append(e.late, l)
	}
	clear(e.tensors)
	clear(e.works)
	e.spot = [2][]uint32{}
	e.reap()
}

// apply goes over to a plan.
func (e *Engine) apply(d core.Apply) error {
	e.plan = d.Plan
	e.ahead.forget()
	for _, s := range d.Drop {
		delete(e.stages, s)
	}
	for _, s := range d.Serve {
		st := e.plan.Stages[s]
		if e.stages[s] = e.initial.stages[[2]int{st.Lo, st.Hi}]; e.stages[s] == nil {
			e.stages[s] = e.c.Stage(st.Lo, st.Hi)
		}
	}
	var firsts []int
	for _, s := range e.plan.StagesOf(e.c.Self.ID) {
		firsts = append(firsts, e.plan.Stages[s].Lo)
	}
	e.c.Meter.Keep(firsts...)
	for _, l := range d.Fresh {
		e.grads[l] = tree.NewSums(e.micros, e.mergeGrads)
	}
	for _, l := range d.Stale {
		e.grads[l] = nil
	}
	if err := e.hold(d); err != nil {
		return err
	}
	for _, l := range d.Fresh {
		params := e.c.Layers[l].Params
		for _, sh := range e.shards {
			if sh.Layer == l && sh.state != nil && sh.late == nil {
				place(params[sh.Lo:sh.Hi], sh.params)
				sh.params = params[sh.Lo:sh.Hi]
			}
		}
		if d.Initial && !e.c.Beside {
			e.guard.take(id.Range{Layer: l, Lo: 0, Hi: len(params)}, params)
		}
	}
	e.watch(d.Initial)
	if !d.Initial {
		clear(e.initial.shards)
		clear(e.initial.stages)
	}
	return nil
}

// values returns the number of the values that a layer's parameters have, see Micro.Values.
func (e *Engine) values(layer int) uint64 { return e.gates[layer].values.Load() }

// changed says that all parameters may have other values than before.
func (e *Engine) changed() {
	for l := range e.gates {
		e.gates[l].change()
	}
}

// allValues is the newest number of values in this process. What has a copy of parameters may outlive the engine.
var allValues atomic.Uint64

// gate lets passes wait for the parameters of a layer. The loop shuts and opens it.
type gate struct {
	full   atomic.Pointer[chan struct{}] // closed when nothing is missing; nil if nothing was
	values atomic.Uint64                 // see Micro.Values
}

func (g *gate) shut() {
	full := make(chan struct{})
	g.full.Store(&full)
}

func (g *gate) change() { g.values.Store(allValues.Add(1)) }

func (g *gate) open() {
	g.change() // before the passes that wait
	close(*g.full.Load())
}

// isOpen reports whether nothing is missing.
func (g *gate) isOpen() bool {
	full := g.full.Load()
	return full == nil || comm.Closed(*full)
}

// wait returns when nothing is missing.
func (g *gate) wait(ctx context.Context) error {
	if g.isOpen() {
		return nil
	}
	select {
	case <-*g.full.Load():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// lateBuffer is memory of the pool that the network may still use.
type lateBuffer struct {
	buf   []float32
	until []<-chan struct{}
}

// reap gives memory back that the network is done with.
func (e *Engine) reap() {
	e.loans = slices.DeleteFunc(e.loans, loan.ended)
	e.late = slices.DeleteFunc(e.late, func(l lateBuffer) bool {
		for _, c := range l.until {
			if !comm.Closed(c) {
				return false
			}
		}
		e.free.put(l.buf)
		return true
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

// pool keeps memory of float32 for reuse, by size. The zero value is ready. The loop and the computing goroutines share it.
type pool struct {
	mu   sync.Mutex
	free map[int][][]float32
	make func(n int) []float32 // nil: of the heap
}

// get returns n elements of unspecified content.
func (p *pool) get(n int) []float32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f := p.free[n]; len(f) > 0 {
		p.free[n] = f[:len(f)-1] // the newest, which may still be in the cache
		return f[len(f)-1]
	}
	if p.make != nil {
		return p.make(n)
	}
	return pages.Make(n)
}

// drop gives up the memory that is free.
func (p *pool) drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = nil
}

func (p *pool) put(x []float32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.free == nil {
		p.free = make(map[int][][]float32)
	}
	p.free[len(x)] = append(p.free[len(x)], x)
}

// batch is memory for the samples of one micro-batch.
type batch struct{ in, target tensor.Tensor }

// batches keeps that memory for reuse.
type batches struct {
	mu   sync.Mutex
	free []*batch
	make func() *batch
}

func (b *batches) get() *batch {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := len(b.free)
	if n == 0 {
		return b.make()
	}
	x := b.free[n-1]
	b.free = b.free[:n-1]
	return x
}

func (b *batches) put(all ...*batch) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.free = append(b.free, all...)
}

func makeBatch(s tensor.Spec, samples int) tensor.Tensor {
	return tensor.Make(s.Kind, append([]int{samples}, s.Shape...)...)
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
func row(t tensor.Tensor, i int) tensor.Tensor { return part(t, i, t.Shape[1:]...) }

// head returns the first n samples of t.
func head(t tensor.Tensor, n int) tensor.Tensor {
	return part(t, 0, append([]int{n}, t.Shape[1:]...)...)
}

// part returns part i of t, all of one shape.
func part(t tensor.Tensor, i int, shape ...int) tensor.Tensor {
	p := tensor.Tensor{Shape: shape}
	n := tensor.Size(shape)
	if t.I != nil {
		p.I = t.I[i*n : (i+1)*n : (i+1)*n]
	} else {
		p.F = t.F[i*n : (i+1)*n : (i+1)*n]
	}
	return p
}
