package plan

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/elastic/graph"
)

// lost makes the in-step plan after the loss of workers: those of the current
// plan that are not in the view. It keeps the borders of layers and shards.
//
//   - Of a shard whose owner is lost, the first living mirror is promoted.
//   - A stage that has no worker left is taken over by the new owners of its
//     shards.
//   - Pairs of lost workers are routed to the workers of their stage, in
//     runs, so that what is left to do is balanced.
//
// A pair of a lost worker has to run again unless it is settled. A settled
// one has to run again, too, if someone still needs what it made and does not
// have it.
func lost(current Plan, v View, prof Profile, e Event) (Plan, Reason, error) {
	alive := make(map[WorkerID]bool)
	for _, w := range v.Workers {
		if was, ok := current.Worker(w.ID); ok && was == w {
			alive[w.ID] = true
		}
	}
	p := Plan{
		Version:  Version{Generation: max(e.Generation, current.Version.Generation), N: current.Version.N + 1},
		FromStep: max(v.Step, current.FromStep),
		InStep:   true,
		Mirrors:  current.Mirrors,
		Buffers:  current.Buffers,
	}
	var gone []WorkerID
	for _, w := range current.Workers {
		if alive[w.ID] {
			p.Workers = append(p.Workers, w)
		} else {
			gone = append(gone, w.ID)
		}
	}
	if len(p.Workers) == 0 {
		return Plan{}, "", fmt.Errorf("plan: of the current plan, %w", ErrNoWorkers)
	}
	if len(gone) == 0 {
		return Plan{}, "", fmt.Errorf("plan: all %s of the current plan live", count(len(current.Workers), "worker"))
	}
	for _, c := range current.Clocks {
		if alive[c.Worker] {
			p.Clocks = append(p.Clocks, c)
		}
	}
	promoted, err := p.promote(&current, alive)
	if err != nil {
		return Plan{}, "", err
	}
	p.staff(&current, alive)
	again := rerun(&current, &v, alive)
	moved := p.reroute(&current, &v, &prof, alive, again)
	p.capacity(&current)

	cause := e.Cause
	if cause == "" {
		cause = fmt.Sprintf("%s lost (%s)", count(len(gone), "worker"), join(gone))
	}
	reason := fmt.Sprintf("%s: %s promoted, %s routed to others", cause, count(promoted, "shard"), count(moved, "pass"))
	return p, Reason(reason), nil
}

func join(ids []WorkerID) string {
	var s []string
	for _, id := range ids {
		s = append(s, fmt.Sprint(id))
	}
	return strings.Join(s, ", ")
}

// promote gives every shard a living owner.
func (p *Plan) promote(current *Plan, alive map[WorkerID]bool) (promoted int, err error) {
	var dead LostError
	for _, s := range current.Shards {
		var mirrors []WorkerID
		for _, m := range s.Mirrors {
			if alive[m] {
				mirrors = append(mirrors, m)
			}
		}
		if !alive[s.Owner] {
			if len(mirrors) == 0 {
				if dead.Count == 0 {
					dead.Shard = s
				}
				dead.Count++
				continue
			}
			s.Owner, mirrors = mirrors[0], mirrors[1:]
			promoted++
		}
		s.Mirrors = mirrors
		p.Shards = append(p.Shards, s)
	}
	if dead.Count > 0 {
		return 0, fmt.Errorf("plan: %w", &dead)
	}
	return promoted, nil
}

// staff gives every stage living workers.
func (p *Plan) staff(current *Plan, alive map[WorkerID]bool) {
	for _, s := range current.Stages {
		st := Stage{Lo: s.Lo, Hi: s.Hi}
		for _, w := range s.Workers {
			if alive[w] {
				st.Workers = append(st.Workers, w)
			}
		}
		if len(st.Workers) == 0 {
			for _, sh := range p.Shards {
				if s.Lo <= sh.Layer && sh.Layer < s.Hi && !slices.Contains(st.Workers, sh.Owner) {
					st.Workers = append(st.Workers, sh.Owner)
				}
			}
		}
		if len(st.Workers) == 0 { // a stage without parameters
			for _, w := range p.Workers {
				st.Workers = append(st.Workers, w.ID)
			}
		}
		p.Stages = append(p.Stages, st)
	}
}

// routed reports whether the plan routes a pair to the worker that speaks of
// it. A worker that has not applied the plan yet may speak of others.
func (p *Plan) routed(w Work) bool {
	return w.Stage >= 0 && w.Stage < len(p.Route) && w.Micro >= 0 && w.Micro < p.Micros() && p.Route[w.Stage][w.Micro] == w.Worker
}

// rerun returns the pairs that have to run again because nobody alive has
// what they made and somebody needs it.
func rerun(current *Plan, v *View, alive map[WorkerID]bool) map[graph.Pair]bool {
	works := make(map[graph.Pair]graph.Status, len(v.Works))
	for _, w := range v.Works {
		if alive[w.Worker] && current.routed(w) {
			works[w.Pair] = w.Status
		}
	}
	settled := make(map[graph.Pair]bool, len(v.Settled))
	for _, s := range v.Settled {
		settled[s] = true
	}
	// lost: what the pair made is on no living worker.
	lost := func(pair graph.Pair) bool {
		return !alive[current.Route[pair.Stage][pair.Micro]] || !current.Runs(pair, v.Step)
	}
	again := make(map[graph.Pair]bool)
	var need func(pair graph.Pair)
	need = func(pair graph.Pair) {
		if pair.Stage < 0 || pair.Stage >= len(current.Stages) || again[pair] || !lost(pair) {
			return
		}
		again[pair] = true
		need(graph.Pair{Stage: pair.Stage - 1, Micro: pair.Micro})
		need(graph.Pair{Stage: pair.Stage + 1, Micro: pair.Micro})
	}
	for s := range current.Stages {
		for m := range current.Route[s] {
			pair := graph.Pair{Stage: s, Micro: m}
			if lost(pair) {
				if !settled[pair] {
					need(pair)
				}
				continue
			}
			// A pair of the living may wait for what the lost have made.
			w := works[pair]
			if !w.Begun() && !w.Input {
				need(graph.Pair{Stage: s - 1, Micro: m})
			}
			if w.Phase < graph.Backing && !w.Gradient {
				need(graph.Pair{Stage: s + 1, Micro: m})
			}
		}
	}
	return again
}

// reroute routes the pairs of lost workers, and returns how many of them are
// to run again. The others are settled.
func (p *Plan) reroute(current *Plan, v *View, prof *Profile, alive map[WorkerID]bool, again map[graph.Pair]bool) int {
	done := make(map[graph.Pair]bool)
	for _, w := range v.Works {
		if alive[w.Worker] && current.routed(w) && w.Phase == graph.Finished {
			done[w.Pair] = true
		}
	}
	// What is left to do on each worker, in all stages, in units of time.
	costs := stageCosts(prof, p.Stages)
	weight := func(s int, w WorkerID) float64 { return max(costs[s].work(), 1) / prof.speed(w) }
	left := make(map[WorkerID]float64)
	for s, route := range current.Route {
		for m, w := range route {
			pair := graph.Pair{Stage: s, Micro: m}
			if alive[w] && !done[pair] && current.Runs(pair, v.Step) {
				left[w] += weight(s, w)
			}
		}
	}
	for s, route := range current.Route {
		next := slices.Clone(route)
		var run, rest []int
		for m, w := range route {
			pair := graph.Pair{Stage: s, Micro: m}
			switch {
			case again[pair]:
				run = append(run, m)
			case !alive[w]:
				rest = append(rest, m)
				p.Settled = append(p.Settled, pair)
			case !current.Runs(pair, v.Step):
				p.Settled = append(p.Settled, pair)
			}
		}
		// How many each gets, one by one to who has the least; then in runs, in
		// the order of ranks.
		workers := p.Stages[s].Workers
		gets := make(map[WorkerID]int)
		for range run {
			best := slices.MinFunc(workers, func(a, b WorkerID) int {
				return cmp.Compare(left[a]+weight(s, a), left[b]+weight(s, b))
			})
			gets[best]++
			left[best] += weight(s, best)
		}
		at := 0
		for _, w := range workers {
			for range gets[w] {
				next[run[at]] = w
				at++
			}
		}
		// Settled pairs run again in the next step only.
		for i, m := range rest {
			next[m] = workers[i*len(workers)/len(rest)]
		}
		p.Route = append(p.Route, next)
	}
	return len(again)
}

// capacity sets limits and buffers to what the routes need at least; places
// that are not new keep their limits.
func (p *Plan) capacity(current *Plan) {
	for s, st := range p.Stages {
		for _, w := range st.Workers {
			p.Limits = append(p.Limits, Limit{s, w, max(current.Limit(s, w), len(p.Stages)-s)})
		}
		p.Buffers = max(p.Buffers, p.mostSums(s))
	}
}
