package nn

import (
	"slices"
	"strconv"

	"github.com/soliton-train/soliton/kernel"
	"github.com/soliton-train/soliton/trainer"
)

// Named returns l with name and a dot before the names of its parameters
// where it is part of a [Sequence] or [Residual], which otherwise number
// their parts. With an empty name the parameters keep their own names.
func Named(name string, l trainer.Layer) trainer.Layer {
	if name != "" {
		name += "."
	}
	return named{l, name}
}

type named struct {
	trainer.Layer
	prefix string
}

// Params prefixes the names of the layer's parameters.
func (n named) Params() []trainer.Param { return prefixed(n.prefix, n.Layer.Params()) }

func prefixed(prefix string, ps []trainer.Param) []trainer.Param {
	ps = slices.Clone(ps)
	for i := range ps {
		ps[i].Name = prefix + ps[i].Name
	}
	return ps
}

// Sequence returns the layer that runs the given ones, at most 31, one after
// the other.
func Sequence(layers ...trainer.Layer) trainer.Layer { return newSequence(layers) }

// sequence knows the parameters of its parts, because asking for them again
// at each call would cost allocations.
type sequence struct {
	layers []trainer.Layer
	params []trainer.Param
	first  []int // index of each part's first parameter, and their number at the end
}

func newSequence(layers []trainer.Layer) *sequence {
	s := &sequence{layers: layers, first: []int{0}}
	for i, l := range layers {
		ps := l.Params()
		if _, ok := l.(named); !ok {
			ps = prefixed(strconv.Itoa(i)+".", ps)
		}
		s.params = append(s.params, ps...)
		s.first = append(s.first, len(s.params))
	}
	return s
}

// Params declares the parameters of all parts.
func (s *sequence) Params() []trainer.Param { return slices.Clone(s.params) }

// Forward runs the parts in order.
func (s *sequence) Forward(c *trainer.Context, p []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	stash := make([]any, len(s.layers))
	x := in
	for i, l := range s.layers {
		x, stash[i] = l.Forward(c.Sub(i), p[s.first[i]:s.first[i+1]], x)
	}
	return x, stash
}

// Backward runs the parts' derivatives in reverse order.
func (s *sequence) Backward(c *trainer.Context, p []trainer.Tensor, stash any, dout trainer.Tensor, dp []trainer.Tensor) trainer.Tensor {
	stashes := stash.([]any)
	d := dout
	for i := len(s.layers) - 1; i >= 0; i-- {
		lo, hi := s.first[i], s.first[i+1]
		d = s.layers[i].Backward(c.Sub(i), p[lo:hi], stashes[i], d, dp[lo:hi])
	}
	return d
}

// Residual returns x + f(x), where f is the [Sequence] of the given layers.
func Residual(layers ...trainer.Layer) trainer.Layer { return &residual{newSequence(layers)} }

type residual struct{ f *sequence }

// Params declares the parameters of f.
func (r *residual) Params() []trainer.Param { return r.f.Params() }

// Forward keeps the shape of its input.
func (r *residual) Forward(c *trainer.Context, p []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	y, stash := r.f.Forward(c, p, in)
	return sum(c, in, y), stash
}

// Backward is the derivative of Forward.
func (r *residual) Backward(c *trainer.Context, p []trainer.Tensor, stash any, dout trainer.Tensor, dp []trainer.Tensor) trainer.Tensor {
	return sum(c, dout, r.f.Backward(c, p, stash, dout, dp))
}

// Checkpoint returns l with less memory for more computing: Forward keeps its input only, and Backward begins with Forward once more
// (T. Chen and others, "Training deep nets with sublinear memory cost", 2016). The bits are the same.
//
//	for i := range model.Layers {
//		model.Layers[i] = nn.Checkpoint(model.Layers[i])
//	}
func Checkpoint(l trainer.Layer) trainer.Layer { return checkpoint{l} }

type checkpoint struct{ trainer.Layer }

// Forward keeps the input.
func (l checkpoint) Forward(c *trainer.Context, p []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	return c.Keep(func() trainer.Tensor {
		out, _ := l.Layer.Forward(c, p, in)
		return out
	}), in
}

// Backward runs Forward first, with the same random numbers.
func (l checkpoint) Backward(c *trainer.Context, p []trainer.Tensor, stash any, dout trainer.Tensor, dp []trainer.Tensor) trainer.Tensor {
	_, stash = l.Layer.Forward(c, p, stash.(trainer.Tensor))
	return l.Layer.Backward(c, p, stash, dout, dp)
}

// sum returns a new tensor, because a layer may return what it was given.
func sum(c *trainer.Context, a, b trainer.Tensor) trainer.Tensor {
	out := like(c, a)
	c.Pool().For(len(out.F), grain, func(lo, hi int) {
		kernel.Add(out.F[lo:hi], a.F[lo:hi], b.F[lo:hi])
	})
	return out
}
