package nn

import (
	"cmp"
	"math"

	"github.com/soliton-train/soliton/kernel"
	"github.com/soliton-train/soliton/trainer"
)

// Linear is in·weight + bias, for weight [In, Out] and bias [Out].
type Linear struct {
	In, Out int
	NoBias  bool
	// Init gives the first weights; the zero value means uniform in
	// ±1/√In. The bias begins as zeros.
	Init trainer.Init
}

// Params declares "weight" and "bias".
func (l Linear) Params() []trainer.Param {
	init := cmp.Or(l.Init, trainer.Uniform(float32(1/math.Sqrt(float64(max(l.In, 1))))))
	ps := []trainer.Param{{Name: "weight", Shape: []int{l.In, l.Out}, Init: init}}
	if !l.NoBias {
		ps = append(ps, trainer.Param{Name: "bias", Shape: []int{l.Out}, NoDecay: true})
	}
	return ps
}

// Forward maps [..., In] to [..., Out].
func (l Linear) Forward(c *trainer.Context, p []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	x, w := matrix("Linear", in, l.In), kernel.Matrix(p[0].F, l.In, l.Out)
	out := withCols(c, in, l.Out)
	y := kernel.Matrix(out.F, x.Rows, l.Out)
	if l.NoBias {
		kernel.MatMul(c.Pool(), y, x, w)
	} else {
		kernel.MatMulBias(c.Pool(), y, x, w, p[1].F)
	}
	return out, in
}

// Backward is the derivative of Forward.
func (l Linear) Backward(c *trainer.Context, p []trainer.Tensor, stash any, dout trainer.Tensor, dp []trainer.Tensor) trainer.Tensor {
	in := stash.(trainer.Tensor)
	din := like(c, in)
	rows := in.Rows()
	x, dx := kernel.Matrix(in.F, rows, l.In), kernel.Matrix(din.F, rows, l.In)
	w, dw := kernel.Matrix(p[0].F, l.In, l.Out), kernel.Matrix(dp[0].F, l.In, l.Out)
	dy := kernel.Matrix(dout.F, rows, l.Out)
	kernel.MatMul(c.Pool(), dw, x.T(), dy)
	if !l.NoBias {
		kernel.SumRows(c.Pool(), dp[1].F, dout.F, rows, l.Out)
	}
	kernel.MatMul(c.Pool(), dx, dy, w.T())
	return din
}
