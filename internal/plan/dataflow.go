package plan

import (
	"fmt"
	"slices"
)

// reroute is [rebalance] in the dataflow dimension alone: the micro-batches are routed anew
// over the workers of each stage, whose layers stay as they are. Nothing is transferred but
// shards that are with workers of other stages.
func reroute(current Plan, v View, prof Profile, e Event) (Plan, Reason, error) {
	if !prof.isMeasured() || !slices.Equal(current.Workers, sorted(v.Workers)) {
		return Plan{}, "", fmt.Errorf("plan: %w", ErrNoGain)
	}
	if len(prof.Layers) != current.Layers() {
		return Plan{}, "", fmt.Errorf("plan: a profile of %s for a plan of %d", count(len(prof.Layers), "layer"), current.Layers())
	}
	now := current
	now.InStep, now.Settled, now.First = false, nil, nil
	was := now.time(&prof)
	best := Plan{Workers: current.Workers, Stages: slices.Clone(current.Stages)}
	best.route(&prof, current.Micros())
	t := best.time(&prof)
	if float64(t) > (1-gain)*float64(was) {
		return Plan{}, "", fmt.Errorf("plan: %w", ErrNoGain)
	}
	p, reason, err := boundary(current, v, prof, e, func(d *draft) (string, error) { return d.reshape(&best, e) })
	if err != nil {
		return Plan{}, "", err
	}
	share := 100 * (1 - float64(t)/float64(was))
	return p, reason + Reason(fmt.Sprintf(", a step %.0f %% shorter", share)), nil
}
