package planner

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/plan/simulate"
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
//   - Workers that would wait for these get other work first: see occupy.
//
// A pair of a lost worker has to run again unless it is settled: the view says
// so, or all shards of its stage have owners with the whole gradient. (In the
// last stage the lost worker's losses are lacking even so.) A settled
// one has to run again, too, if a live worker still needs its output and does not
// have it.
//
// If the current plan begins with a later step than the view's, nothing of its
// first step has begun, whatever the view says, and the plan is for that step.
func lost(current plan.Plan, v plan.View, prof plan.Profile, e Event) (plan.Plan, Reason, error) {
	if v.Step < current.FromStep {
		v.Step, v.Works, v.Complete, v.Settled = current.FromStep, nil, nil, nil
	}
	l, gone := newLoss(&current, &v, &prof, e)
	if len(l.Workers) == 0 {
		return plan.Plan{}, "", fmt.Errorf("plan: of the current plan, %w", ErrNoWorkers)
	}
	if len(gone) == 0 {
		return plan.Plan{}, "", fmt.Errorf("plan: all %s of the current plan live", plan.Count(len(current.Workers), "worker"))
	}
	promoted, err := l.promote()
	if err != nil {
		return plan.Plan{}, "", err
	}
	staffStages(&l.Plan, &current, l.alive)
	l.collect()
	l.rerun(l.settled())
	l.prioritize()
	l.reroute()
	l.capacity(l.occupy())

	cause := cmp.Or(e.Cause, fmt.Sprintf("%s lost (%s)", plan.Count(len(gone), "worker"), join(gone)))
	reason := fmt.Sprintf("%s: %s promoted, %s rerouted", cause, plan.Count(promoted, "shard"), plan.Count(len(l.again), "pass"))
	return l.Plan, Reason(reason), nil
}

// loss is the plan that follows a loss, or the lateness of a worker, in the making.
type loss struct {
	plan.Plan
	current *plan.Plan
	view    *plan.View
	prof    *plan.Profile
	alive   map[id.WorkerID]bool
	said    [][]graph.Status    // by stage and micro-batch: the progress that living workers reported
	again   map[graph.Pair]bool // pairs that run again
	late    *Late               // nil after a loss
}

// newLoss begins an in-step plan, and returns the workers of the current plan that are lost.
func newLoss(current *plan.Plan, v *plan.View, prof *plan.Profile, e Event) (l *loss, gone []id.WorkerID) {
	l = &loss{
		Plan: plan.Plan{
			Version:  following(current, e),
			FromStep: v.Step,
			InStep:   true,
			Mirrors:  current.Mirrors,
			Buffers:  current.Buffers,
		},
		current: current, view: v, prof: prof, alive: make(map[id.WorkerID]bool),
	}
	for _, w := range v.Workers {
		if was, ok := current.Worker(w.ID); ok && was == w {
			l.alive[w.ID] = true
		}
	}
	for _, w := range current.Workers {
		if l.alive[w.ID] {
			l.Workers = append(l.Workers, w)
		} else {
			gone = append(gone, w.ID)
		}
	}
	return l, gone
}

// promote gives every shard a living owner.
func (l *loss) promote() (promoted int, err error) {
	complete := make(map[plan.Complete]bool, len(l.view.Complete))
	for _, c := range l.view.Complete {
		complete[c] = true
	}
	owned := make(map[id.WorkerID]int)
	for _, s := range l.current.Shards {
		owned[s.Owner] += s.Hi - s.Lo
	}
	var dead LostError
	for i, s := range l.current.Shards {
		s.Mirrors = keep(s.Mirrors, func(m id.WorkerID) bool { return l.alive[m] })
		if !l.alive[s.Owner] {
			if len(s.Mirrors) == 0 {
				if dead.Count == 0 {
					dead.Shard = l.current.Shards[i]
				}
				dead.Count++
				continue
			}
			flaw := func(m id.WorkerID) (n int) {
				if !complete[plan.Complete{Shard: i, Worker: m}] {
					n += 2
				}
				if slices.Contains(l.view.Leaving, m) {
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
		l.Shards = append(l.Shards, s)
	}
	if dead.Count > 0 {
		return 0, fmt.Errorf("plan: %w", &dead)
	}
	return promoted, nil
}

// settled returns the pairs whose gradients and losses are all held:
// those that the view lists, and all of a stage before the last one whose
// shards are complete at their owners. An owner forwards the sum to its
// mirrors.
func (l *loss) settled() map[graph.Pair]bool {
	settled := make(map[graph.Pair]bool, len(l.view.Settled))
	for _, s := range l.view.Settled {
		settled[s] = true
	}
	lacks := make([]int, len(l.Stages)) // shards
	for _, s := range l.Shards {
		lacks[l.StageOf(s.Layer)]++
	}
	seen := make(map[int]bool)
	for _, c := range l.view.Complete {
		if c.Shard >= 0 && c.Shard < len(l.Shards) && l.Shards[c.Shard].Owner == c.Worker && !seen[c.Shard] {
			seen[c.Shard] = true
			lacks[l.StageOf(l.Shards[c.Shard].Layer)]--
		}
	}
	// The losses of the last stage are with the workers until the commit.
	for st := range len(l.Stages) - 1 {
		for m := range l.current.Micros() {
			if lacks[st] == 0 {
				settled[graph.Pair{Stage: st, Micro: m}] = true
			}
		}
	}
	return settled
}

// routed reports whether the plan routes a pair to the worker that reports its progress. A worker that
// has not applied the plan yet may report others.
func routed(p *plan.Plan, w plan.Work) bool {
	return w.Stage >= 0 && w.Stage < len(p.Route) && w.Micro >= 0 && w.Micro < p.Micros() && p.Route[w.Stage][w.Micro] == w.Worker
}

// collect sorts the reported progress by stage and micro-batch. A pair without a report has
// not begun.
func (l *loss) collect() {
	l.said = make([][]graph.Status, len(l.current.Route))
	for s, route := range l.current.Route {
		l.said[s] = make([]graph.Status, len(route))
	}
	for _, w := range l.view.Works {
		if l.alive[w.Worker] && routed(l.current, w) {
			l.said[w.Stage][w.Micro] = w.Status
		}
	}
}

// rerun finds the pairs that run again: a worker needs their output, and no live worker has it.
func (l *loss) rerun(settled map[graph.Pair]bool) {
	// lost: what the pair made is on no living worker.
	lost := func(pair graph.Pair) bool {
		return !l.alive[l.current.Route[pair.Stage][pair.Micro]] || !l.current.Runs(pair, l.view.Step)
	}
	l.again = make(map[graph.Pair]bool)
	var need func(pair graph.Pair)
	need = func(pair graph.Pair) {
		if pair.Stage < 0 || pair.Stage >= len(l.current.Stages) || l.again[pair] || !lost(pair) {
			return
		}
		l.again[pair] = true
		need(graph.Pair{Stage: pair.Stage - 1, Micro: pair.Micro})
		need(graph.Pair{Stage: pair.Stage + 1, Micro: pair.Micro})
	}
	for s := range l.current.Stages {
		for m := range l.current.Route[s] {
			pair := graph.Pair{Stage: s, Micro: m}
			if lost(pair) {
				if !settled[pair] {
					need(pair)
				}
				continue
			}
			// A pair of the living may wait for what the lost have made.
			w := l.said[s][m]
			if !w.Begun() && !w.Input {
				need(graph.Pair{Stage: s - 1, Micro: m})
			}
			if w.Phase < graph.Backing && !w.Gradient {
				need(graph.Pair{Stage: s + 1, Micro: m})
			}
		}
	}
}

// prioritize fills in First: pairs that block live workers. Either they run again, and pairs that began before the loss wait
// for their gradients, or their output is the first thing that an idle worker of the next stage can begin with. Other pairs
// that run again only complete sums, or are needed in their order.
func (l *loss) prioritize() {
	if len(l.again) == 0 {
		return
	}
	var first []graph.Pair
	wait := make([]bool, l.current.Micros()) // for the stage at hand
	for s := range l.current.Stages {
		for m := range wait {
			pair := graph.Pair{Stage: s, Micro: m}
			switch was := l.said[s][m]; {
			case l.again[pair]:
				if wait[m] {
					first = append(first, pair)
				}
			default:
				wait[m] = l.alive[l.current.Route[s][m]] && l.current.Runs(pair, l.view.Step) && was.Phase == graph.Forwarded && !was.Gradient
			}
		}
	}
	// Workers whose pairs are all finished or not begun, without input: the lowest pair not begun.
	for s, route := range l.current.Route[1:] {
		next, has := make(map[id.WorkerID]int), make(map[id.WorkerID]bool)
		for m, w := range route {
			was := l.said[s+1][m]
			switch {
			case !l.alive[w] || was.Phase == graph.Finished || !l.current.Runs(graph.Pair{Stage: s + 1, Micro: m}, l.view.Step):
			case was.Begun() || was.Input:
				has[w] = true
			default:
				if _, ok := next[w]; !ok {
					next[w] = m
				}
			}
		}
		for w, m := range next {
			before := graph.Pair{Stage: s, Micro: m}
			queued := l.alive[l.current.Route[s][m]] && l.current.Runs(before, l.view.Step) && !l.said[s][m].Begun()
			if !has[w] && (l.again[before] || queued) {
				first = append(first, before)
			}
		}
	}
	slices.SortFunc(first, graph.Pair.Compare)
	l.First = slices.Compact(first)
}

// reroute routes the pairs that run again, and those of lost workers that do not, which are settled.
func (l *loss) reroute() {
	// What is left to do on each worker, in all stages, in units of time.
	costs := simulate.StageCosts(l.prof, l.Stages)
	weight := func(s int, w id.WorkerID) float64 {
		if l.late != nil {
			return max(costs[s].Work(), 1) * l.late.each(w)
		}
		return max(costs[s].Work(), 1) / l.prof.SpeedOf(w)
	}
	left := make(map[id.WorkerID]float64)
	for s, route := range l.current.Route {
		for m, w := range route {
			pair := graph.Pair{Stage: s, Micro: m}
			if l.alive[w] && l.said[s][m].Phase != graph.Finished && l.current.Runs(pair, l.view.Step) && !l.again[pair] {
				left[w] += weight(s, w)
			}
		}
	}
	for s, route := range l.current.Route {
		next := slices.Clone(route)
		var run, rest []int
		for m, w := range route {
			pair := graph.Pair{Stage: s, Micro: m}
			switch {
			case l.again[pair]:
				run = append(run, m)
			case !l.alive[w]:
				rest = append(rest, m)
				l.Settled = append(l.Settled, pair)
			case !l.current.Runs(pair, l.view.Step):
				l.Settled = append(l.Settled, pair)
			}
		}
		// How many each gets: one by one to the worker with the least left; then in runs, in
		// the order of ranks.
		workers := l.Stages[s].Workers
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
			if _, waits := slices.BinarySearchFunc(l.First, graph.Pair{Stage: s, Micro: m}, graph.Pair.Compare); !waits {
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
		l.Route = append(l.Route, next)
	}
}

// capacity sets limits and buffers to what the routes need at least; places
// that are not new keep their limits. A micro-batch in flight whose next stage has
// to run again takes up no room: its worker would have nothing to do else. spare are
// forward passes beyond that.
func (l *loss) capacity(spare map[place]int) {
	stuck := make(map[place]int)
	for _, w := range l.view.Works {
		if w.Phase == graph.Forwarded && !w.Gradient && l.again[graph.Pair{Stage: w.Stage + 1, Micro: w.Micro}] {
			stuck[place{w.Stage, w.Worker}]++
		}
	}
	for s, st := range l.Stages {
		for _, w := range st.Workers {
			// The lead was for other routes. In the first stage, for whose backward passes no worker waits, it lets the next one
			// always have something to do.
			limit := plan.Limit{Stage: s, Worker: w, Forwards: max(l.current.Limit(s, w).Forwards, len(l.Stages)-s) + stuck[place{s, w}] + spare[place{s, w}]}
			if s == 0 && len(l.Stages) > 1 {
				limit.Lead = limit.Forwards
			}
			l.Limits = append(l.Limits, limit)
		}
		l.Buffers = max(l.Buffers, l.MostSums(s))
	}
}
