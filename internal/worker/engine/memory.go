package engine

import (
	"sync"

	"github.com/soliton-train/soliton/internal/compute/tensor"
)

// pool keeps memory of float32 for reuse, by size. The zero value is ready.
// The loop and the computing goroutine share it.
type pool struct {
	mu   sync.Mutex
	free map[int][][]float32
}

// get returns n elements of unspecified content.
func (p *pool) get(n int) []float32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f := p.free[n]; len(f) > 0 {
		p.free[n] = f[:len(f)-1] // the newest, which may still be in the cache
		return f[len(f)-1]
	}
	return make([]float32, n)
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

func makeBatch(s tensor.Spec, samples int) tensor.Tensor {
	shape := append([]int{samples}, s.Shape...)
	if s.Kind == tensor.Int32 {
		return tensor.NewInt(shape...)
	}
	return tensor.New(shape...)
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

// mailbox takes functions from any goroutine, for the loop to call.
type mailbox struct {
	signal chan struct{}
	state  *mailState
}

type mailState struct {
	mu    sync.Mutex
	items []func()
}

func newMailbox() mailbox { return mailbox{make(chan struct{}, 1), new(mailState)} }

// leave is put for what can wait until the next that is put: the loop is not woken for it.
func (m mailbox) leave(f func()) {
	m.state.mu.Lock()
	defer m.state.mu.Unlock()
	m.state.items = append(m.state.items, f)
}

// put never blocks.
func (m mailbox) put(f func()) {
	m.leave(f)
	select {
	case m.signal <- struct{}{}:
	default:
	}
}

// take returns what has come since, in order.
func (m mailbox) take() []func() {
	m.state.mu.Lock()
	defer m.state.mu.Unlock()
	items := m.state.items
	m.state.items = nil
	return items
}
