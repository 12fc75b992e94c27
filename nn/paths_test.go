package nn

import (
	"crypto/sha256"
	"encoding/hex"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/kernel"
)

// hash is over the bits of everything that a run gives.
func (r run) hash() string {
	h := sha256.New()
	h.Write(kernel.Bytes(r.logits.F))
	for _, layer := range r.grads {
		for _, g := range layer {
			h.Write(kernel.Bytes(g.F))
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// The bits of a step are the same on every machine and in every build, and a
// change of them is a change of what a job gives.
func TestGPTGolden(t *testing.T) {
	m := GPT(GPTConfig{Layers: 1, Width: 96, Heads: 3, Context: 50, Vocab: 70, Dropout: 0.1})
	params := parameters(m)
	in, target := tokens(1, 70, 3, 50), tokens(2, 70, 3, 50)
	const want = "284b175f8edb7374"
	for _, p := range kernel.Available() {
		restore, err := kernel.Use(p)
		if err != nil {
			t.Fatal(err)
		}
		got := train(m, params, in, target, 1).hash()
		restore()
		if got != want {
			t.Errorf("kernels %v: hash %s, want %s", p, got, want)
		}
	}
}
