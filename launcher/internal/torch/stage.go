package torch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/worker/engine"
	"github.com/soliton-train/soliton/internal/worker/process"
	"github.com/soliton-train/soliton/rng"
)

// Hold returns memory for the parameters of a layer, the same each time: what else refers to it holds the same parameters.
func (p *Program) Hold(layer, size int) []float32 {
	if p.params[layer].at == 0 {
		p.params[layer] = p.memory.take(size)
	}
	return p.params[layer].f
}

// Memory returns n numbers of the shared memory, until Free is called.
func (p *Program) Memory(n int) []float32 { return p.memory.lend(n).f }

// Free takes all numbers back that Memory has returned.
func (p *Program) Free() { p.memory.reclaim() }

// Stage returns layers [lo, hi) for the engine.
func (p *Program) Stage(lo, hi int, seed uint64, calls *process.Calls) engine.Stage {
	return &stage{program: p, lo: lo, hi: hi, seed: seed, calls: calls}
}

// stage has a Python process compute layers [lo, hi). Requests for all layers of a pass are sent one after the other, so the process
// does not wait between them.
type stage struct {
	program *Program
	lo, hi  int
	seed    uint64
	calls   *process.Calls
}

// pass is a micro-batch in flight. Its blocks are in use until it has ended.
type pass struct {
	stage    *stage
	micro    engine.Micro
	number   uint64
	on       *connection // to the process that holds its graphs
	in       block
	out      block
	target   block // in the last stage
	lossGrad block // the same
	dout     block // if the gradient of the output came from elsewhere
	din      block
	within   []block // outputs of layers, for the witness of a spot check
}

// random returns the seed of a call. op is 0 for forward passes and the loss, 1 for backward passes.
func (s *stage) random(m engine.Micro, layer int, op uint32) int {
	stream := rng.New(s.seed, rng.Place{Step: uint32(m.Step), Sample: uint32(m.First), Layer: uint16(layer), Op: op})
	return int(stream.Uint64())
}

// shape returns the shape of a layer's output, as it crosses to the next layer.
func (s *stage) shape(layer, samples int) []int {
	l := s.program.job.Layers[layer]
	if l.Carries > 0 {
		return []int{samples*tensor.Size(l.Out) + l.Carries}
	}
	return append([]int{samples}, l.Out...)
}

// must panics with an error of the program, as a layer in Go would.
func must(err error) {
	if err == nil {
		return
	}
	trace := err.Error()
	if f := new(failure); errors.As(err, &f) && f.Trace != "" {
		trace = f.Trace
	}
	panic(&kernel.Panic{Value: err.Error(), Stack: []byte(trace)})
}

// await receives the reply for a layer; while it waits, calls name that call.
func (s *stage) await(c *connection, kind control.CallKind, layer int) (time.Duration, []byte, error) {
	before := s.calls.Enter(kind, layer, 0)
	took, said, err := c.done()
	lost := new(lostError)
	if errors.As(err, &lost) {
		lost.call = " in the loss"
		if name := s.program.job.Layers[layer].Name; kind == control.CallForward {
			lost.call = fmt.Sprintf(" in Forward of layer %q", name)
		} else if kind == control.CallBackward {
			lost.call = fmt.Sprintf(" in Backward of layer %q", name)
		}
	}
	if err == nil || lost.err != nil {
		s.calls.Leave(before) // otherwise the record tells which call it was
	}
	return took, said, err
}

// Forward implements [engine.Stage].
func (s *stage) Forward(m engine.Micro, in tensor.Tensor) (engine.Pass, tensor.Tensor, error) {
	p := s.program
	p.sweep(m)
	p.number++
	f := &pass{stage: s, micro: m, number: p.number, in: p.place(in)}
	p.passes[f.number] = f
	shape := s.shape(s.hi-1, m.Samples)
	f.out = p.memory.take(tensor.Size(shape))
	ready := s.lo // layers before have their parameters
	var wait error
	must(p.run(func(c *connection) error {
		f.on = c
		asked := s.lo
		for ; asked < s.hi; asked++ {
			if ready == asked {
				if m.Ready != nil {
					if wait = m.Ready(asked); wait != nil {
						break
					}
				}
				ready++
			}
			if err := f.sendForward(c, asked); err != nil {
				return err
			}
		}
		for i := s.lo; i < asked; i++ {
			took, _, err := s.await(c, control.CallForward, i)
			if err != nil {
				return err
			}
			if m.Took != nil {
				m.Took(i, took)
			}
		}
		return nil
	}))
	if wait != nil {
		s.Drop(f)
		return nil, tensor.Tensor{}, wait
	}
	if m.Made != nil {
		for i := s.lo; i < s.hi; i++ {
			m.Made(tensor.Of(f.output(i).f, s.shape(i, m.Samples)...))
		}
	}
	return f, tensor.Of(f.out.f, shape...), nil
}

// output returns the block for the output of a layer, 0 where that stays in the Python process.
func (f *pass) output(layer int) block {
	s := f.stage
	switch {
	case layer == s.hi-1:
		return f.out
	case f.micro.Made == nil:
		return block{}
	case f.within == nil:
		for i := s.lo; i < s.hi-1; i++ {
			f.within = append(f.within, s.program.memory.take(tensor.Size(s.shape(i, f.micro.Samples))))
		}
	}
	return f.within[layer-s.lo]
}

func (f *pass) sendForward(c *connection, layer int) error {
	s := f.stage
	return c.send(askForward, int(f.number), layer, number(layer == s.lo), number(f.micro.Train), f.micro.Samples,
		f.in.at, s.program.params[layer].at, s.random(f.micro, layer, 0), f.output(layer).at)
}

// again computes a pass up to its loss, if it has one, in another process than before.
func (f *pass) again(c *connection) error {
	if f.on == c {
		return nil
	}
	s := f.stage
	f.on = c
	for i := s.lo; i < s.hi; i++ {
		if err := f.sendForward(c, i); err != nil {
			return err
		}
	}
	for range s.hi - s.lo {
		if _, _, err := c.done(); err != nil {
			return err
		}
	}
	return nil
}

// Loss implements [engine.Stage].
func (s *stage) Loss(ep engine.Pass, target tensor.Tensor) (sum float64, count int64, dout tensor.Tensor) {
	p, f := s.program, ep.(*pass)
	m := f.micro
	f.target = p.place(target)
	shape := s.shape(s.hi-1, m.Samples)
	f.lossGrad = p.memory.take(tensor.Size(shape))
	must(p.run(func(c *connection) error {
		if err := f.again(c); err != nil {
			return err
		}
		if err := c.send(askLoss, int(f.number), f.target.at, s.random(m, len(p.job.Layers), 0), f.lossGrad.at); err != nil {
			return err
		}
		_, said, err := s.await(c, control.CallLoss, 0)
		if err != nil {
			return err
		}
		if len(said) != 16*(1+len(p.job.Metrics)) {
			return &failure{Text: fmt.Sprintf("the Python process sent a loss of %d bytes", len(said))}
		}
		sum = math.Float64frombits(binary.LittleEndian.Uint64(said))
		count = int64(binary.LittleEndian.Uint64(said[8:]))
		if count < 0 {
			return &failure{Text: fmt.Sprintf("the loss counts %d targets", count)}
		}
		for i := range p.job.Metrics {
			of := said[16*(i+1):]
			m.Metric(i, math.Float64frombits(binary.LittleEndian.Uint64(of)), int64(binary.LittleEndian.Uint64(of[8:])))
		}
		return nil
	}))
	return sum, count, tensor.Of(f.lossGrad.f, shape...)
}

// Backward implements [engine.Stage]. It hands over the gradients of a layer while the process computes those of the layer before.
func (s *stage) Backward(ep engine.Pass, dout tensor.Tensor, grads engine.Gradients) tensor.Tensor {
	p, f := s.program, ep.(*pass)
	m := f.micro
	at, shared := p.memory.where(dout.F)
	if !shared {
		f.dout = p.place(dout)
		at = f.dout.at
	}
	var din tensor.Tensor
	p.memory.give(p.din) // the engine has copied it
	p.din = block{}
	if s.lo > 0 {
		shape := s.shape(s.lo-1, m.Samples)
		f.din = p.memory.take(tensor.Size(shape))
		din = tensor.Of(f.din.f, shape...)
	}
	dins := make(map[int]block) // gradients of inputs within the stage, for a witness
	for i := s.lo + 1; m.Made != nil && i < s.hi; i++ {
		dins[i] = p.memory.take(tensor.Size(s.shape(i-1, m.Samples)))
	}
	dins[s.lo] = f.din
	left := s.hi // layers from here on have handed over their gradients
	flats, into := make([][]float32, s.hi), make([]int, s.hi)
	for i := s.hi - 1; i >= s.lo; i-- {
		flats[i] = grads.Buffer(i)
		if flat, shared := p.memory.where(flats[i]); shared {
			into[i] = flat
		} else {
			into[i] = p.gradient(i).at
		}
	}
	must(p.run(func(c *connection) error {
		if err := f.again(c); err != nil {
			return err
		}
		for i := s.hi - 1; i >= s.lo; i-- {
			behind := 0
			if i == s.hi-1 {
				behind = at
			}
			if i >= left {
				into[i] = 0 // these are no longer ours
			}
			if err := c.send(askBackward, int(f.number), i, number(i == s.lo), p.params[i].at, s.random(m, i, 1), behind, into[i], dins[i].at); err != nil {
				return err
			}
		}
		for i := s.hi - 1; i >= s.lo; i-- {
			took, _, err := s.await(c, control.CallBackward, i)
			if err != nil {
				return err
			}
			if i >= left {
				continue // the process before had come so far
			}
			left = i
			if m.Took != nil {
				m.Took(i, took)
			}
			if _, shared := p.memory.where(flats[i]); !shared {
				copy(flats[i], p.gradient(i).f)
			}
			grads.Done(i, flats[i])
			if m.Made != nil {
				t := tensor.Tensor{}
				if i > 0 {
					t = tensor.Of(dins[i].f, s.shape(i-1, m.Samples)...)
				}
				m.Made(t)
			}
		}
		return nil
	}))
	for i, b := range dins {
		if i > s.lo {
			p.memory.give(b)
		}
	}
	p.din, f.din = f.din, block{}
	p.end(f)
	return din
}

// gradient returns the block for the gradient of a layer.
func (p *Program) gradient(layer int) block {
	if p.grads[layer].at == 0 {
		p.grads[layer] = p.memory.take(p.job.Layers[layer].size())
	}
	return p.grads[layer]
}

// Drop implements [engine.Stage].
func (s *stage) Drop(ep engine.Pass) {
	f := ep.(*pass)
	s.program.drop(f)
	s.program.end(f)
}

// drop has the process that holds a pass forget it.
func (p *Program) drop(f *pass) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f.on != nil && f.on == p.computer {
		if err := f.on.send(askDrop, int(f.number)); err != nil {
			p.endComputer()
		}
	}
}

// end gives the memory of a pass back.
func (p *Program) end(f *pass) {
	delete(p.passes, f.number)
	for _, b := range append(f.within, f.in, f.out, f.target, f.lossGrad, f.dout, f.din) {
		p.memory.give(b)
	}
}

// sweep ends the passes that a step before has left.
func (p *Program) sweep(m engine.Micro) {
	for _, f := range p.passes {
		if f.micro.Step != m.Step {
			f.stage.Drop(f)
		}
	}
}

// place copies a tensor into the shared memory.
func (p *Program) place(t tensor.Tensor) block {
	b := p.memory.take(t.Len())
	if t.I != nil {
		copy(b.ints(), t.I)
	} else {
		copy(b.f, t.F)
	}
	return b
}

// Shapes implements [engine.Stage].
func (s *stage) Shapes(ep engine.Pass) (shapes [][]int) {
	for i := s.lo; i < s.hi-1; i++ {
		shapes = append(shapes, s.shape(i, ep.(*pass).micro.Samples))
	}
	return shapes
}

// Suspect implements [engine.Stage].
func (s *stage) Suspect(ep engine.Pass) int {
	f := ep.(*pass)
	if f.on != s.program.computer || !f.micro.Train {
		return -1
	}
	said, err := s.program.call(askSuspect, int(f.number))
	if err != nil || len(said) != 8 {
		return -1 // the loss is not finite all the same
	}
	layer := int(int64(binary.LittleEndian.Uint64(said))) - 1
	if layer < s.lo || layer >= s.hi {
		return -1
	}
	return layer
}

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}
