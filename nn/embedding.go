package nn

import (
	"cmp"
	"fmt"

	"github.com/soliton-train/soliton/kernel"
	"github.com/soliton-train/soliton/trainer"
)

// Embedding maps token t at position i to row t of the table "token.weight"
// [Vocab, Width] plus row i of "position.weight" [Context, Width].
type Embedding struct {
	Vocab, Context, Width int
	// Init gives the first values of both tables; the zero value means a
	// normal distribution of standard deviation 0.02.
	Init trainer.Init
}

// Params declares the two tables.
func (e Embedding) Params() []trainer.Param {
	init := cmp.Or(e.Init, trainer.Normal(0.02))
	return []trainer.Param{
		{Name: "token.weight", Shape: []int{e.Vocab, e.Width}, Init: init},
		{Name: "position.weight", Shape: []int{e.Context, e.Width}, Init: init},
	}
}

// Forward maps tokens, int32 [samples, n] with n at most Context, to
// [samples, n, Width].
func (e Embedding) Forward(c *trainer.Context, p []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	if in.I == nil || len(in.Shape) != 2 || in.Shape[1] > e.Context {
		panic(fmt.Sprintf("nn: Embedding was given %v%v: it takes int32 [samples, n] with n at most its context %d", in.Kind(), in.Shape, e.Context))
	}
	for _, t := range in.I {
		if t < 0 || int(t) >= e.Vocab {
			panic(fmt.Sprintf("nn: Embedding was given token %d: tokens of its vocabulary are 0 to %d", t, e.Vocab-1))
		}
	}
	n, w := in.Shape[1], e.Width
	out := c.Tensor(in.Shape[0], n, w)
	token, position := p[0].F, p[1].F
	c.For(len(in.I), func(lo, hi int) {
		for r := lo; r < hi; r++ {
			t, i := int(in.I[r]), r%n
			kernel.Add(out.F[r*w:][:w], token[t*w:][:w], position[i*w:][:w])
		}
	})
	return out, in
}

// Backward sets the gradients of the tables. Rows are added in order, so
// threads split the columns.
func (e Embedding) Backward(c *trainer.Context, p []trainer.Tensor, stash any, dout trainer.Tensor, dp []trainer.Tensor) trainer.Tensor {
	in := stash.(trainer.Tensor)
	n, w := in.Shape[1], e.Width
	token, position := dp[0].F, dp[1].F
	c.Pool().For(w, 16, func(lo, hi int) {
		for _, table := range [][]float32{token, position} {
			for r := 0; r < len(table); r += w {
				clear(table[r+lo : r+hi])
			}
		}
		for r, t := range in.I {
			d, i := dout.F[r*w:], r%n
			for _, row := range [][]float32{token[int(t)*w:], position[i*w:]} {
				kernel.Add(row[lo:hi], row[lo:hi], d[lo:hi])
			}
		}
	})
	return trainer.Tensor{}
}
