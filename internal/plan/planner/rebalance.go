package planner

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/search"
)

// rebalance makes the plan that fits the times best, with the stages and routes of [search.Improve].
func rebalance(current plan.Plan, v plan.View, prof plan.Profile, e Event) (plan.Plan, Reason, error) {
	if !slices.Equal(current.Workers, sorted(v.Workers)) {
		return plan.Plan{}, "", fmt.Errorf("plan: %w", ErrNoGain)
	}
	if len(prof.Layers) != current.Layers() {
		return plan.Plan{}, "", fmt.Errorf("plan: a profile of %s for a plan of %d", plan.Count(len(prof.Layers), "layer"), current.Layers())
	}
	best, shorter, ok := search.Improve(&current, prof, e.Fixed)
	if !ok {
		return plan.Plan{}, "", fmt.Errorf("plan: %w", ErrNoGain)
	}
	p, reason, err := boundary(current, v, prof, e, func(d *draft) (string, error) { return d.reshape(&best) })
	if err != nil {
		return plan.Plan{}, "", err
	}
	return p, reason + Reason(fmt.Sprintf(", a step %.0f %% shorter", 100*shorter)), nil
}

// reshape takes stages and routes over, and gives the state of layers to workers of
// their stages.
func (d *draft) reshape(to *plan.Plan) (string, error) {
	if _, _, err := d.inherit(); err != nil {
		return "", err
	}
	d.Stages = slices.Clone(to.Stages)
	d.Route, d.Limits, d.Buffers = to.Route, to.Limits, to.Buffers
	d.prune()
	moved := 0
	for s := range d.Stages {
		moved += d.own(s)
	}
	d.mirror()
	d.merge()
	var changed []string
	borders, places := 0, 0
	for s, st := range d.Stages {
		if s > 0 && st.Lo != d.current.Stages[s].Lo {
			borders++
		}
		for _, w := range st.Workers {
			if !slices.Contains(d.current.Stages[s].Workers, w) {
				places++
			}
		}
	}
	if borders > 0 {
		changed = append(changed, plan.Count(borders, "stage border")+" moved")
	}
	if places > 0 {
		changed = append(changed, plan.Count(places, "worker")+" moved to another stage")
	}
	if moved > 0 {
		changed = append(changed, fmt.Sprintf("%d parameters moved", moved))
	}
	if len(changed) == 0 {
		changed = append(changed, "micro-batches rerouted")
	}
	return d.prof.String() + ": " + strings.Join(changed, ", "), nil
}

// own gives a stage that was reshaped to its own workers, with their fair shares for those that
// are new in it, and returns how many parameters that hands over.
func (d *draft) own(stage int) (moved int) {
	moved = d.settle(stage)
	var fresh []id.WorkerID
	for _, w := range d.Stages[stage].Workers {
		if stage >= len(d.current.Stages) || !slices.Contains(d.current.Stages[stage].Workers, w) {
			fresh = append(fresh, w)
		}
	}
	return moved + d.handOver(stage, fresh)
}

// settle gives what workers of other stages own of a stage to its own workers, and returns
// how many parameters that needs to be moved: those of which no worker of the stage is a
// mirror. Owners that the stage never had, because they took it over, keep nothing either.
func (d *draft) settle(stage int) (moved int) {
	st := &d.Stages[stage]
	e := d.estate(stage)
	for from := range d.Workers {
		if slices.Contains(st.Workers, d.Workers[from].ID) {
			continue
		}
		for _, i := range slices.Clone(e.shards[from]) {
			s := d.Shards[i]
			if candidates := keep(s.Mirrors, func(m id.WorkerID) bool { return slices.Contains(st.Workers, m) }); len(candidates) > 0 {
				to := d.index[slices.MinFunc(candidates, func(a, b id.WorkerID) int { return cmp.Compare(e.excess(d.index[a]), e.excess(d.index[b])) })]
				e.give(i, from, to)
			}
		}
		for len(e.shards[from]) > 0 {
			i := e.shards[from][0]
			s := d.Shards[i]
			to := d.index[slices.MinFunc(st.Workers, func(a, b id.WorkerID) int { return cmp.Compare(e.excess(d.index[a]), e.excess(d.index[b])) })]
			n := e.takePart(i, from, to, s.Lo, s.Hi, -e.excess(to))
			if n == 0 { // too little to be split
				n = e.give(i, from, to)
			}
			moved += n
		}
	}
	return moved
}

// give makes another worker the owner of a whole shard.
func (e *estate) give(i, from, to int) int {
	s := &e.Shards[i]
	return e.takePart(i, from, to, s.Lo, s.Hi, max(s.Hi-s.Lo, wholeShard))
}
