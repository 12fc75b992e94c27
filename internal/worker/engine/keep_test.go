package engine

import (
	"context"
	"testing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
)

// When all is written, the others go on to their end under a plan in which holders have no state: all holders
// of a shard may be dead.
func TestKeptNeedsNoHolders(t *testing.T) {
	const workers = 4
	engines, _ := lines{workers: workers, mirrors: 1, global: 8, micro: 1}.start(t)
	all(engines, func(_ int, e *Engine) {
		if _, err := e.Step(t.Context(), 1); err != nil {
			t.Error(err)
		}
		if _, _, err := e.Keep(t.Context(), 1, 0, func(context.Context) (Collector, error) { return nothing{}, nil }); err != nil {
			t.Error(err)
		}
	})
	first := engines[0].plan
	dead := first.Shards[0]
	var done control.Done
	engines[0].Describe(&done)
	order := control.Order{
		Ballot: id.Ballot{Term: 1, Attempt: 1}, Passed: id.Point{Step: 1, Gate: id.Kept}, Result: done.Result,
	}
	var view plan.View
	for i, w := range first.Workers {
		if w.ID == dead.Owner || w.ID == dead.Mirrors[0] {
			engines[i].Close()
			continue
		}
		view.Workers = append(view.Workers, w)
		order.Peers = append(order.Peers, control.Peer{Worker: w, Addr: engines[i].c.Network.Addr()})
	}
	var err error
	if order.Plan, _, err = planner.Next(plan.Plan{}, view, plan.Profile{Layers: []plan.Layer{{Tensors: []int{1}}, {Tensors: []int{1}}}},
		planner.Event{Micros: 8, Mirrors: 1, FromStep: 2}); err != nil {
		t.Fatal(err)
	}
	order.Plan.Version = id.Version{Generation: first.Version.Generation, N: first.Version.N + 1}
	for _, w := range view.Workers {
		engines[w.ID].Query(order.Ballot, func(control.Report) {})
		engines[w.ID].Order(order)
	}
	for _, w := range view.Workers {
		var v id.Version
		for err == nil && v != order.Plan.Version { // each look takes a turn of its loop
			engines[w.ID].inspect(func() { v, err = engines[w.ID].plan.Version, engines[w.ID].core.Err() })
		}
		if err != nil {
			t.Fatalf("worker %d: %v", w.ID, err)
		}
	}
}
