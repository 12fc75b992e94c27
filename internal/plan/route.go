package plan

import (
	"cmp"
	"container/heap"
	"math"
	"math/bits"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// cover calls f for the fewest nodes of the gradient tree over m micro-batches
// that together are [lo, hi).
func cover(m, lo, hi int, f func(tree.Node)) {
	var visit func(n tree.Node)
	visit = func(n tree.Node) {
		switch {
		case hi <= n.Lo || n.Hi <= lo:
		case lo <= n.Lo && n.Hi <= hi:
			f(n)
		default:
			l, r := n.Split()
			visit(l)
			visit(r)
		}
	}
	visit(tree.Root(m))
}

// nodes returns how many nodes cover [lo, hi). All aligned blocks of a power
// of two are nodes, and so are the right halves of the root, of its right half
// and so on, which end with the last micro-batch.
func nodes(m, lo, hi int) (n int) {
	right := 0
	for ; lo < hi; n++ {
		if hi == m {
			for right < lo {
				right += 1 << (bits.Len(uint(m-right-1)) - 1)
			}
			if right == lo {
				return n + 1
			}
		}
		size := 1 << (bits.Len(uint(hi-lo)) - 1)
		if lo > 0 {
			size = min(size, lo&-lo)
		}
		lo += size
	}
	return n
}

// Nodes returns the nodes of the gradient tree that a worker can complete
// alone in a step: those whose micro-batches it runs in a stage. It sends
// their sums to the owners of the stage's shards. They are in ascending order.
func (p *Plan) Nodes(stage int, w id.WorkerID, step int) []tree.Node {
	var all []tree.Node
	route := p.runs(stage, step)
	for lo := 0; lo < len(route); {
		hi := lo + 1
		if route[lo] == w {
			for hi < len(route) && route[hi] == w {
				hi++
			}
			cover(len(route), lo, hi, func(n tree.Node) { all = append(all, n) })
		}
		lo = hi
	}
	return all
}

// nobody is the worker of settled pairs.
const nobody id.WorkerID = -1

// runs returns which worker runs each micro-batch in a step.
func (p *Plan) runs(stage, step int) []id.WorkerID {
	if !p.InStep || step != p.FromStep || len(p.Settled) == 0 {
		return p.Route[stage]
	}
	route := slices.Clone(p.Route[stage])
	i, _ := slices.BinarySearchFunc(p.Settled, graph.Pair{Stage: stage}, graph.Pair.Compare)
	for ; i < len(p.Settled) && p.Settled[i].Stage == stage; i++ {
		if m := p.Settled[i].Micro; m >= 0 && m < len(route) { // Validate comes here with anything
			route[m] = nobody
		}
	}
	return route
}

// mostSums returns the most nodes a worker has in a stage, in the step that
// the plan begins with or in a later one.
func (p *Plan) mostSums(stage int) int {
	return max(mostNodes(p.Route[stage]), mostNodes(p.runs(stage, p.FromStep)))
}

// nodeCounts returns how many nodes each worker has.
func nodeCounts(route []id.WorkerID) map[id.WorkerID]int {
	counts := make(map[id.WorkerID]int)
	for lo := 0; lo < len(route); {
		hi := lo + 1
		for hi < len(route) && route[hi] == route[lo] {
			hi++
		}
		counts[route[lo]] += nodes(len(route), lo, hi)
		lo = hi
	}
	return counts
}

// mostNodes returns the most nodes a worker has.
func mostNodes(route []id.WorkerID) (most int) {
	for w, n := range nodeCounts(route) {
		if w >= 0 {
			most = max(most, n)
		}
	}
	return most
}

// stageCost is what routing needs to know of a stage.
type stageCost struct {
	workers           []id.WorkerID
	speeds            []float64
	forward, backward time.Duration // of a micro-batch at speed 1
}

func (c *stageCost) work() float64 { return float64(c.forward + c.backward) }

func stageCosts(p *Profile, stages []Stage) []stageCost {
	costs := make([]stageCost, len(stages))
	for i, s := range stages {
		c := &costs[i]
		c.workers = s.Workers
		for _, w := range s.Workers {
			c.speeds = append(c.speeds, p.speed(w))
		}
		for _, l := range p.Layers[s.Lo:s.Hi] {
			c.forward += l.Forward
			c.backward += l.Backward
		}
	}
	return costs
}

// alike reports whether rank i of one stage can have what rank i of the other
// has.
func (c *stageCost) alike(o *stageCost) bool { return slices.Equal(c.speeds, o.speeds) }

// A ranking says which rank of a stage has each micro-batch.
type ranking []int

func (r ranking) route(workers []id.WorkerID) []id.WorkerID {
	route := make([]id.WorkerID, len(r))
	for m, rank := range r {
		route[m] = workers[rank]
	}
	return route
}

// borderWindow bounds how many places are tried for each border.
const borderWindow = 64

// contiguous deals micro-batches in contiguous runs. No worker needs longer
// than the slowest of shares, and of all such runs these are covered by the
// fewest nodes of the gradient tree.
func contiguous(micros int, speeds []float64) ranking {
	n, slowest := shares(micros, speeds)
	ranks := len(speeds)
	most := make([]int, ranks) // micro-batches that rank can run in time
	after := make([]int, ranks+1)
	for r := ranks - 1; r >= 0; r-- {
		most[r] = max(n[r], int(slowest*speeds[r]))
		after[r] = after[r+1] + most[r]
	}
	// best[r][e-lows[r]] is the fewest nodes for the first r ranks if they end
	// at e; back is where the last of them begins.
	type cell struct{ nodes, back int }
	best := make([][]cell, ranks+1)
	lows := make([]int, ranks+1)
	best[0] = []cell{{}}
	before, even := 0, 0
	for r := range ranks {
		before += most[r]
		even += n[r]
		lo, hi := max(0, micros-after[r+1]), min(micros, before)
		lo, hi = max(lo, even-borderWindow/2), min(hi, even+borderWindow/2)
		lows[r+1] = lo
		best[r+1] = make([]cell, hi-lo+1)
		for end := lo; end <= hi; end++ {
			c := cell{nodes: math.MaxInt}
			for i, b := range best[r] {
				begin := lows[r] + i
				if begin > end || end-begin > most[r] || b.nodes == math.MaxInt {
					continue
				}
				if total := b.nodes + nodes(micros, begin, end); total < c.nodes {
					c = cell{total, begin}
				}
			}
			best[r+1][end-lo] = c
		}
	}
	ranking := make(ranking, micros)
	end := micros
	for r := ranks; r > 0; r-- {
		begin := best[r][end-lows[r]].back
		for m := begin; m < end; m++ {
			ranking[m] = r - 1
		}
		end = begin
	}
	return ranking
}

// schedule says when micro-batches come to a stage.
type schedule struct {
	at    []float64
	order []int // micro-batches by at
}

// together is the schedule in which all are there at once.
func together(micros int) schedule {
	s := schedule{make([]float64, micros), make([]int, micros)}
	for m := range s.order {
		s.order[m] = m
	}
	return s
}

// inOrder deals blocks of micro-batches, in the order in which their first
// ones come, each to the worker that is done first with what it has.
func inOrder(block int, speeds []float64, come schedule) ranking {
	micros := len(come.at)
	n, _ := shares(micros, speeds)
	d := dealt{ranks: make([]int, len(speeds)), has: make([]int, len(speeds)), share: n, speeds: speeds, block: block}
	for i := range d.ranks {
		d.ranks[i] = i
	}
	heap.Init(&d)
	r := make(ranking, micros)
	for _, first := range come.order {
		if first%block != 0 {
			continue
		}
		rank := d.ranks[0]
		end := min(first+block, micros)
		for m := first; m < end; m++ {
			r[m] = rank
		}
		d.has[rank] += end - first
		heap.Fix(&d, 0)
	}
	return r
}

// dealt is a heap of ranks: who would be over its share by the least with
// another block comes first, then who is done first.
type dealt struct {
	ranks      []int
	has, share []int // by rank
	speeds     []float64
	block      int
}

func (d *dealt) Len() int      { return len(d.ranks) }
func (d *dealt) Swap(i, j int) { d.ranks[i], d.ranks[j] = d.ranks[j], d.ranks[i] }
func (d *dealt) Less(i, j int) bool {
	a, b := d.ranks[i], d.ranks[j]
	if x, y := max(0, d.has[a]+d.block-d.share[a]), max(0, d.has[b]+d.block-d.share[b]); x != y {
		return x < y
	}
	if x, y := float64(d.has[a]+d.block)/d.speeds[a], float64(d.has[b]+d.block)/d.speeds[b]; x != y {
		return x < y
	}
	return a < b
}
func (d *dealt) Push(any) { panic("plan: ranks are fixed") }
func (d *dealt) Pop() any { panic("plan: ranks are fixed") }

// handOn estimates when a stage hands each micro-batch on: every worker runs
// its own one after the other, each as soon as it is there.
func handOn(r ranking, c *stageCost, come schedule) schedule {
	out := schedule{make([]float64, len(r)), slices.Clone(come.order)}
	free := make([]float64, len(c.speeds))
	for _, m := range come.order {
		w := r[m]
		begin := max(free[w], come.at[m])
		out.at[m] = begin + float64(c.forward)/c.speeds[w]
		free[w] = begin + c.work()/c.speeds[w]
	}
	slices.SortStableFunc(out.order, func(a, b int) int {
		switch x, y := out.at[a], out.at[b]; {
		case x < y:
			return -1
		case x > y:
			return 1
		}
		return a - b
	})
	return out
}

// candidate is a way to route all stages.
type candidate struct {
	rankings []ranking
}

// follow routes all stages after the first one: a stage like the one before
// has the same micro-batches at each rank, so that each rank talks to one
// rank only; another one takes blocks as they come.
func follow(first ranking, costs []stageCost, block int) candidate {
	c := candidate{rankings: []ranking{first}}
	come := handOn(first, &costs[0], together(len(first)))
	for s := 1; s < len(costs); s++ {
		r := c.rankings[s-1]
		if !costs[s].alike(&costs[s-1]) {
			r = inOrder(block, costs[s].speeds, come)
		}
		c.rankings = append(c.rankings, r)
		if s+1 < len(costs) {
			come = handOn(r, &costs[s], come)
		}
	}
	return c
}

// alongside routes all stages after the first one: each rank talks to the same rank of the next stage, where
// there is one, but for what is over its share there. That goes to others, evenly over the step: with a worker less in a stage, the one too
// many in the next gets every n-th micro-batch.
func alongside(first ranking, costs []stageCost, block int) candidate {
	c := candidate{rankings: []ranking{first}}
	micros := len(first)
	come := handOn(first, &costs[0], together(micros))
	for s := 1; s < len(costs); s++ {
		r := c.rankings[s-1]
		if !costs[s].alike(&costs[s-1]) {
			r = steadily(r, block, costs[s].speeds, come)
		}
		c.rankings = append(c.rankings, r)
		if s+1 < len(costs) {
			come = handOn(r, &costs[s], come)
		}
	}
	return c
}

// steadily gives each rank its share at all times, as they come, and what the same rank had before as long as no other
// rank lacks a whole block of micro-batches more than it does.
func steadily(before ranking, block int, speeds []float64, come schedule) ranking {
	micros := len(before)
	share, _ := shares(micros, speeds)
	has := make([]int, len(share))
	dealt := 0
	lack := func(rank int) int { return dealt*share[rank] - has[rank]*micros }
	r := make(ranking, micros)
	for _, m := range come.order {
		if m%block != 0 {
			continue
		}
		end := min(m+block, micros)
		dealt += end - m
		to := 0
		for rank := range share {
			if lack(rank) > lack(to) {
				to = rank
			}
		}
		if was := before[m]; was < len(share) && has[was] < share[was] && lack(was) > lack(to)-block*micros {
			to = was
		}
		has[to] += end - m
		for ; m < end; m++ {
			r[m] = to
		}
	}
	return r
}

// runsOnly routes all stages in contiguous runs.
func runsOnly(micros int, costs []stageCost) candidate {
	var c candidate
	for s := range costs {
		if s > 0 && costs[s].alike(&costs[s-1]) {
			c.rankings = append(c.rankings, c.rankings[s-1])
		} else {
			c.rankings = append(c.rankings, contiguous(micros, costs[s].speeds))
		}
	}
	return c
}

// buffers returns the most nodes of the gradient tree that a worker has.
func (c *candidate) buffers() (most int) {
	for s, r := range c.rankings {
		if s == 0 || !same(r, c.rankings[s-1]) {
			counts := make([]int, slices.Max(r)+1)
			r.count(func(rank, n int) { counts[rank] += n })
			most = max(most, slices.Max(counts))
		}
	}
	return most
}

// nodes returns how many nodes all workers have.
func (c *candidate) nodes() (total int) {
	for _, r := range c.rankings {
		r.count(func(_, n int) { total += n })
	}
	return total
}

// count calls f with the nodes of each run of micro-batches of a rank.
func (r ranking) count(f func(rank, nodes int)) {
	for lo := 0; lo < len(r); {
		hi := lo + 1
		for hi < len(r) && r[hi] == r[lo] {
			hi++
		}
		f(r[lo], nodes(len(r), lo, hi))
		lo = hi
	}
}

// same reports whether two rankings are one in memory.
func same(a, b ranking) bool { return &a[0] == &b[0] }

// searchTasks is the number of passes of a step up to which candidates are
// tried in the simulator.
const searchTasks = 1024

func (p *Plan) small(micros int) bool { return 2*micros*len(p.Stages) <= searchTasks }

// time returns how long a step takes, as exactly as there is time to say.
func (p *Plan) time(prof *Profile) time.Duration {
	if p.small(p.Micros()) {
		return p.passTime(prof) + p.reduceTime(prof, p.nodes)
	}
	return p.Estimate(*prof)
}

const (
	// slack is by how much a step may be longer for equal numbers of workers in all stages.
	slack = 0.03
	// fewer is by how much for fewer nodes in the gradient tree, or fewer forward passes in
	// flight.
	fewer = 0.005
)

// route fills in Route, Limits and Buffers of a plan that has stages.
func (p *Plan) route(prof *Profile, micros int) {
	if !p.small(micros) {
		p.deal(prof, micros)
		return
	}
	p.search(newPasses(prof, p.Workers), micros, math.MaxInt64)
}

// deal is route where there is no time for a search.
func (p *Plan) deal(prof *Profile, micros int) {
	costs := stageCosts(prof, p.Stages)
	share(costs)
	runs := runsOnly(micros, costs)
	if allAlike(costs) {
		p.take(runs, costs, 0, noLead)
		return
	}
	// The largest blocks that are still small against what a worker has in all.
	buffers := prof.buffers()
	block := 1
	most, fewest := len(costs[0].workers), len(costs[0].workers)
	for _, c := range costs {
		most, fewest = max(most, len(c.workers)), min(fewest, len(c.workers))
	}
	for block*16 <= micros/most || block*buffers < ceil(micros, fewest) {
		block *= 2
	}
	for ; block < micros; block *= 2 {
		if c := follow(inOrder(block, costs[0].speeds, together(micros)), costs, block); c.buffers() <= buffers {
			p.take(c, costs, 1, noLead)
			return
		}
	}
	p.take(runs, costs, 1, noLead)
}

// allAlike reports whether all stages have workers of the same speeds.
func allAlike(costs []stageCost) bool {
	return !slices.ContainsFunc(costs, func(c stageCost) bool { return !c.alike(&costs[0]) })
}

// search is route with the simulator: of several candidates it takes one that is about the
// fastest, and returns how long its step takes. ok is false, and nothing is taken, if none
// takes at most a time. Candidates that cannot be taken are not simulated to their end.
func (p *Plan) search(x *passes, micros int, most time.Duration) (t time.Duration, ok bool) {
	prof := x.prof
	x.set(p.Stages, micros)
	if x.bound() > most {
		return 0, false
	}
	type trial struct {
		candidate
		costs []stageCost
		lead  lead
		extra int
		nodes int
		time  time.Duration
	}
	var trials []trial
	enough := most // for what can be taken
	tiny := 2*micros*len(p.Stages) <= tinyPasses/2
	try := func(c candidate, costs []stageCost, leads []lead, extras ...int) {
		reduce := p.reduceTime(prof, func(s int) (n int) {
			c.rankings[s].count(func(_, k int) { n += k })
			return n
		})
		needs := needs(c, costs)
		for _, lead := range leads {
			var last []Limit
			for i, extra := range extras {
				l := limits(costs, c, needs, extra, lead)
				if slices.Equal(l, last) {
					continue
				}
				last = l
				t, ok := x.run(c.rankings, l, enough-reduce)
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
	buffers := prof.buffers()
	for i, stages := range p.orders(prof) {
		costs := stageCosts(prof, stages)
		share(costs)
		runs := runsOnly(micros, costs)
		if allAlike(costs) && equal(costs[0].speeds, func(v float64) float64 { return v }) {
			try(runs, costs, leads[:1], 0)
			break
		}
		x.set(stages, micros)
		try(runs, costs, leads[:1], extras...)
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
				add(follow(inOrder(first, costs[0].speeds, together(micros)), costs, block), leads[:1])
			}
		}
		for block := 1; block <= 2; block *= 2 {
			add(alongside(runs.rankings[0], costs, block), leads)
			add(alongside(inOrder(block, costs[0].speeds, together(micros)), costs, block), leads)
		}
		for block := 1; block <= 2; block *= 2 {
			if c, _, ok := x.inTurn(costs, runs, block, extras[0], buffers, enough); ok {
				add(c, leads[:1])
			}
		}
	}
	trials = slices.DeleteFunc(trials, func(t trial) bool { return t.time > enough })
	if len(trials) == 0 {
		return 0, false
	}
	best := slices.MinFunc(trials, func(a, b trial) int {
		return cmp.Or(cmp.Compare(a.nodes, b.nodes), cmp.Compare(a.extra, b.extra), cmp.Compare(a.lead.slowest, b.lead.slowest), cmp.Compare(a.time, b.time))
	})
	p.take(best.candidate, best.costs, best.extra, best.lead)
	unsorted := p.Limits
	p.Limits = nil
	for s, st := range p.Stages {
		for _, w := range st.Workers {
			p.Limits = append(p.Limits, unsorted[slices.IndexFunc(unsorted, func(l Limit) bool { return l.Stage == s && l.Worker == w })])
		}
	}
	return best.time, true
}

// orders returns the stages with their workers in the orders that routes are tried with: the
// fastest first, and the slowest first. Who is listed before whom of equals makes no difference to what is found.
func (p *Plan) orders(prof *Profile) [][]Stage {
	fast, slow := slices.Clone(p.Stages), slices.Clone(p.Stages)
	differ := false
	for s, st := range p.Stages {
		bySpeed := func(a, b id.WorkerID) int { return cmp.Compare(prof.speed(a), prof.speed(b)) }
		differ = differ || !equal(st.Workers, prof.speed)
		fast[s].Workers, slow[s].Workers = slices.Clone(st.Workers), slices.Clone(st.Workers)
		slices.SortFunc(fast[s].Workers, func(a, b id.WorkerID) int { return cmp.Or(bySpeed(b, a), cmp.Compare(a, b)) })
		slices.SortFunc(slow[s].Workers, func(a, b id.WorkerID) int { return cmp.Or(bySpeed(a, b), cmp.Compare(a, b)) })
	}
	if !differ {
		return [][]Stage{p.Stages}
	}
	return [][]Stage{fast, slow}
}

// inTurn routes by a simulation in which workers take micro-batches in turn, as many as with
// other routes, with limits greater by extra than need be. Blocks are greater where a worker
// would else have too many nodes. ok is false if the step takes longer than most.
func (x *passes) inTurn(costs []stageCost, like candidate, block, extra, buffers int, most time.Duration) (c candidate, t time.Duration, ok bool) {
	var quota, blocks []int
	for _, counts := range like.counts(costs) {
		quota = append(quota, counts...)
		b := block
		for ceil(slices.Max(counts), b) > buffers {
			b *= 2
		}
		blocks = append(blocks, b)
	}
	c.rankings, t, ok = x.deal(quota, blocks, limits(costs, like, needs(like, costs), extra, noLead), most)
	return c, t, ok
}

// take writes a candidate into the plan, with limits greater by extra than
// they have to be in all stages but the last, where one micro-batch is in
// flight at a time anyway.
func (p *Plan) take(c candidate, costs []stageCost, extra int, l lead) {
	p.Route = make([][]id.WorkerID, len(costs))
	for s, r := range c.rankings {
		p.Route[s] = r.route(costs[s].workers)
	}
	p.Buffers = c.buffers()
	p.Limits = limits(costs, c, needs(c, costs), extra, l)
}

// needs returns the limits that keep a pipeline busy, by stage and rank. A worker has as
// many micro-batches in flight as it begins in the time that one takes from its forward to
// its backward pass, through all later stages: at the pace of the slowest stage these are
// the path times what the worker runs in a step, over the time of the slowest stage. For
// equal stages this is the number of stages from its own on.
func needs(c candidate, costs []stageCost) [][]int {
	step := 0.0
	counts := c.counts(costs)
	for s := range counts {
		for rank, n := range counts[s] {
			step = max(step, float64(n)*costs[s].work()/costs[s].speeds[rank])
		}
	}
	path := 0.0
	for s := len(costs) - 1; s >= 0; s-- {
		slowest := math.Inf(1)
		for rank, n := range counts[s] {
			if n > 0 {
				slowest = min(slowest, costs[s].speeds[rank])
			}
		}
		path += costs[s].work() / slowest
		for rank, n := range counts[s] {
			counts[s][rank] = 0
			if step > 0 {
				const rounding = 1e-9
				counts[s][rank] = int(math.Ceil(path*float64(n)/step - rounding))
			}
		}
	}
	return counts
}

// counts returns how many micro-batches each rank has.
func (c *candidate) counts(costs []stageCost) [][]int {
	counts := make([][]int, len(costs))
	for s, r := range c.rankings {
		counts[s] = make([]int, len(costs[s].workers))
		for _, rank := range r {
			counts[s][rank]++
		}
	}
	return counts
}

// ahead is how many more micro-batches than a busy pipeline needs a worker begins at least, so that a later stage
// has something at hand when who feeds it is lost.
const ahead = 1

// A lead is by how much the leads of stages are greater than needs; where it is none they are 0.
type lead struct{ slowest, others int }

// none is the lead of stages where backward passes always come first.
const none = -1

var noLead = lead{none, none}

// leads are tried in this order, with routes that go alongside. The slowest stages, which all wait for, gain by one: they get micro-batches under way
// while others are busy, and have backward passes left for the end of the step, when the last
// micro-batches go through the other stages.
var leads = []lead{noLead, {2, none}, {1, none}, {3, none}, {2, 0}, {1, 0}, {3, 0}, {1, 1}, {2, 2}}

// of returns the lead of a stage that needs so many in flight.
func (l lead) of(slowest bool, needs int) int {
	more := l.others
	if slowest {
		more = l.slowest
	}
	if more == none {
		return 0
	}
	return needs + more
}

// slowest says which stages take longest for all micro-batches, or nearly so.
func slowest(costs []stageCost) []bool {
	const nearly = 0.98
	most, all := 0.0, make([]float64, len(costs))
	for s := range costs {
		sum := 0.0
		for _, v := range costs[s].speeds {
			sum += v
		}
		all[s] = costs[s].work() / sum
		most = max(most, all[s])
	}
	slow := make([]bool, len(costs))
	for s, t := range all {
		slow[s] = t >= nearly*most
	}
	return slow
}

// limits returns needs, greater by extra, and by at least ahead, in all stages but the last, as far as there are
// micro-batches.
func limits(costs []stageCost, c candidate, needs [][]int, extra int, l lead) []Limit {
	var list []Limit
	counts := c.counts(costs)
	var slow []bool
	if l != noLead {
		slow = slowest(costs)
	}
	for s := range costs {
		for rank, w := range costs[s].workers {
			n := needs[s][rank]
			if s < len(costs)-1 {
				n += max(extra, ahead)
			}
			limit := Limit{Stage: s, Worker: w, Forwards: max(min(n, counts[s][rank]), len(costs)-s)}
			if slow != nil && s < len(costs)-1 {
				limit.Lead = min(l.of(slow[s], needs[s][rank]), limit.Forwards)
			}
			list = append(list, limit)
		}
	}
	return list
}
