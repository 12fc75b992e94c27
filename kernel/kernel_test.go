package kernel_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/soliton-train/soliton/kernel"
	"github.com/soliton-train/soliton/rng"
)

// A product with a part of a transposed matrix.
func ExampleMatMul() {
	a := kernel.Matrix([]float32{1, 2, 3, 4}, 2, 2)
	b := kernel.Mat{Data: []float32{1, 10, 0, 2, 20, 0}, Rows: 2, Cols: 2, Stride: 3}
	c := kernel.Matrix(make([]float32, 4), 2, 2)
	kernel.MatMul(nil, c, a, b.T())
	fmt.Println(c.Data)
	// Output: [21 42 43 86]
}

func TestAddScaled(t *testing.T) {
	draw := rng.New(1, rng.Place{})
	for _, n := range []int{0, 1, 17, 512, 513, 2000} {
		dst, a, want := make([]float32, n), make([]float32, n), make([]float32, n)
		for i := range dst {
			dst[i], a[i] = float32(draw.Normal()), float32(draw.Normal())
			want[i] = dst[i] + float32(0.3*a[i])
		}
		kernel.AddScaled(dst, a, 0.3)
		for i := range dst {
			if math.Float32bits(dst[i]) != math.Float32bits(want[i]) {
				t.Fatalf("element %d of %d is %v, want %v", i, n, dst[i], want[i])
			}
		}
	}
}
