package search

import (
	"cmp"
	"math"
	"slices"

	"github.com/soliton-train/soliton/internal/plan"
)

// Arrange fills in stages, routes and limits. Equal numbers of workers in all
// stages let every rank talk to one rank of the next stage and need fewer sums
// of gradients, which is worth a little time, and more than a guess.
func Arrange(p *plan.Plan, given plan.Profile, stages, micros int) {
	all := given.WithDefaults()
	prof := &all
	p.Stages = staffed(prof, p.Workers, deal(prof.Layers, stages, len(p.Workers), micros, math.MaxInt), micros)
	route(p, prof, micros)
	if len(p.Workers)%stages != 0 {
		return
	}
	even := *p
	parts := recut(prof.Layers, slices.Repeat([]float64{1}, stages))
	for i := range parts {
		parts[i].workers = len(p.Workers) / stages
	}
	even.Stages = staffed(prof, p.Workers, parts, micros)
	route(&even, prof, micros)
	if !given.IsMeasured() || float64(StepTime(&even, prof)) <= (1+slack)*float64(StepTime(p, prof)) {
		*p = even
	}
}

// staffed gives the parts their workers. Where speeds differ, layers are cut
// by the sums of these speeds.
func staffed(p *plan.Profile, workers []plan.Worker, parts []part, micros int) []plan.Stage {
	near := slices.Clone(workers)
	byPlace := func(a, b plan.Worker) int { return cmp.Or(cmp.Compare(a.Host, b.Host), cmp.Compare(a.ID, b.ID)) }
	slices.SortFunc(near, byPlace)
	groups := make([][]plan.Worker, len(parts))
	if equal(near, func(w plan.Worker) float64 { return p.SpeedOf(w.ID) }) {
		at := 0
		for i, part := range parts {
			groups[i] = near[at : at+part.workers]
			at += part.workers
		}
	} else {
		groups = bySpeed(p, near, parts)
		factors := make([]float64, len(parts))
		for i, g := range groups {
			slices.SortFunc(g, byPlace)
			_, factors[i] = shares(micros, speedsOf(p, g))
		}
		parts = recut(p.Layers, factors)
	}
	result := make([]plan.Stage, len(parts))
	for i, part := range parts {
		result[i] = plan.Stage{Lo: part.lo, Hi: part.hi}
		for _, w := range groups[i] {
			result[i].Workers = append(result[i].Workers, w.ID)
		}
	}
	return result
}

// bySpeed gives every stage its number of workers: the fastest that is left
// goes where the most work waits for the least speed.
func bySpeed(p *plan.Profile, workers []plan.Worker, parts []part) [][]plan.Worker {
	work := sums(p.Layers)
	fast := slices.Clone(workers)
	slices.SortStableFunc(fast, func(a, b plan.Worker) int { return cmp.Compare(p.SpeedOf(b.ID), p.SpeedOf(a.ID)) })
	groups := make([][]plan.Worker, len(parts))
	speed := make([]float64, len(parts))
	for _, w := range fast {
		best, bestNeed := -1, -1.0
		for i, part := range parts {
			if len(groups[i]) == part.workers {
				continue
			}
			const none = 1e-9 // instead of no speed, so that work decides among empty stages
			if need := float64(work[part.hi]-work[part.lo]) / max(speed[i], none); need > bestNeed {
				best, bestNeed = i, need
			}
		}
		groups[best] = append(groups[best], w)
		speed[best] += p.SpeedOf(w.ID)
	}
	return groups
}

func speedsOf(p *plan.Profile, workers []plan.Worker) []float64 {
	v := make([]float64, len(workers))
	for i, w := range workers {
		v[i] = p.SpeedOf(w.ID)
	}
	return v
}

const (
	// slack is by how much a step may be longer for equal numbers of workers in all stages.
	slack = 0.03
	// fewer is by how much for fewer nodes in the gradient tree, or fewer forward passes in
	// flight.
	fewer = 0.005
)
