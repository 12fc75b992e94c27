package plan

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// lost makes the in-step plan after the loss of workers: those of the current
// plan that are not in the view. It keeps the borders of layers and shards.
//
//   - Of a shard whose owner is lost, a living mirror is promoted: one that has
//     the whole gradient before others, one that does not leave before others,
//     then the one that owns least.
//   - A stage that has no worker left is taken over by the new owners of its
//     shards.
//   - Pairs of lost workers are routed to the workers of their stage, in
//     runs, so that what is left to do is balanced. Those that a living one waits for
//     are dealt out and begin first.
//   - Who would wait for these has other work first: see occupy.
//
// A pair of a lost worker has to run again unless it is settled: the view says
// so, or all shards of its stage have owners with the whole gradient. (In the
// last stage the lost worker's losses are lacking even so.) A settled
// one has to run again, too, if someone still needs what it made and does not
// have it.
//
// If the current plan begins with a later step than the view's, nothing of its
// first step has begun, whatever the view says, and the plan is for that step.
func lost(current Plan, v View, prof Profile, e Event) (Plan, Reason, error) {
	if v.Step < current.FromStep {
		v.Step, v.Works, v.Complete, v.Settled = current.FromStep, nil, nil, nil
	}
	alive := make(map[id.WorkerID]bool)
	for _, w := range v.Workers {
		if was, ok := current.Worker(w.ID); ok && was == w {
			alive[w.ID] = true
		}
	}
	p := Plan{
		Version:  following(&current, e),
		FromStep: v.Step,
		InStep:   true,
		Mirrors:  current.Mirrors,
		Buffers:  current.Buffers,
	}
	var gone []id.WorkerID
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
	promoted, err := p.promote(&current, &v, alive)
	if err != nil {
		return Plan{}, "", err
	}
	p.staff(&current, alive)
	said := statuses(&current, &v, alive)
	again := rerun(&current, &v, alive, said, p.settled(&v, current.Micros()))
	p.First = waited(&current, &v, alive, said, again)
	moved := p.reroute(&current, &v, &prof, alive, said, again)
	p.capacity(&current, &v, again, p.occupy(&current, &v, alive, said, again))

	cause := e.Cause
	if cause == "" {
		cause = fmt.Sprintf("%s lost (%s)", count(len(gone), "worker"), join(gone))
	}
	reason := fmt.Sprintf("%s: %s promoted, %s routed to others", cause, count(promoted, "shard"), count(moved, "pass"))
	return p, Reason(reason), nil
}

func join(ids []id.WorkerID) string {
	var s []string
	for _, id := range ids {
		s = append(s, fmt.Sprint(id))
	}
	return strings.Join(s, ", ")
}

// promote gives every shard a living owner.
func (p *Plan) promote(current *Plan, v *View, alive map[id.WorkerID]bool) (promoted int, err error) {
	complete := make(map[Complete]bool, len(v.Complete))
	for _, c := range v.Complete {
		complete[c] = true
	}
	owned := make(map[id.WorkerID]int)
	for _, s := range current.Shards {
		owned[s.Owner] += s.Hi - s.Lo
	}
	var dead LostError
	for i, s := range current.Shards {
		s.Mirrors = keep(s.Mirrors, func(m id.WorkerID) bool { return alive[m] })
		if !alive[s.Owner] {
			if len(s.Mirrors) == 0 {
				if dead.Count == 0 {
					dead.Shard = current.Shards[i]
				}
				dead.Count++
				continue
			}
			flaw := func(m id.WorkerID) (n int) {
				if !complete[Complete{i, m}] {
					n += 2
				}
				if slices.Contains(v.Leaving, m) {
					n++
				}
				return n
			}
			s.Owner = slices.MinFunc(s.Mirrors, func(a, b id.WorkerID) int {
				return cmp.Or(cmp.Compare(flaw(a), flaw(b)), cmp.Compare(owned[a], owned[b]))
			})
			owned[s.Owner] += s.Hi - s.Lo
			s.Mirrors = keep(s.Mirrors, func(m id.WorkerID) bool { return m != s.Owner })
			promoted++
		}
		p.Shards = append(p.Shards, s)
	}
	if dead.Count > 0 {
		return 0, fmt.Errorf("plan: %w", &dead)
	}
	return promoted, nil
}

// settled returns the pairs of whose gradients and losses nothing is lacking:
// those that the view names, and all of a stage before the last one whose
// shards are complete at their owners. An owner hands the sum on to its
// mirrors.
func (p *Plan) settled(v *View, micros int) map[graph.Pair]bool {
	settled := make(map[graph.Pair]bool, len(v.Settled))
	for _, s := range v.Settled {
		settled[s] = true
	}
	lacks := make([]int, len(p.Stages)) // shards
	for _, s := range p.Shards {
		lacks[p.StageOf(s.Layer)]++
	}
	seen := make(map[int]bool)
	for _, c := range v.Complete {
		if c.Shard >= 0 && c.Shard < len(p.Shards) && p.Shards[c.Shard].Owner == c.Worker && !seen[c.Shard] {
			seen[c.Shard] = true
			lacks[p.StageOf(p.Shards[c.Shard].Layer)]--
		}
	}
	// The losses of the last stage are with the workers until the commit.
	for st := range len(p.Stages) - 1 {
		for m := range micros {
			if lacks[st] == 0 {
				settled[graph.Pair{Stage: st, Micro: m}] = true
			}
		}
	}
	return settled
}

// staff gives every stage living workers.
func (p *Plan) staff(current *Plan, alive map[id.WorkerID]bool) {
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

// statuses returns what the living said of their pairs, by stage and micro-batch. A pair
// of which nobody speaks has not begun.
func statuses(current *Plan, v *View, alive map[id.WorkerID]bool) [][]graph.Status {
	said := make([][]graph.Status, len(current.Route))
	for s, route := range current.Route {
		said[s] = make([]graph.Status, len(route))
	}
	for _, w := range v.Works {
		if alive[w.Worker] && current.routed(w) {
			said[w.Stage][w.Micro] = w.Status
		}
	}
	return said
}

// rerun returns the pairs that have to run again because nobody alive has
// what they made and somebody needs it.
func rerun(current *Plan, v *View, alive map[id.WorkerID]bool, said [][]graph.Status, settled map[graph.Pair]bool) map[graph.Pair]bool {
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
			w := said[s][m]
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

// waited returns the pairs that run again and that keep someone who lives from going on: without their gradients pairs that were
// begun before the loss cannot go on, or what they make is the first thing that a worker of the next stage, who has nothing,
// can begin with. The others run again for the sum alone, or in their order.
func waited(current *Plan, v *View, alive map[id.WorkerID]bool, said [][]graph.Status, again map[graph.Pair]bool) (first []graph.Pair) {
	if len(again) == 0 {
		return nil
	}
	wait := make([]bool, current.Micros()) // for the stage at hand
	for s := range current.Stages {
		for m := range wait {
			pair := graph.Pair{Stage: s, Micro: m}
			switch was := said[s][m]; {
			case again[pair]:
				if wait[m] {
					first = append(first, pair)
				}
			default:
				wait[m] = alive[current.Route[s][m]] && current.Runs(pair, v.Step) && was.Phase == graph.Forwarded && !was.Gradient
			}
		}
	}
	// Whose pairs have all been finished or not begun, and have no input: the lowest of those not begun.
	next := make([]map[id.WorkerID]int, len(current.Stages)) // of those that wait for something that runs again
	for pair := range again {
		if s := pair.Stage + 1; s < len(next) && alive[current.Route[s][pair.Micro]] {
			if next[s] == nil {
				next[s] = make(map[id.WorkerID]int)
			}
			next[s][current.Route[s][pair.Micro]] = current.Micros()
		}
	}
	for s, next := range next {
		if next == nil {
			continue
		}
		for m, w := range current.Route[s] {
			was := said[s][m]
			lowest, ok := next[w]
			switch {
			case !ok || was.Phase == graph.Finished || !current.Runs(graph.Pair{Stage: s, Micro: m}, v.Step):
			case was.Begun() || was.Input:
				delete(next, w) // it has something
			default:
				next[w] = min(lowest, m)
			}
		}
		for _, m := range next {
			if before := (graph.Pair{Stage: s - 1, Micro: m}); again[before] {
				first = append(first, before)
			}
		}
	}
	slices.SortFunc(first, graph.Pair.Compare)
	return slices.Compact(first)
}

// reroute routes the pairs of lost workers, and returns how many of them are
// to run again. The others are settled.
func (p *Plan) reroute(current *Plan, v *View, prof *Profile, alive map[id.WorkerID]bool, said [][]graph.Status, again map[graph.Pair]bool) int {
	// What is left to do on each worker, in all stages, in units of time.
	costs := stageCosts(prof, p.Stages)
	weight := func(s int, w id.WorkerID) float64 { return max(costs[s].work(), 1) / prof.speed(w) }
	left := make(map[id.WorkerID]float64)
	for s, route := range current.Route {
		for m, w := range route {
			pair := graph.Pair{Stage: s, Micro: m}
			if alive[w] && said[s][m].Phase != graph.Finished && current.Runs(pair, v.Step) {
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
		gets := make(map[id.WorkerID]int)
		for range run {
			best := slices.MinFunc(workers, func(a, b id.WorkerID) int {
				return cmp.Compare(left[a]+weight(s, a), left[b]+weight(s, b))
			})
			gets[best]++
			left[best] += weight(s, best)
		}
		to := 0
		run = slices.DeleteFunc(run, func(m int) bool {
			if _, waits := slices.BinarySearchFunc(p.First, graph.Pair{Stage: s, Micro: m}, graph.Pair.Compare); !waits {
				return false
			}
			for gets[workers[to%len(workers)]] == 0 {
				to++
			}
			next[m] = workers[to%len(workers)]
			gets[next[m]]--
			to++
			return true
		})
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
// that are not new keep their limits. A micro-batch in flight whose next stage has
// to run again takes up no room: its worker would have nothing to do else. spare are
// forward passes beyond that.
func (p *Plan) capacity(current *Plan, v *View, again map[graph.Pair]bool, spare map[place]int) {
	stuck := make(map[place]int)
	for _, w := range v.Works {
		if w.Phase == graph.Forwarded && !w.Gradient && again[graph.Pair{Stage: w.Stage + 1, Micro: w.Micro}] {
			stuck[place{w.Stage, w.Worker}]++
		}
	}
	for s, st := range p.Stages {
		for _, w := range st.Workers {
			// The lead was for other routes.
			p.Limits = append(p.Limits, Limit{Stage: s, Worker: w, Forwards: max(current.Limit(s, w), len(p.Stages)-s) + stuck[place{s, w}] + spare[place{s, w}]})
		}
		p.Buffers = max(p.Buffers, p.mostSums(s))
	}
}
