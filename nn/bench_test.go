package nn

import (
	"testing"

	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

// benchmarkLayer times a layer forward and backward on one thread. New memory
// is filled with NaN in this harness, which costs a few percent.
func benchmarkLayer(b *testing.B, l trainer.Layer, samples int, shape ...int) {
	draw := rng.New(1, rng.Place{})
	random := func(shape ...int) trainer.Tensor {
		x := trainer.NewTensor(trainer.Float32, shape...)
		for i := range x.F {
			x.F[i] = float32(draw.Normal())
		}
		return x
	}
	shape = append([]int{samples}, shape...)
	in, dout := random(shape...), random(shape...)
	var params, grads []trainer.Tensor
	for j, p := range l.Params() {
		x := trainer.NewTensor(trainer.Float32, p.Shape...)
		p.Init.Fill(x.F, 1, 1, j)
		params, grads = append(params, x), append(grads, trainer.NewTensor(trainer.Float32, p.Shape...))
	}
	for b.Loop() {
		ctx, release := trainer.NewContext(trainer.Call{Samples: samples, Train: true, Step: 1})
		_, stash := l.Forward(ctx, params, in)
		l.Backward(ctx, params, stash, dout, grads)
		release()
	}
}

func BenchmarkBlock(b *testing.B) {
	m := GPT(GPTConfig{Dropout: 0.1})
	benchmarkLayer(b, m.Layers[1], 8, 128, 256)
}

func BenchmarkBlockMicroBatch2(b *testing.B) {
	m := GPT(GPTConfig{Dropout: 0.1})
	benchmarkLayer(b, m.Layers[1], 2, 128, 256)
}

func BenchmarkAttention(b *testing.B) {
	benchmarkLayer(b, CausalAttention{Width: 256, Heads: 8, Dropout: 0.1}, 8, 128, 256)
}
