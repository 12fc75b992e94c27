package plan

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/id"
)

// ErrNoGain is the error of [Next] for [Rebalance] when no plan is better than the current
// one by enough.
var ErrNoGain = errors.New("no plan is better by enough")

const (
	// gain is by how much of a step a plan for Rebalance has to be better, so that plans do
	// not follow noise.
	gain = 0.01
	// shapeTrials is the most shapes that are routed, and trialRange by how much one may be
	// behind the best in closed form, which is not exact where stages are uneven.
	shapeTrials = 3
	trialRange  = 0.1
)

// rebalance makes the plan that fits the times best, in two dimensions:
//
//   - dataflow: the micro-batches are routed anew over the workers as they are;
//   - graph: layers go over to other stages, and workers to other stages.
//
// Of all candidates it is the one whose step, with its share of the time of the
// transfers that it needs first, is shortest: transfers have to be won back within
// Profile.Horizon steps. They go on beside training, so their time is that of the link of
// the worker that gets most; links that are not measured cost nothing.
//
// Where nothing is measured there is nothing to go by, and no plan is better.
func rebalance(current Plan, v View, prof Profile, e Event) (Plan, Reason, error) {
	if !prof.isMeasured() || !slices.Equal(current.Workers, sorted(v.Workers)) {
		return Plan{}, "", fmt.Errorf("plan: %w", ErrNoGain)
	}
	if len(prof.Layers) != current.Layers() {
		return Plan{}, "", fmt.Errorf("plan: a profile of %s for a plan of %d", count(len(prof.Layers), "layer"), current.Layers())
	}
	micros := current.Micros()
	now := current
	now.InStep, now.Settled, now.First = false, nil, nil
	was := now.time(&prof)
	horizon := time.Duration(cmp.Or(prof.Horizon, defaultHorizon))

	s := newShaper(&now, &prof)
	// What is far from the best in closed form need not be routed, see shapes; but the stages as
	// they are always, because the closed form is not exact.
	choices := s.shapes(&now, shapeTrials)
	if !slices.ContainsFunc(choices, func(c shape) bool { return slices.EqualFunc(c.stages, current.Stages, sameStage) }) {
		choices = append(choices, shape{stages: slices.Clone(current.Stages)})
	}
	var best Plan
	var bestTime time.Duration
	bestWorth := time.Duration(math.MaxInt64)
	x := newPasses(&prof, current.Workers)
	if now.small(micros) && equal(current.Workers, func(w Worker) float64 { return prof.speed(w.ID) }) {
		choices = append(s.sketch(x, s.spread(current.Workers), micros, horizon), choices...)
	}
	for _, c := range choices {
		p := Plan{Workers: current.Workers, Stages: c.stages}
		moving := prof.stream(int64(c.moves)) / horizon
		var t time.Duration
		if p.small(micros) {
			var ok bool
			if t, ok = p.search(x, micros, bestWorth-moving-1); !ok {
				continue
			}
		} else {
			p.deal(&prof, micros)
			t = p.Estimate(prof)
		}
		if worth := t + moving; worth < bestWorth {
			best, bestTime, bestWorth = p, t, worth
		}
	}
	if float64(bestWorth) > (1-gain)*float64(was) {
		return Plan{}, "", fmt.Errorf("plan: %w", ErrNoGain)
	}
	p, reason, err := boundary(current, v, prof, e, func(d *draft) (string, error) { return d.reshape(&best, e) })
	if err != nil {
		return Plan{}, "", err
	}
	share := 100 * (1 - float64(bestTime)/float64(was))
	return p, reason + Reason(fmt.Sprintf(", a step %.0f %% shorter", share)), nil
}

// reshape takes stages and routes over, and gives the state of layers to workers of
// their stages.
func (d *draft) reshape(to *Plan, e Event) (string, error) {
	if _, _, err := d.inherit(); err != nil {
		return "", err
	}
	d.Stages = slices.Clone(to.Stages)
	d.Route, d.Limits, d.Buffers = to.Route, to.Limits, to.Buffers
	d.prune()
	moved := 0
	if e.Contiguous {
		moved = d.line()
	} else {
		for s := range d.Stages {
			moved += d.own(s)
		}
	}
	d.mirror()
	d.merge()
	cause := e.Cause
	if cause == "" {
		cause = d.prof.String()
	}
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
		changed = append(changed, count(borders, "border")+" of stages moved")
	}
	if places > 0 {
		changed = append(changed, count(places, "worker")+" to other stages")
	}
	if moved > 0 {
		changed = append(changed, fmt.Sprintf("%d parameters handed over", moved))
	}
	if len(changed) == 0 {
		changed = append(changed, "micro-batches routed anew")
	}
	return cause + ": " + strings.Join(changed, ", "), nil
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
			if heirs := keep(s.Mirrors, func(m id.WorkerID) bool { return slices.Contains(st.Workers, m) }); len(heirs) > 0 {
				to := d.index[slices.MinFunc(heirs, func(a, b id.WorkerID) int { return cmp.Compare(e.excess(d.index[a]), e.excess(d.index[b])) })]
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
