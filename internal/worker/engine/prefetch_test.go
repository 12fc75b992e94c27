package engine

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// A batch that was read ahead is there when it is needed, those that are not needed any more are dropped, and a failure is left to who
// needs the samples.
func TestPrefetch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reads []string
		p := newPrefetcher(1<<20, func(k readKey, b *batch) error {
			time.Sleep(30 * time.Millisecond)
			if reads = append(reads, fmt.Sprint(k)); k.micro == 3 {
				return errors.New("bad sector")
			}
			if k.micro == 4 {
				panic("bad index")
			}
			return nil
		})
		defer p.close()
		if p.depth() != 0 || p.take(readKey{1, 0}) != nil {
			t.Error("it reads ahead before anything was measured")
		}
		for range 20 {
			time.Sleep(10 * time.Millisecond)
			p.measure(time.Now(), 30*time.Millisecond)
		}
		if got := p.depth(); got != maxAhead {
			t.Errorf("depth %d, where reading is slower than computing", got)
		}
		made := 0
		batches := func() *batch { made++; return new(batch) }
		if free := p.want([]readKey{{1, 1}, {1, 2}, {1, 3}}, batches); len(free) > 0 || made != 3 {
			t.Errorf("%d free, %d made", len(free), made)
		}
		synctest.Wait() // the first is being read
		began := time.Now()
		if p.take(readKey{1, 1}) == nil || time.Since(began) > 30*time.Millisecond {
			t.Errorf("waited %v", time.Since(began))
		}
		// Micro-batch 2 is being read, and not needed any more.
		synctest.Wait()
		p.want([]readKey{{1, 3}, {2, 0}}, batches)
		time.Sleep(time.Second)
		if began = time.Now(); p.take(readKey{1, 3}) != nil || p.take(readKey{2, 0}) == nil || time.Since(began) > 0 {
			t.Error("micro-batch 3 is there although it could not be read, or the next is not")
		}
		if want := []string{"{1 1}", "{1 2}", "{1 3}", "{2 0}"}; !slices.Equal(reads, want) || made != 4 {
			t.Errorf("read %v, want %v, in %d batches", reads, want, made)
		}
		if free := p.want(nil, batches); len(free) != 0 {
			t.Errorf("%d free", len(free))
		}
		p.want([]readKey{{2, 4}, {2, 5}}, batches)
		time.Sleep(time.Second)
		if p.take(readKey{2, 4}) != nil || p.take(readKey{2, 5}) == nil {
			t.Error("micro-batch 4 is there although its data panicked, or the next is not")
		}
	})
}

// Nothing is read ahead where that takes no time worth it, and never more than the memory allows.
func TestPrefetchDepth(t *testing.T) {
	for _, c := range []struct {
		interval, took time.Duration
		size, want     int
	}{
		{100 * time.Millisecond, time.Millisecond, 1, 0},
		{100 * time.Millisecond, 3 * time.Millisecond, 1, 2},
		{100 * time.Millisecond, 150 * time.Millisecond, 1, 3},
		{100 * time.Millisecond, time.Second, 1, maxAhead},
		{100 * time.Millisecond, time.Second, 40 << 20, 1},
		{100 * time.Millisecond, time.Second, 1 << 30, 0},
	} {
		p, now := newPrefetcher(c.size, nil), time.Unix(0, 0)
		for range 50 {
			now = now.Add(c.interval)
			p.measure(now, c.took)
		}
		if got := p.depth(); got != c.want {
			t.Errorf("%v of %v and %d bytes: %d ahead, want %d", c.took, c.interval, c.size, got, c.want)
		}
	}
}
