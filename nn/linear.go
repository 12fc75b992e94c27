package nn

import (
	"cmp"
	"math"

	"github.com/soliton-train/soliton/kernel"
	"github.com/soliton-train/soliton/trainer"
)

// Linear is in·weight + bias, for weight [In, Out] and bias [Out].
//
// A Transposed one has a weight [Out, In], as the table of an [Embedding] is, which it may share; see [trainer.Model].
type Linear struct {
	In, Out int
	NoBias  bool

	Transposed bool
	// Init gives the first weights; the zero value means uniform in
	// ±1/√In. The bias begins as zeros.
	Init trainer.Init
}

// Params declares "weight" and "bias".
func (l Linear) Params() []trainer.Param {
	init := cmp.Or(l.Init, trainer.Uniform(float32(1/math.Sqrt(float64(max(l.In, 1))))))
	shape := []int{l.In, l.Out}
	if l.Transposed {
		shape = []int{l.Out, l.In}
	}
	ps := []trainer.Param{{Name: "weight", Shape: shape, Init: init}}
	if !l.NoBias {
		ps = append(ps, trainer.Param{Name: "bias", Shape: []int{l.Out}, NoDecay: true})
	}
	return ps
}

// Forward maps [..., In] to [..., Out].
func (l Linear) Forward(c *trainer.Context, p []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	x, w := matrix("Linear", in, l.In), l.weight(p[0])
	out := withCols(c, in, l.Out)
	y := kernel.Matrix(out.F, x.Rows, l.Out)
	if l.NoBias {
		kernel.MatMul(c.Pool(), y, x, w)
	} else {
		kernel.MatMulBias(c.Pool(), y, x, w, p[1].F)
	}
	return out, in
}

// weight returns the matrix [In, Out].
func (l Linear) weight(t trainer.Tensor) kernel.Mat {
	if l.Transposed {
		return kernel.Matrix(t.F, l.Out, l.In).T()
	}
	return kernel.Matrix(t.F, l.In, l.Out)
}

// Backward is the derivative of Forward.
func (l Linear) Backward(c *trainer.Context, p []trainer.Tensor, stash any, dout trainer.Tensor, dp []trainer.Tensor) trainer.Tensor {
	in := stash.(trainer.Tensor)
	din := like(c, in)
	rows := in.Rows()
	x, dx := kernel.Matrix(in.F, rows, l.In), kernel.Matrix(din.F, rows, l.In)
	w, dy := l.weight(p[0]), kernel.Matrix(dout.F, rows, l.Out)
	if l.Transposed {
		kernel.MatMul(c.Pool(), kernel.Matrix(dp[0].F, l.Out, l.In), dy.T(), x)
	} else {
		kernel.MatMul(c.Pool(), kernel.Matrix(dp[0].F, l.In, l.Out), x.T(), dy)
	}
	if !l.NoBias {
		kernel.SumRows(c.Pool(), dp[1].F, dout.F, rows, l.Out)
	}
	kernel.MatMul(c.Pool(), dx, dy, w.T())
	return din
}
