package planner_test

import (
	"testing"

	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/plan/planner/plannertest"
	"github.com/soliton-train/soliton/internal/plan/plantest"
)

// The model goes to the first wanted host that has a worker, under every kind of plan; where none has, the first worker writes it.
func TestModelHost(t *testing.T) {
	prof := plan.Profile{Layers: plantest.Model(4)}
	all := plantest.Workers(6, 2) // on A, B and C
	p := plannertest.First(t, all[2:], prof, 1, 8, 1)
	if p.ModelHost != "" || p.Collector() != all[2] {
		t.Errorf("nothing is wanted: %q, %v", p.ModelHost, p.Collector())
	}
	for _, c := range []struct {
		name    string
		kind    planner.EventKind
		workers []plan.Worker
		wanted  []string // the host of the start, of the plan before, of the leader
		host    string
		by      plan.Worker
	}{
		{"the start host has no worker yet", planner.Lost, all[3:], []string{"A", "C", "B"}, "C", all[4]},
		{"nor has the one before", planner.Lost, all[2:4], []string{"A", "C", "B"}, "B", all[2]},
		{"no host that is wanted has one", planner.Lost, all[3:], []string{"A", "D", ""}, "", all[3]},
		{"the start host is back", planner.Join, all, []string{"A", "C", "B"}, "A", all[0]},
	} {
		v := plan.View{Workers: c.workers, ModelHosts: c.wanted, Step: 4}
		next, _, err := planner.Next(p, v, prof, planner.Event{Kind: c.kind})
		if err == nil {
			err = next.Validate(prof.Layers)
		}
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if next.ModelHost != c.host || next.Collector() != c.by {
			t.Errorf("%s: %q, by %v", c.name, next.ModelHost, next.Collector())
		}
	}
}
