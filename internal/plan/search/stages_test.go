package search

import (
	"math"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/plan"
	"pgregory.net/rapid"
)

// TestDealAgainstOracle tries every way to deal layers and workers.
func TestDealAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 6).Draw(t, "layers")
		ws := rapid.IntRange(1, 6).Draw(t, "workers")
		stages := rapid.IntRange(1, min(n, ws, 4)).Draw(t, "stages")
		micros := rapid.IntRange(1, 12).Draw(t, "micro-batches")
		layers := make([]plan.Layer, n)
		for i := range layers {
			layers[i].Forward = time.Duration(rapid.IntRange(0, 30).Draw(t, "work"))
		}
		var oracle func(lo, ws, stages int) time.Duration
		oracle = func(lo, ws, stages int) time.Duration {
			if stages == 0 {
				if lo == n {
					return 0
				}
				return math.MaxInt64
			}
			best := time.Duration(math.MaxInt64)
			var work time.Duration
			for hi := lo + 1; hi <= n; hi++ {
				work += layers[hi-1].Forward
				for k := 1; k <= ws; k++ {
					each := (micros + k - 1) / k
					best = min(best, max(work*time.Duration(2*each-1), oracle(hi, ws-k, stages-1)))
				}
			}
			return best
		}
		want := oracle(0, ws, stages)
		parts := deal(layers, stages, ws, micros, math.MaxInt)
		d := newDealer(layers, stages, ws, micros, math.MaxInt)
		at, used := 0, 0
		for _, p := range parts {
			if p.lo != at || p.hi <= p.lo || p.workers < 1 {
				t.Fatalf("parts %v", parts)
			}
			at, used = p.hi, used+p.workers
		}
		if at != n || used != ws || len(parts) != stages {
			t.Fatalf("parts %v of %d layers, %d workers", parts, n, ws)
		}
		got := d.slowest(parts)
		if got != want {
			t.Fatalf("parts %v take %d, the best %d", parts, got, want)
		}
	})
}

// TestRecutAgainstOracle does so for given factors.
func TestRecutAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 7).Draw(t, "layers")
		factors := rapid.SliceOfN(rapid.Float64Range(0.5, 3), 1, min(n, 4)).Draw(t, "factors")
		layers := make([]plan.Layer, n)
		for i := range layers {
			layers[i].Backward = time.Duration(rapid.IntRange(1, 30).Draw(t, "work"))
		}
		var oracle func(lo, s int) float64
		oracle = func(lo, s int) float64 {
			if s == len(factors) {
				if lo == n {
					return 0
				}
				return math.Inf(1)
			}
			best, work := math.Inf(1), 0.0
			for hi := lo + 1; hi <= n; hi++ {
				work += float64(layers[hi-1].Backward)
				best = min(best, max(work*factors[s], oracle(hi, s+1)))
			}
			return best
		}
		got := 0.0
		work := sums(layers)
		for s, p := range recut(layers, factors) {
			got = max(got, factors[s]*float64(work[p.hi]-work[p.lo]))
		}
		if want := oracle(0, 0); math.Abs(got-want) > 1e-9*want {
			t.Fatalf("the slowest takes %v, the best %v", got, want)
		}
	})
}
