package process

import (
	"testing"

	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/worker/engine"
)

func TestGCPercent(t *testing.T) {
	for _, test := range []struct{ params, want int }{{0, 100}, {1 << 20, 100}, {16 << 20, 99}, {32 << 20, 49}, {89 << 20, 20}, {1 << 33, 20}} {
		layers := []engine.Layer{{}, {}}
		layers[1].Tensors = []zero.Tensor{{Size: test.params}}
		if got := gcPercent(layers); got != test.want {
			t.Errorf("%d parameters: %d %%, want %d", test.params, got, test.want)
		}
	}
}
