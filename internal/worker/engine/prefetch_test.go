package engine

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// wants is begin and follow, where no pass begins.
func (p *prefetcher) wants(next []readKey, batch func() *batch) []*batch {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.want(next, batch)
}

// A batch that was read ahead is there when it is needed, those that are not needed any more are dropped, and a failure is left to who
// needs the samples.
func TestPrefetch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reads []string
		p := newPrefetcher(1<<20, 1, func(k readKey, b *batch) error {
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
		taken := func(step, micro int) bool {
			_, read := p.take(readKey{step, micro})
			return read
		}
		if p.depth() != 0 || taken(1, 0) {
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
		if free := p.wants([]readKey{{1, 1}, {1, 2}, {1, 3}}, batches); len(free) > 0 || made != 3 {
			t.Errorf("%d free, %d made", len(free), made)
		}
		synctest.Wait() // the first is being read
		began := time.Now()
		if !taken(1, 1) || time.Since(began) > 30*time.Millisecond {
			t.Errorf("waited %v", time.Since(began))
		}
		// Micro-batch 2 is being read, and not needed any more.
		synctest.Wait()
		p.wants([]readKey{{1, 3}, {2, 0}}, batches)
		time.Sleep(time.Second)
		if began = time.Now(); taken(1, 3) || !taken(2, 0) || time.Since(began) > 0 {
			t.Error("micro-batch 3 is there although it could not be read, or the next is not")
		}
		if want := []string{"{1 1}", "{1 2}", "{1 3}", "{2 0}"}; !slices.Equal(reads, want) || made != 4 {
			t.Errorf("read %v, want %v, in %d batches", reads, want, made)
		}
		if free := p.wants(nil, batches); len(free) != 0 {
			t.Errorf("%d free", len(free))
		}
		p.wants([]readKey{{2, 4}, {2, 5}}, batches)
		time.Sleep(time.Second)
		if taken(2, 4) || !taken(2, 5) {
			t.Error("micro-batch 4 is there although its data panicked, or the next is not")
		}
	})
}

// A micro-batch that is needed before the goroutine has begun with it is read once: by the pass that needs it.
func TestPrefetchReadsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reads []readKey
		p := newPrefetcher(1, 1, func(k readKey, _ *batch) error {
			time.Sleep(30 * time.Millisecond)
			reads = append(reads, k)
			return nil
		})
		defer p.close()
		second := new(batch)
		free := []*batch{new(batch), second}
		p.wants([]readKey{{1, 0}, {1, 1}}, func() (b *batch) {
			b, free = free[0], free[1:]
			return b
		})
		synctest.Wait() // the first is being read
		if b, read := p.take(readKey{1, 1}); b != second || read {
			t.Errorf("memory %p, want %p; read: %v", b, second, read)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if want := []readKey{{1, 0}}; !slices.Equal(reads, want) {
			t.Errorf("read ahead %v, want %v", reads, want)
		}
	})
}

// What a pass has begun with is its own: another one that follows gives no memory of it away.
func TestPrefetchOfTwoPasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPrefetcher(1, 1, func(readKey, *batch) error {
			time.Sleep(30 * time.Millisecond)
			return nil
		})
		defer p.close()
		batches := func() *batch { return new(batch) }
		p.begin(readKey{1, 0}, []readKey{{1, 1}, {1, 2}})
		p.follow(batches)
		synctest.Wait() // micro-batch 1 is being read
		p.begin(readKey{1, 1}, []readKey{{1, 2}, {1, 3}})
		if free := p.follow(batches); len(free) > 0 || !p.has(readKey{1, 1}) {
			t.Errorf("%d free, before the pass has its samples", len(free))
		}
		took := make(chan *batch)
		go func() {
			b, read := p.take(readKey{1, 1})
			if !read {
				t.Error("they were not read")
			}
			took <- b
		}()
		synctest.Wait() // it waits for the one that reads
		if p.has(readKey{1, 1}) {
			t.Error("it is still among what others may give up")
		}
		p.begin(readKey{1, 2}, nil)
		if free := p.follow(batches); len(free) != 1 || free[0] == <-took { // {1, 3}
			t.Errorf("%d free", len(free))
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
		p, now := newPrefetcher(c.size, 1, nil), time.Unix(0, 0)
		for range 50 {
			now = now.Add(c.interval)
			p.measure(now, c.took)
		}
		if got := p.depth(); got != c.want {
			t.Errorf("%v of %v and %d bytes: %d ahead, want %d", c.took, c.interval, c.size, got, c.want)
		}
	}
}

// Several readers read as many micro-batches at a time, each of them once.
func TestPrefetchWithReaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPrefetcher(1, 3, func(readKey, *batch) error {
			time.Sleep(30 * time.Millisecond)
			return nil
		})
		defer p.close()
		began, next := time.Now(), []readKey{{1, 0}, {1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 5}}
		p.wants(next, func() *batch { return new(batch) })
		synctest.Wait()
		for i, k := range next {
			_, read := p.take(k)
			if took, want := time.Since(began), time.Duration(1+i/3)*30*time.Millisecond; !read || took != want {
				t.Errorf("%v: read %v after %v, want %v", k, read, took, want)
			}
		}
	})
}
