package controller

import (
	"errors"
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/timing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
)

// Reshape says in which dimensions work is balanced between two steps.
type Reshape uint8

// The values of Reshape.
const (
	Full     Reshape = iota // micro-batches, layers and workers
	Dataflow                // micro-batches only: layers and workers stay in their stages
	Off                     // nothing: the work of failed workers stays with the workers that took it over
)

var reshapeNames = []string{"full", "dataflow", "off"}

// String returns the text of flags and files.
func (r Reshape) String() string { return reshapeNames[r] }

// ParseReshape reads the text of a flag or a file.
func ParseReshape(text string) (Reshape, error) {
	i := slices.Index(reshapeNames, text)
	if i < 0 {
		return 0, fmt.Errorf("%s: give full, dataflow or off", faults.Value(text))
	}
	return Reshape(i), nil
}

// measurement is a plan and the profile under which it runs.
type measurement struct {
	version id.Version
	profile plan.Profile
}

// measured takes note of what a worker has measured.
func (r *reconfiguration) measured(e Measured) []Effect {
	if r.session(e.Worker) == nil {
		return nil
	}
	r.times[e.Worker.ID] = e.Times
	if r.looking {
		return nil
	}
	r.looking = true
	return []Effect{SetTimer{LookTimer, timing.Balance}}
}

// balance begins the search for a plan that divides the work better, if something has changed since the last one.
func (r *reconfiguration) balance(view plan.View) []Effect {
	prof := r.profile()
	tried := r.exhausted != nil && r.exhausted.version == r.plan.Version && !r.exhausted.profile.Differs(&prof)
	if r.search != nil || r.cfg.Reshape == Off || len(r.times) == 0 || tried {
		return nil
	}
	r.searches++
	r.search = &Balance{r.searches, r.plan, view, prof, planner.Event{Kind: planner.Rebalance, After: r.issued, Fixed: r.cfg.Reshape == Dataflow}}
	return []Effect{*r.search}
}

// balanced begins with the plan that a search has found, unless something has changed meanwhile.
func (r *reconfiguration) balanced(e Balanced) []Effect {
	b := r.search
	if b == nil || e.Look != b.Look {
		return nil
	}
	r.search = nil
	prof := r.profile()
	switch {
	case !r.free():
		return nil // it is asked for again afterwards
	case b.Current.Version != r.plan.Version || b.Event.After != r.issued || b.Profile.Differs(&prof):
		return r.next()
	case errors.Is(e.Err, planner.ErrNoGain):
		r.exhausted = &measurement{r.plan.Version, b.Profile}
		return nil
	}
	return r.begin(e.Plan, b.View, CauseRebalance, e.Reason, e.Err)
}
