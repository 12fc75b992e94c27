package engine

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/worker/order"
)

// Samples of micro-batches that this worker is to run next are read by goroutines of their own while it computes, each a micro-batch at a
// time, where reading takes a share of its time that is worth it. What a sample is does not depend on when it is read, so no bit does.

const (
	maxAhead      = 4        // micro-batches that are read ahead, and one more for each further reader
	maxAheadBytes = 64 << 20 // that they may take
	worthAhead    = 50       // reading that takes less than one in so many parts of the time is not
	aheadMemory   = 0.8      // of the measured times, for each micro-batch
)

// readKey names the samples of a micro-batch.
type readKey struct{ step, micro int }

// prefetcher reads ahead.
type prefetcher struct {
	read    func(readKey, *batch) error
	readers int // goroutines
	most    int // micro-batches

	mu      sync.Mutex
	changed *sync.Cond
	wanted  []*ahead // in the order in which they are used
	closed  bool
	began   bool
	joined  sync.WaitGroup

	last     time.Time
	interval float64 // seconds from one micro-batch to the next, a moving mean
	took     float64 // seconds to read one
}

// ahead is a micro-batch that is wanted.
type ahead struct {
	readKey
	batch         *batch
	reading, done bool
	dropped       bool
	err           error
}

// newPrefetcher returns one for micro-batches of a size in bytes, of which so many may be read at a time.
func newPrefetcher(size, readers int, read func(readKey, *batch) error) *prefetcher {
	readers = max(readers, 1)
	p := &prefetcher{read: read, readers: readers, most: min(maxAhead+readers-1, maxAheadBytes/max(size, 1))}
	p.changed = sync.NewCond(&p.mu)
	return p
}

// measure takes in that the samples of one more micro-batch are needed, and how long it takes to read them, 0 where that is not known.
func (p *prefetcher) measure(now time.Time, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	mean := func(m *float64, x float64) {
		if *m == 0 {
			*m = x
		}
		*m = aheadMemory**m + (1-aheadMemory)*x
	}
	if took > 0 {
		mean(&p.took, took.Seconds())
	}
	if !p.last.IsZero() {
		mean(&p.interval, now.Sub(p.last).Seconds())
	}
	p.last = now
}

// depth returns how many micro-batches are to be read ahead.
func (p *prefetcher) depth() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.interval == 0 || p.took*worthAhead < p.interval {
		return 0
	}
	return min(p.most, 1+int(p.took/p.interval+1))
}

// want says which micro-batches come next, and has those read that are not yet. batch gets memory for one; what is not wanted any
// more is returned.
func (p *prefetcher) want(next []readKey, batch func() *batch) (free []*batch) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var wanted []*ahead
	for _, k := range next {
		i := slices.IndexFunc(p.wanted, func(a *ahead) bool { return a.readKey == k })
		if i >= 0 {
			wanted = append(wanted, p.wanted[i])
		} else {
			wanted = append(wanted, &ahead{readKey: k, batch: batch()})
		}
	}
	for _, a := range p.wanted {
		if slices.Contains(wanted, a) {
			continue
		}
		if a.dropped = true; !a.reading {
			free = append(free, a.batch)
		}
	}
	p.wanted = wanted
	if len(wanted) > 0 && !p.began {
		p.began = true
		for range min(p.readers, p.most) {
			p.joined.Go(p.run)
		}
	}
	p.changed.Broadcast()
	return free
}

// has reports whether a micro-batch is wanted.
func (p *prefetcher) has(k readKey) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.wanted, func(a *ahead) bool { return a.readKey == k })
}

// take returns the samples of a micro-batch, and whether they were read: before, or now by the goroutine that reads ahead. If they were
// not, they are left to the caller, and the goroutine does not begin with them any more; b is memory for them, if it is not nil.
func (p *prefetcher) take(k readKey) (b *batch, read bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.IndexFunc(p.wanted, func(a *ahead) bool { return a.readKey == k })
	if i < 0 {
		return nil, false
	}
	a := p.wanted[i]
	for a.reading {
		p.changed.Wait()
	}
	p.wanted = slices.DeleteFunc(p.wanted, func(x *ahead) bool { return x == a })
	return a.batch, a.done && a.err == nil // after a failure it is tried again where it is needed
}

func (p *prefetcher) run() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for !p.closed {
		i := slices.IndexFunc(p.wanted, func(a *ahead) bool { return !a.done && !a.reading })
		if i < 0 {
			p.changed.Wait()
			continue
		}
		a := p.wanted[i]
		a.reading = true
		p.mu.Unlock()
		began := time.Now()
		err := p.try(a)
		took := time.Since(began).Seconds()
		p.mu.Lock()
		p.took = aheadMemory*p.took + (1-aheadMemory)*took
		a.reading, a.done, a.err = false, true, err
		p.changed.Broadcast()
	}
}

// try reads a micro-batch. A panic of user code is left to the pass that needs the samples, as errors are: the run learns of it there.
func (p *prefetcher) try(a *ahead) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
	}()
	return p.read(a.readKey, a.batch)
}

// close ends and joins the goroutines, which read one sample to its end each.
func (p *prefetcher) close() {
	p.mu.Lock()
	p.closed = true
	p.changed.Broadcast()
	p.mu.Unlock()
	p.joined.Wait()
}

// upcoming returns the micro-batches of a stage that this worker runs after one, as far as they are to be read ahead.
func (e *Engine) upcoming(step, stage, after int) (next []readKey) {
	n := e.ahead.depth()
	for ; len(next) < n && step <= e.c.Steps; step, after = step+1, -1 {
		had := len(next)
		for m, w := range e.plan.Route[stage] {
			if m > after && w == e.c.Self.ID && len(next) < n {
				next = append(next, readKey{step, m})
			}
		}
		if after < 0 && len(next) == had {
			break // it runs none
		}
	}
	return next
}

// readAhead returns the samples of a micro-batch, and whether they were read ahead. If they were not, b may be memory for them.
func (e *Engine) readAhead(m Micro) (b *batch, read bool) {
	if !e.ahead.has(readKey{m.Step, m.Index}) {
		return nil, false
	}
	e.c.Await(m.Lane, order.First(m.Step, e.c.GlobalBatch, m.First), func() { b, read = e.ahead.take(readKey{m.Step, m.Index}) })
	return b, read
}
