package kernel

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestForCoversOnce(t *testing.T) {
	for threads := 1; threads <= 5; threads++ {
		p := NewPool(threads)
		for n := range 40 {
			for _, grain := range []int{1, 3, 16} {
				var mu sync.Mutex
				seen := make([]int, n)
				p.For(n, grain, func(lo, hi int) {
					mu.Lock()
					defer mu.Unlock()
					if lo%grain != 0 || lo >= hi {
						t.Errorf("range [%d, %d) with grain %d", lo, hi, grain)
					}
					for i := lo; i < hi; i++ {
						seen[i]++
					}
				})
				for i, s := range seen {
					if s != 1 {
						t.Fatalf("threads %d, n %d, grain %d: index %d came %d times", threads, n, grain, i, s)
					}
				}
			}
		}
		p.Close()
	}
}

func TestEachCallsOnce(t *testing.T) {
	for threads := 1; threads <= 5; threads++ {
		p := NewPool(threads)
		for _, n := range []int{0, 1, 2, 7, 100, maxParts + 1} {
			seen := make([]atomic.Int32, n)
			running := make([]atomic.Int32, threads)
			p.Each(n, func(thread, i int) {
				if running[thread].Add(1) != 1 {
					t.Errorf("thread %d runs two calls at once", thread)
				}
				seen[i].Add(1)
				running[thread].Add(-1)
			})
			for i := range seen {
				if c := seen[i].Load(); c != 1 {
					t.Fatalf("%d threads, n %d: index %d came %d times", threads, n, i, c)
				}
			}
		}
		p.Close()
	}
}

// A helper that gets no processor delays nothing.
func TestCallerTakesAll(t *testing.T) {
	gate := make(chan struct{})
	p := NewPool(3, func() { <-gate })
	defer p.Close()
	defer close(gate)
	sum := 0
	p.For(6, 1, func(lo, hi int) { sum += hi - lo })
	p.Each(6, func(thread, _ int) {
		if thread != 0 {
			t.Errorf("thread %d, which has not begun, was given work", thread)
		}
		sum++
	})
	if sum != 12 {
		t.Errorf("%d of 12 indices came", sum)
	}
}

// A helper that was still on its way to the last call when the pool was closed ends too. Only luck finds one there, so the time
// between the two varies.
func TestCloseBehindCall(t *testing.T) {
	var spent [3]int
	for n := range 5000 {
		p := NewPool(2 + n%2)
		p.Each(3, func(_, i int) {
			for range n * 7 % 5000 {
				spent[i]++
			}
		})
		p.Close()
	}
}

func TestEachPanicEndsCall(t *testing.T) {
	p := NewPool(3)
	defer p.Close()
	for range 50 {
		var running atomic.Int32
		func() {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
				if running.Load() != 0 {
					t.Error("the call returned before its parts")
				}
			}()
			p.Each(100, func(_, i int) {
				running.Add(1)
				defer running.Add(-1)
				if i%10 == 3 {
					panic("boom")
				}
			})
		}()
	}
	sum := 0
	p.For(1, 1, func(lo, hi int) { sum += hi - lo })
	p.Each(1, func(_, _ int) { sum++ })
	if sum != 2 {
		t.Error("after a panic the pool does not run")
	}
}

func TestSpinner(t *testing.T) {
	var now time.Duration
	look := func(s *spinner, each time.Duration) (looks int) {
		s.until(func() bool {
			looks++
			now += each
			return false
		})
		return looks
	}
	clock := func() time.Duration { return now }
	if n := look(&spinner{now: clock, never: true}, 0); n != 1 {
		t.Errorf("with more threads than processors it looked %d times", n)
	}
	if n := look(&spinner{now: clock}, 0); n > spinLooks+1 {
		t.Errorf("while the clock stood still it looked %d times", n)
	}
	s := &spinner{now: clock}
	if n := look(s, time.Microsecond); n < 15 || n > 25 {
		t.Errorf("at a microsecond a look it looked %d times", n)
	}
	if n := look(s, spinGap+1); n != 2 {
		t.Errorf("when it was interrupted it looked %d times", n)
	}
	if n := look(s, time.Microsecond); n != 1 {
		t.Errorf("after an interruption it looked %d times", n)
	}
	now += spinRest
	if n := look(s, time.Microsecond); n < 15 {
		t.Errorf("long after an interruption it looked %d times", n)
	}
}

func BenchmarkForkJoin(b *testing.B) {
	for _, threads := range []int{1, 2} {
		b.Run(fmt.Sprint(threads), func(b *testing.B) {
			runtime.LockOSThread() // as in a worker
			defer runtime.UnlockOSThread()
			p := NewPool(threads, runtime.LockOSThread)
			defer p.Close()
			for b.Loop() {
				p.For(threads, 1, func(lo, hi int) {})
			}
		})
	}
}

func TestForPanicReachesCaller(t *testing.T) {
	p := NewPool(3)
	defer p.Close()
	boom := errors.New("boom")
	for part := range 3 {
		err := func() (err error) {
			defer func() {
				switch v := recover().(type) {
				case *Panic:
					if len(v.Stack) == 0 {
						t.Error("no stack")
					}
					err = v.Value.(error)
				case error:
					err = v
				}
			}()
			p.For(3, 1, func(lo, _ int) {
				if lo == part {
					panic(boom)
				}
			})
			return nil
		}()
		if !errors.Is(err, boom) {
			t.Errorf("part %d: recovered %v", part, err)
		}
	}
	ran := make([]bool, 3)
	p.For(3, 1, func(lo, hi int) { ran[lo] = true })
	if fmt.Sprint(ran) != "[true true true]" {
		t.Errorf("after panics the pool ran %v", ran)
	}
}

func TestForNests(t *testing.T) {
	p := NewPool(3)
	defer p.Close()
	var mu sync.Mutex
	sum := 0
	p.For(6, 1, func(lo, hi int) {
		for range hi - lo {
			p.For(10, 1, func(lo, hi int) {
				mu.Lock()
				defer mu.Unlock()
				sum += hi - lo
			})
		}
	})
	if sum != 60 {
		t.Errorf("%d of 60 inner indices came", sum)
	}
}

func TestChoose(t *testing.T) {
	have := []Path{Generic, AVX2}
	for want, ok := range map[string]bool{"": true, "avx2": true, "generic": true, "avx512": false, "AVX2": false} {
		p, err := choose(want, have)
		if (err == nil) != ok {
			t.Errorf("choose(%q) = %v, %v", want, p, err)
		}
		if want == "generic" && p != Generic || want == "" && p != AVX2 {
			t.Errorf("choose(%q) = %v", want, p)
		}
	}
	if _, err := Use(Path(99)); err == nil {
		t.Error("Use of an unknown path succeeded")
	}
}
