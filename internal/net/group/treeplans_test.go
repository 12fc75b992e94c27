package group

import (
	"reflect"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/tree"
)

// The plans that a version of a group keeps are those of the nodes that ranks hold now, also when these have changed.
func TestTreePlans(t *testing.T) {
	contiguous := [][]tree.Node{{{Lo: 0, Hi: 2}}, {{Lo: 2, Hi: 4}}}
	swapped := [][]tree.Node{{{Lo: 2, Hi: 4}}, {{Lo: 0, Hi: 2}}}
	shards := []TreeShard{{Owner: 0, Hi: 8}, {Owner: 1, Hi: 8}, {Owner: 0, Hi: 8}, {Owner: 0, Hi: 8}}
	var plans treePlans
	for round, nodes := range [][][]tree.Node{contiguous, contiguous, swapped, contiguous} {
		got, err := plans.of(Tree{Micros: 4, Nodes: nodes, Shards: shards})
		if err != nil {
			t.Fatal(err)
		}
		for i, s := range shards {
			want, err := PlanTree(4, nodes, s.Owner, i%2)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got[i], want) {
				t.Errorf("round %d, shard %d: %+v, want %+v", round, i, got[i], want)
			}
		}
	}
	// The caller may use the memory of its nodes again.
	contiguous[0][0], contiguous[1][0] = contiguous[1][0], contiguous[0][0]
	got, err := plans.of(Tree{Micros: 4, Nodes: contiguous, Shards: shards[:1]})
	if want, _ := PlanTree(4, swapped, 0, 0); err != nil || !reflect.DeepEqual(got[0], want) {
		t.Errorf("after a change in place: %+v, %v; want %+v", got, err, want)
	}
	if _, err := plans.of(Tree{Micros: 5, Nodes: contiguous, Shards: shards}); err == nil {
		t.Error("nodes that cover 4 of 5 micro-batches have a plan")
	}
}
