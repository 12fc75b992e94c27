package planner_test

import (
	"cmp"
	"slices"
	"testing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/plan/planner/plannertest"
	"github.com/soliton-train/soliton/internal/plan/plantest"
)

// halfway is what the workers of a plan say in the middle of a step: of each one's pairs
// in a stage, so many are finished, then in flight, and of the rest so many have input.
func halfway(p *plan.Plan, of map[id.WorkerID][3]int) (works []plan.Work) {
	for s, route := range p.Route {
		seen := map[id.WorkerID]int{}
		for m, w := range route {
			n, ok := of[w]
			if !ok {
				continue
			}
			st := graph.Status{Pair: graph.Pair{Stage: s, Micro: m}, Phase: graph.Waiting}
			switch i := seen[w]; {
			case i < n[0]:
				st.Phase, st.Input, st.Gradient = graph.Finished, true, true
			case i < n[0]+n[1]:
				st.Phase, st.Input = graph.Forwarded, true
			case i < n[0]+n[1]+n[2] || s == 0:
				st.Input = true
			}
			seen[w]++
			works = append(works, plan.Work{Worker: w, Status: st})
		}
	}
	return works
}

// TestNoWorkerWaits: after a loss in the first stage, the worker that was to go on with what the
// lost one makes gets a pair of one that has two, and those of the first stage that wait for
// gradients may begin one more.
func TestNoWorkerWaits(t *testing.T) {
	prof := plan.Profile{Layers: plantest.Model(8)}
	old := plannertest.First(t, plantest.Workers(8, 1), prof, 2, 32, 1)
	lost := old.Stages[0].Workers[0]
	waits := old.Route[1][microsOf(&old, 0, lost)[2]]
	of := map[id.WorkerID][3]int{}
	for _, w := range old.Stages[0].Workers[1:] {
		of[w] = [3]int{2, old.Limit(0, w).Forwards, 0}
	}
	for _, w := range old.Stages[1].Workers {
		of[w] = [3]int{2, 0, old.Limit(0, old.Stages[0].Workers[1]).Forwards}
	}
	of[waits] = [3]int{2, 0, 0}
	v := plan.View{Step: 9, Works: halfway(&old, of)}
	for _, w := range old.Workers {
		if w.ID != lost {
			v.Workers = append(v.Workers, w)
		}
	}
	p, _ := plannertest.After(t, &old, v, prof, planner.Event{Kind: planner.Lost})
	fed := 0
	for m, w := range p.Route[1] {
		was := old.Route[1][m]
		if w == was {
			continue
		}
		st := v.Works[0].Status
		for _, x := range v.Works {
			if x.Pair == (graph.Pair{Stage: 1, Micro: m}) {
				st = x.Status
			}
		}
		switch {
		case w == waits && st.Input && !st.Begun():
			fed++
		case was == waits && !st.Input:
		default:
			t.Errorf("%v goes from worker %d to %d", st, was, w)
		}
	}
	if fed != 1 {
		t.Errorf("worker %d gets %d pairs that it can begin, want 1\n%v", waits, fed, &p)
	}
	for _, w := range p.Stages[0].Workers {
		if was, now := old.Limit(0, w).Forwards, p.Limit(0, w).Forwards; now != was+1 {
			t.Errorf("worker %d may have %d in flight, want one more than %d", w, now, was)
		}
	}
}

// micros are the micro-batches that a stage gives a worker.
func microsOf(p *plan.Plan, stage int, id id.WorkerID) (list []int) {
	for m, w := range p.Route[stage] {
		if w == id {
			list = append(list, m)
		}
	}
	return list
}

// TestWhatOthersWaitForComesFirst: at the end of a step a worker of the last stage is lost. The workers before it wait
// for a few of its gradients only; these are computed again first, by as many as there are.
func TestWhatOthersWaitForComesFirst(t *testing.T) {
	prof := plan.Profile{Layers: plantest.Model(8)}
	old := plannertest.First(t, plantest.Workers(8, 1), prof, 2, 32, 1)
	lost := old.Stages[1].Workers[3]
	of := map[id.WorkerID][3]int{}
	for _, w := range old.Stages[1].Workers[:3] {
		of[w] = [3]int{8, 0, 0}
	}
	waits := map[int]bool{}
	for _, m := range microsOf(&old, 1, lost)[5:] {
		waits[m] = true
	}
	v := plan.View{Step: 9, Works: halfway(&old, of)}
	for m, w := range old.Route[0] {
		st := graph.Status{Pair: graph.Pair{Stage: 0, Micro: m}, Phase: graph.Finished, Input: true, Gradient: true}
		if waits[m] {
			st.Phase, st.Gradient = graph.Forwarded, false
		}
		v.Works = append(v.Works, plan.Work{Worker: w, Status: st})
	}
	for _, w := range old.Workers {
		if w.ID != lost {
			v.Workers = append(v.Workers, w)
		}
	}
	p, _ := plannertest.After(t, &old, v, prof, planner.Event{Kind: planner.Lost})
	by := map[id.WorkerID]int{}
	for _, pair := range p.First {
		if pair.Stage != 1 || !waits[pair.Micro] {
			t.Errorf("%v comes first, and no worker waits for it", pair)
		}
		by[p.Route[1][pair.Micro]]++
	}
	if len(p.First) != 3 || len(by) != 3 {
		t.Errorf("first are %v, by workers %v: want three, each by another worker", p.First, by)
	}
	if p.Ranks(10) != nil {
		t.Error("the next step has ranks")
	}
}

// TestIdleWorkersAreServedFirst: at the begin of a step a worker of the first stage is lost. The worker that was to continue with what it
// makes has no other input, and would get it last.
func TestIdleWorkersAreServedFirst(t *testing.T) {
	prof := plan.Profile{Layers: plantest.Model(8)}
	old := plannertest.First(t, plantest.Workers(8, 1), prof, 2, 32, 1)
	lost := old.Stages[0].Workers[3]
	micro := microsOf(&old, 0, lost)[0]
	of := map[id.WorkerID][3]int{}
	for _, w := range old.Workers {
		of[w.ID] = [3]int{0, 0, 0}
	}
	for _, w := range old.Stages[1].Workers {
		if w != old.Route[1][micro] {
			of[w] = [3]int{0, 0, 1}
		}
	}
	delete(of, lost)
	v := plan.View{Step: 9, Works: halfway(&old, of)}
	for _, w := range old.Workers {
		if w.ID != lost {
			v.Workers = append(v.Workers, w)
		}
	}
	p, _ := plannertest.After(t, &old, v, prof, planner.Event{Kind: planner.Lost})
	if want := (graph.Pair{Stage: 0, Micro: micro}); len(p.First) != 1 || p.First[0] != want {
		t.Errorf("first are %v, want %v", p.First, want)
	}
	for _, limit := range p.Limits {
		if first := limit.Stage == 0; first != (limit.Lead == limit.Forwards) {
			t.Errorf("in a pipeline, those of the first stage alone lead by what may be in flight: %+v", limit)
		}
	}

	// Another one waits for what a living worker has not begun.
	waits := old.Route[1][microsOf(&old, 0, old.Stages[0].Workers[0])[0]]
	next := microsOf(&old, 1, waits)[0]
	v.Works = slices.DeleteFunc(v.Works, func(x plan.Work) bool { return x.Worker == waits })
	p, _ = plannertest.After(t, &old, v, prof, planner.Event{Kind: planner.Lost})
	if want := []graph.Pair{{Stage: 0, Micro: next}, {Stage: 0, Micro: micro}}; !slices.Equal(p.First, want) {
		t.Errorf("first are %v, want %v", p.First, want)
	}
}

// After a loss at the begin of a step, a worker may have micro-batches for two workers of the next stage: they get theirs in
// turns, and so do two workers that one goes on for.
func TestTurns(t *testing.T) {
	p := plan.Plan{
		FromStep: 4, InStep: true,
		Stages: []plan.Stage{{Lo: 0, Hi: 1, Workers: []id.WorkerID{1, 2}}, {Lo: 1, Hi: 2, Workers: []id.WorkerID{4, 5, 6}}},
		Route:  [][]id.WorkerID{{1, 1, 2, 2, 1, 1, 1, 1, 2, 2, 2, 2}, {4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6}},
		First:  []graph.Pair{{Stage: 0, Micro: 7}},
	}
	order := func(s int, w id.WorkerID) (list []int) {
		for m, x := range p.Route[s] {
			if x == w {
				list = append(list, m)
			}
		}
		rank := p.Ranks(4)
		slices.SortStableFunc(list, func(a, b int) int {
			return cmp.Compare(rank(graph.Pair{Stage: s, Micro: a}), rank(graph.Pair{Stage: s, Micro: b}))
		})
		return list
	}
	if got, want := order(0, 1), []int{7, 0, 4, 1, 5, 6}; !slices.Equal(got, want) {
		t.Errorf("worker 1 begins %v, want %v", got, want)
	}
	if got, want := order(0, 2), []int{8, 9, 2, 10, 3, 11}; !slices.Equal(got, want) {
		t.Errorf("worker 2 begins %v, want %v", got, want)
	}
	if got, want := order(1, 4), []int{0, 2, 1, 3}; !slices.Equal(got, want) {
		t.Errorf("worker 4 begins %v, want %v", got, want)
	}
	if p.Ranks(5) != nil {
		t.Error("the step after has ranks")
	}
}
