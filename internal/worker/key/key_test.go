package key

import (
	"testing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
)

// No two messages of a run have one key, whatever the fields of each are.
func TestKeysDiffer(t *testing.T) {
	seen := make(map[comm.Key]string)
	add := func(what string, k comm.Key) {
		t.Helper()
		if other, ok := seen[k]; ok {
			t.Errorf("%s and %s have the key %v", what, other, k)
		}
		seen[k] = what
	}
	a, v, w := Attempt{1, 7, 2}, id.Version{Generation: 1, N: 3}, id.Version{Generation: 1, N: 4}
	r := id.Range{Layer: 2, Lo: 4096, Hi: 8192}
	for _, at := range []Attempt{a, {1, 7, 3}, {1, 8, 2}, {2, 7, 2}} {
		for _, back := range []bool{false, true} {
			x := Tensor{Boundary: 1, Micro: 5, Back: back}
			add("a boundary tensor", Boundary(at, x))
			for _, by := range []id.Session{{Worker: 0}, {Worker: 0, Incarnation: 1}, {Worker: 1}} {
				add("its attestation", Attestation(at, x, by))
			}
		}
		add("a gradient", Gradient(at, v, r, 8))
		add("a gradient of another plan", Gradient(at, w, r, 8))
		for array := range 3 {
			add("a block", Block(at, id.Committed, r, array))
			add("a block of an evaluation", Block(at, id.Evaluated, r, array))
		}
	}
	after := After(1, 7)
	add("an evaluation", Evaluation(after, v, 0, 1, 5))
	add("a shape of an evaluation", EvaluationShape(Evaluation(after, v, 0, 1, 5)))
	add("an evaluation after a repair", Evaluation(after, v, 1, 1, 5))
	add("an evaluation under another plan", Evaluation(after, w, 0, 1, 5))
	add("parameters", Params(after, r))
	for moment := -1; moment < 2; moment++ {
		add("a collected array", Collected(after, v, 0, r, moment))
	}
	fill := id.Fill{Term: 1, N: 1}
	add("a base", Base(fill, r))
	add("an increment", Increment(fill, r, 7, Try{3, 0}))
	add("an increment after a repair", Increment(fill, r, 7, Try{3, 1}))
	add("an update", Applied(fill, r, 7))
	add("a base of another fill", Base(id.Fill{Term: 1, N: 2}, r))
	add("a base of another term's fill", Base(id.Fill{Term: 1 << 40, N: 1}, r))
	add("a shape", Shape(1, 2))
	add("a shape after a restart", Shape(2, 2))
	add("a live plan", Live(v))
	if RangeOf(Params(after, r)) != r {
		t.Error("the range of a key is another one")
	}
}

// What comes later has the greater word, so an endpoint that leaves a step behind keeps what is to come.
func TestAttemptsGrow(t *testing.T) {
	order := []Attempt{{0, 1, 0}, {0, 1, 1}, {0, 1, MaxRepair}, After(0, 1), {0, 2, 0}, {0, 1<<32 - 1, 0}, {1, 0, 0}}
	for i := 1; i < len(order); i++ {
		if order[i-1].Word() >= order[i].Word() {
			t.Errorf("%v is not below %v", order[i-1], order[i])
		}
	}
	for _, x := range []Try{{}, {0, MaxRepair}, {1<<23 - 1, 3}} {
		if TryOf(x.Word()) != x || int(int32(x.Word())) != x.Word() {
			t.Errorf("%v does not survive its word", x)
		}
	}
}
