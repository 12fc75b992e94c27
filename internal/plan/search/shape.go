package search

import (
	"cmp"
	"math"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

// shape is the stages of a plan before micro-batches are routed.
type shape struct {
	stages []plan.Stage
	time   float64 // of a step, in closed form, in nanoseconds
	moves  float64 // bytes of state that the busiest worker gets; -1: not known yet
	groups []groupCost
}

// shaper looks for better stages than those of a plan. Layers stay in their order and the
// number of stages stays.
type shaper struct {
	prof   *plan.Profile // measured
	work   []float64
	params []float64
	sizes  []int // parameters, by layer
	micros int
	copies int // owner and mirrors
	old    []plan.Stage
	home   map[id.WorkerID]int // the first stage it serves
	most   float64             // parameters of a stage
	shared bool                // some serve several stages
	budget int                 // shapes to try
}

func newShaper(p *plan.Plan, prof *plan.Profile) *shaper {
	s := &shaper{prof: prof, micros: p.Micros(), copies: 1 + p.Mirrors, old: p.Stages, home: make(map[id.WorkerID]int)}
	s.work, s.params = make([]float64, len(prof.Layers)+1), make([]float64, len(prof.Layers)+1)
	for i, l := range prof.Layers {
		s.sizes = append(s.sizes, l.Size())
		s.work[i+1] = s.work[i] + float64(l.Forward+l.Backward)
		s.params[i+1] = s.params[i] + float64(s.sizes[i])
	}
	// No stage gets more than twice the mean, or what there is already: what activations take is not known. That is never less than any one layer.
	s.most = 2 * s.params[len(s.sizes)] / float64(len(p.Stages))
	for _, n := range s.sizes {
		s.most = max(s.most, float64(n))
	}
	for _, st := range p.Stages {
		s.most = max(s.most, s.params[st.Hi]-s.params[st.Lo])
	}
	for i := len(p.Stages) - 1; i >= 0; i-- {
		for _, w := range p.Stages[i].Workers {
			_, twice := s.home[w]
			s.shared = s.shared || twice
			s.home[w] = i
		}
	}
	// A shape takes time in proportion to the workers that its stages have.
	s.budget = max(200, min(5000, 200_000/max(1, len(p.Workers))))
	return s
}

// groupCost is what matters of the workers of a stage, by unit of work on a micro-batch.
type groupCost struct {
	slowest float64 // the time of the slowest worker, without its last micro-batch
	factor  float64 // the same without half of one, so that it is never 0
	fastest float64 // the time of one micro-batch at the fastest
}

func (s *shaper) group(speeds []float64) groupCost {
	n, _ := shares(s.micros, speeds)
	g := groupCost{fastest: 1 / slices.Max(speeds)}
	for i, v := range speeds {
		if n[i] > 0 {
			g.slowest = max(g.slowest, float64(n[i]-1)/v)
			g.factor = max(g.factor, (float64(n[i])-0.5)/v)
		}
	}
	return g
}

// groups returns the costs of all stages.
func (s *shaper) groups(stages []plan.Stage) (groups []groupCost) {
	for _, c := range shared(s.prof, stages) {
		groups = append(groups, s.group(c.Speeds))
	}
	return groups
}

// measure fills in what a shape costs.
func (s *shaper) measure(stages []plan.Stage, groups []groupCost) shape {
	var way, slowest float64
	for i, st := range stages {
		work := s.work[st.Hi] - s.work[st.Lo]
		way += work * groups[i].fastest
		slowest = max(slowest, work*groups[i].slowest)
		if i > 0 {
			way += 2 * float64(s.prof.Transfer(s.prof.Layers[st.Lo-1].Output))
		}
	}
	return shape{stages, way + slowest, -1, groups}
}

// moved estimates the bytes that the busiest worker gets: its part of the state of the
// layers that are new to it.
func (s *shaper) moved(stages []plan.Stage) (most float64) {
	for i, st := range stages {
		for _, w := range st.Workers {
			lo, hi := st.Lo, st.Hi // without what it has
			for j, was := range s.old {
				if (j == i || s.home[w] == j) && slices.Contains(was.Workers, w) && was.Lo < hi && lo < was.Hi {
					if was.Lo <= lo {
						lo = min(hi, was.Hi)
					} else if hi <= was.Hi {
						hi = max(lo, was.Lo)
					}
				}
			}
			most = max(most, plan.StateParts*plan.BytesPerParameter*(s.params[hi]-s.params[lo])*float64(s.copies)/float64(len(st.Workers)))
		}
	}
	return most
}

// fits reports whether the workers have memory enough, as far as is known: for the
// parameters of their stages and their part of the state. Activations are not counted.
func (s *shaper) fits(stages []plan.Stage) bool {
	if len(s.prof.Memory) == 0 {
		return true
	}
	needs := make(map[id.WorkerID]float64)
	for _, st := range stages {
		params := s.params[st.Hi] - s.params[st.Lo]
		for _, w := range st.Workers {
			needs[w] += plan.BytesPerParameter * params * (1 + plan.StateParts*float64(s.copies)/float64(len(st.Workers)))
		}
	}
	for w, n := range needs {
		if limit := s.prof.Memory[w]; limit > 0 && n > float64(limit) {
			return false
		}
	}
	return true
}

// cut gives stages the layers with which the slowest is as fast as possible; of all such
// cuts, borders are where they are nearest to those of the plan.
//
// Whether stages can do all layers within a time is found by giving each as many as it
// can do, from the first on; the least time is found by bisection. The same from the last
// stage on says where borders have to be at least.
func (s *shaper) cut(stages []plan.Stage, groups []groupCost) []plan.Stage {
	layers, n := len(s.work)-1, len(stages)
	// first returns how far the stages can come, last where they can begin.
	first := make([]int, n+1)
	reach := func(i, lo int, limit float64) int {
		hi := lo
		for hi < layers-(n-1-i) && s.params[hi+1]-s.params[lo] <= s.most && groups[i].factor*(s.work[hi+1]-s.work[lo]) <= limit {
			hi++
		}
		return hi
	}
	can := func(limit float64) bool {
		for i := range n {
			first[i+1] = reach(i, first[i], limit)
			if first[i+1] == first[i] {
				return false
			}
		}
		return first[n] == layers
	}
	lo, hi := 0.0, 0.0
	for _, g := range groups {
		hi = max(hi, g.factor*s.work[layers])
	}
	if !can(hi) {
		return stages
	}
	for range 40 {
		if mid := (lo + hi) / 2; can(mid) {
			hi = mid
		} else {
			lo = mid
		}
	}
	last := make([]int, n+1)
	last[n] = layers
	for i := n - 1; i > 0; i-- {
		lo := last[i+1] - 1
		for lo > i && s.params[last[i+1]]-s.params[lo-1] <= s.most && groups[i].factor*(s.work[last[i+1]]-s.work[lo-1]) <= hi {
			lo--
		}
		last[i] = lo
	}
	result := slices.Clone(stages)
	at := 0
	for i := range result {
		end := reach(i, at, hi)
		if i < n-1 {
			end = max(at+1, last[i+1], min(end, s.old[i].Hi))
		}
		result[i].Lo, result[i].Hi = at, end
		at = end
	}
	return result
}

// try measures groups of workers with the best cut.
func (s *shaper) try(stages []plan.Stage) shape {
	s.budget--
	groups := s.groups(stages)
	return s.measure(s.cut(stages, groups), groups)
}

// vary is try for stages of which only some have other workers than a shape has.
func (s *shaper) vary(from *shape, stages []plan.Stage, changed ...int) shape {
	if s.shared {
		return s.try(stages)
	}
	s.budget--
	groups := slices.Clone(from.groups)
	for _, i := range changed {
		speeds := make([]float64, len(stages[i].Workers))
		for k, w := range stages[i].Workers {
			speeds[k] = s.prof.SpeedOf(w)
		}
		groups[i] = s.group(speeds)
	}
	return s.measure(s.cut(stages, groups), groups)
}

// worthwhile is by how much of a step shapes have to differ for more bytes to be moved.
const worthwhile = 0.001

// better compares shapes: by time, and by bytes where that hardly differs.
func (s *shaper) better(a, b *shape) bool {
	if math.Abs(a.time-b.time) > worthwhile*b.time {
		return a.time < b.time
	}
	return s.bytes(a) < s.bytes(b)
}

// bytes returns the moves of a shape.
func (s *shaper) bytes(a *shape) float64 {
	if a.moves < 0 {
		a.moves = s.moved(a.stages)
	}
	return a.moves
}

// climb moves a worker to another stage, or lets two change places, as long as that helps.
func (s *shaper) climb(from shape) shape {
	best := from
	for s.budget > 0 {
		next := best
		consider := func(stages []plan.Stage, i, j int) {
			if s.budget > 0 {
				if c := s.vary(&best, stages, i, j); c.time < (1-worthwhile)*next.time && s.fits(c.stages) {
					next = c
				}
			}
		}
		// Of workers with the same speed, one of each stage is enough.
		kinds := make([][]id.WorkerID, len(best.stages))
		serves := make(map[id.WorkerID]int)
		for _, st := range best.stages {
			for _, w := range st.Workers {
				serves[w]++
			}
		}
		for i, st := range best.stages {
			for _, w := range slices.Backward(st.Workers) {
				if serves[w] == 1 && !slices.ContainsFunc(kinds[i], func(k id.WorkerID) bool { return s.prof.SpeedOf(k) == s.prof.SpeedOf(w) }) {
					kinds[i] = append(kinds[i], w)
				}
			}
		}
		for i, st := range best.stages {
			for _, w := range kinds[i] {
				for j := range best.stages {
					if i == j {
						continue
					}
					if len(st.Workers) > 1 {
						stages := slices.Clone(best.stages)
						stages[i].Workers = others(st.Workers, w)
						stages[j].Workers = append(slices.Clone(stages[j].Workers), w)
						consider(stages, i, j)
					}
					for _, x := range kinds[j] {
						if i < j && s.prof.SpeedOf(x) != s.prof.SpeedOf(w) {
							stages := slices.Clone(best.stages)
							stages[i].Workers = append(others(st.Workers, w), x)
							stages[j].Workers = append(others(stages[j].Workers, x), w)
							consider(stages, i, j)
						}
					}
				}
			}
		}
		if next.time >= best.time {
			break
		}
		best = next
	}
	return best
}

// staff gives each stage a number of workers; as many as possible stay where they are.
func (s *shaper) staff(workers []plan.Worker, parts []part) []plan.Stage {
	stages := make([]plan.Stage, len(parts))
	var spare []id.WorkerID
	for _, w := range workers {
		best := -1
		for i, st := range s.old {
			if len(stages[i].Workers) < parts[i].workers && slices.Contains(st.Workers, w.ID) && (best < 0 || len(st.Workers) < len(s.old[best].Workers)) {
				best = i
			}
		}
		if best < 0 {
			spare = append(spare, w.ID)
		} else {
			stages[best].Workers = append(stages[best].Workers, w.ID)
		}
	}
	for i := range stages {
		stages[i].Lo, stages[i].Hi = parts[i].lo, parts[i].hi
		n := parts[i].workers - len(stages[i].Workers)
		stages[i].Workers = append(stages[i].Workers, spare[:n]...)
		spare = spare[n:]
	}
	return stages
}

// shapes returns stages that may be better than those of the plan, the most promising
// first: the plan's own workers with other borders, with workers that move between
// stages, and what is best if nothing stays, see deal.
func (s *shaper) shapes(p *plan.Plan, most int) []shape {
	old := s.measure(s.old, s.groups(s.old))
	var list []shape
	add := func(c shape) {
		s.bytes(&c)
		if s.fits(c.stages) && !slices.ContainsFunc(list, func(o shape) bool { return slices.EqualFunc(o.stages, c.stages, sameStage) }) {
			list = append(list, c)
		}
	}
	add(old)
	recut := s.try(s.old)
	add(recut)
	begin := recut
	if s.better(&old, &recut) {
		begin = old
	}
	add(s.climb(begin))
	if len(p.Workers) >= len(p.Stages) {
		dealt := s.staff(p.Workers, deal(s.prof.Layers, len(p.Stages), len(p.Workers), s.micros, int(s.most)))
		add(s.measure(dealt, s.groups(dealt)))
		again := s.try(dealt)
		add(again)
		if len(s.prof.Speed) > 0 {
			add(s.climb(again))
		}
	}
	span := trialRange
	if every := s.every(p.Workers); len(every) > 0 {
		most, span = tinyTrials, tinyRange
		for _, c := range every {
			add(c)
		}
	}
	horizon := float64(s.prof.Horizon)
	worth := func(c shape) float64 { return c.time + float64(s.prof.Stream(int64(c.moves)))/horizon }
	slices.SortStableFunc(list, func(a, b shape) int {
		return cmp.Or(cmp.Compare(worth(a), worth(b)), cmp.Compare(a.moves, b.moves))
	})
	if len(list) == 0 { // no memory for any
		return []shape{old}
	}
	list = list[:min(most, len(list))]
	return slices.DeleteFunc(list, func(c shape) bool { return worth(c) > (1+span)*worth(list[0]) })
}

const (
	// tinyShapes is up to how many shapes all are measured.
	tinyShapes = 3000
	// tinyPasses is up to how many passes of a step tinyTrials of these are routed. Up to half as
	// many, all routes are tried to their end.
	tinyPasses = 128
	tinyTrials = 32
	tinyRange  = 1
)

// every returns the best of all shapes with one stage for each worker, if these are few:
// where stages have one worker or two, the closed form does not tell which one is best. Of
// shapes that only exchange equal workers, it is the one nearest to the plan.
func (s *shaper) every(workers []plan.Worker) []shape {
	stages, layers := len(s.old), len(s.sizes)
	if s.shared || 2*s.micros*stages > tinyPasses {
		return nil
	}
	var speeds []float64
	kinds := make(map[float64][]plan.Worker)
	for _, w := range workers {
		v := s.prof.SpeedOf(w.ID)
		if kinds[v] == nil {
			speeds = append(speeds, v)
		}
		kinds[v] = append(kinds[v], w)
	}
	slices.Sort(speeds)
	n := choose(layers-1, stages-1)
	for _, k := range kinds {
		n *= choose(len(k)+stages-1, stages-1)
	}
	if n > tinyShapes {
		return nil
	}
	// A staffing says how many of each kind a stage has, by kind, then stage.
	type sketch struct {
		staffing []int
		borders  []int
		groups   []groupCost
		time     float64
	}
	var list []sketch
	now := make([]int, len(speeds)*stages)
	stage := make([]plan.Stage, stages)
	cuts := everyCut(stages, layers)
	measure := func() {
		groups := make([]groupCost, stages)
		for i := range groups {
			var has []float64
			for k, v := range speeds {
				for range now[k*stages+i] {
					has = append(has, v)
				}
			}
			if len(has) == 0 {
				return
			}
			groups[i] = s.group(has)
		}
		staffing := slices.Clone(now)
		for _, c := range cuts {
			for i := range stage {
				stage[i].Lo, stage[i].Hi = c[i], c[i+1]
			}
			list = append(list, sketch{staffing, c, groups, s.measure(stage, groups).time})
		}
	}
	var staff func(k, i, left int)
	staff = func(k, i, left int) {
		switch {
		case k == len(speeds):
			measure()
		case i == stages-1:
			now[k*stages+i] = left
			next := 0
			if k+1 < len(speeds) {
				next = len(kinds[speeds[k+1]])
			}
			staff(k+1, 0, next)
		default:
			for n := range left + 1 {
				now[k*stages+i] = n
				staff(k, i+1, left-n)
			}
		}
	}
	staff(0, 0, len(kinds[speeds[0]]))
	slices.SortStableFunc(list, func(a, b sketch) int { return cmp.Compare(a.time, b.time) })
	list = list[:min(len(list), tinyTrials)]
	best := make([]shape, 0, len(list))
	for _, c := range list {
		stages := make([]plan.Stage, stages)
		for k, v := range speeds {
			parts := make([]part, len(stages))
			for i := range parts {
				parts[i].workers = c.staffing[k*len(stages)+i]
			}
			for i, st := range s.staff(kinds[v], parts) {
				stages[i].Workers = append(stages[i].Workers, st.Workers...)
			}
		}
		for i := range stages {
			stages[i].Lo, stages[i].Hi = c.borders[i], c.borders[i+1]
			slices.Sort(stages[i].Workers)
		}
		best = append(best, s.measure(stages, c.groups))
	}
	return best
}

// everyCut returns all borders of stages, with the begin and the end.
func everyCut(stages, layers int) [][]int {
	var list [][]int
	now := make([]int, stages+1)
	now[stages] = layers
	var cut func(i int)
	cut = func(i int) {
		if i == stages {
			list = append(list, slices.Clone(now))
			return
		}
		for now[i] = now[i-1] + 1; now[i] <= layers-(stages-i); now[i]++ {
			cut(i + 1)
		}
	}
	cut(1)
	return list
}

// choose returns in how many ways k of n things can be chosen.
func choose(n, k int) float64 {
	ways := 1.0
	for i := range k {
		ways *= float64(n-i) / float64(i+1)
	}
	return ways
}

func sameStage(a, b plan.Stage) bool {
	if a.Lo != b.Lo || a.Hi != b.Hi || len(a.Workers) != len(b.Workers) {
		return false
	}
	for _, w := range a.Workers {
		if !slices.Contains(b.Workers, w) {
			return false
		}
	}
	return true
}

// others returns the workers of a list but one.
func others(list []id.WorkerID, w id.WorkerID) []id.WorkerID {
	return slices.DeleteFunc(slices.Clone(list), func(x id.WorkerID) bool { return x == w })
}
