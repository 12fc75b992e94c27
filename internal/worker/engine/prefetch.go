package engine

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/plan/graph"
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
	next    []readKey // what comes after the passes that have begun
	wanted  []*ahead  // in the order in which they are used
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
	claimed       bool // a pass has begun that needs it
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
	if !now.After(p.last) {
		return // lanes may tell in another order than they began in
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

// begin says that a pass begins that needs a micro-batch, and which ones come after all that have begun. What is read ahead of that
// micro-batch is kept until the pass takes it.
func (p *prefetcher) begin(k readKey, next []readKey) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next = next
	if i := slices.IndexFunc(p.wanted, func(a *ahead) bool { return a.readKey == k }); i >= 0 {
		p.wanted[i].claimed = true
	}
}

// follow has the micro-batches read that come after the passes that have begun; see want.
func (p *prefetcher) follow(batch func() *batch) (free []*batch) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.want(p.next, batch)
}

// forget says that another plan decides what comes next.
func (p *prefetcher) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next = nil
}

// want takes which micro-batches come next, and has those read that are not yet. batch gets memory for one; what is not wanted any
// more is returned, unless a pass has begun that needs it. p.mu is held.
func (p *prefetcher) want(next []readKey, batch func() *batch) (free []*batch) {
	var wanted []*ahead
	for _, a := range p.wanted {
		if a.claimed && !slices.Contains(next, a.readKey) {
			wanted = append(wanted, a)
		}
	}
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
		if !a.reading {
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
	p.wanted = slices.Delete(p.wanted, i, i+1) // at once: from now on its memory is the caller's
	for a.reading {
		p.changed.Wait()
	}
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

// upcoming returns the micro-batches of a pair's stage that this worker begins after it, as far as they are to be read ahead.
func (e *Engine) upcoming(step int, after graph.Pair) (next []readKey) {
	n := e.ahead.depth()
	for at := step; len(next) < n && at <= e.c.Steps; at++ {
		had := len(next)
		for m, w := range e.plan.Route[after.Stage] {
			begun := at == step && (m == after.Micro || e.works[graph.Pair{Stage: after.Stage, Micro: m}] != nil)
			if !begun && w == e.c.Self.ID && len(next) < n {
				next = append(next, readKey{at, m})
			}
		}
		if at > step && len(next) == had {
			break // it runs none
		}
	}
	return next
}

// atOnce returns how many passes of a stage run here at a time: one for each lane, unless there are fewer.
func (e *Engine) atOnce(stage int) int64 {
	n := 0
	for _, w := range e.plan.Route[stage] {
		if w == e.c.Self.ID {
			n++
		}
	}
	return int64(min(len(e.lanes), max(n, 1)))
}

// load brings the samples, and has those read that come next. Meanwhile the lane does not compute.
func (w *task) load(e *Engine) error {
	began := time.Now()
	kernel.Leave(e.c.Pool)
	defer func() {
		kernel.Enter(e.c.Pool)
		e.waited(trace.Load, began, w.micro.Lane, -1)
	}()
	var ahead bool
	if w.batch, ahead = e.readAhead(w.micro); ahead {
		e.ahead.measure(began, 0)
	} else {
		if w.batch == nil {
			w.batch = e.batches.get()
		}
		load := func(i uint64, in, target tensor.Tensor) error { return e.c.Load(w.micro.Lane, i, in, target) }
		if err := e.read(w.batch, w.micro, load); err != nil {
			return err
		}
		e.ahead.measure(began, time.Since(began))
	}
	w.reading = time.Since(began).Nanoseconds()
	e.batches.put(e.ahead.follow(e.batches.get)...)
	return nil
}

// readAhead returns the samples of a micro-batch, and whether they were read ahead. If they were not, b may be memory for them.
func (e *Engine) readAhead(m Micro) (b *batch, read bool) {
	if !e.ahead.has(readKey{m.Step, m.Index}) {
		return nil, false
	}
	e.c.Await(m.Lane, order.First(m.Step, e.c.GlobalBatch, m.First), func() { b, read = e.ahead.take(readKey{m.Step, m.Index}) })
	return b, read
}
