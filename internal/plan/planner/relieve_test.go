package planner_test

import (
	"errors"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/plan/planner/plannertest"
	"github.com/soliton-train/soliton/internal/plan/plantest"
)

// TestRelieve holds that relief moves nothing but what a late worker has not begun, to workers of the same stage, and that no way to deal
// that out ends a step of one stage sooner.
func TestRelieve(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, stages := rapid.IntRange(2, 4).Draw(t, "workers"), rapid.IntRange(1, 2).Draw(t, "stages")
		prof := plan.Profile{Layers: plantest.Model(4)}
		old := plannertest.First(t, plantest.Workers(n, 2), prof, stages, 8, 1)
		late := id.WorkerID(rapid.IntRange(0, n-1).Draw(t, "late"))
		v := plan.View{Workers: old.Workers, Step: 5}
		each := make(map[id.WorkerID]float64)
		left := make(map[id.WorkerID]int)
		var open []graph.Pair
		for _, w := range old.Workers {
			each[w.ID] = float64(rapid.IntRange(1, 3).Draw(t, "each"))
		}
		each[late] *= 4
		for s, route := range old.Route {
			for m, w := range route {
				st := graph.Status{Pair: graph.Pair{Stage: s, Micro: m}, Input: true, Phase: graph.Phase(rapid.IntRange(1, 4).Draw(t, "phase"))}
				if w != late && rapid.Bool().Draw(t, "done") {
					st.Phase = graph.Finished
				}
				st.Gradient = st.Phase >= graph.Backing
				v.Works = append(v.Works, plan.Work{Worker: w, Status: st})
				switch {
				case st.Phase == graph.Finished:
				case w == late && !st.Begun():
					open = append(open, st.Pair)
				default:
					left[w]++
				}
			}
		}
		// Some pairs of the first stage were settled by an earlier loss in this step: nothing sends what they made any more.
		if stages > 1 && rapid.Bool().Draw(t, "settled") {
			old.InStep, old.FromStep = true, 5
			for m := range old.Micros() {
				if rapid.Bool().Draw(t, "of it") {
					old.Settled = append(old.Settled, graph.Pair{Stage: 0, Micro: m})
				}
			}
			open = slices.DeleteFunc(open, func(p graph.Pair) bool {
				return !old.Runs(p, 5) || p.Stage > 0 && !old.Runs(graph.Pair{Stage: p.Stage - 1, Micro: p.Micro}, 5)
			})
		}
		p, _, err := planner.Next(old, v, prof, planner.Event{Kind: planner.Relieve, Cause: "late", Late: planner.Late{Worker: late, Each: each}})
		if err != nil && !errors.Is(err, planner.ErrNoGain) {
			t.Fatal(err)
		}
		if err != nil {
			p = old
		} else if !p.InStep || p.FromStep != 5 || p.Version.Compare(old.Version) <= 0 {
			t.Fatalf("plan %v in step %d", p.Version, p.FromStep)
		} else if err := errors.Join(p.Validate(prof.Layers), plantest.ValidateAfter(&p, &old)); err != nil {
			t.Fatal(err)
		}
		movable := make(map[graph.Pair]bool)
		for _, pair := range open {
			movable[pair] = true
		}
		for s, route := range old.Route {
			for m, w := range route {
				if pair := (graph.Pair{Stage: s, Micro: m}); p.Route[s][m] != w && !movable[pair] {
					t.Fatalf("%v goes from worker %d to %d", pair, w, p.Route[s][m])
				}
			}
		}
		if stages > 1 {
			return
		}
		end := func(gets map[id.WorkerID]int) (last float64) {
			for w, n := range left {
				last = max(last, float64(n)*each[w])
			}
			for w, n := range gets {
				last = max(last, float64(left[w]+n)*each[w])
			}
			return last
		}
		got := make(map[id.WorkerID]int)
		for _, pair := range open {
			got[p.Route[0][pair.Micro]]++
		}
		best := end(map[id.WorkerID]int{late: len(open)})
		var deal func(gets map[id.WorkerID]int, at, rest int)
		deal = func(gets map[id.WorkerID]int, at, rest int) {
			w := old.Workers[at].ID
			if at == len(old.Workers)-1 {
				gets[w] = rest
				best = min(best, end(gets))
				return
			}
			for k := range rest + 1 {
				gets[w] = k
				deal(gets, at+1, rest-k)
			}
		}
		deal(make(map[id.WorkerID]int), 0, len(open))
		if end(got) > best {
			t.Fatalf("the step ends after %v, and could end after %v: %v with %v left, %v each", end(got), best, got, left, each)
		}
	})
}
