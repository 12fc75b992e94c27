package search

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/simulate"
)

// Route fills in Route, Limits and Buffers of a plan that has stages.
func Route(p *plan.Plan, prof plan.Profile, micros int) {
	prof = prof.WithDefaults()
	route(p, &prof, micros)
}

func route(p *plan.Plan, prof *plan.Profile, micros int) {
	if !small(p, micros) {
		dealRoutes(p, prof, micros)
		return
	}
	search(p, prof, simulate.NewPasses(prof, p.Workers), micros, math.MaxInt64)
}

// dealRoutes is route for steps that are too large for a search.
func dealRoutes(p *plan.Plan, prof *plan.Profile, micros int) {
	costs := shared(prof, p.Stages)
	runs := runsOnly(micros, costs)
	if allAlike(costs) {
		write(p, runs, costs, 0, evenLead)
		return
	}
	// The largest blocks that are still small against what a worker has in all.
	buffers := prof.Buffers
	block := 1
	size := func(a, b simulate.StageCost) int { return cmp.Compare(len(a.Workers), len(b.Workers)) }
	most, fewest := len(slices.MaxFunc(costs, size).Workers), len(slices.MinFunc(costs, size).Workers)
	for block*16 <= micros/most || block*buffers < ceil(micros, fewest) {
		block *= 2
	}
	for ; block < micros; block *= 2 {
		if c := follow(inOrder(block, costs[0].Speeds, together(micros)), costs, block); c.buffers() <= buffers {
			write(p, c, costs, 1, noLead)
			return
		}
	}
	write(p, runs, costs, 1, noLead)
}

// allAlike reports whether all stages have workers of the same speeds.
func allAlike(costs []simulate.StageCost) bool {
	return !slices.ContainsFunc(costs, func(c simulate.StageCost) bool { return !c.Alike(&costs[0]) })
}

// search is route with the simulator: of several candidates it takes one that is about the
// fastest, and returns how long its step takes. ok is false, and nothing is taken, if none
// takes at most a time. Candidates that cannot be taken are not simulated to their end.
func search(p *plan.Plan, prof *plan.Profile, x *simulate.Passes, micros int, most time.Duration) (t time.Duration, ok bool) {
	x.Set(p.Stages, micros)
	if x.Bound() > most {
		return 0, false
	}
	type trial struct {
		candidate
		costs []simulate.StageCost
		lead  lead
		extra int
		nodes int
		time  time.Duration
	}
	var trials []trial
	enough := most // for what can be taken
	tiny := 2*micros*len(p.Stages) <= tinyPasses/2
	try := func(c candidate, costs []simulate.StageCost, leads []lead, extras ...int) {
		reduce := simulate.ReduceTime(p, prof, func(s int) (n int) {
			countNodes(c.rankings[s], func(_, k int) { n += k })
			return n
		})
		needs := needs(c, costs)
		for _, lead := range leads {
			var last []plan.Limit
			for i, extra := range extras {
				l := limits(costs, c, needs, extra, lead)
				if slices.Equal(l, last) {
					continue
				}
				last = l
				t, ok := x.Run(c.rankings, l, enough-reduce)
				if !ok && i == 0 && !tiny {
					break // smaller limits hardly ever help
				}
				if !ok {
					continue
				}
				t += reduce
				trials = append(trials, trial{c, costs, lead, extra, c.nodes(), t})
				enough = min(enough, t+time.Duration(fewer*float64(t)))
			}
		}
	}
	extras := []int{16, 8, 4, 2, 1, 0}
	buffers := prof.Buffers
	for i, stages := range orders(p, prof) {
		costs := shared(prof, stages)
		runs := runsOnly(micros, costs)
		if allAlike(costs) && equal(costs[0].Speeds, func(v float64) float64 { return v }) {
			try(runs, costs, []lead{evenLead}, 0)
			break
		}
		x.Set(stages, micros)
		try(runs, costs, []lead{evenLead, noLead}, extras...)
		if i > 0 && !tiny {
			continue
		}
		add := func(c candidate, leads []lead) {
			if c.buffers() <= buffers {
				try(c, costs, leads, extras...)
			}
		}
		for block := 1; block <= 8 && block < micros; block *= 2 {
			add(follow(runs.rankings[0], costs, block), leads[:1])
			for first := 1; first <= block; first *= 2 {
				add(follow(inOrder(first, costs[0].Speeds, together(micros)), costs, block), leads[:1])
			}
		}
		for block := 1; block <= 2; block *= 2 {
			add(alongside(runs.rankings[0], costs, block), leads)
			add(alongside(inOrder(block, costs[0].Speeds, together(micros)), costs, block), leads)
		}
		for block := 1; block <= 2; block *= 2 {
			if c, _, ok := inTurn(x, costs, runs, block, extras[0], buffers, enough); ok {
				add(c, leads[:1])
			}
		}
	}
	trials = slices.DeleteFunc(trials, func(t trial) bool { return t.time > enough })
	if len(trials) == 0 {
		return 0, false
	}
	best := slices.MinFunc(trials, func(a, b trial) int {
		return cmp.Or(cmp.Compare(a.nodes, b.nodes), cmp.Compare(a.extra, b.extra), cmp.Compare(a.lead.slowest, b.lead.slowest), a.lead.compareFirst(b.lead), cmp.Compare(a.time, b.time))
	})
	write(p, best.candidate, best.costs, best.extra, best.lead)
	slices.SortFunc(p.Limits, func(a, b plan.Limit) int {
		rank := func(l plan.Limit) int { return slices.Index(p.Stages[l.Stage].Workers, l.Worker) }
		return cmp.Or(cmp.Compare(a.Stage, b.Stage), cmp.Compare(rank(a), rank(b)))
	})
	return best.time, true
}

// orders returns the stages with their workers in the orders that routes are tried with: the
// fastest first, and the slowest first. The order of equal workers does not matter.
func orders(p *plan.Plan, prof *plan.Profile) [][]plan.Stage {
	fast, slow := slices.Clone(p.Stages), slices.Clone(p.Stages)
	differ := false
	for s, st := range p.Stages {
		bySpeed := func(a, b id.WorkerID) int { return cmp.Compare(prof.SpeedOf(a), prof.SpeedOf(b)) }
		differ = differ || !equal(st.Workers, prof.SpeedOf)
		fast[s].Workers, slow[s].Workers = slices.Clone(st.Workers), slices.Clone(st.Workers)
		slices.SortFunc(fast[s].Workers, func(a, b id.WorkerID) int { return cmp.Or(bySpeed(b, a), cmp.Compare(a, b)) })
		slices.SortFunc(slow[s].Workers, func(a, b id.WorkerID) int { return cmp.Or(bySpeed(a, b), cmp.Compare(a, b)) })
	}
	if !differ {
		return [][]plan.Stage{p.Stages}
	}
	return [][]plan.Stage{fast, slow}
}

// inTurn routes by a simulation in which workers take micro-batches in turn, as many as with
// other routes, with limits greater by extra than need be. Blocks are greater where a worker
// would else have too many nodes. ok is false if the step takes longer than most.
func inTurn(x *simulate.Passes, costs []simulate.StageCost, like candidate, block, extra, buffers int, most time.Duration) (c candidate, t time.Duration, ok bool) {
	var quota, blocks []int
	for _, counts := range like.counts(costs) {
		quota = append(quota, counts...)
		b := block
		for ceil(slices.Max(counts), b) > buffers {
			b *= 2
		}
		blocks = append(blocks, b)
	}
	c.rankings, t, ok = x.Deal(quota, blocks, limits(costs, like, needs(like, costs), extra, noLead), most)
	return c, t, ok
}

// write writes a candidate into the plan, with limits greater by extra than
// they have to be in all stages but the last, where one micro-batch is in
// flight at a time anyway.
func write(p *plan.Plan, c candidate, costs []simulate.StageCost, extra int, l lead) {
	p.Route = make([][]id.WorkerID, len(costs))
	for s, r := range c.rankings {
		p.Route[s] = make([]id.WorkerID, len(r))
		for m, rank := range r {
			p.Route[s][m] = costs[s].Workers[rank]
		}
	}
	p.Buffers = c.buffers()
	p.Limits = limits(costs, c, needs(c, costs), extra, l)
}
