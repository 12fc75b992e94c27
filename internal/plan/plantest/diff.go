package plantest

import (
	"cmp"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

func link(a, b id.WorkerID) plan.Link { return plan.Link{A: min(a, b), B: max(a, b)} }

// Reroute is a pair that another worker gets.
type Reroute struct {
	graph.Pair
	From, To id.WorkerID
}

// Gather is a layer whose parameters a worker needs and did not hold under the old plan.
type Gather struct {
	Layer  int
	Worker id.WorkerID
}

// Change lists the differences between two plans. Every list is sorted.
type Change struct {
	Joined, Left []id.WorkerID // by session: a new incarnation does both

	Open    []plan.Link     // needed now and not before
	Promote []plan.Transfer // a mirror of the range becomes its owner
	Move    []plan.Transfer // an owner that was no holder gets parameters and moments
	Mirror  []plan.Transfer // a mirror that was no holder gets them
	Reroute []Reroute
	Gather  []Gather
	Limits  []plan.Limit // to set
}

// Diff returns what has to happen so that workers that run under the old plan
// can run under the new one. With the zero Plan as the old one it is all that
// has to happen at the start, where From is -1.
func Diff(old, p *plan.Plan) Change {
	var c Change
	same := make(map[id.WorkerID]bool) // sessions in both plans
	for _, w := range p.Workers {
		if was, ok := old.Worker(w.ID); ok && was.Incarnation == w.Incarnation {
			same[w.ID] = true
		} else {
			c.Joined = append(c.Joined, w.ID)
		}
	}
	for _, w := range old.Workers {
		if !same[w.ID] {
			c.Left = append(c.Left, w.ID)
		}
	}
	had := make(map[plan.Link]bool)
	for _, l := range Links(old) {
		had[l] = same[l.A] && same[l.B]
	}
	for _, l := range Links(p) {
		if !had[l] {
			c.Open = append(c.Open, l)
		}
	}
	c.diffShards(old, p, same)
	for s, route := range p.Route {
		for m, to := range route {
			from := id.WorkerID(-1)
			if s < len(old.Route) && m < len(old.Route[s]) {
				from = old.Route[s][m]
			}
			if from != to || !same[to] {
				c.Reroute = append(c.Reroute, Reroute{graph.Pair{Stage: s, Micro: m}, from, to})
			}
		}
	}
	held := make(map[Gather]bool)
	for _, g := range parameters(old) {
		held[g] = same[g.Worker]
	}
	for _, g := range parameters(p) {
		if !held[g] {
			c.Gather = append(c.Gather, g)
		}
	}
	for _, l := range p.Limits {
		if !same[l.Worker] || !slices.Contains(old.Limits, l) {
			c.Limits = append(c.Limits, l)
		}
	}
	return c
}

// Links returns all links that the plan needs, sorted: between workers of neighbouring stages
// with a common micro-batch, between all workers of a stage and the
// owners of its shards, and between owners and their mirrors.
func Links(p *plan.Plan) []plan.Link {
	set := make(map[plan.Link]bool)
	add := func(a, b id.WorkerID) {
		if a != b {
			set[link(a, b)] = true
		}
	}
	for s := 1; s < len(p.Route); s++ {
		for m, w := range p.Route[s] {
			add(p.Route[s-1][m], w)
		}
	}
	owners := make([]map[id.WorkerID]bool, len(p.Stages))
	mirrors := make(map[plan.Link]bool)
	for _, sh := range p.Shards {
		if s := p.StageOf(sh.Layer); s >= 0 {
			if owners[s] == nil {
				owners[s] = make(map[id.WorkerID]bool)
			}
			owners[s][sh.Owner] = true
		}
		for _, m := range sh.Mirrors {
			mirrors[link(sh.Owner, m)] = true
		}
	}
	for l := range mirrors {
		add(l.A, l.B)
	}
	for s, st := range p.Stages {
		for o := range owners[s] {
			for _, w := range st.Workers {
				add(o, w)
			}
		}
	}
	links := make([]plan.Link, 0, len(set))
	for l := range set {
		links = append(links, l)
	}
	slices.SortFunc(links, func(a, b plan.Link) int { return cmp.Or(cmp.Compare(a.A, b.A), cmp.Compare(a.B, b.B)) })
	return links
}

// parameters returns the layers whose parameters each worker holds, sorted by layer.
func parameters(p *plan.Plan) []Gather {
	var all []Gather
	for _, s := range p.Stages {
		for l := s.Lo; l < s.Hi; l++ {
			for _, w := range s.Workers {
				all = append(all, Gather{l, w})
			}
		}
	}
	return all
}

// diffShards compares the holders of every range. Borders may differ: ranges
// are cut where either plan has a border.
func (c *Change) diffShards(old, p *plan.Plan, same map[id.WorkerID]bool) {
	i := 0
	for _, s := range p.Shards {
		for i < len(old.Shards) && before(old.Shards[i], s) {
			i++
		}
		at := s.Lo
		for j := i; at < s.Hi; j++ {
			if j == len(old.Shards) || old.Shards[j].Layer != s.Layer || old.Shards[j].Lo >= s.Hi {
				c.holders(id.Range{Layer: s.Layer, Lo: at, Hi: s.Hi}, plan.Shard{Owner: -1}, s, same)
				break
			}
			was := old.Shards[j]
			if was.Lo > at {
				c.holders(id.Range{Layer: s.Layer, Lo: at, Hi: was.Lo}, plan.Shard{Owner: -1}, s, same)
			}
			c.holders(id.Range{Layer: s.Layer, Lo: max(at, was.Lo), Hi: min(s.Hi, was.Hi)}, was, s, same)
			at = min(s.Hi, was.Hi)
		}
	}
}

// before reports whether shard a ends before shard b begins.
func before(a, b plan.Shard) bool {
	return a.Layer < b.Layer || a.Layer == b.Layer && a.Hi <= b.Lo
}

func (c *Change) holders(r id.Range, was, is plan.Shard, same map[id.WorkerID]bool) {
	mirrored := func(w id.WorkerID) bool { return same[w] && slices.Contains(was.Mirrors, w) }
	owned := func(w id.WorkerID) bool { return same[w] && was.Owner == w }
	t := plan.Transfer{Range: r, From: was.Owner, To: is.Owner}
	switch {
	case owned(is.Owner):
	case mirrored(is.Owner):
		c.Promote = append(c.Promote, t)
	default:
		c.Move = append(c.Move, t)
	}
	for _, m := range is.Mirrors {
		if !owned(m) && !mirrored(m) {
			c.Mirror = append(c.Mirror, plan.Transfer{Range: r, From: was.Owner, To: m})
		}
	}
}
