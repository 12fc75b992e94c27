package simulate

import (
	"fmt"
	"math"
	"math/bits"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

// Passes simulates the forward and backward passes of a step, and gives the same time as
// package graph does: workers take the next pass by the rules of a graph.Queue. It is for
// the many simulations of a search: only passes, none of which runs again, in numbers
// instead of names, with buffers that are kept from one run to the next, and with an end as
// soon as it is known that a step takes too long.
//
// A place is a stage's rank. Places are numbered by stage, then rank.
type Passes struct {
	prof    *plan.Profile
	workers []plan.Worker
	index   map[id.WorkerID]int
	paces   []plan.LinkSpeed // from worker * workers + to worker; nil: all are the same

	// Of the stages.
	stages, micros    int
	base              []int // first place of a stage
	worker            []int // of a place
	stage             []int // of a place
	forward, backward []time.Duration
	output            []int64         // bytes of a micro-batch that a stage gets
	lag               []time.Duration // of these, if all paces are the same
	tail              []time.Duration // of a stage: the backward passes before it at the fastest
	places            [][]int         // of a worker, the deepest stage first

	// Of a run.
	words    int      // of the set of a place
	ready    []uint64 // sets of micro-batches by place: forward passes
	answered []uint64 // sets of micro-batches by place: backward passes
	open     []uint64 // sets of micro-batches by stage: forward passes that are to be dealt
	at       []int    // place by pass; -1: to be dealt
	quota    []int    // by place: micro-batches that it may still be dealt
	blocks   []int    // by stage: micro-batches that are dealt together
	limits   []int    // by place
	leads    []int    // by place
	flight   []int    // by place
	left     []time.Duration
	running  []int32 // by worker: a pass; none: -1
	touched  []bool
	woken    []int
	events   []passEvent
}

// passEvent is the end of what a worker runs, or a pass that has what it needs. Passes are
// numbered by kind, then stage, then micro-batch; what is less than 0 is a worker.
type passEvent struct {
	at   time.Duration
	what int32
}

// NewPasses returns a simulation of steps of these workers.
func NewPasses(prof *plan.Profile, workers []plan.Worker) *Passes {
	n := len(workers)
	x := &Passes{
		prof: prof, workers: workers, index: make(map[id.WorkerID]int, n),
		places: make([][]int, n), left: make([]time.Duration, n), running: make([]int32, n), touched: make([]bool, n),
	}
	for i, w := range workers {
		x.index[w.ID] = i
	}
	if len(prof.Links) > 0 {
		x.paces = make([]plan.LinkSpeed, n*n)
		for i, a := range workers {
			for j, b := range workers {
				x.paces[i*n+j] = prof.LinkBetween(a.ID, b.ID)
			}
		}
	}
	return x
}

// resize returns a slice of n zeros, in the memory of the old one if there is room.
func resize[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	s = s[:n]
	clear(s)
	return s
}

// Set takes stages, whose costs are without share.
func (x *Passes) Set(stages []plan.Stage, micros int) {
	x.stages, x.micros = len(stages), micros
	x.base, x.worker, x.stage = x.base[:0], x.worker[:0], x.stage[:0]
	x.forward, x.backward = x.forward[:0], x.backward[:0]
	x.output, x.lag, x.tail = x.output[:0], x.lag[:0], x.tail[:0]
	for w := range x.places {
		x.places[w] = x.places[w][:0]
	}
	var tail time.Duration
	for s, st := range stages {
		var forward, backward time.Duration
		for _, l := range x.prof.Layers[st.Lo:st.Hi] {
			forward += l.Forward
			backward += l.Backward
		}
		x.base = append(x.base, len(x.worker))
		x.tail = append(x.tail, tail)
		fastest := time.Duration(math.MaxInt64)
		for _, w := range st.Workers {
			v := x.prof.SpeedOf(w)
			x.worker = append(x.worker, x.index[w])
			x.stage = append(x.stage, s)
			x.forward = append(x.forward, time.Duration(float64(forward)/v))
			x.backward = append(x.backward, time.Duration(float64(backward)/v))
			fastest = min(fastest, x.backward[len(x.backward)-1])
		}
		tail += fastest
		var bytes int64
		if s > 0 {
			bytes = x.prof.Layers[st.Lo-1].Output
		}
		x.output = append(x.output, bytes)
		x.lag = append(x.lag, x.prof.Transfer(bytes))
	}
	for place := len(x.worker) - 1; place >= 0; place-- {
		w := x.worker[place]
		x.places[w] = append(x.places[w], place)
	}
}

// Bound returns a time that no routes are faster than: the way through the stages before
// one at the fastest, there and back, and what the slowest of its workers has to do.
func (x *Passes) Bound() (t time.Duration) {
	var head time.Duration
	for s, lo := range x.base {
		hi := len(x.worker)
		if s+1 < x.stages {
			hi = x.base[s+1]
		}
		// The slowest has as little as possible: within a time, all workers have room for all.
		fastest := time.Duration(math.MaxInt64)
		rate := 0.0
		for p := lo; p < hi; p++ {
			each := x.forward[p] + x.backward[p]
			if each <= 0 {
				rate = math.Inf(1)
			} else {
				rate += 1 / float64(each)
			}
			fastest = min(fastest, x.forward[p])
		}
		enough := max(0, time.Duration(float64(x.micros)/rate)-1) // rounding
		for {
			room := 0
			next := time.Duration(math.MaxInt64) // when a worker has done one more
			for p := lo; p < hi; p++ {
				each := x.forward[p] + x.backward[p]
				if each <= 0 {
					room = x.micros
					break
				}
				room += int(enough / each)
				next = min(next, enough-enough%each+each)
			}
			if room >= x.micros {
				break
			}
			enough = next
		}
		t = max(t, head+enough+x.tail[s])
		head += fastest
	}
	return t
}

// delay returns how long what a stage gets is on its way between places.
func (x *Passes) delay(stage, from, to int) time.Duration {
	a, b := x.worker[from], x.worker[to]
	switch {
	case a == b:
		return 0
	case x.paces == nil:
		return x.lag[stage]
	}
	return x.paces[a*len(x.workers)+b].Transfer(x.output[stage])
}

// report returns how long it takes until the first worker knows that another one is done.
func (x *Passes) report(from int) time.Duration {
	switch w := x.worker[from]; {
	case w == 0:
		return 0
	case x.paces == nil:
		return x.prof.Latency
	default:
		return x.paces[w*len(x.workers)].Latency
	}
}

// Run returns how long the passes take, with a ranking for each stage and a limit for each
// place. ok is false if that is more than most.
func (x *Passes) Run(rankings []Ranking, limits []plan.Limit, most time.Duration) (makespan time.Duration, ok bool) {
	x.reset(limits)
	for s, r := range rankings {
		for m, rank := range r {
			place := x.base[s] + rank
			x.at[s*x.micros+m] = place
			x.left[x.worker[place]] += x.forward[place] + x.backward[place]
			if s == 0 {
				x.ready[place*x.words+m/64] |= 1 << (m % 64)
			}
		}
	}
	return x.loop(most)
}

// Deal is run where a worker that could begin a forward pass takes the lowest unassigned
// micro-batch, and those of its block with it, up to its quota. It returns what they took.
func (x *Passes) Deal(quotas, blocks []int, limits []plan.Limit, most time.Duration) (rankings []Ranking, makespan time.Duration, ok bool) {
	x.reset(limits)
	x.open = resize(x.open, x.stages*x.words)
	for i := range x.at {
		x.at[i] = -1
	}
	copy(x.quota, quotas)
	x.blocks = blocks
	for m := range x.micros {
		x.open[m/64] |= 1 << (m % 64)
	}
	if makespan, ok = x.loop(most); !ok {
		return nil, 0, false
	}
	for s := range x.stages {
		r := make(Ranking, x.micros)
		for m := range r {
			r[m] = x.at[s*x.micros+m] - x.base[s]
		}
		rankings = append(rankings, r)
	}
	return rankings, makespan, true
}

func (x *Passes) reset(limits []plan.Limit) {
	places := len(x.worker)
	x.words = (x.micros + 63) / 64
	x.ready, x.answered = resize(x.ready, places*x.words), resize(x.answered, places*x.words)
	x.open = x.open[:0]
	x.at = resize(x.at, x.stages*x.micros)
	x.quota = resize(x.quota, places)
	x.limits, x.leads, x.flight = resize(x.limits, places), resize(x.leads, places), resize(x.flight, places)
	for i := range x.limits {
		x.limits[i] = max(limits[i].Forwards, x.stages-x.stage[i])
		x.leads[i] = min(limits[i].Lead, x.limits[i])
	}
	clear(x.left)
	x.events, x.woken = x.events[:0], x.woken[:0]
	for w := range x.running {
		x.running[w], x.touched[w] = -1, true
		x.woken = append(x.woken, w)
	}
}

func (x *Passes) loop(most time.Duration) (makespan time.Duration, ok bool) {
	backwards := x.stages * x.micros // the first backward pass
	done := 0
	var now time.Duration
	for {
		for _, w := range x.woken {
			x.touched[w] = false
			if x.running[w] < 0 && !x.begin(w, now, most) {
				return 0, false
			}
		}
		x.woken = x.woken[:0]
		if len(x.events) == 0 {
			break
		}
		now = x.events[0].at
		for len(x.events) > 0 && x.events[0].at == now {
			what := int(x.pop())
			worker := -1 - what
			if worker >= 0 {
				what = int(x.running[worker])
				x.running[worker] = -1
				x.wake(worker)
			}
			back := what >= backwards
			s, m := what/x.micros, what%x.micros
			if back {
				s -= x.stages
			}
			if worker < 0 {
				x.arrive(back, s, m)
				continue
			}
			place := x.at[s*x.micros+m]
			done++
			to, next := s+1, what+x.micros
			if back {
				x.flight[place]--
				to, next = s-1, what-x.micros
			}
			switch {
			case to < 0:
				makespan = max(makespan, now+x.report(place))
			case to == x.stages:
				x.arrive(true, s, m)
			default:
				var lag time.Duration
				if target := x.at[to*x.micros+m]; target >= 0 {
					lag = x.delay(max(s, to), place, target)
				} else {
					lag = x.lag[to]
				}
				if lag > 0 {
					x.push(passEvent{now + lag, int32(next)})
				} else {
					x.arrive(back, to, m)
				}
			}
		}
	}
	if done < 2*backwards {
		panic(fmt.Sprintf("plan: %d of %d passes have run", done, 2*backwards)) // limits are at least what is needed
	}
	return makespan, makespan <= most
}

func (x *Passes) wake(worker int) {
	if !x.touched[worker] {
		x.touched[worker] = true
		x.woken = append(x.woken, worker)
	}
}

// arrive notes that a pass has what it needs.
func (x *Passes) arrive(back bool, stage, m int) {
	place := x.at[stage*x.micros+m]
	if place < 0 {
		x.open[stage*x.words+m/64] |= 1 << (m % 64)
		x.rouse(stage)
		return
	}
	set := x.ready
	if back {
		set = x.answered
	}
	set[place*x.words+m/64] |= 1 << (m % 64)
	x.wake(x.worker[place])
}

// rouse wakes those of a stage that have nothing to do.
func (x *Passes) rouse(stage int) {
	hi := len(x.worker)
	if stage+1 < x.stages {
		hi = x.base[stage+1]
	}
	for p := x.base[stage]; p < hi; p++ {
		if w := x.worker[p]; x.running[w] < 0 {
			x.wake(w)
		}
	}
}

// begin lets a worker begin its next pass, and reports whether the step may still take no
// longer than most: the worker has all of the rest to do, and the stages before it the last
// backward pass.
func (x *Passes) begin(worker int, now, most time.Duration) bool {
	places := x.places[worker]
	if len(places) == 0 {
		return true
	}
	if now+x.left[worker]+x.tail[x.stage[places[len(places)-1]]] > most && x.left[worker] > 0 {
		return false
	}
	best, micro := x.nextForward(places, x.leads)
	back := false
	if best < 0 {
		for _, p := range places {
			if m := x.least(x.answered, p); m < micro {
				best, micro, back = p, m, true
			}
		}
	}
	if best < 0 {
		best, micro = x.nextForward(places, x.limits)
	}
	if best < 0 {
		return true
	}
	var takes time.Duration
	var pass int
	if back {
		x.answered[best*x.words+micro/64] &^= 1 << (micro % 64)
		takes, pass = x.backward[best], (x.stages+x.stage[best])*x.micros+micro
	} else {
		if x.at[x.stage[best]*x.micros+micro] < 0 {
			x.take(best, micro)
		}
		x.ready[best*x.words+micro/64] &^= 1 << (micro % 64)
		x.flight[best]++
		takes, pass = x.forward[best], x.stage[best]*x.micros+micro
	}
	x.left[worker] -= takes
	x.running[worker] = int32(pass)
	x.push(passEvent{now + takes, int32(-1 - worker)})
	return true
}

// nextForward returns the place and the micro-batch of the forward pass that begins next where fewer are in flight than
// may be, -1 if there is none.
func (x *Passes) nextForward(places, may []int) (best, micro int) {
	best, micro = -1, x.micros
	for _, p := range places {
		if x.flight[p] < may[p] {
			if m := x.least(x.ready, p); m < micro {
				best, micro = p, m
			}
			if x.quota[p] > 0 {
				if m := x.least(x.open, x.stage[p]); m < micro {
					best, micro = p, m
				}
			}
		}
	}
	return best, micro
}

// take deals a micro-batch and those of its block to a place.
func (x *Passes) take(place, micro int) {
	s := x.stage[place]
	lo := micro / x.blocks[s] * x.blocks[s]
	for m := lo; m < min(lo+x.blocks[s], x.micros); m++ {
		if i := s*x.micros + m; x.at[i] < 0 {
			x.at[i] = place
			x.quota[place]--
			x.left[x.worker[place]] += x.forward[place] + x.backward[place]
			if bit := uint64(1) << (m % 64); x.open[s*x.words+m/64]&bit != 0 {
				x.open[s*x.words+m/64] &^= bit
				x.ready[place*x.words+m/64] |= bit
			}
		}
	}
}

// least returns the least micro-batch of a set; without any, one after the last.
func (x *Passes) least(set []uint64, place int) int {
	for i, word := range set[place*x.words : (place+1)*x.words] {
		if word != 0 {
			return 64*i + bits.TrailingZeros64(word)
		}
	}
	return x.micros
}

func (x *Passes) push(e passEvent) {
	i := len(x.events)
	x.events = append(x.events, e)
	for i > 0 {
		up := (i - 1) / 2
		if x.events[up].at <= e.at {
			break
		}
		x.events[i] = x.events[up]
		i = up
	}
	x.events[i] = e
}

func (x *Passes) pop() int32 {
	first, n := x.events[0].what, len(x.events)-1
	e := x.events[n]
	x.events = x.events[:n]
	i := 0
	for {
		down := 2*i + 1
		if down >= n {
			break
		}
		if down+1 < n && x.events[down+1].at < x.events[down].at {
			down++
		}
		if e.at <= x.events[down].at {
			break
		}
		x.events[i] = x.events[down]
		i = down
	}
	if n > 0 {
		x.events[i] = e
	}
	return first
}

// PassTime returns how long the forward and backward passes take.
func PassTime(p *plan.Plan, prof *plan.Profile) time.Duration {
	x, rankings, limits := newPasses(p, prof)
	t, _ := x.Run(rankings, limits, math.MaxInt64)
	return t
}

// newPasses returns the simulation of a plan, with the arguments of its Run.
func newPasses(p *plan.Plan, prof *plan.Profile) (*Passes, []Ranking, []plan.Limit) {
	x := NewPasses(prof, p.Workers)
	x.Set(p.Stages, p.Micros())
	var rankings []Ranking
	var limits []plan.Limit
	for s, st := range p.Stages {
		ranks := make(map[id.WorkerID]int, len(st.Workers))
		for rank, w := range st.Workers {
			ranks[w] = rank
			limits = append(limits, p.Limit(s, w))
		}
		r := make(Ranking, len(p.Route[s]))
		for m, w := range p.Route[s] {
			r[m] = ranks[w]
		}
		rankings = append(rankings, r)
	}
	return x, rankings, limits
}

// A Ranking says which rank of a stage has each micro-batch.
type Ranking []int
