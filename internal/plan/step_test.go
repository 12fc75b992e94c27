package plan_test

import (
	"slices"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/plan/planner/plannertest"
	"github.com/soliton-train/soliton/internal/plan/plantest"
)

func TestNodes(t *testing.T) {
	p := plan.Plan{InStep: true, FromStep: 3, Route: [][]id.WorkerID{{1, 1, 1, 1, 0, 1, 1, 1}}, Settled: []graph.Pair{{Stage: 0, Micro: 1}}}
	for _, c := range []struct {
		w    id.WorkerID
		step int
		want []tree.Node
	}{
		{1, 4, []tree.Node{{Lo: 0, Hi: 4}, {Lo: 5, Hi: 6}, {Lo: 6, Hi: 8}}},
		{1, 3, []tree.Node{{Lo: 0, Hi: 1}, {Lo: 2, Hi: 4}, {Lo: 5, Hi: 6}, {Lo: 6, Hi: 8}}},
		{0, 3, []tree.Node{{Lo: 4, Hi: 5}}},
		{2, 3, nil},
	} {
		if got := p.Nodes(0, c.w, c.step); !slices.Equal(got, c.want) {
			t.Errorf("worker %d in step %d: %v, want %v", c.w, c.step, got, c.want)
		}
	}
	if p.MostSums(0) != 4 {
		t.Errorf("most sums %d", p.MostSums(0))
	}
}

// What workers hold in all: the parameters of a stage on each of its workers, and each shard's state on its owner
// and mirrors.
func TestHolds(t *testing.T) {
	prof := plan.Profile{Layers: plantest.Model(4)}
	p := plannertest.First(t, plantest.Workers(5, 2), prof, 2, 8, 1)
	var got, want int64
	for _, w := range p.Workers {
		got += p.Holds(w.ID, prof.Layers)
	}
	for _, s := range p.Stages {
		for _, l := range prof.Layers[s.Lo:s.Hi] {
			want += 4 * int64(l.Size()) * int64(len(s.Workers)+3*2)
		}
	}
	if got != want {
		t.Errorf("%d bytes, want %d", got, want)
	}
}
