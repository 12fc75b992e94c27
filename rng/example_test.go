package rng_test

import (
	"fmt"

	"github.com/soliton-train/soliton/rng"
)

// A draw depends on the seed and on what it is for, so it can be made again at any time.
func ExampleNew() {
	place := rng.Place{Step: 7, Sample: 3, Layer: 2, Op: 1}
	a := rng.New(1, place)
	a.Uint64()
	saved := a
	fmt.Println(a.IntN(100), a.IntN(100))
	fmt.Println(saved.IntN(100), saved.IntN(100))
	// Output:
	// 93 5
	// 93 5
}

// Sample i of a run over n samples is in epoch i/n, at the place that the epoch's permutation gives it.
func ExampleNewPerm() {
	const n = 5
	for i := range uint64(2 * n) {
		fmt.Print(rng.NewPerm(1, i/n, n).At(i%n), " ")
	}
	fmt.Println()
	// Output:
	// 2 1 3 4 0 2 3 0 4 1
}
