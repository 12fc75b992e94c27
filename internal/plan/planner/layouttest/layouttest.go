// Package layouttest lays out the shards of a plan in another way than the planner does, for tests and benchmarks that compare.
package layouttest

import (
	"slices"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

// Contiguous gives every worker of a stage one range of all parameters of the stage, layer after layer in the order of ranks,
// instead of a range of each layer. So a layer has few owners, and when it moves, the ranges behind it move along.
//
// Mirrors that a range has under from stay. Further ones are the former owner, then the workers after the new one. from is nil
// for a first plan. All workers are on one host.
func Contiguous(p, from *plan.Plan, layers []plan.Layer) {
	p.Shards = nil
	for _, st := range p.Stages {
		total, before := 0, 0 // parameters of the stage
		for _, l := range layers[st.Lo:st.Hi] {
			total += l.Size()
		}
		for l := st.Lo; l < st.Hi; l++ {
			at := 0
			for _, n := range layers[l].Tensors {
				for ; n > 0; n -= kernel.Block {
					size := min(n, kernel.Block)
					add(p, from, plan.Shard{Layer: l, Lo: at, Hi: at + size, Owner: st.Workers[(before+at)*len(st.Workers)/total]})
					at += size
				}
			}
			before += at
		}
	}
}

// add appends a block, to the last shard if that has the same holders.
func add(p, from *plan.Plan, block plan.Shard) {
	mirror := func(w id.WorkerID) {
		if _, ok := p.Worker(w); ok && !block.Holds(w) && len(block.Mirrors) < p.Mirrors {
			block.Mirrors = append(block.Mirrors, w)
		}
	}
	if from != nil {
		was := from.Shards[slices.IndexFunc(from.Shards, func(s plan.Shard) bool { return s.Layer == block.Layer && s.Lo <= block.Lo && block.Lo < s.Hi })]
		for _, w := range was.Mirrors {
			mirror(w)
		}
		mirror(was.Owner)
	}
	i := slices.IndexFunc(p.Workers, func(w plan.Worker) bool { return w.ID == block.Owner })
	for k := range p.Workers {
		mirror(p.Workers[(i+k)%len(p.Workers)].ID)
	}
	if n := len(p.Shards); n > 0 {
		if last := &p.Shards[n-1]; last.Layer == block.Layer && last.Owner == block.Owner && slices.Equal(last.Mirrors, block.Mirrors) {
			last.Hi = block.Hi
			return
		}
	}
	p.Shards = append(p.Shards, block)
}
