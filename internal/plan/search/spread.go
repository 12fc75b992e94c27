package search

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/simulate"
)

const (
	// spreadShapes is up to how many shapes spread compares, spreadMost how many it returns,
	// and spreadRange by how much these may be behind the best in closed form.
	spreadShapes = 1500
	spreadMost   = 24
	spreadRange  = 0.03
	// floorBits is how exact floor is: to one part in 2 to the power of it.
	floorBits = 24
)

// spread returns shapes for workers that are equally fast, those first whose step can be the
// shortest, see floor. It enumerates all that are nearly the best but for the filling of the
// pipeline: a stage's workers wait for the way through the stages before it, there and back,
// and have whole micro-batches to run. Dynamic programming says which begins can be completed.
func (s *shaper) spread(workers []plan.Worker) []shape {
	d := newSpreader(s, len(workers))
	lo, hi := time.Duration(0), d.way[len(d.way)-1]*time.Duration(s.micros)
	if !d.within(hi) {
		return nil
	}
	for hi-lo > max(1, hi>>12) {
		if mid := lo + (hi-lo)/2; d.within(mid) {
			hi = mid
		} else {
			lo = mid
		}
	}
	d.within(hi + time.Duration(spreadRange*float64(hi)))
	d.enumerate(0, 0, d.workers, spreadShapes)
	slices.SortStableFunc(d.list, func(a, b spreadShape) int { return cmp.Compare(a.floor, b.floor) })
	var best []shape
	for _, c := range d.list[:min(len(d.list), spreadMost)] {
		sh := shape{stages: s.staff(workers, c.parts), time: float64(c.floor), moves: -1}
		s.bytes(&sh)
		if s.fits(sh.stages) {
			best = append(best, sh)
		}
	}
	return best
}

type spreader struct {
	*shaper
	forward, way []time.Duration // running sums of the layers: forward, and both passes
	workers      int
	limit        time.Duration
	least        [][]int // least[i][lo]: workers for the layers from lo on in the stages from i on
	parts        []part
	list         []spreadShape
	arrive, back []time.Duration
}

type spreadShape struct {
	parts []part
	floor time.Duration
}

func newSpreader(s *shaper, workers int) *spreader {
	layers, stages := len(s.sizes), len(s.old)
	d := &spreader{shaper: s, workers: workers, way: sums(s.prof.Layers), forward: make([]time.Duration, layers+1), parts: make([]part, stages)}
	for i, l := range s.prof.Layers {
		d.forward[i+1] = d.forward[i] + l.Forward
	}
	d.least = make([][]int, stages+1)
	for i := range d.least {
		d.least[i] = make([]int, layers+1)
	}
	d.arrive, d.back = make([]time.Duration, 2*workers), make([]time.Duration, 2*workers)
	return d
}

// need returns how many workers layers need in a stage that is done within the limit.
func (d *spreader) need(lo, hi int) int {
	work := d.way[hi] - d.way[lo]
	if d.params[hi]-d.params[lo] > d.most || d.limit < d.way[lo]+work {
		return tooMany
	}
	if work == 0 {
		return 1
	}
	return ceil(d.micros, int(min((d.limit-d.way[lo])/work, time.Duration(d.micros))))
}

// within reports whether there is a shape whose stages are done within a limit, and prepares
// for enumerate.
func (d *spreader) within(limit time.Duration) bool {
	d.limit = limit
	stages, layers := len(d.parts), len(d.sizes)
	for i := stages; i >= 0; i-- {
		for lo := range d.least[i] {
			d.least[i][lo] = tooMany
			if i == stages {
				if lo == layers {
					d.least[i][lo] = 0
				}
				continue
			}
			for hi := lo + 1; hi <= layers-(stages-1-i); hi++ {
				n := d.need(lo, hi)
				if n >= tooMany {
					break // more layers need more workers
				}
				d.least[i][lo] = min(d.least[i][lo], n+d.least[i+1][hi])
			}
		}
	}
	return d.least[0][0] <= d.workers
}

// enumerate lists up to a number of the shapes within the limit that begin with the stages
// before i, about as many for each way to go on. More workers than a stage needs save a worker
// a micro-batch; the rest go to the first stage, for which the others wait.
func (d *spreader) enumerate(i, lo, left, most int) {
	stages, layers := len(d.parts), len(d.sizes)
	if i == stages {
		parts := slices.Clone(d.parts)
		parts[0].workers += left
		d.list = append(d.list, spreadShape{parts, d.floor(parts)})
		return
	}
	var ways []part
	for hi := lo + 1; hi <= layers-(stages-1-i); hi++ {
		n := d.need(lo, hi)
		for n < tooMany && n+d.least[i+1][hi] <= left {
			ways = append(ways, part{lo, hi, n})
			each := ceil(d.micros, n)
			if each == 1 {
				break
			}
			n = ceil(d.micros, each-1)
		}
	}
	end := len(d.list) + most
	for k, way := range ways {
		if share := ceil(end-len(d.list), len(ways)-k); share > 0 {
			d.parts[i] = way
			d.enumerate(i+1, way.hi, left-way.workers, share)
		}
	}
}

// floor returns about the time that no step of a shape is shorter than, whatever the routes
// and limits. The micro-batches come to a stage no faster than the stages before can run them
// forward, and these need as long after the stage's last backward passes. Between the two a
// worker runs whole micro-batches: the one that begins first may end last.
func (d *spreader) floor(parts []part) (least time.Duration) {
	most := 0
	for _, p := range parts {
		most = max(most, p.workers)
	}
	// arrive[k] is when k+1 micro-batches can be at a stage, and back[k] how long before the
	// end k+1 are still to be run backward by the stages before; next is the same for the next
	// stage.
	arrive, back := d.arrive[:most], d.back[:most]
	nextArrive, nextBack := d.arrive[most:2*most], d.back[most:2*most]
	clear(arrive)
	clear(back)
	for i, p := range parts {
		forward, work := d.forward[p.hi]-d.forward[p.lo], d.way[p.hi]-d.way[p.lo]
		if !d.room(p.workers, work, least, arrive, back) {
			lo, hi := least, arrive[p.workers-1]+back[p.workers-1]+time.Duration(ceil(d.micros, p.workers))*work
			for hi-lo > max(1, hi>>floorBits) {
				if mid := lo + (hi-lo)/2; d.room(p.workers, work, mid, arrive, back) {
					hi = mid
				} else {
					lo = mid
				}
			}
			least = hi
		}
		if i+1 == len(parts) {
			break
		}
		lag := d.prof.Transfer(d.prof.Layers[p.hi-1].Output)
		for k := range most {
			a, b := arrive[k], back[k]
			if k >= p.workers {
				a, b = max(a, nextArrive[k-p.workers]-lag), max(b, nextBack[k-p.workers]-lag)
			}
			nextArrive[k], nextBack[k] = a+forward+lag, b+work-forward+lag
		}
		arrive, back, nextArrive, nextBack = nextArrive, nextBack, arrive, back
	}
	return least
}

// room reports whether workers can run all micro-batches within a time. Workers that can run
// at least n each are at most as many as can be matched with begins and ends that leave
// room for n; arrive and back are ascending.
func (d *spreader) room(workers int, work, within time.Duration, arrive, back []time.Duration) bool {
	total := 0
	for n := ceil(d.micros, workers); n > 0; n-- {
		total += pairs(within-time.Duration(n)*work, workers, arrive, back)
	}
	for n := ceil(d.micros, workers) + 1; total < d.micros; n++ {
		m := pairs(within-time.Duration(n)*work, workers, arrive, back)
		if m == 0 {
			return false
		}
		total += m
	}
	return true
}

// pairs returns how many pairs of a begin and an end leave a time.
func pairs(left time.Duration, workers int, arrive, back []time.Duration) (n int) {
	k := workers - 1
	for _, a := range arrive[:workers] {
		for k >= 0 && a+back[k] > left {
			k--
		}
		if k < 0 {
			break
		}
		k--
		n++
	}
	return n
}

// sketch returns the shapes that are the most promising with routes that are soon made, the
// best first.
func (s *shaper) sketch(x *simulate.Passes, shapes []shape, micros int, horizon time.Duration) []shape {
	const keep, extra = 4, 16
	type trial struct {
		shape
		worth time.Duration
	}
	var trials []trial
	best := time.Duration(math.MaxInt64)
	for _, c := range shapes {
		costs := shared(s.prof, c.stages)
		x.Set(c.stages, micros)
		moving := s.prof.Stream(int64(c.moves)) / horizon
		most := best - moving
		t, ok := most, false
		one := follow(inOrder(1, costs[0].Speeds, together(micros)), costs, 1)
		if took, fine := x.Run(one.rankings, limits(costs, one, needs(one, costs), extra, noLead), t); fine {
			t, ok = took-1, true
		}
		runs := runsOnly(micros, costs)
		beside := alongside(runs.rankings[0], costs, 1)
		for _, l := range leads[1:3] {
			if took, fine := x.Run(beside.rankings, limits(costs, beside, needs(beside, costs), extra, l), t); fine {
				t, ok = took-1, true
			}
		}
		if _, took, fine := inTurn(x, costs, runs, 1, extra, s.prof.Buffers, t); fine {
			t, ok = took, true
		}
		if ok {
			trials = append(trials, trial{c, t + moving})
			best = min(best, t+moving+time.Duration(fewer*float64(t)))
		}
	}
	slices.SortStableFunc(trials, func(a, b trial) int { return cmp.Compare(a.worth, b.worth) })
	var list []shape
	for _, t := range trials[:min(len(trials), keep)] {
		list = append(list, t.shape)
	}
	return list
}
