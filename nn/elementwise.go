package nn

import (
	"github.com/soliton-train/soliton/kernel"
	"github.com/soliton-train/soliton/trainer"
)

// GELU is the Gaussian error linear unit in its tanh form, element by element
// (D. Hendrycks and K. Gimpel, "Gaussian error linear units", 2016).
type GELU struct{}

// Params declares none.
func (GELU) Params() []trainer.Param { return nil }

// Forward keeps the shape of its input.
func (GELU) Forward(c *trainer.Context, _ []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	out := like(c, in)
	kernel.GELU(c.Pool(), out.F, in.F)
	return out, in
}

// Backward is the derivative of Forward.
func (GELU) Backward(c *trainer.Context, _ []trainer.Tensor, stash any, dout trainer.Tensor, _ []trainer.Tensor) trainer.Tensor {
	in := stash.(trainer.Tensor)
	din := like(c, in)
	kernel.GELUBackward(c.Pool(), din.F, in.F, dout.F)
	return din
}

// ReLU is max(x, 0), element by element. Its derivative at 0 is 0.
type ReLU struct{}

// Params declares none.
func (ReLU) Params() []trainer.Param { return nil }

// Forward keeps the shape of its input.
func (ReLU) Forward(c *trainer.Context, _ []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	out := like(c, in)
	c.Pool().For(len(in.F), grain, func(lo, hi int) {
		dst := out.F[lo:hi]
		for i, x := range in.F[lo:hi] {
			dst[i] = max(x, 0)
		}
	})
	return out, out
}

// Backward is the derivative of Forward.
func (ReLU) Backward(c *trainer.Context, _ []trainer.Tensor, stash any, dout trainer.Tensor, _ []trainer.Tensor) trainer.Tensor {
	out := stash.(trainer.Tensor)
	din := like(c, out)
	c.Pool().For(len(out.F), grain, func(lo, hi int) {
		dst, d := din.F[lo:hi], dout.F[lo:hi]
		for i, y := range out.F[lo:hi] {
			if y > 0 {
				dst[i] = d[i]
			} else {
				dst[i] = 0
			}
		}
	})
	return din
}

// Dropout sets every element to 0 with probability Prob and divides the
// others by 1-Prob (N. Srivastava and others, "Dropout: a simple way to
// prevent neural networks from overfitting", 2014). In evaluation, and with
// Prob 0, it does nothing.
type Dropout struct {
	Prob float64 // in [0, 1)
}

// Params declares none.
func (Dropout) Params() []trainer.Param { return nil }

// Forward keeps the shape of its input.
func (d Dropout) Forward(c *trainer.Context, _ []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	needDropout("Dropout", d.Prob)
	return d.apply(c, in), nil
}

// Backward drops the gradients of the elements that Forward dropped.
func (d Dropout) Backward(c *trainer.Context, _ []trainer.Tensor, _ any, dout trainer.Tensor, _ []trainer.Tensor) trainer.Tensor {
	return d.apply(c, dout)
}

func (d Dropout) apply(c *trainer.Context, x trainer.Tensor) trainer.Tensor {
	if d.Prob == 0 || !c.Train() {
		return x
	}
	out := like(c, x)
	n := len(x.F) / x.Shape[0]       // elements of a sample, which has its own stream
	parts := (n + grain - 1) / grain // a grain starts where dropout can
	c.For(x.Shape[0]*parts, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			sample, at := i/parts, i%parts*grain
			from, to := sample*n+at, sample*n+min(at+grain, n)
			kernel.Dropout(out.F[from:to], x.F[from:to], at, float32(d.Prob), c.Rand(sample, 0))
		}
	})
	return out
}

// Flatten makes one dimension of all that follow the first.
type Flatten struct{}

// Params declares none.
func (Flatten) Params() []trainer.Param { return nil }

// Forward maps [samples, ...] to [samples, n].
func (Flatten) Forward(c *trainer.Context, _ []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	return in.Reshape(in.Shape[0], in.Len()/in.Shape[0]), in.Shape
}

// Backward restores the shape.
func (Flatten) Backward(c *trainer.Context, _ []trainer.Tensor, stash any, dout trainer.Tensor, _ []trainer.Tensor) trainer.Tensor {
	return dout.Reshape(stash.([]int)...)
}
