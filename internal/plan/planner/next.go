package planner

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/search"
)

// Next makes the plan that an event calls for. current is the live plan, the
// zero Plan for [Start]. The same arguments give the same plan, which is valid.
//
// [Lost] and [Relieve] give in-step plans. [Leave], [Protect], [Join] and [Spread] give boundary
// plans that keep the borders of layers, and [Rebalance] one that may change them and
// the stages of workers; before one goes live, all transfers that plan.Needs lists have to be done.
//
// Errors are [ErrNoWorkers], for Start also [*FlagError], several joined, and
// for the others [*LostError].
func Next(current plan.Plan, v plan.View, prof plan.Profile, e Event) (plan.Plan, Reason, error) {
	if len(v.Workers) == 0 {
		return plan.Plan{}, "", fmt.Errorf("plan: %w", ErrNoWorkers)
	}
	p, reason, err := planFor(current, v, prof, e)
	if err != nil {
		return plan.Plan{}, "", err
	}
	p.PickModelHost(v.ModelHosts)
	return p, reason, nil
}

// planFor makes the plan, but for its ModelHost.
func planFor(current plan.Plan, v plan.View, prof plan.Profile, e Event) (plan.Plan, Reason, error) {
	switch e.Kind {
	case Start:
		return start(v, prof, e)
	case Lost:
		return lost(current, v, prof, e)
	case Relieve:
		return relieve(current, v, prof, e)
	case Leave:
		return boundary(current, v, prof, e, (*draft).leave)
	case Protect:
		return boundary(current, v, prof, e, (*draft).protect)
	case Join:
		return boundary(current, v, prof, e, func(d *draft) (string, error) { return d.join(e.Later) })
	case Spread:
		return boundary(current, v, prof, e, func(d *draft) (string, error) { return d.spread(e.Least) })
	case Rebalance:
		return rebalance(current, v, prof, e)
	default:
		return plan.Plan{}, "", fmt.Errorf("plan: event kind %d is not known", e.Kind)
	}
}

// start makes the first plan.
func start(v plan.View, prof plan.Profile, e Event) (plan.Plan, Reason, error) {
	stages := max(e.Stages, 1)
	if err := possible(v, prof, e, stages); err != nil {
		return plan.Plan{}, "", err
	}
	p := plan.Plan{
		Version:  id.Version{Generation: 1, N: 1},
		FromStep: max(e.FromStep, 1),
		Workers:  sorted(v.Workers),
		Mirrors:  e.Mirrors,
	}
	search.Arrange(&p, prof, stages, e.Micros)
	p.Shards = shards(p.Stages, prof.Layers, mirrorsOf(p.Stages, p.Workers, e.Mirrors))
	reason := fmt.Sprintf("first plan: %s in %s, %s per step",
		plan.Count(len(p.Workers), "worker"), plan.Count(stages, "stage"), plan.Count(e.Micros, "micro-batch"))
	return p, Reason(reason), nil
}

func sorted(workers []plan.Worker) []plan.Worker {
	w := slices.Clone(workers)
	slices.SortFunc(w, func(a, b plan.Worker) int { return cmp.Compare(a.ID, b.ID) })
	return w
}

// possible returns why there can be no plan, all reasons together.
func possible(v plan.View, prof plan.Profile, e Event, stages int) error {
	var errs faults.List
	add := func(flag string, value int, format string, args ...any) {
		errs.Add(&FlagError{flag, value, fmt.Sprintf(format, args...)})
	}
	layers, workers := len(prof.Layers), len(v.Workers)
	errs.If(layers == 0, "plan: the model has no layers")
	if e.Stages < 0 {
		add("--stages", e.Stages, "the number of stages counts from 1")
	}
	if stages > layers && layers > 0 {
		add("--stages", stages, "every stage needs a layer and the model has %s; use --stages %d or fewer", plan.Count(layers, "layer"), layers)
	}
	if stages > workers {
		add("--workers", workers, "every one of %s needs a worker; use --workers %d or more, or --stages %d or fewer",
			plan.Count(stages, "stage"), stages, workers)
	}
	errs.If(e.Micros < 1, "plan: a step of %d micro-batches: --global-batch must be a multiple of --micro-batch", e.Micros)
	if e.Mirrors < 0 {
		add("--mirrors", e.Mirrors, "the number of mirrors counts from 0")
	}
	seen := make(map[id.WorkerID]bool)
	for _, w := range v.Workers {
		errs.If(seen[w.ID] || w.ID < 0 || w.Incarnation < 0, "plan: worker %d, incarnation %d, is listed twice or negative", w.ID, w.Incarnation)
		seen[w.ID] = true
	}
	return errs.Err()
}
