package nn

import (
	"fmt"

	"github.com/soliton-train/soliton/kernel"
	"github.com/soliton-train/soliton/rng"
)

// Sample draws one token from a row of logits: token t with a probability in
// proportion to exp(logits[t]/temperature). A temperature below 1 prefers
// likely tokens, and 0 takes the likeliest, the first if there are several.
// The same logits and stream give the same token on every machine.
func Sample(logits []float32, temperature float64, draw *rng.Stream) int {
	if len(logits) == 0 || !(temperature >= 0) {
		panic(fmt.Sprintf("nn: Sample of %d logits at temperature %v: it takes at least one, and a temperature of 0 or more", len(logits), temperature))
	}
	best := 0
	for t, x := range logits {
		if x > logits[best] {
			best = t
		}
	}
	scale := float32(1 / temperature)
	if scale > 1e9 {
		return best
	}
	probs := make([]float32, len(logits))
	kernel.Softmax(probs, logits, scale)
	left := draw.Float64()
	for t, p := range probs {
		if left -= float64(p); left < 0 {
			return t
		}
	}
	return best // rounding left the sum just below 1
}
