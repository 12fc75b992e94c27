package pages

import (
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
)

func TestMakeCopyClear(t *testing.T) {
	for _, n := range []int{0, 1, longest, longest + 1, 3*longest + 7, 2*hugePage/4 - 1, 2 * hugePage / 4, 5<<20 + 3} {
		src, dst := Make(n), Make(n+1)
		if len(src) != n || slices.Max(append(src, 0)) != 0 {
			t.Fatalf("Make(%d) gave %d elements, or not zeros", n, len(src))
		}
		for i := range src {
			src[i] = float32(i + 1)
		}
		Copy(dst, src)
		if !slices.Equal(dst[:n], src) || dst[n] != 0 {
			t.Errorf("Copy of %d elements is wrong", n)
		}
		Clear(dst[:n])
		if slices.Max(dst) != 0 {
			t.Errorf("Clear of %d elements is wrong", n)
		}
	}
}

func BenchmarkFirstUse(b *testing.B) {
	const n = 64 << 20
	for _, way := range []struct {
		name string
		make func(int) []float32
	}{{"make", func(n int) []float32 { return make([]float32, n) }}, {"pages", Make}} { // in this order: memory stays what Make has asked for
		b.Run(way.name, func(b *testing.B) {
			b.SetBytes(4 * n)
			for b.Loop() {
				b.StopTimer()
				debug.FreeOSMemory() // what a turn before has left is in use already
				b.StartTimer()
				x := way.make(n)
				for i := 0; i < n; i += 1024 {
					x[i] = 1
				}
			}
		})
	}
}

// How long it takes until all goroutines are stopped while one of them copies.
func BenchmarkStopTheWorld(b *testing.B) {
	dst, src := make([]float32, 100<<20), make([]float32, 100<<20)
	for _, way := range []struct {
		name string
		copy func(dst, src []float32)
	}{
		{"copy", func(dst, src []float32) { copy(dst, src) }},
		{"copy in parts", func(dst, src []float32) {
			for ; len(src) > 0; dst, src = dst[longest:], src[longest:] {
				copy(dst[:longest], src[:longest])
			}
		}},
		{"Copy", Copy},
	} {
		b.Run(way.name, func(b *testing.B) {
			var over atomic.Bool
			var copying sync.WaitGroup
			begun := make(chan struct{})
			copying.Go(func() {
				way.copy(dst, src)
				close(begun)
				for !over.Load() {
					way.copy(dst, src)
				}
			})
			<-begun
			var m runtime.MemStats
			for b.Loop() {
				runtime.ReadMemStats(&m)
			}
			over.Store(true)
			copying.Wait()
		})
	}
}
