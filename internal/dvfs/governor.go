package dvfs

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/internal/faults"
)

// Config says when a [Governor] acts. Its zero value is documented with each field.
type Config struct {
	// Tolerance is the share by which a predicted step may be longer than with all clocks at their highest. 0 means
	// 0.005.
	Tolerance float64

	// Gain is the least share of the energy of a step that a change saves, if it does nothing else. 0 means 0.02.
	Gain float64

	// Slow is the share by which steps may be longer than necessary before clocks are raised at once. 0 means 0.02.
	Slow float64

	// Worse is the share by which the median of steps may grow after a change before it is undone, where nearly all steps
	// are longer than the median before. 0 means 0.01.
	Worse float64

	// Settle is the number of steps from a change to the first conclusion, and from one conclusion to the next. 0 means
	// 8.
	Settle int

	// Hold is the least number of steps from one change to the next that only saves energy. It doubles with each change
	// that is undone, up to 64 times. For as long, the steps after a change are compared with up to Hold steps before it.
	// 0 means 32.
	Hold int
}

// Validate reports every fault of the configuration.
func (c Config) Validate() error {
	var errs faults.List
	for _, f := range []struct {
		name string
		v    float64
	}{{"Tolerance", c.Tolerance}, {"Gain", c.Gain}, {"Slow", c.Slow}, {"Worse", c.Worse}} {
		errs.If(!(f.v >= 0 && f.v <= 1), "%s is %v: give a share up to 1, or 0 for the default", f.name, f.v)
	}
	errs.If(c.Settle < 0, "Settle is %d: give at least 1, or 0 for 8", c.Settle)
	errs.If(c.Hold < 0, "Hold is %d: give at least 1, or 0 for 32", c.Hold)
	return errs.Err()
}

func (c Config) withDefaults() Config {
	c.Tolerance, c.Gain, c.Slow, c.Worse = cmp.Or(c.Tolerance, 0.005), cmp.Or(c.Gain, 0.02), cmp.Or(c.Slow, 0.02), cmp.Or(c.Worse, 0.01)
	c.Settle, c.Hold = cmp.Or(c.Settle, 8), cmp.Or(c.Hold, 32)
	return c
}

// Observation is what a governor sees after a step.
type Observation struct {
	// Plan is the version of the plan under which the step ran, in any numbering.
	Plan uint64

	// Seconds is how long the step took.
	Seconds float64

	// Devices are the clocks, in the order of their indices in settings. Now is what is set.
	Devices []Device

	// Model is called only where a decision is due; nil means that no prediction is possible.
	Model func() Model
}

// Decision is the clocks to set, and why.
type Decision struct {
	Settings []Setting // nil: nothing
	Reason   string    // one sentence; "" if there is nothing to do
}

// Governor decides when to set which clock. It is a state machine that knows only its arguments. One goroutine at a time uses it.
//
// After a plan, and after each change, it waits for Settle steps. It raises clocks as soon as steps are longer than necessary, and
// with a new plan at once. It lowers them where that saves enough, and not again before Hold steps. It undoes a change that made
// steps longer, and watches for that during Hold steps, since one percent does not show in a few.
type Governor struct {
	cfg Config

	begun   bool
	plan    uint64
	devices int
	steps   int       // since the plan or the last change
	seconds []float64 // of these, up to Hold
	hold    int       // steps until the next one that only saves
	failed  int       // changes in a row that were taken back

	trial  bool // a change is not confirmed
	before float64
	undo   []Setting
}

// NewGovernor returns a governor; the error is of [Config.Validate].
func NewGovernor(cfg Config) (*Governor, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Governor{cfg: cfg.withDefaults()}, nil
}

// Step takes in a step and returns what is to be done before the next one. The error is that of [Allocate].
func (g *Governor) Step(o Observation) (Decision, error) {
	if !g.begun || o.Plan != g.plan || len(o.Devices) != g.devices {
		g.begun, g.plan, g.devices = true, o.Plan, len(o.Devices)
		g.trial, g.failed, g.hold = false, 0, 0
		g.settle()
		return g.raise(o)
	}
	if g.steps++; len(g.seconds) == g.cfg.Hold {
		g.seconds = g.seconds[1:]
	}
	g.seconds = append(g.seconds, o.Seconds)
	g.hold--
	if g.steps < g.cfg.Settle || g.steps%g.cfg.Settle != 0 {
		return Decision{}, nil
	}
	now := median(g.seconds)
	worse := g.trial && now > g.before*(1+g.cfg.Worse) && few(g.seconds, g.before)
	var model Model
	slow := false
	if o.Model != nil && len(o.Devices) > 0 {
		model = o.Model()
		if err := check(o.Devices, model, g.cfg.Tolerance); err != nil {
			return Decision{}, err
		}
		present, fastest := ends(o.Devices, model)
		slow = present > fastest*(1+g.cfg.Slow)
	}
	raises := slow && (g.hold <= 0 || g.failed == 0)
	if worse && !raises { // where the model knows why, it says what to do
		g.failed++
		g.hold = g.cfg.Hold << min(g.failed, 6)
		d := Decision{g.undo, fmt.Sprintf("clocks put back: steps became %.1f %% longer", 100*(now/g.before-1))}
		g.trial = false
		g.settle()
		return d, nil
	}
	if g.trial && g.steps >= g.cfg.Hold {
		g.trial, g.failed = false, 0
	}
	if model.Step == nil {
		return Decision{}, nil
	}
	if slow { // what became slow under the same clocks is what a change is held against
		now = max(now, median(g.seconds[len(g.seconds)-max(1, g.cfg.Settle/2):]))
	}
	if g.hold > 0 && !raises { // raising did not help: the hardware does not do what the model says
		return Decision{}, nil
	}
	a, err := Allocate(o.Devices, model, g.cfg.Tolerance)
	if err != nil {
		return Decision{}, err
	}
	if !slow && a.NowEnergy-a.Energy < g.cfg.Gain*a.NowEnergy {
		g.hold = g.cfg.Hold // the search takes a while
		return Decision{}, nil
	}
	return g.change(o.Devices, a, now, func(int, int) bool { return true }), nil
}

// raise raises clocks at once where a new plan's steps would be longer than need be: what was low by right may have
// become what all wait for.
func (g *Governor) raise(o Observation) (Decision, error) {
	if o.Model == nil || len(o.Devices) == 0 {
		return Decision{}, nil
	}
	a, err := Allocate(o.Devices, o.Model(), g.cfg.Tolerance)
	if err != nil || a.Now <= a.Fastest*(1+g.cfg.Slow) {
		return Decision{}, err
	}
	d := g.change(o.Devices, a, 0, func(now, to int) bool { return to > now })
	g.trial = false // there is nothing to compare with
	return d, nil
}

// change sets the clocks of an allocation that pass the filter.
func (g *Governor) change(devices []Device, a Allocation, before float64, want func(now, to int) bool) Decision {
	var d Decision
	g.undo = nil
	up, down := 0, 0
	for i, to := range a.MHz {
		now := devices[i].Now
		if to == now || !want(now, to) {
			continue
		}
		if to > now {
			up++
		} else {
			down++
		}
		d.Settings = append(d.Settings, Setting{i, to})
		g.undo = append(g.undo, Setting{i, now})
	}
	if d.Settings == nil {
		return d
	}
	var parts []string
	if up > 0 {
		parts = append(parts, fmt.Sprintf("%d raised", up))
	}
	if down > 0 {
		parts = append(parts, fmt.Sprintf("%d lowered", down))
	}
	d.Reason = fmt.Sprintf("clocks: %s; predicted %+.1f %% step time and %+.1f %% energy",
		strings.Join(parts, ", "), 100*(a.Seconds/a.Now-1), 100*(a.Energy/a.NowEnergy-1))
	g.trial, g.before, g.hold = true, before, g.cfg.Hold
	g.settle()
	return d
}

func (g *Governor) settle() { g.steps, g.seconds = 0, nil }

// few reports whether at most an eighth of the values are no greater than a limit.
func few(v []float64, limit float64) bool {
	n := 0
	for _, x := range v {
		if x <= limit {
			n++
		}
	}
	return 8*n <= len(v)
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}
