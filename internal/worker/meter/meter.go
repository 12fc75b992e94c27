// Package meter measures how long a worker's passes take, layer by layer.
//
// Time counts while the computing thread runs or sleeps. It does not count while
// the thread waits for a processor, nor while a pass waits for parameters: a busy
// machine or a late peer does not make a worker look slow. The time of a pass is
// the median of the newest ones, and each layer has its share of it, so that
// single outliers do not count.
package meter

import (
	"slices"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/platform"
)

// Direction is that of a pass.
type Direction uint8

// The directions.
const (
	Forward Direction = iota
	Backward
)

// Layer is how long the passes of one micro-batch through a layer take.
type Layer struct {
	Layer             int
	Forward, Backward time.Duration
}

// window is how many passes count: few, so that a change shows after half as
// many, but enough to hide outliers.
const window = 8

// shareWindow is how many laps of a layer make its share.
const shareWindow = 24

// A Meter keeps what its threads measure. Any goroutine may use it.
type Meter struct {
	mu     sync.Mutex
	stages map[int]*stage // by first layer
	count  uint64         // passes that counted
}

// A Thread measures the passes of one computing goroutine, which keeps its thread: one pass at a time.
type Thread struct {
	to    *Meter
	delay func() time.Duration // that the thread has waited for a processor so far

	// The pass.
	beside int // passes that ran at the same time, this one included
	laps   []lap
	told   []lap     // by Took; they count instead of laps
	at     time.Time // when the lap began
	spent  time.Duration
	late   time.Duration // delay at the beginning
}

type lap struct {
	layer int
	took  time.Duration
}

type stage struct {
	hi    int // behind the last layer
	total [2]recent
	laps  [2]map[int]recent
}

// recent holds the newest values, the last one at the end.
type recent []time.Duration

// with returns at most n values, of which d is the newest.
func (r recent) with(d time.Duration, n int) recent { return append(r[max(0, len(r)+1-n):], d) }

// median returns the median, of two the lesser; 0 of none.
func (r recent) median() time.Duration {
	if len(r) == 0 {
		return 0
	}
	return slices.Sorted(slices.Values(r))[(len(r)-1)/2]
}

// trimmed returns the mean without the greatest twelfth, which is at least one.
func (r recent) trimmed() time.Duration {
	sorted := slices.Sorted(slices.Values(r))
	if n := len(sorted); n > 1 {
		sorted = sorted[:n-(n+11)/12]
	}
	var sum time.Duration
	for _, d := range sorted {
		sum += d
	}
	return sum / time.Duration(max(1, len(sorted)))
}

// New returns a meter.
func New() *Meter {
	return &Meter{stages: make(map[int]*stage)}
}

// Thread returns what measures the passes of one more goroutine.
func (m *Meter) Thread() *Thread {
	return &Thread{to: m, delay: func() time.Duration { return 0 }}
}

// Attach lets the calling goroutine, which keeps its thread, be the computing one, from when it calls here until another one does, or it detaches.
func (m *Thread) Attach() (here, detach func()) {
	delay, detach := platform.ThreadDelay()
	return func() { m.delay = delay }, detach
}

// Begin begins a pass beside which others run: so many with this one. Each takes a share of the worker, so that its time counts for as
// much less.
func (m *Thread) Begin(beside int) {
	m.laps, m.told, m.spent, m.late, m.beside = m.laps[:0], m.told[:0], 0, m.delay(), beside
	m.at = time.Now()
}

// Lap begins a layer of the pass. The time before the first one is the first one's.
func (m *Thread) Lap(layer int) {
	if len(m.laps) > 0 {
		m.close()
	}
	m.laps = append(m.laps, lap{layer: layer})
}

// Took says how long a layer of the pass has computed in another process. Then what is told counts, and not the time of this thread.
func (m *Thread) Took(layer int, d time.Duration) { m.told = append(m.told, lap{layer, d}) }

// close ends the lap.
func (m *Thread) close() {
	now := time.Now()
	m.laps[len(m.laps)-1].took += m.spent + now.Sub(m.at)
	m.at, m.spent = now, 0
}

// Hold stops the time until the returned function is called, for a wait that the
// worker does not cause.
func (m *Thread) Hold() (resume func()) {
	began := m.delay()
	m.spent += time.Since(m.at)
	return func() {
		m.late += m.delay() - began
		m.at = time.Now()
	}
}

// End ends a pass through layers lo to hi-1, at the end of which so many ran.
func (m *Thread) End(d Direction, lo, hi, beside int) {
	if len(m.laps)+len(m.told) == 0 {
		return
	}
	laps, waited := m.told, time.Duration(0)
	if len(laps) == 0 {
		m.close()
		laps, waited = m.laps, m.delay()-m.late
	}
	var total time.Duration
	for _, l := range laps {
		total += l.took
	}
	total -= min(waited, total)
	if total /= time.Duration(max(m.beside, beside, 1)); total > 0 {
		m.to.take(d, lo, hi, total, laps)
	}
}

// take takes what a pass has measured.
func (m *Meter) take(d Direction, lo, hi int, total time.Duration, laps []lap) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.stages[lo]
	if s == nil || s.hi != hi {
		s = &stage{hi: hi, laps: [2]map[int]recent{{}, {}}}
		m.stages[lo] = s
	}
	s.total[d] = s.total[d].with(total, window)
	for _, l := range laps {
		s.laps[d][l.layer] = s.laps[d][l.layer].with(l.took, shareWindow)
	}
	m.count++
}

// Layers returns the times of the layers of this worker's stages, in order, and
// the number of passes so far.
func (m *Meter) Layers() (all []Layer, passes uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for lo, s := range m.stages {
		if len(s.total[Backward]) < window {
			continue
		}
		var sum [2]time.Duration
		for d := range sum {
			for _, r := range s.laps[d] {
				sum[d] += r.trimmed()
			}
		}
		for l := lo; l < s.hi; l++ {
			var took [2]time.Duration
			for d := range took {
				if r := s.laps[d][l]; len(r) > 0 && sum[d] > 0 {
					took[d] = time.Duration(float64(s.total[d].median()) * (float64(r.trimmed()) / float64(sum[d])))
				}
			}
			all = append(all, Layer{l, took[Forward], took[Backward]})
		}
	}
	slices.SortFunc(all, func(a, b Layer) int { return a.Layer - b.Layer })
	return all, m.count
}

// Keep forgets all stages but those that begin with the given layers.
func (m *Meter) Keep(firsts ...int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for lo := range m.stages {
		if !slices.Contains(firsts, lo) {
			delete(m.stages, lo)
		}
	}
}
