package plan

import (
	"slices"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// Runs reports whether a pair is to run under the plan in a step.
func (p *Plan) Runs(pair graph.Pair, step int) bool {
	if !p.InStep || step != p.FromStep {
		return true
	}
	_, settled := slices.BinarySearchFunc(p.Settled, pair, graph.Pair.Compare)
	return !settled
}

// Ranks returns the order in which workers begin forward passes in a step, for [graph.Queue.Rank]; nil is
// that of micro-batches. A plan made in the middle of a step reassigns queued micro-batches. A worker may then have
// micro-batches from or for several other workers, and in numerical order it would serve one of these after the
// other. With ranks they take turns: a micro-batch goes by its position among all that the other worker has, and
// those in First come before all.
func (p *Plan) Ranks(step int) func(graph.Pair) int {
	if !p.InStep || step != p.FromStep {
		return nil
	}
	micros, last := p.Micros(), len(p.Stages)-1
	along := make([][]int, len(p.Stages)) // in micros-ths of what its worker has in the stage
	for s, route := range p.Route {
		along[s] = make([]int, micros)
		all, sofar := make(map[id.WorkerID]int), make(map[id.WorkerID]int)
		for _, w := range route {
			all[w]++
		}
		for m, w := range route {
			along[s][m] = micros * sofar[w] / all[w]
			sofar[w]++
		}
	}
	ranks := make([][]int, len(p.Stages))
	for s := range ranks {
		ranks[s] = make([]int, micros)
		for m := range micros {
			switch {
			case last == 0:
			case s == 0:
				ranks[s][m] = 2 * along[s+1][m]
			case s == last:
				ranks[s][m] = 2 * along[s-1][m]
			default:
				ranks[s][m] = along[s-1][m] + along[s+1][m]
			}
		}
	}
	for _, f := range p.First {
		ranks[f.Stage][f.Micro] = -1
	}
	return func(pair graph.Pair) int { return ranks[pair.Stage][pair.Micro] }
}

// Nodes returns the nodes of the gradient tree that a worker can complete
// alone in a step: those whose micro-batches it runs in a stage. It sends
// their sums to the owners of the stage's shards. They are in ascending order.
func (p *Plan) Nodes(stage int, w id.WorkerID, step int) []tree.Node {
	var all []tree.Node
	route := p.runs(stage, step)
	tree.Runs(route, func(x id.WorkerID, lo, hi int) {
		if x == w {
			tree.Cover(len(route), lo, hi, func(n tree.Node) { all = append(all, n) })
		}
	})
	return all
}

// none is the worker of settled pairs.
const none id.WorkerID = -1

// Ranges returns which worker runs each micro-batch in a step.
func (p *Plan) runs(stage, step int) []id.WorkerID {
	if !p.InStep || step != p.FromStep || len(p.Settled) == 0 {
		return p.Route[stage]
	}
	route := slices.Clone(p.Route[stage])
	i, _ := slices.BinarySearchFunc(p.Settled, graph.Pair{Stage: stage}, graph.Pair.Compare)
	for ; i < len(p.Settled) && p.Settled[i].Stage == stage; i++ {
		if m := p.Settled[i].Micro; m >= 0 && m < len(route) { // Validate comes here with anything
			route[m] = none
		}
	}
	return route
}

// MostSums returns the most nodes a worker has in a stage, in the step that
// the plan begins with or in a later one.
func (p *Plan) MostSums(stage int) int {
	return max(mostNodes(p.Route[stage]), mostNodes(p.runs(stage, p.FromStep)))
}

// NodeCounts returns how many nodes each worker has.
func NodeCounts(route []id.WorkerID) map[id.WorkerID]int {
	counts := make(map[id.WorkerID]int)
	tree.Runs(route, func(w id.WorkerID, lo, hi int) { counts[w] += tree.CoverSize(len(route), lo, hi) })
	return counts
}

// mostNodes returns the most nodes a worker has.
func mostNodes(route []id.WorkerID) (most int) {
	for w, n := range NodeCounts(route) {
		if w >= 0 {
			most = max(most, n)
		}
	}
	return most
}
