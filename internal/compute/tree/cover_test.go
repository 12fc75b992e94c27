package tree

import (
	"testing"
)

func TestCoverSize(t *testing.T) {
	for m := 1; m <= 40; m++ {
		for lo := range m + 1 {
			for hi := lo; hi <= m; hi++ {
				want := 0
				if lo < hi {
					Cover(m, lo, hi, func(Node) { want++ })
				}
				if got := CoverSize(m, lo, hi); got != want {
					t.Fatalf("[%d,%d) of %d: %d nodes, want %d", lo, hi, m, got, want)
				}
			}
		}
	}
}
