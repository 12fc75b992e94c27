// Package trainertest tests layers and losses: [Layer] and [Loss] run one the
// way a worker may, with micro-batches interleaved and repeated, on one and
// on several threads, compare the bits, and check the derivative by finite
// differences. Layers may nest calls of [trainer.Context.For].
package trainertest

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

// Options adjust a test. The zero value is right for most layers.
type Options struct {
	// Samples is the number of samples of a micro-batch; 0 means 3.
	Samples int

	// Classes bounds int32 inputs and targets, which are drawn from
	// [0, Classes); 0 means 2.
	Classes int

	// Scale is the standard deviation of float32 inputs; 0 means 1.
	Scale float64

	// ParamNoise is the standard deviation of what is added to every initial
	// parameter, so that parameters that begin as zeros or ones are tested
	// elsewhere too; 0 means 0.3, negative means none.
	ParamNoise float64

	// Step is the step of the finite differences; 0 means 0.03. Derivatives
	// are taken at this step and at half of it and extrapolated.
	Step float64

	// Tolerance is the largest difference between the derivative and the
	// finite difference, relative to the largest derivative with respect to
	// the same tensor; 0 means 0.004.
	Tolerance float64

	// NoGradient leaves the finite differences out, for layers that have no
	// derivative in places.
	NoGradient bool
}

func (o Options) withDefaults() Options {
	o.Samples, o.Classes = cmp.Or(o.Samples, 3), cmp.Or(o.Classes, 2)
	o.Scale, o.ParamNoise = cmp.Or(o.Scale, 1), cmp.Or(o.ParamNoise, 0.3)
	o.Step, o.Tolerance = cmp.Or(o.Step, 0.03), cmp.Or(o.Tolerance, 0.004)
	return o
}

func one(opts []Options) Options {
	if len(opts) > 1 {
		panic("trainertest: more than one Options")
	}
	if len(opts) == 1 {
		return opts[0].withDefaults()
	}
	return Options{}.withDefaults()
}

// threads of the runs that are compared with those of one thread.
const threads = 3

// Layer tests l on random inputs of the given kind. It fails t if
//
//   - a result differs in any bit when the micro-batch is run again, with
//     another in flight, on several threads, or at the same time as another;
//   - the layer reads memory that it has not written, leaves an element of a
//     parameter's gradient unset, or writes to what it was given;
//   - a derivative is not that of the forward pass.
func Layer(t testing.TB, l trainer.Layer, in trainer.Spec, opts ...Options) {
	t.Helper()
	o := one(opts)
	b := newBench(l, in, o)

	want := b.run(t, b.call(0, 1))
	other := b.run(t, b.call(1, 1))
	same(t, "run again", want, b.run(t, b.call(0, 1)))
	same(t, fmt.Sprintf("on %d threads", threads), want, b.run(t, b.call(0, threads)))

	first, second := b.forward(b.call(0, 1)), b.forward(b.call(1, threads))
	defer first.release()
	defer second.release()
	first.backward(t)
	second.backward(t)
	same(t, "with another micro-batch in flight", want, first.result)
	same(t, "behind another micro-batch", other, second.result)

	if !t.Failed() {
		b.together(t, want, other)
	}

	var eval [2]*pass
	for i, n := range []int{1, threads} {
		call := b.call(0, n)
		call.Train = false
		eval[i] = b.forward(call)
		defer eval[i].release()
	}
	same(t, fmt.Sprintf("in evaluation on %d threads", threads), eval[0].result, eval[1].result)

	if !o.NoGradient && !t.Failed() {
		b.gradients(t, want)
	}
}

// together runs both micro-batches at the same time, as a worker with several threads does. What calls share and change, the race
// detector finds, too.
func (b *bench) together(t testing.TB, want ...result) {
	t.Helper()
	const rounds = 3
	for range rounds {
		var all sync.WaitGroup
		passes, faults := make([]*pass, len(want)), make([]string, len(want))
		for i := range passes {
			all.Go(func() {
				passes[i] = b.forward(b.call(i, 1))
				faults[i] = passes[i].try()
			})
		}
		all.Wait()
		for i, p := range passes {
			p.release()
			if faults[i] != "" {
				t.Fatalf("at the same time as another micro-batch: %s", faults[i])
			}
			same(t, "at the same time as another micro-batch", want[i], p.result)
		}
	}
}

// bench is a layer with parameters and inputs for two micro-batches.
type bench struct {
	o      Options
	layer  trainer.Layer
	params []trainer.Tensor
	names  []string // of them
	in     [2]trainer.Tensor
}

func newBench(l trainer.Layer, in trainer.Spec, o Options) *bench {
	b := &bench{o: o, layer: l}
	draw := rng.New(1, rng.Place{Op: 1})
	for i, p := range l.Params() {
		x := trainer.NewTensor(trainer.Float32, p.Shape...)
		p.Init.Fill(x.F, 1, 0, i)
		for j := range x.F {
			x.F[j] += float32(max(o.ParamNoise, 0) * draw.Normal())
		}
		b.params, b.names = append(b.params, x), append(b.names, p.Name)
	}
	for i := range b.in {
		b.in[i] = random(in, o, &draw)
	}
	return b
}

func random(s trainer.Spec, o Options, draw *rng.Stream) trainer.Tensor {
	shape := append([]int{o.Samples}, s.Shape...)
	if s.Kind == trainer.Int32 {
		x := trainer.NewTensor(trainer.Int32, shape...)
		for i := range x.I {
			x.I[i] = int32(draw.IntN(o.Classes))
		}
		return x
	}
	x := trainer.NewTensor(trainer.Float32, shape...)
	for i := range x.F {
		x.F[i] = float32(o.Scale * draw.Normal())
	}
	return x
}

func (b *bench) call(microBatch, threads int) trainer.Call {
	return trainer.Call{
		Seed: 7, Step: 5, First: microBatch * b.o.Samples, Samples: b.o.Samples,
		Layer: 2, Train: true, Threads: threads,
	}
}

// pass is one micro-batch in flight.
type pass struct {
	b       *bench
	call    trainer.Call
	ctx     *trainer.Context
	release func()
	in, out trainer.Tensor
	stash   any
	result  result
}

// result is what a layer computed: named, in order.
type result struct {
	names   []string
	tensors []trainer.Tensor
}

func (r *result) add(name string, x trainer.Tensor) {
	r.names = append(r.names, name)
	r.tensors = append(r.tensors, clone(x))
}

func (b *bench) forward(call trainer.Call) *pass {
	p := &pass{b: b, call: call, in: b.in[call.First/b.o.Samples]}
	p.ctx, p.release = trainer.NewContext(call)
	p.out, p.stash = b.layer.Forward(p.ctx, b.params, p.in)
	p.result.add("the output", p.out)
	return p
}

// weights are the gradient of the pretended loss: the same for all runs.
func weights(shape []int) trainer.Tensor {
	draw := rng.New(2, rng.Place{})
	w := trainer.NewTensor(trainer.Float32, shape...)
	for i := range w.F {
		w.F[i] = float32(draw.Normal())
	}
	return w
}

func (p *pass) backward(t testing.TB) {
	t.Helper()
	if fault := p.try(); fault != "" {
		t.Fatalf("%s", fault)
	}
}

// try runs the backward pass, and returns what is wrong with what it makes by itself.
func (p *pass) try() (fault string) {
	// The gradient comes from memory of the layer behind, which is free soon.
	dout := weights(p.out.Shape)
	dp := make([]trainer.Tensor, len(p.b.params))
	for i, x := range p.b.params {
		dp[i] = trainer.NewTensor(trainer.Float32, x.Shape...)
		for j := range dp[i].F {
			dp[i].F[j] = float32(math.NaN())
		}
	}
	// Backward's scratch memory is not Forward's.
	ctx, release := trainer.NewContext(p.call)
	defer release()
	din := p.b.layer.Backward(ctx, p.b.params, p.stash, dout, dp)
	for i, name := range p.b.names {
		p.result.add("the gradient of "+name, dp[i])
	}
	if p.in.Kind() == trainer.Float32 {
		if din.Len() != p.in.Len() || din.F == nil {
			return fmt.Sprintf("the gradient of the input has shape %v, the input %v", din.Shape, p.in.Shape)
		}
		p.result.add("the gradient of the input", din)
	}
	for i, name := range p.result.names {
		for _, x := range p.result.tensors[i].F {
			if x != x {
				return fmt.Sprintf("%s holds NaN: memory was read before it was written, or an element was never set", name)
			}
		}
	}
	return ""
}

// run runs one micro-batch forward and backward and checks that nothing that
// is read-only was written.
func (b *bench) run(t testing.TB, call trainer.Call) result {
	t.Helper()
	var before result
	for i, name := range b.names {
		before.add(name, b.params[i])
	}
	before.add("its input", b.in[call.First/b.o.Samples])
	p := b.forward(call)
	defer p.release()
	before.add("its output", p.out)
	p.backward(t)
	after := append(slices.Clone(b.params), p.in, p.out)
	for i, name := range before.names {
		if !equal(before.tensors[i], after[i]) {
			t.Fatalf("the layer wrote to %s, which is read-only", name)
		}
	}
	return p.result
}

func clone(x trainer.Tensor) trainer.Tensor {
	return trainer.Tensor{Shape: slices.Clone(x.Shape), F: slices.Clone(x.F), I: slices.Clone(x.I)}
}

func equal(a, b trainer.Tensor) bool {
	return slices.Equal(a.Shape, b.Shape) && slices.Equal(a.I, b.I) && slices.EqualFunc(a.F, b.F, func(x, y float32) bool {
		return math.Float32bits(x) == math.Float32bits(y)
	})
}

func same(t testing.TB, how string, want, got result) {
	t.Helper()
	for i, name := range want.names {
		if !equal(want.tensors[i], got.tensors[i]) {
			t.Errorf("%s: %s has other bits", how, name)
		}
	}
}

// gradients compares derivatives with finite differences of
// L = Σ out·weights, summed in float64.
func (b *bench) gradients(t testing.TB, r result) {
	t.Helper()
	loss := func() float64 {
		p := b.forward(b.call(0, 1))
		defer p.release()
		w := weights(p.out.Shape)
		var sum float64
		for i, x := range p.out.F {
			sum += float64(float64(x) * float64(w.F[i]))
		}
		return sum
	}
	at := slices.Clone(b.params)
	if b.in[0].Kind() == trainer.Float32 {
		at = append(at, b.in[0])
	}
	for i, x := range at {
		b.o.check(t, r.names[i+1], x.F, r.tensors[i+1].F, loss)
	}
}

// check compares d, the derivative of loss at x, with finite differences:
// along some coordinates and along random directions through all of them.
func (o Options) check(t testing.TB, name string, x, d []float32, loss func() float64) {
	t.Helper()
	var largest float64
	for _, g := range d {
		largest = max(largest, math.Abs(float64(g)))
	}
	compare := func(where string, dir []float32, norm float64) {
		t.Helper()
		var want float64
		for i, g := range d {
			want += float64(float64(g) * float64(dir[i]))
		}
		got := o.derivative(x, dir, loss)
		limit := o.Tolerance * norm * max(largest, 1e-3)
		if diff := math.Abs(got - want); !(diff <= limit) {
			t.Errorf("%s%s is %.6g, but finite differences give %.6g (a difference of %.2g, allowed %.2g)", name, where, want, got, diff, limit)
		}
	}
	dir := make([]float32, len(x))
	const coordinates = 12
	for k := range min(coordinates, len(x)) {
		i := k * len(x) / min(coordinates, len(x))
		clear(dir)
		dir[i] = 1
		compare(fmt.Sprintf(" at element %d", i), dir, 1)
	}
	draw := rng.New(3, rng.Place{})
	for range 2 {
		// A direction of length 1.
		for i := range dir {
			dir[i] = float32(float64(1-2*draw.IntN(2)) / math.Sqrt(float64(len(x))))
		}
		compare(" along a random direction", dir, 1)
	}
}

// derivative is the central difference of loss at x along dir, at two steps,
// extrapolated (L. F. Richardson, 1911).
func (o Options) derivative(x, dir []float32, loss func() float64) float64 {
	saved := slices.Clone(x)
	defer copy(x, saved)
	at := func(h float64) float64 {
		for i := range x {
			x[i] = saved[i] + float32(h*float64(dir[i]))
		}
		return loss()
	}
	central := func(h float64) float64 { return (at(h) - at(-h)) / (2 * h) }
	return (4*central(o.Step/2) - central(o.Step)) / 3
}

// Loss tests a loss on random outputs and targets of the given kinds, in the
// same way as [Layer].
func Loss(t testing.TB, l trainer.Loss, out, target trainer.Spec, opts ...Options) {
	t.Helper()
	o := one(opts)
	draw := rng.New(1, rng.Place{Op: 2})
	x, y := random(out, o, &draw), random(target, o, &draw)
	keepX, keepY := clone(x), clone(y)
	run := func(train bool, threads int) (sum float64, count int64, d trainer.Tensor) {
		ctx, release := trainer.NewContext(trainer.Call{Samples: o.Samples, Train: train, Threads: threads})
		defer release()
		return l.Loss(ctx, x, y)
	}
	sum, count, d := run(true, 1)
	if math.IsNaN(sum) || count < 1 {
		t.Fatalf("the loss is %v over %d targets", sum, count)
	}
	if d.Len() != x.Len() {
		t.Fatalf("the gradient has shape %v, the output %v", d.Shape, x.Shape)
	}
	for _, n := range []int{1, threads} {
		if s, c, e := run(true, n); math.Float64bits(s) != math.Float64bits(sum) || c != count || !equal(d, e) {
			t.Errorf("run again on %d threads, it gives other bits", n)
		}
		if s, c, _ := run(false, n); math.Float64bits(s) != math.Float64bits(sum) || c != count {
			t.Errorf("in evaluation on %d threads, it gives another loss", n)
		}
	}
	if !t.Failed() { // as a worker with several threads does
		var all sync.WaitGroup
		sums := make([]float64, threads)
		for i := range sums {
			all.Go(func() { sums[i], _, _ = run(true, 1) })
		}
		all.Wait()
		for _, s := range sums {
			if math.Float64bits(s) != math.Float64bits(sum) {
				t.Error("at the same time as another call, it gives another loss")
			}
		}
	}
	if !equal(x, keepX) || !equal(y, keepY) {
		t.Error("the loss wrote to its arguments, which are read-only")
	}
	if !o.NoGradient && !t.Failed() {
		o.check(t, "the gradient", x.F, d.F, func() float64 { s, _, _ := run(false, 1); return s })
	}
}
