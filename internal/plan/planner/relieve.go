package planner

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// Late is a worker that lives and for which the others wait in a step.
type Late struct {
	Worker id.WorkerID
	// Each is how long workers take for a pair in this step, relative to each other, as far as that is known.
	Each map[id.WorkerID]float64
}

// each returns how long a worker takes for a pair: where that is not known, as long as the slowest but the late one.
func (l *Late) each(w id.WorkerID) float64 {
	if each := l.Each[w]; each > 0 {
		return each
	}
	most := 0.
	for x, each := range l.Each {
		if x != l.Worker {
			most = max(most, each)
		}
	}
	return cmp.Or(most, 1)
}

// relieve makes the in-step plan by which the workers of a late one's stages take over pairs that it has not begun: each goes
// to the worker that is ready with it first, the late one among them. What has begun stays, and so do all shards.
//
// Of the profile, only the costs of stages count, not the speeds: the late worker is slower than they say.
func relieve(current plan.Plan, v plan.View, prof plan.Profile, e Event) (plan.Plan, Reason, error) {
	l, gone := newLoss(&current, &v, &prof, e)
	if len(gone) > 0 || v.Step < current.FromStep {
		return plan.Plan{}, "", fmt.Errorf("plan: %w", ErrNoGain)
	}
	l.late = &e.Late
	if _, err := l.promote(); err != nil {
		return plan.Plan{}, "", err
	}
	staffStages(&l.Plan, &current, l.alive)
	l.collect()
	l.again = make(map[graph.Pair]bool)
	for s, route := range current.Route {
		for m, w := range route {
			pair := graph.Pair{Stage: s, Micro: m}
			// What its passes need must be with a worker that makes it in this step, so that it is sent to another one.
			made := s == 0 || current.Runs(graph.Pair{Stage: s - 1, Micro: m}, v.Step)
			if was := l.said[s][m]; w == e.Late.Worker && current.Runs(pair, v.Step) && made && !was.Begun() && !was.Gradient {
				l.again[pair] = true
			}
		}
	}
	l.prioritize()
	if current.InStep && current.FromStep == v.Step { // what blocked others before does so still
		l.First = append(l.First, current.First...)
		slices.SortFunc(l.First, graph.Pair.Compare)
		l.First = slices.Compact(l.First)
	}
	l.reroute()
	taken := 0
	for s, route := range l.Route {
		for m, w := range route {
			if w != current.Route[s][m] {
				taken++
			}
		}
	}
	if taken == 0 {
		return plan.Plan{}, "", fmt.Errorf("plan: %w", ErrNoGain)
	}
	l.capacity(nil)
	return l.Plan, Reason(fmt.Sprintf("%s: others take %s that it has not begun", e.Cause, plan.Count(taken, "micro-batch"))), nil
}
