package engine

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/worker/core"
)

// witness takes digests of what a pair's passes read and make, in that order; package core tells them apart by it. A nil witness
// takes none.
type witness struct{ digests []uint32 }

// tensor takes the digest of a tensor.
func (w *witness) tensor(t tensor.Tensor) { w.all(t) }

// all takes one digest of several tensors.
func (w *witness) all(tensors ...tensor.Tensor) {
	if w == nil {
		return
	}
	le := binary.LittleEndian
	var b []byte
	for _, t := range tensors {
		b = le.AppendUint32(b, kernel.Digest(t.F))
		for _, x := range t.I {
			b = le.AppendUint32(b, uint32(x))
		}
	}
	w.digests = append(w.digests, crc32.Checksum(b, castagnoli))
}

// samples takes a digest of each sample.
func (w *witness) samples(b *batch, n int) {
	for i := 0; w != nil && i < n; i++ {
		w.all(row(b.in, i), row(b.target, i))
	}
}

// loss takes a digest of a loss and its gradient.
func (w *witness) loss(l core.Loss, dout tensor.Tensor) {
	bits := math.Float64bits(l.Sum)
	w.all(dout, tensor.Tensor{I: []int32{int32(bits), int32(bits >> 32), int32(l.Count), int32(l.Count >> 32)}})
}

// gradients has the witness take digests of gradients on their way.
func (w *witness) gradients(to Gradients) Gradients {
	if w == nil {
		return to
	}
	return witnessed{to, w}
}

type witnessed struct {
	Gradients
	by *witness
}

func (w witnessed) Done(layer int, grad []float32) {
	w.by.tensor(tensor.Tensor{F: grad})
	w.Gradients.Done(layer, grad)
}

// unused are gradients of which nothing is kept.
type unused struct{ e *Engine }

func (u unused) Buffer(layer int) []float32  { return u.e.free.get(len(u.e.c.Layers[layer].Params)) }
func (u unused) Done(_ int, grad []float32)  { u.e.free.put(grad) }
func (unused) Sum(int, tree.Node, []float32) { panic("engine: a repeated pass was kept") }
func (unused) Last() bool                    { return false }
func (unused) Lane() int                     { return 0 }

var errStopped = errors.New("engine: stopped")

// repeat runs both passes of a pair, and keeps digests of them only. It can be stopped between layers of the forward pass, and before the backward pass.
func (e *Engine) repeat(d core.Repeat) {
	w := e.newTask(0, d.Step, d.Pair, d.Digests)
	e.takeGradient(w, d.Pair)
	e.repeatStop.Store(false)
	w.micro.Ready = func(layer int) error {
		if e.repeatStop.Load() {
			return errStopped
		}
		return e.gates[layer].wait(e.ctx)
	}
	e.start(0, taskEnded{}, func(end *taskEnded) error {
		_, _, err := w.forward(e)
		switch {
		case err == nil && e.repeatStop.Load():
			w.stage.Drop(w.pass)
			w.leave(e)
			end.event = core.Repeated{Stopped: true}
			return nil
		case errors.Is(err, errStopped):
			w.leave(e)
			end.event = core.Repeated{Stopped: true}
			return nil
		case err != nil:
			return err
		}
		w.backward(e, unused{e})
		end.event, end.take = core.Repeated{}, func() { e.spot[1] = w.witness.digests }
		return nil
	})
}
