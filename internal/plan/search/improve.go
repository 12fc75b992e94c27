package search

import (
	"math"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/simulate"
)

const (
	// gain is by how much of a step a plan for Rebalance has to be better, so that plans do
	// not follow noise.
	gain = 0.01
	// shapeTrials is the most shapes that are routed, and trialRange by how much one may be
	// behind the best in closed form, which is not exact where stages are uneven.
	shapeTrials = 3
	trialRange  = 0.1
)

// Improve looks for the stages and routes that fit the times best, in two dimensions:
//
//   - dataflow: micro-batches move between the workers of a stage;
//   - graph: layers and workers move to other stages. Fixed leaves that out.
//
// The best candidate has the shortest step plus its share of the time of transfers, which must pay off within
// Profile.Horizon steps. Transfers run beside training, so their time is that of the link of
// the worker that receives most; links that are not measured cost nothing.
//
// It returns the part by which a step is shorter; ok is false if that is not enough. Where nothing is
// measured there is nothing to go by, and no plan is better.
func Improve(current *plan.Plan, measured plan.Profile, fixed bool) (best plan.Plan, shorter float64, ok bool) {
	if !measured.IsMeasured() {
		return plan.Plan{}, 0, false
	}
	measured = measured.WithDefaults()
	prof := &measured
	now := *current
	now.InStep, now.Settled, now.First = false, nil, nil
	was := StepTime(&now, prof)
	var t, worth time.Duration
	if fixed {
		best = plan.Plan{Workers: current.Workers, Stages: slices.Clone(current.Stages)}
		route(&best, prof, current.Micros())
		t = StepTime(&best, prof)
		worth = t
	} else {
		best, t, worth = reshape(&now, prof)
	}
	if float64(worth) > (1-gain)*float64(was) {
		return plan.Plan{}, 0, false
	}
	return best, 1 - float64(t)/float64(was), true
}

// reshape returns the best shape of a plan with its routes, its step, and this with the share of the transfers.
func reshape(now *plan.Plan, prof *plan.Profile) (best plan.Plan, bestTime, bestWorth time.Duration) {
	micros := now.Micros()
	horizon := time.Duration(prof.Horizon)
	s := newShaper(now, prof)
	// What is far from the best in closed form need not be routed, see shapes; but the stages as
	// they are always, because the closed form is not exact.
	choices := s.shapes(now, shapeTrials)
	if !slices.ContainsFunc(choices, func(c shape) bool { return slices.EqualFunc(c.stages, now.Stages, sameStage) }) {
		choices = append(choices, shape{stages: slices.Clone(now.Stages)})
	}
	bestWorth = time.Duration(math.MaxInt64)
	x := simulate.NewPasses(prof, now.Workers)
	if small(now, micros) && equal(now.Workers, func(w plan.Worker) float64 { return prof.SpeedOf(w.ID) }) {
		choices = append(s.sketch(x, s.spread(now.Workers), micros, horizon), choices...)
	}
	for _, c := range choices {
		p := plan.Plan{Workers: now.Workers, Stages: c.stages}
		moving := prof.Stream(int64(c.moves)) / horizon
		var t time.Duration
		if small(&p, micros) {
			var ok bool
			if t, ok = search(&p, prof, x, micros, bestWorth-moving-1); !ok {
				continue
			}
		} else {
			dealRoutes(&p, prof, micros)
			t = simulate.Estimate(&p, *prof)
		}
		if worth := t + moving; worth < bestWorth {
			best, bestTime, bestWorth = p, t, worth
		}
	}
	return best, bestTime, bestWorth
}

// StepTime returns how long a step takes, simulated where the step is small enough.
func StepTime(p *plan.Plan, prof *plan.Profile) time.Duration {
	if small(p, p.Micros()) {
		return simulate.PassTime(p, prof) + simulate.ReduceTime(p, prof, func(s int) int { return simulate.TreeNodes(p, s) })
	}
	return simulate.Estimate(p, *prof)
}

func small(p *plan.Plan, micros int) bool { return 2*micros*len(p.Stages) <= searchTasks }

// searchTasks is the number of passes of a step up to which candidates are
// tried in the simulator.
const searchTasks = 1024
