package nn

import (
	"slices"
	"testing"

	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

// A layer that keeps its input only has the bits of one that keeps all.
func TestCheckpointSameBits(t *testing.T) {
	l := Sequence(Linear{In: 64, Out: 600}, GELU{}, Dropout{Prob: 0.3}, Linear{In: 600, Out: 500})
	in, params := trainer.NewTensor(trainer.Float32, 8, 64), []trainer.Tensor{}
	s := rng.New(1, rng.Place{})
	for i := range in.F {
		in.F[i] = float32(s.Normal())
	}
	for i, p := range l.Params() {
		x := trainer.NewTensor(trainer.Float32, p.Shape...)
		p.Init.Fill(x.F, 1, 0, i)
		params = append(params, x)
	}
	run := func(l trainer.Layer) (all [][]float32) {
		c, release := trainer.NewContext(trainer.Call{Seed: 1, Step: 1, Samples: 8, Train: true})
		defer release()
		out, stash := l.Forward(c, params, in)
		second, again := l.Forward(c, params, in) // another micro-batch in flight
		all = append(all, slices.Clone(out.F), slices.Clone(second.F))
		for _, stash := range []any{again, stash} {
			dp := make([]trainer.Tensor, len(params))
			for i := range dp {
				dp[i] = trainer.NewTensor(trainer.Float32, params[i].Shape...)
			}
			din := l.Backward(c, params, stash, out, dp)
			all = append(all, slices.Clone(din.F))
			for _, x := range dp {
				all = append(all, x.F)
			}
		}
		return all
	}
	if !slices.EqualFunc(run(Checkpoint(l)), run(l), slices.Equal) {
		t.Error("other bits than without")
	}
}
