package torch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/tree"
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
	kept    kept
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
	dout     block // if the gradient of the output came from elsewhere, or must last
	doutAt   int   // 0: the process has it
	din      block
	losses   []sumOf // the loss and the metrics, in the last stage
	keeps    bool    // the process keeps its gradients
	merges   []int   // slots that are added then
	within   []block // outputs of layers, for the witness of a spot check
}

// sumOf is a loss or a metric of a micro-batch.
type sumOf struct {
	sum   float64
	count int64
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

// Forward implements [engine.Stage]. In the last stage it computes the loss, too, for which the process does not wait.
func (s *stage) Forward(m engine.Micro, in tensor.Tensor) (engine.Pass, tensor.Tensor, error) {
	p := s.program
	if k := s.kept.passes; len(k) > 0 && k[0].micro.Step != m.Step {
		s.Forget()
	}
	p.sweep(m)
	p.number++
	f := &pass{stage: s, micro: m, number: p.number, in: p.place(in)}
	p.passes[f.number] = f
	out := tensor.Tensor{Shape: s.shape(s.hi-1, m.Samples)}
	last := s.hi == len(p.job.Layers)
	if last {
		f.target = p.place(m.Target)
	}
	if !last || m.Made != nil { // otherwise the loss finds it in the process
		f.out = p.memory.take(out.Len())
		out.F = f.out.f
	}
	if last && m.Made != nil { // otherwise the backward pass finds it in the process
		f.lossGrad = p.memory.take(out.Len())
	}
	ready := s.lo // layers before have their parameters
	var wait error
	must(p.run(func(c *connection) error {
		f.on = c
		asked, next := s.lo, s.lo
		receive := func() error {
			took, _, err := s.await(c, control.CallForward, next)
			if err == nil && m.Took != nil {
				m.Took(next, took)
			}
			next++
			return err
		}
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
			if asked-next == maxOpen {
				if err := receive(); err != nil {
					return err
				}
			}
		}
		scores := last && wait == nil
		if scores {
			if err := f.sendLoss(c); err != nil {
				return err
			}
		}
		for next < asked {
			if err := receive(); err != nil {
				return err
			}
		}
		if scores {
			return f.awaitLoss(c)
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
	return f, out, nil
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
	s, values := f.stage, 0
	if f.micro.Values != nil {
		values = int(f.micro.Values(layer))
	}
	return c.send(askForward, int(f.number), layer, number(layer == s.lo), number(f.micro.Train), f.micro.Samples,
		f.in.at, s.program.params[layer].at, s.random(f.micro, layer, 0), f.output(layer).at, values)
}

// again computes a pass again in another process than before.
func (f *pass) again(c *connection) error {
	if f.on == c {
		return nil
	}
	s := f.stage
	f.on = c
	if err := s.each(c, control.CallForward, f.sendForward, s.layers()); err != nil || s.hi < len(s.program.job.Layers) || f.lossGrad.at != 0 {
		return err
	}
	if err := f.sendLoss(c); err != nil {
		return err
	}
	_, _, err := s.await(c, control.CallLoss, 0)
	return err
}

// layers returns the layers of the stage, from first to last.
func (s *stage) layers() (all []int) {
	for i := s.lo; i < s.hi; i++ {
		all = append(all, i)
	}
	return all
}

// each makes a request for each of layers, of whose replies nothing is needed.
func (s *stage) each(c *connection, kind control.CallKind, send func(c *connection, layer int) error, layers []int) error {
	for sent, next := 0, 0; next < len(layers); {
		if sent < len(layers) && sent-next < maxOpen {
			if err := send(c, layers[sent]); err != nil {
				return err
			}
			sent++
			continue
		}
		if _, _, err := s.await(c, kind, layers[next]); err != nil {
			return err
		}
		next++
	}
	return nil
}

func (f *pass) sendLoss(c *connection) error {
	p := f.stage.program
	return c.send(askLoss, int(f.number), f.target.at, f.stage.random(f.micro, len(p.job.Layers), 0), f.lossGrad.at)
}

// awaitLoss receives the reply to sendLoss.
func (f *pass) awaitLoss(c *connection) error {
	s := f.stage
	_, said, err := s.await(c, control.CallLoss, 0)
	if err != nil {
		return err
	}
	if len(said) != 16*(1+len(s.program.job.Metrics)) {
		return &failure{Text: fmt.Sprintf("the Python process sent a loss of %d bytes", len(said))}
	}
	f.losses = f.losses[:0]
	for ; len(said) > 0; said = said[16:] {
		f.losses = append(f.losses, sumOf{math.Float64frombits(binary.LittleEndian.Uint64(said)), int64(binary.LittleEndian.Uint64(said[8:]))})
	}
	if n := f.losses[0].count; n < 0 {
		return &failure{Text: fmt.Sprintf("the loss counts %d targets", n)}
	}
	return nil
}

// Loss implements [engine.Stage]. Forward has computed it.
func (*stage) Loss(ep engine.Pass, _ tensor.Tensor) (sum float64, count int64, dout tensor.Tensor) {
	f := ep.(*pass)
	for i, m := range f.losses[1:] {
		f.micro.Metric(i, m.sum, m.count)
	}
	return f.losses[0].sum, f.losses[0].count, tensor.Tensor{Shape: f.stage.shape(f.stage.hi-1, f.micro.Samples), F: f.lossGrad.f}
}

// Backward implements [engine.Stage]. It hands over the gradients of a layer while the process computes those of the layer before.
func (s *stage) Backward(ep engine.Pass, dout tensor.Tensor, grads engine.Gradients) tensor.Tensor {
	p, f := s.program, ep.(*pass)
	m := f.micro
	f.keeps = s.keeps(m)
	s.takeGradient(f, dout)
	before := s.kept.passes
	if f.keeps {
		s.keep(f)
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
	own := make([]landing, s.hi)
	for i := s.hi - 1; i >= s.lo && !f.keeps; i-- {
		own[i] = p.land(grads.Buffer(i))
	}
	left := s.hi // layers from here on have handed over their gradients
	sums := make([][]landing, s.hi)
	if grads.Last() {
		sums = s.landings(grads)
	}
	must(p.run(func(c *connection) error {
		if err := s.restore(c, before); err != nil {
			return err
		}
		if err := f.again(c); err != nil {
			return err
		}
		had, next, open := left, s.hi-1, 0 // next is the layer whose replies come next
		receive := func() error {
			i := next
			next--
			took, _, err := s.await(c, control.CallBackward, i)
			if open--; err != nil || i >= had { // the process before had come so far
				return err
			}
			if err := s.awaitHandOver(c, i, sums[i]); err != nil {
				return err
			}
			open -= len(sums[i])
			left = i
			if m.Took != nil {
				m.Took(i, took)
			}
			if !f.keeps {
				grads.Done(i, p.settle(own[i]))
			}
			for _, l := range sums[i] {
				grads.Sum(i, l.of, p.settle(l))
			}
			if m.Made != nil {
				t := tensor.Tensor{}
				if i > 0 {
					t = tensor.Of(dins[i].f, s.shape(i-1, m.Samples)...)
				}
				m.Made(t)
			}
			return nil
		}
		for i := s.hi - 1; i >= s.lo; i-- {
			into := own[i].at
			if i >= had {
				into = 0 // these are no longer ours
			}
			if err := f.sendBackward(c, i, into, dins[i].at); err != nil {
				return err
			}
			open++
			if i < had {
				if err := s.sendHandOver(c, i, sums[i]); err != nil {
					return err
				}
				open += len(sums[i])
			}
			for open > maxOpen {
				if err := receive(); err != nil {
					return err
				}
			}
		}
		for next >= s.lo {
			if err := receive(); err != nil {
				return err
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
	if f.keeps {
		p.shed(f)
	} else {
		p.end(f)
	}
	if grads.Last() {
		s.Forget()
	}
	return din
}

// takeGradient takes the gradient of the output, which may be in the process that computes.
func (s *stage) takeGradient(f *pass, dout tensor.Tensor) {
	switch at, shared := s.program.memory.where(dout.F); {
	case f.losses != nil && dout.F == nil: // in the process
	case shared && !f.keeps:
		f.doutAt = at
	default:
		f.dout = s.program.place(dout)
		f.doutAt = f.dout.at
	}
}

// sendBackward asks for the backward pass of a layer, with the gradients at into and din, or nowhere.
func (f *pass) sendBackward(c *connection, layer, into, din int) error {
	s, behind, slot := f.stage, 0, 0
	if layer == s.hi-1 {
		behind = f.doutAt
	}
	var merges []int
	if f.keeps {
		slot, merges = f.micro.Index+1, f.merges
	}
	return c.send(askBackward, append([]int{
		int(f.number), layer, number(layer == s.lo), s.program.params[layer].at, s.random(f.micro, layer, 1), behind, into, din, slot,
	}, merges...)...)
}

// landing is where a process writes a gradient: in the memory that it is wanted in, or beside it.
type landing struct {
	of     tree.Node // of a sum
	want   []float32
	at     int
	beside block
}

func (p *Program) land(want []float32) landing {
	l := landing{want: want}
	var shared bool
	if l.at, shared = p.memory.where(want); !shared {
		l.beside = p.memory.take(len(want))
		l.at = l.beside.at
	}
	return l
}

// settle returns a gradient that has come.
func (p *Program) settle(l landing) []float32 {
	if l.beside.at != 0 {
		copy(l.want, l.beside.f)
		p.memory.give(l.beside)
	}
	return l.want
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
