package search

import (
	"container/heap"
	"math"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/plan/simulate"
)

// shares deals micro-batches to workers by their speeds, so that the slowest
// is done as early as possible, and returns how many each gets and the time
// in units of a micro-batch at speed 1.
func shares(micros int, speeds []float64) (n []int, slowest float64) {
	n = make([]int, len(speeds))
	if equal(speeds, func(v float64) float64 { return v }) {
		for i := range n {
			n[i] = micros / len(n)
			if i < micros%len(n) {
				n[i]++
			}
		}
		return n, float64(n[0]) / speeds[0]
	}
	sum := 0.0
	for _, v := range speeds {
		sum += v
	}
	left := micros
	for i, v := range speeds {
		n[i] = min(left, int(float64(float64(micros)*v)/sum))
		left -= n[i]
	}
	for ; left > 0; left-- {
		best := 0
		for i, v := range speeds {
			if float64(n[i]+1)/v < float64(n[best]+1)/speeds[best] {
				best = i
			}
		}
		n[best]++
	}
	for i, v := range speeds {
		slowest = max(slowest, float64(n[i])/v)
	}
	return n, slowest
}

// countNodes calls f with the nodes of each run of micro-batches of a rank.
func countNodes(r simulate.Ranking, f func(rank, nodes int)) {
	tree.Runs(r, func(rank, lo, hi int) { f(rank, tree.CoverSize(len(r), lo, hi)) })
}

// borderWindow bounds how many places are tried for each border.
const borderWindow = 64

// contiguous deals micro-batches in contiguous runs. No worker needs longer
// than the slowest of shares, and of all such runs these are covered by the
// fewest nodes of the gradient tree.
func contiguous(micros int, speeds []float64) simulate.Ranking {
	n, slowest := shares(micros, speeds)
	ranks := len(speeds)
	most := make([]int, ranks) // micro-batches that rank can run in time
	after := make([]int, ranks+1)
	for r := ranks - 1; r >= 0; r-- {
		most[r] = max(n[r], int(slowest*speeds[r]))
		after[r] = after[r+1] + most[r]
	}
	// best[r][e-lows[r]] is the fewest nodes for the first r ranks if they end
	// at e; back is where the last of them begins.
	type cell struct{ nodes, back int }
	best := make([][]cell, ranks+1)
	lows := make([]int, ranks+1)
	best[0] = []cell{{}}
	before, even := 0, 0
	for r := range ranks {
		before += most[r]
		even += n[r]
		lo, hi := max(0, micros-after[r+1]), min(micros, before)
		lo, hi = max(lo, even-borderWindow/2), min(hi, even+borderWindow/2)
		lows[r+1] = lo
		best[r+1] = make([]cell, hi-lo+1)
		for end := lo; end <= hi; end++ {
			c := cell{nodes: math.MaxInt}
			for i, b := range best[r] {
				begin := lows[r] + i
				if begin > end || end-begin > most[r] || b.nodes == math.MaxInt {
					continue
				}
				if total := b.nodes + tree.CoverSize(micros, begin, end); total < c.nodes {
					c = cell{total, begin}
				}
			}
			best[r+1][end-lo] = c
		}
	}
	ranking := make(simulate.Ranking, micros)
	end := micros
	for r := ranks; r > 0; r-- {
		begin := best[r][end-lows[r]].back
		for m := begin; m < end; m++ {
			ranking[m] = r - 1
		}
		end = begin
	}
	return ranking
}

// schedule says when micro-batches come to a stage.
type schedule struct {
	at    []float64
	order []int // micro-batches by at
}

// together is the schedule in which all are there at once.
func together(micros int) schedule {
	s := schedule{make([]float64, micros), make([]int, micros)}
	for m := range s.order {
		s.order[m] = m
	}
	return s
}

// inOrder deals blocks of micro-batches, in the order in which their first
// ones come, each to the worker that is done first with what it has.
func inOrder(block int, speeds []float64, come schedule) simulate.Ranking {
	micros := len(come.at)
	n, _ := shares(micros, speeds)
	d := dealt{ranks: make([]int, len(speeds)), has: make([]int, len(speeds)), share: n, speeds: speeds, block: block}
	for i := range d.ranks {
		d.ranks[i] = i
	}
	heap.Init(&d)
	r := make(simulate.Ranking, micros)
	for _, first := range come.order {
		if first%block != 0 {
			continue
		}
		rank := d.ranks[0]
		end := min(first+block, micros)
		for m := first; m < end; m++ {
			r[m] = rank
		}
		d.has[rank] += end - first
		heap.Fix(&d, 0)
	}
	return r
}

// dealt is a heap of ranks: the rank that would exceed its share by the least with
// another block comes first, then the one that is done first.
type dealt struct {
	ranks      []int
	has, share []int // by rank
	speeds     []float64
	block      int
}

func (d *dealt) Len() int { return len(d.ranks) }

func (d *dealt) Swap(i, j int) { d.ranks[i], d.ranks[j] = d.ranks[j], d.ranks[i] }

func (d *dealt) Less(i, j int) bool {
	a, b := d.ranks[i], d.ranks[j]
	if x, y := max(0, d.has[a]+d.block-d.share[a]), max(0, d.has[b]+d.block-d.share[b]); x != y {
		return x < y
	}
	if x, y := float64(d.has[a]+d.block)/d.speeds[a], float64(d.has[b]+d.block)/d.speeds[b]; x != y {
		return x < y
	}
	return a < b
}

func (d *dealt) Push(any) { panic("plan: ranks are fixed") }

func (d *dealt) Pop() any { panic("plan: ranks are fixed") }

// handOn estimates when a stage hands each micro-batch on: every worker runs
// its own one after the other, each as soon as it is there.
func handOn(r simulate.Ranking, c *simulate.StageCost, come schedule) schedule {
	out := schedule{make([]float64, len(r)), slices.Clone(come.order)}
	free := make([]float64, len(c.Speeds))
	for _, m := range come.order {
		w := r[m]
		begin := max(free[w], come.at[m])
		out.at[m] = begin + float64(c.Forward)/c.Speeds[w]
		free[w] = begin + c.Work()/c.Speeds[w]
	}
	slices.SortStableFunc(out.order, func(a, b int) int { // cmp.Or makes large plans a fifth slower
		switch x, y := out.at[a], out.at[b]; {
		case x < y:
			return -1
		case x > y:
			return 1
		}
		return a - b
	})
	return out
}

// candidate is a way to route all stages.
type candidate struct {
	rankings []simulate.Ranking
}

// follow routes all stages after the first one: a stage like the one before
// has the same micro-batches at each rank, so that each rank talks to one
// rank only; another one takes blocks as they come.
func follow(first simulate.Ranking, costs []simulate.StageCost, block int) candidate {
	return routeAll(first, costs, func(_ simulate.Ranking, speeds []float64, come schedule) simulate.Ranking {
		return inOrder(block, speeds, come)
	})
}

// alongside routes all stages after the first one: each rank talks to the same rank of the next stage, where
// there is one, except for what exceeds its share there. The rest goes to other ranks, evenly over the step: where a stage has one
// worker fewer than the next, the extra worker gets every n-th micro-batch.
func alongside(first simulate.Ranking, costs []simulate.StageCost, block int) candidate {
	return routeAll(first, costs, func(before simulate.Ranking, speeds []float64, come schedule) simulate.Ranking {
		return steadily(before, block, speeds, come)
	})
}

// routeAll routes all stages after the first one: next makes the ranking of a stage that is not like the one before.
func routeAll(first simulate.Ranking, costs []simulate.StageCost, next func(before simulate.Ranking, speeds []float64, come schedule) simulate.Ranking) candidate {
	c := candidate{rankings: []simulate.Ranking{first}}
	come := handOn(first, &costs[0], together(len(first)))
	for s := 1; s < len(costs); s++ {
		r := c.rankings[s-1]
		if !costs[s].Alike(&costs[s-1]) {
			r = next(r, costs[s].Speeds, come)
		}
		c.rankings = append(c.rankings, r)
		if s+1 < len(costs) {
			come = handOn(r, &costs[s], come)
		}
	}
	return c
}

// steadily gives each rank its share at all times, as they come, and what the same rank had before as long as no other
// rank lacks a whole block of micro-batches more than it does.
func steadily(before simulate.Ranking, block int, speeds []float64, come schedule) simulate.Ranking {
	micros := len(before)
	share, _ := shares(micros, speeds)
	has := make([]int, len(share))
	dealt := 0
	lack := func(rank int) int { return dealt*share[rank] - has[rank]*micros }
	r := make(simulate.Ranking, micros)
	for _, m := range come.order {
		if m%block != 0 {
			continue
		}
		end := min(m+block, micros)
		dealt += end - m
		to := 0
		for rank := range share {
			if lack(rank) > lack(to) {
				to = rank
			}
		}
		if was := before[m]; was < len(share) && has[was] < share[was] && lack(was) > lack(to)-block*micros {
			to = was
		}
		has[to] += end - m
		for ; m < end; m++ {
			r[m] = to
		}
	}
	return r
}

// runsOnly routes all stages in contiguous runs.
func runsOnly(micros int, costs []simulate.StageCost) candidate {
	var c candidate
	for s := range costs {
		if s > 0 && costs[s].Alike(&costs[s-1]) {
			c.rankings = append(c.rankings, c.rankings[s-1])
		} else {
			c.rankings = append(c.rankings, contiguous(micros, costs[s].Speeds))
		}
	}
	return c
}

// buffers returns the most nodes of the gradient tree that a worker has.
func (c *candidate) buffers() (most int) {
	for s, r := range c.rankings {
		if s == 0 || !same(r, c.rankings[s-1]) {
			counts := make([]int, slices.Max(r)+1)
			countNodes(r, func(rank, n int) { counts[rank] += n })
			most = max(most, slices.Max(counts))
		}
	}
	return most
}

// nodes returns how many nodes all workers have.
func (c *candidate) nodes() (total int) {
	for _, r := range c.rankings {
		countNodes(r, func(_, n int) { total += n })
	}
	return total
}

// same reports whether two rankings are one in memory.
func same(a, b simulate.Ranking) bool { return &a[0] == &b[0] }
