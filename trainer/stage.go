package trainer

import (
	"fmt"
	"math"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/worker/engine"
	"github.com/soliton-train/soliton/internal/worker/model"
	"github.com/soliton-train/soliton/internal/worker/process"
)

// stage runs layers [lo, hi) of a model for the engine.
type stage struct {
	model  *Model
	lo, hi int
	params *model.Params
	pool   *kernel.Pool
	seed   uint64

	free []*flight       // memory of passes that have ended
	back [2]tensor.Arena // scratch memory of Backward, in turns

	calls  *process.Calls
	before uint64 // of calls, when the call of the moment began
}

// flight is one micro-batch in flight. outs and stash count from the first
// layer of the stage.
type flight struct {
	micro engine.Micro
	arena tensor.Arena
	outs  []Tensor
	stash []any
}

func newStage(m *Model, lo, hi int, params *model.Params, pool *kernel.Pool, seed uint64, calls *process.Calls) *stage {
	return &stage{model: m, lo: lo, hi: hi, params: params, pool: pool, seed: seed, calls: calls}
}

func (s *stage) context(m engine.Micro, layer int, arena *tensor.Arena) *Context {
	call := Call{Seed: s.seed, Step: uint32(m.Step), First: m.First, Samples: m.Samples, Layer: layer, Train: m.Train}
	return &Context{call: call, pool: s.pool, arena: arena}
}

// enter and leave record a call of user code. After a panic, the record tells which it was.
func (s *stage) enter(layer int, kind control.CallKind) { s.before = s.calls.Enter(kind, layer, 0) }
func (s *stage) leave()                                 { s.calls.Leave(s.before) }

// Forward implements [engine.Stage].
func (s *stage) Forward(m engine.Micro, in tensor.Tensor) (engine.Pass, tensor.Tensor, error) {
	f := &flight{}
	if n := len(s.free); n > 0 {
		f, s.free = s.free[n-1], s.free[:n-1]
	}
	f.micro = m
	for i := s.lo; i < s.hi; i++ {
		if m.Ready != nil {
			if err := m.Ready(i); err != nil {
				s.Drop(f)
				return nil, Tensor{}, err
			}
		}
		l := s.model.Layers[i]
		s.enter(i, control.CallForward)
		out, stash := l.Forward(s.context(m, i, &f.arena), s.params.Views(i), in)
		if len(out.Shape) == 0 || out.Shape[0] != m.Samples || len(out.F) != out.Len() {
			panic(fmt.Sprintf("returned %d float32 numbers of shape %v for %d samples; the first dimension counts samples", len(out.F), out.Shape, m.Samples))
		}
		s.leave()
		if m.Made != nil {
			m.Made(out)
		}
		f.outs = append(f.outs, out)
		f.stash = append(f.stash, stash)
		in = out
	}
	return f, in, nil
}

// Loss implements [engine.Stage].
func (s *stage) Loss(p engine.Pass, target tensor.Tensor) (sum float64, count int64, dout tensor.Tensor) {
	f := p.(*flight)
	s.enter(0, control.CallLoss)
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
	s.leave() // not deferred: a panic keeps the place
	return sum, count, dout
}

// Backward implements [engine.Stage]. Its scratch memory is two arenas: a
// layer's memory lives until the layer before has run, and reusing little
// memory often keeps it in the cache.
func (s *stage) Backward(p engine.Pass, dout tensor.Tensor, grads engine.Gradients) tensor.Tensor {
	f := p.(*flight)
	for i := s.hi - 1; i >= s.lo; i-- {
		// A layer may pass on what it was given, so dout says which arena is
		// free, not the number of the layer.
		scratch := &s.back[0]
		if scratch.Owns(dout.F) {
			scratch = &s.back[1]
		}
		scratch.Reset()
		flat := grads.Buffer(i)
		s.enter(i, control.CallBackward)
		din := s.model.Layers[i].Backward(s.context(f.micro, i, scratch), s.params.Views(i), f.stash[i-s.lo], dout, s.params.Split(i, flat))
		if i > s.lo && len(din.F) != f.outs[i-s.lo-1].Len() {
			panic(fmt.Sprintf("returned a gradient of %d numbers for an input of shape %v", len(din.F), f.outs[i-s.lo-1].Shape))
		}
		s.leave()
		grads.Done(i, flat)
		if f.micro.Made != nil {
			f.micro.Made(din)
		}
		dout = din
	}
	s.Drop(p)
	return dout
}

// Drop implements [engine.Stage].
func (s *stage) Drop(p engine.Pass) {
	f := p.(*flight)
	f.arena.Reset()
	clear(f.outs)
	clear(f.stash)
	f.outs, f.stash = f.outs[:0], f.stash[:0]
	s.free = append(s.free, f)
}

// Shapes implements [engine.Stage].
func (s *stage) Shapes(p engine.Pass) (shapes [][]int) {
	outs := p.(*flight).outs
	for _, out := range outs[:len(outs)-1] {
		shapes = append(shapes, slices.Clone(out.Shape))
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
// All methods are called by one goroutine at a time, but Hold.
type remote interface {
	// Hold returns memory for the parameters of a layer that both processes see, the same for each call.
	Hold(layer, size int) []float32
	// Stage makes layers [lo, hi) run, whose parameters are held. It records its calls of user code.
	Stage(lo, hi int, seed uint64, calls *process.Calls) engine.Stage
	// Param returns the name of a parameter in the model file. First sets its first values.
	Param(layer, param int) string
	First(layer, param int, x []float32)
	// Metrics returns the names of what Loss measures besides.
	Metrics() []string
}
