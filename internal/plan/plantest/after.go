package plantest

import (
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

// ValidateAfter checks properties 15 to 19 of [plan.Plan]: that a plan may follow another one. Both are valid.
// The error is an [*plan.InvalidError].
func ValidateAfter(p, old *plan.Plan) error {
	e := &plan.InvalidError{Version: p.Version}
	add := func(number int, format string, args ...any) {
		e.Faults = append(e.Faults, plan.Fault{Number: number, What: fmt.Sprintf(format, args...)})
	}
	result := func() error {
		if len(e.Faults) == 0 {
			return nil
		}
		return e
	}
	if p.Version.Compare(old.Version) <= 0 || p.FromStep < old.FromStep {
		add(15, "version %v from step %d follows version %v from step %d", p.Version, p.FromStep, old.Version, old.FromStep)
	}
	if p.Micros() != old.Micros() {
		add(16, "%s follow %d", plan.Count(p.Micros(), "micro-batch"), old.Micros())
	}
	if p.Mirrors != old.Mirrors {
		add(19, "%s per shard follow %d", plan.Count(p.Mirrors, "mirror"), old.Mirrors)
	}
	if !p.InStep {
		return result()
	}
	alive := make(map[id.WorkerID]bool)
	for _, w := range p.Workers {
		if before, ok := old.Worker(w.ID); !ok || before != w {
			add(17, "worker %d is new", w.ID)
		}
		alive[w.ID] = true
	}
	if !slices.EqualFunc(p.Stages, old.Stages, func(a, b plan.Stage) bool { return a.Lo == b.Lo && a.Hi == b.Hi }) {
		add(17, "the stages have other layers")
	}
	if !slices.EqualFunc(p.Shards, old.Shards, func(a, b plan.Shard) bool { return a.Layer == b.Layer && a.Lo == b.Lo && a.Hi == b.Hi }) {
		add(17, "the shards have other borders")
		return result()
	}
	for i, s := range p.Shards {
		was := old.Shards[i]
		switch {
		case s.Owner == was.Owner:
		case alive[was.Owner]:
			add(18, "worker %d takes [%d,%d) of layer %d from worker %d, which lives", s.Owner, s.Lo, s.Hi, s.Layer, was.Owner)
		case !slices.Contains(was.Mirrors, s.Owner):
			add(18, "worker %d owns [%d,%d) of layer %d and did not mirror it", s.Owner, s.Lo, s.Hi, s.Layer)
		}
		for _, m := range s.Mirrors {
			if !slices.Contains(was.Mirrors, m) {
				add(18, "worker %d mirrors [%d,%d) of layer %d and did not before", m, s.Lo, s.Hi, s.Layer)
			}
		}
	}
	return result()
}
