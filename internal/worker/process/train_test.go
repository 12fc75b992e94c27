package process

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
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

// The first collection of garbage is late, and ends that.
func TestCollectLater(t *testing.T) {
	now := func() int {
		s := []metrics.Sample{{Name: "/gc/gogc:percent"}}
		metrics.Read(s)
		return int(s[0].Value.Uint64())
	}
	defer debug.SetGCPercent(now())
	if collectLater(1, 70); now() != 70 {
		t.Errorf("with more in use than the floor: %d %%", now())
	}
	if collectLater(1<<30, 70); now() <= 70 {
		t.Errorf("before the first collection: %d %%", now())
	}
	for now() != 70 { // the test's time limit ends that otherwise
		runtime.GC()
	}
}
