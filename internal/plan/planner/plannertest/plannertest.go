// Package plannertest makes plans for the tests of other packages.
package plannertest

import (
	"errors"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/plan/plantest"
)

// First returns the first plan, which is valid.
func First(t plantest.Fataler, w []plan.Worker, prof plan.Profile, stages, micros, mirrors int) plan.Plan {
	t.Helper()
	p, reason, err := planner.Next(plan.Plan{}, plan.View{Workers: w}, prof, planner.Event{Micros: micros, Stages: stages, Mirrors: mirrors})
	if err != nil {
		t.Fatalf("Next: %v", err)
	}
	if reason == "" {
		t.Fatalf("a plan without a reason")
	}
	if err := p.Validate(prof.Layers); err != nil {
		t.Fatalf("%v\n%v", err, &p)
	}
	return p
}

// After returns the plan that an event calls for, which is valid.
func After(t plantest.Fataler, old *plan.Plan, v plan.View, prof plan.Profile, e planner.Event) (plan.Plan, planner.Reason) {
	t.Helper()
	p, reason, err := planner.Next(*old, v, prof, e)
	if err != nil {
		t.Fatalf("%v", err)
	}
	if err := errors.Join(p.Validate(prof.Layers), plantest.ValidateAfter(&p, old)); err != nil {
		t.Fatalf("%v\n%v", err, &p)
	}
	return p, reason
}

// Losing returns the plan after a loss, with its mirrors made again.
func Losing(t plantest.Fataler, p plan.Plan, prof plan.Profile, lost id.WorkerID) plan.Plan {
	t.Helper()
	v := plan.View{Step: p.FromStep}
	for _, w := range p.Workers {
		if w.ID != lost {
			v.Workers = append(v.Workers, w)
		}
	}
	for _, kind := range []planner.EventKind{planner.Lost, planner.Protect} {
		next, _, err := planner.Next(p, v, prof, planner.Event{Kind: kind})
		if err != nil {
			t.Fatalf("%v", err)
		}
		if err := next.Validate(prof.Layers); err != nil {
			t.Fatalf("%v", err)
		}
		p = next
	}
	return p
}
