package nn

import (
	"math"
	"testing"

	"github.com/soliton-train/soliton/rng"
)

func TestSampleFollowsProbabilities(t *testing.T) {
	logits := []float32{0, 1, float32(math.Inf(-1)), 2}
	const n = 20000
	for _, temperature := range []float64{0.5, 1, 2} {
		draw := rng.New(1, rng.Place{})
		var count [4]float64
		for range n {
			count[Sample(logits, temperature, &draw)]++
		}
		var sum float64
		for _, x := range logits {
			sum += math.Exp(float64(x) / temperature)
		}
		for i, x := range logits {
			p := math.Exp(float64(x)/temperature) / sum
			if limit := 5 * math.Sqrt(p*(1-p)/n); math.Abs(count[i]/n-p) > limit {
				t.Errorf("at temperature %v token %d came with frequency %.3f, want %.3f within %.3f", temperature, i, count[i]/n, p, limit)
			}
		}
	}
}

func TestSampleWithoutTemperature(t *testing.T) {
	draw := rng.New(1, rng.Place{})
	for _, temperature := range []float64{0, 1e-300} {
		if got := Sample([]float32{-1, 3, 3, 2}, temperature, &draw); got != 1 {
			t.Errorf("at temperature %v token %d, want the first of the likeliest, 1", temperature, got)
		}
	}
	if draw != rng.New(1, rng.Place{}) {
		t.Error("a certain choice draws a number")
	}
}
