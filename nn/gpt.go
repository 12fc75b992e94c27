package nn

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/soliton-train/soliton/trainer"
)

// GPTConfig describes a [GPT]. Zero means the documented default, except for
// Dropout. It survives a round trip through JSON.
type GPTConfig struct {
	Layers  int     `json:"layers"`  // transformer blocks; 0 means 4
	Width   int     `json:"width"`   // elements of an activation; 0 means 256
	Heads   int     `json:"heads"`   // attention heads, a divisor of Width; 0 means 8
	Context int     `json:"context"` // longest sequence, in tokens; 0 means 128
	Vocab   int     `json:"vocab"`   // different tokens; 0 means 256, the bytes
	Dropout float64 `json:"dropout"` // probability of dropout, in [0, 1)

	// Tied has the head share the table of tokens: "head.weight" is "embedding.token.weight".
	Tied bool `json:"tied,omitempty"`
}

// Limits of a configuration, far beyond what one computer trains. They bound what
// a config.json can ask for.
const (
	maxLayers = 4000 // random streams tell 4096 layers apart
	maxSize   = 1 << 20
)

func (g GPTConfig) withDefaults() GPTConfig {
	g.Layers, g.Width, g.Heads = cmp.Or(g.Layers, 4), cmp.Or(g.Width, 256), cmp.Or(g.Heads, 8)
	g.Context, g.Vocab = cmp.Or(g.Context, 128), cmp.Or(g.Vocab, 256)
	return g
}

// Validate returns an error that lists all faults, one a line, or nil.
func (g GPTConfig) Validate() error {
	g = g.withDefaults()
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	inRange := func(field, flag string, x, limit int) {
		if x < 1 || x > limit {
			fault("GPTConfig.%s (%s) is %d: use 1 to %d (0 means the default)", field, flag, x, limit)
		}
	}
	inRange("Layers", "--layers", g.Layers, maxLayers)
	inRange("Width", "--width", g.Width, maxSize)
	inRange("Heads", "--heads", g.Heads, maxSize)
	inRange("Context", "--context", g.Context, maxSize)
	inRange("Vocab", "the number of tokens", g.Vocab, maxSize)
	if g.Heads >= 1 && g.Width >= 1 && g.Width <= maxSize && g.Width%g.Heads != 0 {
		fault("GPTConfig.Heads (--heads) is %d, which does not divide Width (--width) %d: use a divisor such as %s", g.Heads, g.Width, divisors(g.Width, g.Heads))
	}
	if !isDropout(g.Dropout) {
		fault("GPTConfig.Dropout (--dropout) is %v: use 0 up to, but not including, 1", g.Dropout)
	}
	return errors.Join(faults...)
}

// isDropout reports whether p is a probability of dropout. The layers compute
// with float32, where 1-1e-9 is 1.
func isDropout(p float64) bool { return p >= 0 && float32(p) < 1 }

func needDropout(layer string, p float64) {
	if !isDropout(p) {
		panic(fmt.Sprintf("nn: %s drops with probability %v: use 0 up to, but not including, 1", layer, p))
	}
}

// divisors names the divisors of width that are nearest to heads, at most
// three.
func divisors(width, heads int) string {
	var below, above []string
	for d := 1; d <= width && len(above) < 2; d++ {
		switch {
		case width%d != 0:
		case d < heads:
			below = append(below, fmt.Sprint(d))
		default:
			above = append(above, fmt.Sprint(d))
		}
	}
	near := append(below[max(0, len(below)-(3-len(above))):], above...)
	last := len(near) - 1
	if last == 0 {
		return near[0]
	}
	return strings.Join(near[:last], ", ") + " or " + near[last]
}

// GPT returns a decoder-only transformer that predicts the next token at
// every position (A. Radford and others, "Language models are unsupervised
// multitask learners", 2019). A sample is Context tokens, its target the
// Context tokens that follow each of them; inference takes shorter sequences
// too. The output has Vocab logits for every position.
//
// The model's layers are "embedding", "block.0" and so on, and "head". A
// block is x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x)));
// the head is a norm and a projection, of its own or onto the table of tokens. Weights begin as normal
// numbers of standard deviation 0.02, those that end in a residual sum
// divided by √(2·Layers).
//
// An impossible configuration is reported through [trainer.Model.Fault].
func GPT(config GPTConfig) trainer.Model {
	g := config.withDefaults()
	m := trainer.Model{Name: "gpt", Config: g, Fault: config.Validate()}
	if m.Fault != nil {
		return m
	}
	init := trainer.Normal(0.02)
	toResidual := trainer.Normal(float32(0.02 / math.Sqrt(float64(2*g.Layers))))
	tokens := trainer.Spec{Shape: []int{g.Context}, Kind: trainer.Int32}

	m.Input, m.Target, m.Loss = tokens, tokens, CrossEntropy{}
	add := func(name string, l trainer.Layer) {
		m.LayerNames = append(m.LayerNames, name)
		m.Layers = append(m.Layers, l)
	}
	add("embedding", Sequence(
		Named("", Embedding{Vocab: g.Vocab, Context: g.Context, Width: g.Width, Init: init}),
		Dropout{Prob: g.Dropout},
	))
	for i := range g.Layers {
		add(fmt.Sprintf("block.%d", i), Sequence(
			Named("", Residual(
				Named("norm1", LayerNorm{Width: g.Width}),
				Named("attention", CausalAttention{
					Width: g.Width, Heads: g.Heads, Dropout: g.Dropout,
					Init: init, OutInit: toResidual,
				}),
				Dropout{Prob: g.Dropout},
			)),
			Named("", Residual(
				Named("norm2", LayerNorm{Width: g.Width}),
				Named("mlp", MLP{Width: g.Width, InInit: init, OutInit: toResidual}),
				Dropout{Prob: g.Dropout},
			)),
		))
	}
	add("head", Sequence(
		Named("norm", LayerNorm{Width: g.Width}),
		Named("", Linear{In: g.Width, Out: g.Vocab, NoBias: true, Transposed: g.Tied, Init: init}),
	))
	if g.Tied {
		m.Tied = map[string]string{"head.weight": "embedding.token.weight"}
	}
	return m
}
