package search

import (
	"math"

	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/simulate"
)

// needs returns the limits that keep a pipeline busy, by stage and rank. A worker has as
// many micro-batches in flight as it begins in the time that one takes from its forward to
// its backward pass, through all later stages: at the pace of the slowest stage these are
// the path times what the worker runs in a step, over the time of the slowest stage. For
// equal stages this is the number of stages from its own on.
func needs(c candidate, costs []simulate.StageCost) [][]int {
	step := 0.0
	counts := c.counts(costs)
	for s := range counts {
		for rank, n := range counts[s] {
			step = max(step, float64(n)*costs[s].Work()/costs[s].Speeds[rank])
		}
	}
	path := 0.0
	for s := len(costs) - 1; s >= 0; s-- {
		slowest := math.Inf(1)
		for rank, n := range counts[s] {
			if n > 0 {
				slowest = min(slowest, costs[s].Speeds[rank])
			}
		}
		path += costs[s].Work() / slowest
		for rank, n := range counts[s] {
			counts[s][rank] = 0
			if step > 0 {
				const rounding = 1e-9
				counts[s][rank] = int(math.Ceil(path*float64(n)/step - rounding))
			}
		}
	}
	return counts
}

// counts returns how many micro-batches each rank has.
func (c *candidate) counts(costs []simulate.StageCost) [][]int {
	counts := make([][]int, len(costs))
	for s, r := range c.rankings {
		counts[s] = make([]int, len(costs[s].Workers))
		for _, rank := range r {
			counts[s][rank]++
		}
	}
	return counts
}

// ahead is how many more micro-batches than a busy pipeline needs a worker begins at least, so that a later stage
// has work when the worker that feeds it is lost, or gets less of a processor for a while.
const ahead = 3

// A lead is by how much the leads of stages are greater than needs; where it is none they are 0.
type lead struct {
	slowest, others int
	first           bool // that of the first stage is its limit
}

// compareFirst puts leads in which the first stage's is its limit before others.
func (l lead) compareFirst(o lead) int {
	switch {
	case l.first == o.first:
		return 0
	case l.first:
		return -1
	}
	return 1
}

// none is the lead of stages where backward passes always come first.
const none = -1

var noLead = lead{none, none, false}

// evenLead is for stages that are alike, or nearly. No worker waits for backward passes of the first stage, and what it has left of them at the end keeps it busy while
// the last micro-batches are in the other stages: a step takes as long, but a worker seldom waits for a pass of another one, which
// is what a recovery ends with.
var evenLead = lead{none, none, true}

// leads are tried in this order, with routes that go alongside. The slowest stages, which all wait for, gain by one: they get micro-batches under way
// while others are busy, and have backward passes left for the end of the step, when the last
// micro-batches go through the other stages.
var leads = []lead{noLead, {2, none, false}, {1, none, false}, {3, none, false}, {2, 0, false}, {1, 0, false}, {3, 0, false}, {1, 1, false}, {2, 2, false}}

// of returns the lead of a stage that needs so many in flight.
func (l lead) of(slowest bool, needs int) int {
	more := l.others
	if slowest {
		more = l.slowest
	}
	if more == none {
		return 0
	}
	return needs + more
}

// slowest says which stages take longest for all micro-batches, or nearly so.
func slowest(costs []simulate.StageCost) []bool {
	const nearly = 0.98
	most, all := 0.0, make([]float64, len(costs))
	for s := range costs {
		sum := 0.0
		for _, v := range costs[s].Speeds {
			sum += v
		}
		all[s] = costs[s].Work() / sum
		most = max(most, all[s])
	}
	slow := make([]bool, len(costs))
	for s, t := range all {
		slow[s] = t >= nearly*most
	}
	return slow
}

// limits returns needs, greater by extra, and by at least ahead, in all stages but the last, as far as there are
// micro-batches.
func limits(costs []simulate.StageCost, c candidate, needs [][]int, extra int, l lead) []plan.Limit {
	var list []plan.Limit
	counts := c.counts(costs)
	var slow []bool
	if l != noLead {
		slow = slowest(costs)
	}
	for s := range costs {
		for rank, w := range costs[s].Workers {
			n := needs[s][rank]
			if s < len(costs)-1 {
				n += max(extra, ahead)
			}
			limit := plan.Limit{Stage: s, Worker: w, Forwards: max(min(n, counts[s][rank]), len(costs)-s)}
			switch last := len(costs) - 1; {
			case l.first && s == 0 && s < last:
				limit.Lead = limit.Forwards
			case slow != nil && s < last:
				limit.Lead = min(l.of(slow[s], needs[s][rank]), limit.Forwards)
			}
			list = append(list, limit)
		}
	}
	return list
}
