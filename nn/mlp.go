package nn

import (
	"cmp"

	"github.com/soliton-train/soliton/kernel"
	"github.com/soliton-train/soliton/trainer"
)

// MLP is a [Linear] from Width to Hidden elements, [GELU], and a Linear back
// to Width: the second half of a transformer block.
type MLP struct {
	Width  int
	Hidden int // 0 means 4·Width
	// InInit and OutInit give the first weights of the two; see [Linear].
	InInit, OutInit trainer.Init
}

func (m MLP) parts() (in, out Linear) {
	hidden := cmp.Or(m.Hidden, 4*m.Width)
	return Linear{In: m.Width, Out: hidden, Init: m.InInit}, Linear{In: hidden, Out: m.Width, Init: m.OutInit}
}

// Params declares "in.weight", "in.bias", "out.weight" and "out.bias".
func (m MLP) Params() []trainer.Param {
	in, out := m.parts()
	return append(prefixed("in.", in.Params()), prefixed("out.", out.Params())...)
}

// mlpStash holds the input, and what GELU was given and gave.
type mlpStash struct{ in, hidden, active trainer.Tensor }

// Forward keeps the shape of its input.
func (m MLP) Forward(c *trainer.Context, p []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	first, second := m.parts()
	hidden, _ := first.Forward(c, p[:2], in)
	active := like(c, hidden)
	kernel.GELU(c.Pool(), active.F, hidden.F)
	out, _ := second.Forward(c, p[2:], active)
	return out, &mlpStash{in, hidden, active}
}

// Backward is the derivative of Forward.
func (m MLP) Backward(c *trainer.Context, p []trainer.Tensor, stash any, dout trainer.Tensor, dp []trainer.Tensor) trainer.Tensor {
	s := stash.(*mlpStash)
	first, second := m.parts()
	d := second.Backward(c, p[2:], s.active, dout, dp[2:])
	kernel.GELUBackward(c.Pool(), d.F, s.hidden.F, d.F)
	return first.Backward(c, p[:2], s.in, d, dp[:2])
}
