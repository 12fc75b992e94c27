package trainer

import (
	"fmt"
	"math"
	"sync"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/worker/engine"
	"github.com/soliton-train/soliton/internal/worker/model"
	"github.com/soliton-train/soliton/internal/worker/process"
)

// stage runs layers [lo, hi) of a model for the engine.
type stage struct {
	engine.KeepsNothing
	model  *Model
	lo, hi int
	params *model.Params
	ties   *model.Ties
	pool   *kernel.Pool
	seed   uint64

	mu   sync.Mutex
	free []*flight // memory of passes that have ended

	lanes [engine.Lanes]lane
}

// lane is what passes of one lane need.
type lane struct {
	back   [2]tensor.Arena // scratch memory of Backward, in turns
	calls  *process.Calls
	before uint64 // of calls, when the call of the moment began
}

// enter and leave record a call of user code. After a panic, the record tells which it was.
func (l *lane) enter(layer int, kind control.CallKind) { l.before = l.calls.Enter(kind, layer, 0) }
func (l *lane) leave()                                 { l.calls.Leave(l.before) }

// flight is one micro-batch in flight. outs and stash count from the first
// layer of the stage.
type flight struct {
	micro engine.Micro
	arena tensor.Arena
	outs  []Tensor
	stash []any

	in     []int    // shape of the input
	shared []Tensor // values of shared parameters that are lent
	owed   []Tensor // gradients of shared parameters, for their owners
}

func newStage(m *Model, lo, hi int, params *model.Params, pool *kernel.Pool, seed uint64, calls *process.Calls) *stage {
	ties, _ := m.ties()
	s := &stage{model: m, lo: lo, hi: hi, params: params, ties: ties, pool: pool, seed: seed}
	for i := range s.lanes {
		s.lanes[i].calls = calls.Lane(i)
	}
	return s
}

func (s *stage) context(m engine.Micro, layer int, arena *tensor.Arena) *Context {
	call := Call{Seed: s.seed, Step: uint32(m.Step), First: m.First, Samples: m.Samples, Layer: layer, Train: m.Train}
	return &Context{call: call, pool: s.pool, arena: arena}
}

// flight returns memory for a pass.
func (s *stage) flight() *flight {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.free)
	if n == 0 {
		return &flight{}
	}
	f := s.free[n-1]
	s.free = s.free[:n-1]
	return f
}

// Forward implements [engine.Stage].
func (s *stage) Forward(m engine.Micro, in tensor.Tensor) (engine.Pass, tensor.Tensor, error) {
	f, at := s.flight(), &s.lanes[m.Lane]
	f.micro, f.shared, f.owed = m, s.ties.Shared(), s.ties.Shared()
	if s.lo > 0 {
		in = s.ties.Unpack(s.lo-1, in, f.shared)
	}
	f.in = in.Shape
	for i := s.lo; i < s.hi; i++ {
		if m.Ready != nil {
			if err := m.Ready(i); err != nil {
				s.Drop(f)
				return nil, Tensor{}, err
			}
		}
		l := s.model.Layers[i]
		at.enter(i, control.CallForward)
		out, stash := l.Forward(s.context(m, i, &f.arena), s.tensors(f, i), in)
		if len(out.Shape) == 0 || out.Shape[0] != m.Samples || len(out.F) != out.Len() {
			panic(fmt.Sprintf("returned %d float32 numbers of shape %v for %d samples; the first dimension counts samples", len(out.F), out.Shape, m.Samples))
		}
		at.leave()
		if m.Made != nil {
			m.Made(out)
		}
		f.outs = append(f.outs, out)
		f.stash = append(f.stash, stash)
		in = out
	}
	return f, s.ties.Pack(s.hi-1, in, f.shared, f.arena.Tensor), nil
}

// tensors returns the parameters of a layer, and lends those that it shares.
func (s *stage) tensors(f *flight, layer int) []Tensor {
	all := s.ties.Declared(layer, s.params.Views(layer), func(k int, _ []int) Tensor { return f.shared[k] })
	s.ties.Each(layer, all, func(k int, x Tensor, _ bool) { f.shared[k] = x })
	return all
}

// settle adds what is owed for a layer's shared parameters to their gradients, and has the owners of those that it borrows owed the sums.
func (s *stage) settle(f *flight, layer int, grads []Tensor) {
	s.ties.Each(layer, grads, func(k int, grad Tensor, borrowed bool) {
		if owed := f.owed[k]; owed.F != nil {
			s.pool.For(len(grad.F), 4096, func(lo, hi int) { kernel.Add(grad.F[lo:hi], owed.F[lo:hi], grad.F[lo:hi]) })
		}
		if f.owed[k] = (Tensor{}); borrowed {
			f.owed[k] = grad
		}
	})
}

// Loss implements [engine.Stage].
func (s *stage) Loss(p engine.Pass, target tensor.Tensor) (sum float64, count int64, dout tensor.Tensor) {
	f := p.(*flight)
	at := &s.lanes[f.micro.Lane]
	at.enter(0, control.CallLoss)
	out := f.outs[len(f.outs)-1]
	c := s.context(f.micro, len(s.model.Layers), &f.arena)
	sum, count, dout = s.model.Loss.Loss(c, out, target)
	for i, m := range s.model.Metrics {
		total, n := m.Of(c, out, target)
		f.micro.Metric(i, total, n)
	}
	if f.micro.Train && len(dout.F) != out.Len() {
		panic(fmt.Sprintf("returned a gradient of %d numbers for an output of shape %v", len(dout.F), out.Shape))
	}
	at.leave() // not deferred: a panic keeps the place
	return sum, count, dout
}

// Backward implements [engine.Stage]. Its scratch memory is two arenas: a
// layer's memory lives until the layer before has run, and reusing little
// memory often keeps it in the cache.
func (s *stage) Backward(p engine.Pass, dout tensor.Tensor, grads engine.Gradients) tensor.Tensor {
	f, at := p.(*flight), &s.lanes[grads.Lane()]
	dout = s.ties.Unpack(s.hi-1, dout, f.owed)
	for i := s.hi - 1; i >= s.lo; i-- {
		// A layer may pass on what it was given, so dout says which arena is
		// free, not the number of the layer.
		scratch := at.scratch(dout)
		scratch.Reset()
		flat := grads.Buffer(i)
		dp := s.ties.Declared(i, s.params.Split(i, flat), func(_ int, shape []int) Tensor { return f.arena.Tensor(shape...) })
		at.enter(i, control.CallBackward)
		din := s.model.Layers[i].Backward(s.context(f.micro, i, scratch), s.tensors(f, i), f.stash[i-s.lo], dout, dp)
		shape := f.in
		if i > s.lo {
			shape = f.outs[i-s.lo-1].Shape
		}
		if i > 0 && len(din.F) != tensor.Size(shape) {
			panic(fmt.Sprintf("returned a gradient of %d numbers for an input of shape %v", len(din.F), shape))
		}
		at.leave()
		s.settle(f, i, dp)
		grads.Done(i, flat)
		if f.micro.Made != nil {
			f.micro.Made(din)
		}
		dout = din
	}
	if s.lo > 0 {
		scratch := at.scratch(dout)
		dout = s.ties.Pack(s.lo-1, tensor.Of(dout.F, f.in...), f.owed, func(shape ...int) Tensor {
			scratch.Reset()
			return scratch.Tensor(shape...)
		})
	}
	if f.arena.Owns(dout.F) { // a layer has passed on the loss's gradient, or memory of its forward pass, which the next pass of any lane may use
		scratch := at.scratch(dout)
		scratch.Reset()
		own := scratch.Tensor(dout.Shape...)
		copy(own.F, dout.F)
		dout = own
	}
	s.Drop(p)
	return dout
}

// scratch returns the arena that a gradient is not in.
func (l *lane) scratch(dout Tensor) *tensor.Arena {
	if l.back[0].Owns(dout.F) {
		return &l.back[1]
	}
	return &l.back[0]
}

// Drop implements [engine.Stage].
func (s *stage) Drop(p engine.Pass) {
	f := p.(*flight)
	f.arena.Reset()
	clear(f.outs)
	clear(f.stash)
	f.outs, f.stash = f.outs[:0], f.stash[:0]
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = append(s.free, f)
}

// Shapes implements [engine.Stage].
func (s *stage) Shapes(p engine.Pass) (shapes [][]int) {
	outs := p.(*flight).outs
	for i, out := range outs[:len(outs)-1] {
		shapes = append(shapes, s.ties.Shape(s.lo+i, out.Shape))
	}
	return shapes
}

// Suspect implements [engine.Stage].
func (s *stage) Suspect(p engine.Pass) int {
	for i, out := range p.(*flight).outs {
		for _, x := range out.F {
			if d := x - x; d != 0 || math.IsNaN(float64(d)) {
				return s.lo + i
			}
		}
	}
	return -1
}

// remote is the Loss of a model whose layers run in another process, a whole stage at a time. Its layers only declare parameters.
// All methods are called by one goroutine at a time, but Hold and Memory.
type remote interface {
	// Hold returns memory for the parameters of a layer that both processes see, the same for each call.
	Hold(layer, size int) []float32
	// Memory returns n numbers that both processes see, of unspecified content. Free takes all of them back.
	Memory(n int) []float32
	Free()
	// Stage makes layers [lo, hi) run, whose parameters are held. It records its calls of user code.
	Stage(lo, hi int, seed uint64, calls *process.Calls) engine.Stage
	// Param returns the name of a parameter in the model file. First sets its first values.
	Param(layer, param int) string
	First(layer, param int, x []float32)
	// Metrics returns the names of what Loss measures besides.
	Metrics() []string
}
