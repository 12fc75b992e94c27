package search

import (
	"math"
	"slices"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/plan/simulate"
	"pgregory.net/rapid"
)

// TestContiguousAgainstOracle tries all borders: the slowest worker first, the
// nodes of the gradient tree second.
func TestContiguousAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		micros := rapid.IntRange(1, 16).Draw(t, "micro-batches")
		speeds := rapid.SliceOfN(rapid.SampledFrom([]float64{1, 1, 1, 0.5, 0.25, 2}), 1, 4).Draw(t, "speeds")
		type cost struct {
			slowest float64
			nodes   int
		}
		less := func(a, b cost) bool {
			return a.slowest < b.slowest-1e-9 || a.slowest < b.slowest+1e-9 && a.nodes < b.nodes
		}
		var oracle func(lo, rank int) cost
		oracle = func(lo, rank int) cost {
			if rank == len(speeds)-1 {
				return cost{float64(micros-lo) / speeds[rank], tree.CoverSize(micros, lo, micros)}
			}
			best := cost{math.Inf(1), 0}
			for hi := lo; hi <= micros; hi++ {
				rest := oracle(hi, rank+1)
				c := cost{max(rest.slowest, float64(hi-lo)/speeds[rank]), rest.nodes + tree.CoverSize(micros, lo, hi)}
				if less(c, best) {
					best = c
				}
			}
			return best
		}
		// The recursion takes the least nodes for the least slowest of the
		// rest, which may be less than the whole allows; so the bound first.
		want := oracle(0, 0)
		fewest := fewestNodes(micros, speeds, want.slowest)
		r := contiguous(micros, speeds)
		if !slices.IsSorted(r) {
			t.Fatalf("%v is not contiguous", r)
		}
		got := cost{}
		for rank, v := range speeds {
			n := 0
			for _, x := range r {
				if x == rank {
					n++
				}
			}
			got.slowest = max(got.slowest, float64(n)/v)
		}
		countNodes(r, func(_, n int) { got.nodes += n })
		if got.slowest > want.slowest+1e-9 || got.nodes != fewest {
			t.Fatalf("%v has %+v, the best is %v with %d nodes", r, got, want.slowest, fewest)
		}
	})
}

// fewestNodes tries all contiguous runs in which no worker is slower than a bound.
func fewestNodes(micros int, speeds []float64, slowest float64) int {
	var try func(lo, rank int) int
	try = func(lo, rank int) int {
		if rank == len(speeds) {
			if lo == micros {
				return 0
			}
			return math.MaxInt / 2
		}
		best := math.MaxInt / 2
		for hi := lo; hi <= micros && float64(hi-lo)/speeds[rank] <= slowest+1e-9; hi++ {
			best = min(best, tree.CoverSize(micros, lo, hi)+try(hi, rank+1))
		}
		return best
	}
	return try(0, 0)
}

func TestAlignedRuns(t *testing.T) {
	for _, c := range []struct {
		micros, ranks int
		most          int // nodes of one rank
	}{{8, 2, 1}, {16, 4, 1}, {12, 3, 1}, {48, 3, 1}, {24, 2, 2}, {64, 8, 1}} {
		speeds := slices.Repeat([]float64{1}, c.ranks)
		if got := (&candidate{rankings: []simulate.Ranking{contiguous(c.micros, speeds)}}).buffers(); got > c.most {
			t.Errorf("%d micro-batches on %d ranks: %d nodes", c.micros, c.ranks, got)
		}
	}
}
