package nn

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

// benchmarkLayer times a layer forward and backward on one thread, and on two. New memory
// is filled with NaN in this harness, which costs a few percent.
func benchmarkLayer(b *testing.B, l trainer.Layer, samples int, shape ...int) {
	for _, threads := range []int{1, 2} {
		b.Run(fmt.Sprintf("threads=%d", threads), func(b *testing.B) { benchmarkThreads(b, l, threads, samples, shape...) })
	}
}

func benchmarkThreads(b *testing.B, l trainer.Layer, threads, samples int, shape ...int) {
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
	runtime.LockOSThread() // as in a worker
	defer runtime.UnlockOSThread()
	ctx, release := trainer.NewContext(trainer.Call{Samples: samples, Train: true, Step: 1, Threads: threads})
	defer release()
	best := time.Hour // of all rounds: others may have shared the machine
	for b.Loop() {
		began := time.Now()
		_ = ctx.Keep(func() trainer.Tensor {
			_, stash := l.Forward(ctx, params, in)
			l.Backward(ctx, params, stash, dout, grads)
			return in
		})
		best = min(best, time.Since(began))
	}
	b.ReportMetric(float64(best.Microseconds())/1e3, "best-ms")
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
