package planner

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/simulate"
)

// join makes the plan with the workers of the view that the current one does
// not have.
//
//   - Each new worker goes into the stage that has most to do for its speed.
//   - There it takes over its fair share of the parameters from those that own
//     most, in whole shards and at most one part of a shard from each.
//   - Every shard gets its mirrors, and mirrors go over to the new workers
//     until these have their fair share of them, too.
//
// Nothing else changes hands. With later, no shard does.
func (d *draft) join(later bool) (string, error) {
	var fresh []id.WorkerID
	for _, w := range d.Workers {
		if !d.stays[w.ID] {
			fresh = append(fresh, w.ID)
		}
	}
	if len(fresh) == 0 {
		return "", errors.New("plan: all workers of the view are in the current plan")
	}
	if _, _, err := d.inherit(); err != nil {
		return "", err
	}
	staffStages(&d.Plan, d.current, d.stays)
	d.place(fresh)
	d.flow()
	var gets string
	switch {
	case !later:
		gets = d.share(func(stage int) []id.WorkerID { return fresh })
	case len(fresh) == 1:
		gets = "its shards follow"
	default:
		gets = "their shards follow"
	}
	d.Degraded = d.LacksMirrors()

	var stages []int
	for s, st := range d.Stages {
		if slices.ContainsFunc(st.Workers, func(w id.WorkerID) bool { return !d.stays[w] }) {
			stages = append(stages, s)
		}
	}
	return fmt.Sprintf("%s: into stage %s, %s", workers(fresh, "join"), plan.Ranges(stages, " "), gets), nil
}

// spread makes the plan in which the workers that own nothing of their stage have their fair share of it and of the mirrors, as if they
// had just joined, if that is least parameters or more. Work stays where it is.
func (d *draft) spread(least int) (string, error) {
	if _, _, err := d.inherit(); err != nil {
		return "", err
	}
	staffStages(&d.Plan, d.current, d.stays)
	d.flow()
	lack := make([][]id.WorkerID, len(d.Stages))
	for s, st := range d.Stages {
		e := d.estate(s)
		lack[s] = keep(st.Workers, func(w id.WorkerID) bool {
			i := d.index[w]
			return e.owned[i] == 0 && e.fair[i] >= max(least, leastShare)
		})
	}
	all := slices.Concat(lack...)
	if len(all) == 0 {
		return "", fmt.Errorf("plan: %w", ErrNoGain)
	}
	gets := d.share(func(stage int) []id.WorkerID { return lack[stage] })
	return fmt.Sprintf("%s shards: %s", workers(all, "get"), gets), nil
}

// leastShare is a share that is worth being moved to a worker which owns nothing. It is more than one block, so that it leaves something
// to the worker that it comes from.
const leastShare = 4 * kernel.Block

// share gives workers of each stage their shares of its parameters and of all mirrors, and says what that moves.
func (d *draft) share(to func(stage int) []id.WorkerID) string {
	moved := 0
	var all []id.WorkerID
	for s := range d.Stages {
		fresh := to(s)
		moved += d.handOver(s, fresh)
		for _, w := range fresh {
			if !slices.Contains(all, w) {
				all = append(all, w)
			}
		}
	}
	d.mirror()
	for _, w := range all {
		d.giveMirrors(w)
	}
	d.merge()
	return fmt.Sprintf("%d of %d parameters moved, %s", moved, total(d.owned), d.coverage())
}

func total(n []int) (sum int) {
	for _, v := range n {
		sum += v
	}
	return sum
}

// place puts new workers into stages: each where the most work waits for the
// least speed. A worker that serves several stages counts for a part in each.
func (d *draft) place(fresh []id.WorkerID) {
	serves := d.serves()
	costs := simulate.StageCosts(&d.prof, d.Stages)
	speed := make([]float64, len(costs))
	for s, c := range costs {
		for r, w := range c.Workers {
			speed[s] += c.Speeds[r] / float64(serves[d.index[w]])
		}
	}
	for _, w := range fresh {
		if serves[d.index[w]] > 0 {
			continue // it has taken over a stage that no worker of the current plan could
		}
		best := 0
		for s := range costs {
			if max(costs[s].Work(), 1)/speed[s] > max(costs[best].Work(), 1)/speed[best] {
				best = s
			}
		}
		d.Stages[best].Workers = append(d.Stages[best].Workers, w)
		speed[best] += d.prof.SpeedOf(w)
	}
}

// donors is about how many owners give a new worker its share: more would cut
// the layers into many small shards without making any share much smaller.
const donors = 8

// An estate is the ownership of a stage's parameters.
type estate struct {
	*draft
	shards [][]int // by worker
	owned  []int   // parameters, by worker
	fair   []int
	givers []int // workers that are not new and own some of it
}

// excess returns what a worker owns above its fair share.
func (e *estate) excess(w int) int { return e.owned[w] - e.fair[w] }

// estate returns the ownership of a stage's parameters and the fair shares: the same for all its
// workers, less for those that serve others, too, and nothing for those of other stages.
func (d *draft) estate(stage int) *estate {
	st := &d.Stages[stage]
	n := len(d.Workers)
	e := &estate{d, make([][]int, n), make([]int, n), make([]int, n), nil}
	sum := 0
	for i, s := range d.Shards {
		if st.Lo <= s.Layer && s.Layer < st.Hi {
			w := d.index[s.Owner]
			e.shards[w] = append(e.shards[w], i)
			e.owned[w] += s.Hi - s.Lo
			sum += s.Hi - s.Lo
		}
	}
	// A worker that serves several stages has a part of a share in each.
	weights, all := make([]float64, len(st.Workers)), 0.0
	for r, w := range st.Workers {
		weights[r] = 1 / float64(len(d.StagesOf(w)))
		all += weights[r]
	}
	for r, w := range st.Workers {
		e.fair[d.index[w]] = int(float64(sum) * weights[r] / all)
	}
	return e
}

// wholeShard lets takePart move any shard that is not split.
const wholeShard = kernel.Block

// handOver makes the new workers of a stage owners of their fair share of its
// parameters, and returns how many these are.
func (d *draft) handOver(stage int, fresh []id.WorkerID) (moved int) {
	st := &d.Stages[stage]
	taking := keep(st.Workers, func(w id.WorkerID) bool { return slices.Contains(fresh, w) })
	if len(taking) == 0 {
		return 0
	}
	e := d.estate(stage)
	for v, w := range d.Workers {
		if d.stays[w.ID] && len(e.shards[v]) > 0 && !slices.Contains(taking, w.ID) {
			e.givers = append(e.givers, v)
		}
	}
	for _, w := range taking {
		to := d.index[w]
		least := (max(1, -e.excess(to)) + donors - 1) / donors
		for k := range 2 * donors {
			from := -1
			for _, v := range e.givers {
				if len(e.shards[v]) > 0 && (from < 0 || e.excess(v) > e.excess(from)) {
					from = v
				}
			}
			if from < 0 {
				break
			}
			// Every donor begins at another layer.
			moved += e.take(from, to, k*len(e.shards[from])/donors, min(-e.excess(to), max(e.excess(from), least)))
		}
	}
	return moved
}

// take moves about most parameters from one worker to another: whole shards,
// from the one at a position of its list on, and the end of one.
func (e *estate) take(from, to, at, most int) (moved int) {
	list := slices.Clone(e.shards[from])
	for k := range list {
		i := list[(at+k)%len(list)]
		moved += e.takePart(i, from, to, e.Shards[i].Lo, e.Shards[i].Hi, most-moved)
	}
	return moved
}

// takePart moves the end of [lo, hi) of a shard, about most parameters, and
// returns how many. lo and hi are borders of blocks.
func (e *estate) takePart(i, from, to, lo, hi, most int) int {
	if most < kernel.Block/2 {
		return 0
	}
	s := &e.Shards[i]
	if hi-lo > most {
		lo = max(lo, blockEnds(e.prof.Layers[s.Layer].Tensors).nearest(float64(hi-most)))
	}
	if lo >= hi {
		return 0
	}
	rest := func(lo, hi int) {
		part := *s
		part.Lo, part.Hi = lo, hi
		e.Shards = append(e.Shards, part)
		e.origin = append(e.origin, e.origin[i])
		e.shards[from] = append(e.shards[from], len(e.Shards)-1)
		s = &e.Shards[i]
	}
	if s.Lo < lo {
		rest(s.Lo, lo)
	}
	if hi < s.Hi {
		rest(hi, s.Hi)
	}
	s.Lo, s.Hi = lo, hi
	e.shards[from] = keep(e.shards[from], func(k int) bool { return k != i })
	e.shards[to] = append(e.shards[to], i)
	for _, owned := range [][]int{e.owned, e.draft.owned} {
		owned[from] -= hi - lo
		owned[to] += hi - lo
	}
	e.dropMirror(s, e.Workers[to].ID)
	s.Owner = e.Workers[to].ID
	return hi - lo
}

// giveMirrors makes a new worker a mirror in the place of others that mirror
// more than their fair share: first of its own stages, then of others.
func (d *draft) giveMirrors(id id.WorkerID) {
	to := d.index[id]
	fair := total(d.mirrored) / len(d.Workers)
	stages := d.StagesOf(id)
	for _, fits := range []func(i int) bool{
		func(i int) bool { return slices.Contains(stages, d.StageOf(d.Shards[i].Layer)) },
		func(int) bool { return true },
	} {
		for i := range d.Shards {
			s := &d.Shards[i]
			size := s.Hi - s.Lo
			if d.mirrored[to]+size/2 > fair || s.Owner == id || !fits(i) || slices.Contains(s.Mirrors, id) {
				continue
			}
			for k, m := range s.Mirrors {
				from := d.index[m]
				others := slices.Concat(s.Mirrors[:k], s.Mirrors[k+1:])
				if !d.stays[m] || d.mirrored[from] <= fair || d.where(s.Owner, others, to) > d.where(s.Owner, others, from) {
					continue
				}
				s.Mirrors = slices.Clone(s.Mirrors)
				s.Mirrors[k] = id
				d.mirrored[from] -= size
				d.mirrored[to] += size
				break
			}
		}
	}
}

// merge sorts the shards and joins neighbours with the same holders.
func (d *draft) merge() {
	slices.SortFunc(d.Shards, func(a, b plan.Shard) int { return cmp.Or(cmp.Compare(a.Layer, b.Layer), cmp.Compare(a.Lo, b.Lo)) })
	d.origin = nil
	n := 0
	for _, s := range d.Shards {
		if n > 0 {
			if last := &d.Shards[n-1]; last.Layer == s.Layer && last.Owner == s.Owner && slices.Equal(last.Mirrors, s.Mirrors) {
				last.Hi = s.Hi
				continue
			}
		}
		d.Shards[n] = s
		n++
	}
	d.Shards = d.Shards[:n]
}
