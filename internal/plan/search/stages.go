package search

import (
	"cmp"
	"math"
	"time"

	"github.com/soliton-train/soliton/internal/plan"
)

// part is a stage before it has workers with names.
type part struct {
	lo, hi  int // layers [lo, hi)
	workers int
}

// ceil returns a/b, rounded up.
func ceil[T ~int | ~int64](a, b T) T { return (a + b - 1) / b }

// sums returns the running sums of the work on a micro-batch: sums[hi] -
// sums[lo] is that in layers [lo, hi).
func sums(layers []plan.Layer) []time.Duration {
	c := make([]time.Duration, len(layers)+1)
	for i, l := range layers {
		c[i+1] = c[i] + l.Forward + l.Backward
	}
	return c
}

// deal cuts layers into stages and says how many of the equally fast workers
// each gets, so that a step is as short as possible. There are at least as many
// layers and workers as stages.
//
// In closed form a step takes the work of all stages, which is the way of the
// first micro-batch through the pipeline and back, and then the work of the
// slowest stage for each further micro-batch that one of its workers runs:
// its work times n - 1, where n is ceil(micros/workers). We use n - 1/2, so
// that the work of stages with n = 1 counts, too.
//
// For a given time it is known how many workers a range of layers needs, and
// dynamic programming finds the stages that need the fewest in all. The least
// time is found by bisection.
//
// No stage gets more than most parameters, which are at least twice the mean of all stages
// and at least any one layer's, so that there always is an answer.
func deal(layers []plan.Layer, stages, workers, micros, most int) []part {
	d := newDealer(layers, stages, workers, micros, most)
	// Less than lo cannot be: no layer is faster with all workers.
	var lo time.Duration
	for l := range layers {
		lo = max(lo, d.time(part{l, l + 1, workers})-1)
	}
	var best []part
	hi := max(lo, d.work[len(layers)]*time.Duration(micros)/time.Duration(workers), 1)
	for ; best == nil; hi *= 2 {
		best = d.within(hi)
	}
	for hi = d.slowest(best); hi-lo > max(1, hi>>20); {
		mid := lo + (hi-lo)/2
		if parts := d.within(mid); parts != nil {
			best, hi = parts, d.slowest(parts)
		} else {
			lo = mid
		}
	}
	// Spare workers go where they help most.
	spare := workers
	for _, p := range best {
		spare -= p.workers
	}
	for ; spare > 0; spare-- {
		slow := 0
		for i := range best {
			a, b := best[i], best[slow]
			if c := cmp.Or(cmp.Compare(d.time(a), d.time(b)),
				cmp.Compare((d.work[a.hi]-d.work[a.lo])*time.Duration(b.workers), (d.work[b.hi]-d.work[b.lo])*time.Duration(a.workers))); c > 0 {
				slow = i
			}
		}
		best[slow].workers++
	}
	return best
}

type dealer struct {
	work                    []time.Duration // running sums
	params                  []int           // running sums
	stages, workers, micros int
	most                    int

	need  [][]int32 // need[lo][hi]: workers for these layers within the time
	least [][]int32 // least[s][hi]: workers for layers [0,hi) in s stages
	from  [][]int32 // from[s][hi]: where the last of these stages begins
}

const tooMany = math.MaxInt32 / 2

func newDealer(layers []plan.Layer, stages, workers, micros, most int) *dealer {
	table := func(rows int) [][]int32 {
		cells := make([]int32, rows*(len(layers)+1))
		t := make([][]int32, rows)
		for i := range t {
			t[i] = cells[i*(len(layers)+1) : (i+1)*(len(layers)+1)]
		}
		return t
	}
	params := make([]int, len(layers)+1)
	for i, l := range layers {
		params[i+1] = params[i] + l.Size()
	}
	return &dealer{
		work: sums(layers), params: params, stages: stages, workers: workers, micros: micros, most: most,
		need: table(len(layers)), least: table(stages + 1), from: table(stages + 1),
	}
}

// time returns twice the time of a stage: its work times 2n - 1.
func (d *dealer) time(p part) time.Duration {
	return (d.work[p.hi] - d.work[p.lo]) * time.Duration(2*ceil(d.micros, p.workers)-1)
}

func (d *dealer) slowest(parts []part) (t time.Duration) {
	for _, p := range parts {
		t = max(t, d.time(p))
	}
	return t
}

// within returns stages of which none has more than a (doubled) time, nil if
// there are none.
func (d *dealer) within(limit time.Duration) []part {
	layers := len(d.work) - 1
	for lo := range layers {
		for hi := lo + 1; hi <= layers; hi++ {
			n := tooMany
			if work := d.work[hi] - d.work[lo]; work == 0 {
				n = 1
			} else if each := (limit/work + 1) / 2; each > 0 {
				n = ceil(d.micros, int(min(each, time.Duration(d.micros))))
			}
			if n > d.workers || d.params[hi]-d.params[lo] > d.most {
				for ; hi <= layers; hi++ {
					d.need[lo][hi] = tooMany
				}
				break
			}
			d.need[lo][hi] = int32(n)
		}
	}
	for hi := range d.least[0] {
		d.least[0][hi] = tooMany
	}
	d.least[0][0] = 0
	for s := 1; s <= d.stages; s++ {
		for hi := range layers + 1 {
			d.least[s][hi] = tooMany
			if hi < s || layers-hi < d.stages-s {
				continue
			}
			least, from := int32(tooMany), 0
			// Fewer layers need fewer workers, so the rest is too much once
			// this range is.
			for lo := hi - 1; lo >= s-1 && d.need[lo][hi] < tooMany; lo-- {
				if n := d.least[s-1][lo] + d.need[lo][hi]; n < least {
					least, from = n, lo
				}
			}
			d.least[s][hi], d.from[s][hi] = least, int32(from)
		}
	}
	if int(d.least[d.stages][layers]) > d.workers {
		return nil
	}
	parts := make([]part, d.stages)
	hi := layers
	for s := d.stages; s > 0; s-- {
		lo := int(d.from[s][hi])
		parts[s-1] = part{lo, hi, int(d.need[lo][hi])}
		hi = lo
	}
	return parts
}

// recut cuts layers into stages that take time factors[s] for each unit
// of work, so that the slowest is as fast as possible.
func recut(layers []plan.Layer, factors []float64) []part {
	work := sums(layers)
	stages, n := len(factors), len(layers)
	best := make([][]float64, stages+1)
	from := make([][]int, stages+1)
	for s := range best {
		best[s], from[s] = make([]float64, n+1), make([]int, n+1)
		for hi := range best[s] {
			best[s][hi] = math.Inf(1)
		}
	}
	best[0][0] = 0
	for s := 1; s <= stages; s++ {
		for hi := s; hi <= n-(stages-s); hi++ {
			for lo := s - 1; lo < hi; lo++ {
				if t := max(best[s-1][lo], factors[s-1]*float64(work[hi]-work[lo])); t < best[s][hi] {
					best[s][hi], from[s][hi] = t, lo
				}
			}
		}
	}
	parts := make([]part, stages)
	hi := n
	for s := stages; s > 0; s-- {
		lo := from[s][hi]
		parts[s-1] = part{lo: lo, hi: hi}
		hi = lo
	}
	return parts
}

// equal reports whether f is the same for all.
func equal[T any, V comparable](list []T, f func(T) V) bool {
	for _, x := range list {
		if f(x) != f(list[0]) {
			return false
		}
	}
	return true
}
