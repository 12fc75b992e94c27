package kernel

import (
	"errors"
	"fmt"
	"sync"
	"testing"

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
