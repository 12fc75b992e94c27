package planner

import (
	"slices"
	"sort"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

// shards splits every layer over the workers of its stage: contiguous ranges
// in the order of ranks, each as near to what its worker lacks as blocks
// allow. What a worker lacks is its equal share of all layers of the stage
// so far, less what it owns already, so that roundings do not add up.
func shards(stages []plan.Stage, layers []plan.Layer, mirrors map[id.WorkerID][]id.WorkerID) []plan.Shard {
	n := 0
	for _, s := range stages {
		n += (s.Hi - s.Lo) * len(s.Workers)
	}
	all := make([]plan.Shard, 0, n)
	for _, s := range stages {
		ranks := len(s.Workers)
		owned := make([]int, ranks)
		lacks := make([]float64, ranks)
		total := 0
		for l := s.Lo; l < s.Hi; l++ {
			size := layers[l].Size()
			total += size
			lack := 0.0
			for r := range lacks {
				lacks[r] = max(0, float64(total)/float64(ranks)-float64(owned[r]))
				lack += lacks[r]
			}
			at, sum := 0, 0.0
			ends := blockEnds(layers[l].Tensors)
			for r, w := range s.Workers {
				sum += lacks[r]
				hi := size
				if r < ranks-1 && lack > 0 {
					hi = max(at, ends.nearest(sum/lack*float64(size)))
				}
				if hi > at {
					all = append(all, plan.Shard{Layer: l, Lo: at, Hi: hi, Owner: w, Mirrors: mirrors[w]})
					owned[r] += hi - at
				}
				at = hi
			}
		}
	}
	return all
}

// ends finds borders of blocks; it holds where each tensor begins, and the end.
type ends []int

func blockEnds(tensors []int) ends {
	e := make(ends, 1, len(tensors)+1)
	for _, n := range tensors {
		e = append(e, e[len(e)-1]+n)
	}
	return e
}

// nearest returns the border next to a position; of two, the greater.
func (e ends) nearest(at float64) int {
	i := sort.Search(len(e), func(i int) bool { return float64(e[i]) >= at })
	if i == 0 {
		return 0
	}
	if i == len(e) {
		return e[i-1]
	}
	begin, end := e[i-1], e[i]
	lo := begin + int(at-float64(begin))/kernel.Block*kernel.Block
	hi := min(lo+kernel.Block, end)
	if at-float64(lo) < float64(hi)-at {
		return lo
	}
	return hi
}

// mirrorsOf chooses k mirrors for what a worker owns, for every worker: each
// on a host of its own, as far as there are hosts, then others on other hosts,
// then on its own host, and always of its stage before other stages. Every worker
// begins at another place of these lists, and further mirrors are those that
// have least, so that they are spread evenly.
func mirrorsOf(stages []plan.Stage, workers []plan.Worker, k int) map[id.WorkerID][]id.WorkerID {
	k = min(k, len(workers)-1)
	mirrors := make(map[id.WorkerID][]id.WorkerID, len(workers))
	if k < 1 {
		return mirrors
	}
	hosts := make(map[string]int)
	hostOf := make(map[id.WorkerID]int, len(workers))
	for _, w := range workers {
		if _, ok := hosts[w.Host]; !ok {
			hosts[w.Host] = len(hosts)
		}
		hostOf[w.ID] = hosts[w.Host]
	}
	var all ring
	perStage := make([]ring, len(stages))
	for i, s := range stages {
		for _, w := range s.Workers {
			perStage[i].members = append(perStage[i].members, member{w, hostOf[w]})
		}
		perStage[i].sort(len(hosts))
		all.members = append(all.members, perStage[i].members...)
	}
	all.sort(len(hosts))
	position := make(map[id.WorkerID]int, len(workers))
	for i, m := range all.members {
		position[m.id] = i
	}
	has := make(map[id.WorkerID]int, len(workers)) // for how many it mirrors
	for round := range k {
		for i := range perStage {
			for at, m := range perStage[i].members {
				found, best := false, member{}
				pick := func(visit func(int, func(member) bool) bool, at int, fits func(member) bool) bool {
					visit(at, func(c member) bool {
						if fits(c) && !slices.Contains(mirrors[m.id], c.id) && (!found || has[c.id] < has[best.id]) {
							found, best = true, c
						}
						return found && round == 0 // the first mirrors are even as they come
					})
					return found
				}
				apart := func(c member) bool {
					return !slices.ContainsFunc(mirrors[m.id], func(x id.WorkerID) bool { return hostOf[x] == c.host })
				}
				anyone := func(member) bool { return true }
				_ = pick(perStage[i].away, at, apart) || pick(all.away, position[m.id], apart) ||
					pick(perStage[i].away, at, anyone) || pick(all.away, position[m.id], anyone) ||
					pick(perStage[i].home, at, anyone) || pick(all.home, position[m.id], anyone)
				mirrors[m.id] = append(mirrors[m.id], best.id)
				has[best.id]++
			}
		}
	}
	return mirrors
}

type member struct {
	id   id.WorkerID
	host int
}

// ring holds workers by host.
type ring struct {
	members []member
	first   []int // index of the first member of each host, and the end
}

func (r *ring) sort(hosts int) {
	slices.SortStableFunc(r.members, func(a, b member) int { return a.host - b.host })
	r.first = make([]int, hosts+1)
	for _, m := range r.members {
		r.first[m.host+1]++
	}
	for h := range hosts {
		r.first[h+1] += r.first[h]
	}
}

// away visits the members on other hosts, from the host after that of member
// at on, until visit says that it is enough.
func (r *ring) away(at int, visit func(member) bool) (enough bool) {
	lo, hi := r.first[r.members[at].host], r.first[r.members[at].host+1]
	n := len(r.members) - (hi - lo)
	for i := range n {
		if visit(r.members[(hi+(at-lo+i)%n)%len(r.members)]) {
			return true
		}
	}
	return false
}

// home visits the other members on the host of member at.
func (r *ring) home(at int, visit func(member) bool) (enough bool) {
	lo, hi := r.first[r.members[at].host], r.first[r.members[at].host+1]
	for i := 1; i < hi-lo; i++ {
		if visit(r.members[lo+(at-lo+i)%(hi-lo)]) {
			return true
		}
	}
	return false
}
