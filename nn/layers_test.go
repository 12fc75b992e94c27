package nn

import (
	"testing"

	"github.com/soliton-train/soliton/trainer"
	"github.com/soliton-train/soliton/trainer/trainertest"
)

func floats(shape ...int) trainer.Spec { return trainer.Spec{Shape: shape} }

func ints(shape ...int) trainer.Spec { return trainer.Spec{Shape: shape, Kind: trainer.Int32} }

func TestLayers(t *testing.T) {
	attention := CausalAttention{Width: 12, Heads: 3, Init: trainer.Normal(0.3), OutInit: trainer.Normal(0.3)}
	dropping := attention
	dropping.Dropout = 0.3
	for _, c := range []struct {
		name  string
		layer trainer.Layer
		in    trainer.Spec
		opts  trainertest.Options
	}{
		{"Linear", Linear{In: 7, Out: 20}, floats(5, 7), trainertest.Options{}},
		{"Linear without bias", Linear{In: 20, Out: 3, NoBias: true}, floats(20), trainertest.Options{}},
		{"Linear, transposed", Linear{In: 7, Out: 20, Transposed: true}, floats(5, 7), trainertest.Options{}},
		{"LayerNorm", LayerNorm{Width: 21}, floats(4, 21), trainertest.Options{}},
		{"Embedding", Embedding{Vocab: 11, Context: 6, Width: 33}, ints(5), trainertest.Options{Classes: 11}},
		{"GELU", GELU{}, floats(4, 9), trainertest.Options{}},
		{"ReLU", ReLU{}, floats(4, 9), trainertest.Options{Step: 1e-3}},
		{"Dropout", Dropout{Prob: 0.4}, floats(70, 71), trainertest.Options{}},
		{"Dropout off", Dropout{}, floats(70), trainertest.Options{}},
		{"Flatten", Flatten{}, floats(4, 3, 2), trainertest.Options{}},
		{"MLP", MLP{Width: 10, Hidden: 24}, floats(3, 10), trainertest.Options{}},
		{"CausalAttention", attention, floats(5, 12), trainertest.Options{}},
		{"CausalAttention with dropout", dropping, floats(9, 12), trainertest.Options{}},
		{"CausalAttention of two chunks", dropping, floats(chunk+5, 12), trainertest.Options{Samples: 2}},
		{"Sequence", Sequence(Linear{In: 5, Out: 8}, GELU{}, Dropout{Prob: 0.3}, Linear{In: 8, Out: 2}, Dropout{Prob: 0.3}), floats(5), trainertest.Options{}},
		{"Checkpoint", Checkpoint(Sequence(Linear{In: 5, Out: 8}, GELU{}, Dropout{Prob: 0.3}, Linear{In: 8, Out: 2})), floats(5), trainertest.Options{}},
		{"Checkpoint of nothing", Checkpoint(Dropout{}), floats(5), trainertest.Options{}},
		{"Residual", Residual(Named("norm", LayerNorm{Width: 9}), Linear{In: 9, Out: 9}, Dropout{Prob: 0.3}), floats(2, 9), trainertest.Options{}},
		{"Residual of nothing", Residual(Dropout{}), floats(5), trainertest.Options{}},
	} {
		t.Run(c.name, func(t *testing.T) { trainertest.Layer(t, c.layer, c.in, c.opts) })
	}
}

func TestCrossEntropy(t *testing.T) {
	trainertest.Loss(t, CrossEntropy{}, floats(5, 19), ints(5), trainertest.Options{Classes: 19})
	trainertest.Loss(t, CrossEntropy{}, floats(3), ints(1), trainertest.Options{Classes: 3})
}

func TestGPTLayers(t *testing.T) {
	m := GPT(GPTConfig{Layers: 2, Width: 12, Heads: 3, Context: 7, Vocab: 13, Dropout: 0.2})
	if m.Fault != nil {
		t.Fatal(m.Fault)
	}
	for i, l := range m.Layers {
		in := floats(7, 12)
		if i == 0 {
			in = m.Input
		}
		t.Run(m.LayerNames[i], func(t *testing.T) {
			trainertest.Layer(t, l, in, trainertest.Options{Classes: 13})
		})
	}
}
