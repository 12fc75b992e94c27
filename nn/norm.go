package nn

import (
	"github.com/soliton-train/soliton/kernel"
	"github.com/soliton-train/soliton/trainer"
)

// normEps is added to the variance, as is usual for transformers.
const normEps = 1e-5

// LayerNorm brings every row of Width elements to mean 0 and variance 1 and
// then scales it by "gain" and shifts it by "bias" (J. Ba, J. Kiros, G.
// Hinton, "Layer normalization", 2016). 1e-5 is added to the variance.
type LayerNorm struct{ Width int }

// Params declares "gain" and "bias".
func (l LayerNorm) Params() []trainer.Param {
	return []trainer.Param{
		{Name: "gain", Shape: []int{l.Width}, Init: trainer.Ones(), NoDecay: true},
		{Name: "bias", Shape: []int{l.Width}, NoDecay: true},
	}
}

type normStash struct{ in, mean, rstd trainer.Tensor }

// Forward keeps the shape of its input.
func (l LayerNorm) Forward(c *trainer.Context, p []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	rows := matrix("LayerNorm", in, l.Width).Rows
	out := like(c, in)
	s := &normStash{in, c.Tensor(rows), c.Tensor(rows)}
	kernel.LayerNorm(c.Pool(), out.F, s.mean.F, s.rstd.F, in.F, p[0].F, p[1].F, rows, l.Width, normEps)
	return out, s
}

// Backward is the derivative of Forward.
func (l LayerNorm) Backward(c *trainer.Context, p []trainer.Tensor, stash any, dout trainer.Tensor, dp []trainer.Tensor) trainer.Tensor {
	s := stash.(*normStash)
	din := like(c, s.in)
	kernel.LayerNormBackward(c.Pool(), din.F, dp[0].F, dp[1].F, dout.F, s.in.F, s.mean.F, s.rstd.F, p[0].F, s.in.Rows(), l.Width)
	return din
}
