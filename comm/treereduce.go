package comm

import (
	"context"
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/kernel"
	"github.com/soliton-train/soliton/internal/tree"
)

// Move is a node's sum on its way from one rank to another.
type Move struct {
	Node     tree.Node
	From, To int
}

// TreePlan says how the sums of one range come to its owner: every move, so
// that what a rank holds and receives merges, by the rules of package tree,
// into what it sends or, at the owner, into the root. A rank sends a node as
// soon as it has it.
type TreePlan struct {
	Owner int
	Moves []Move // in the order of their nodes; a node moves at most once
}

// PlanTree plans the reduction of the sums of micros micro-batches to an
// owner. nodes lists, by rank, the nodes whose sums that rank holds: disjoint
// nodes of the tree that together cover all micro-batches. Among all ways to
// place the additions on ranks that hold a part of them or on the owner, it
// takes one with the fewest messages, hence bytes; among those, one that adds
// at the owner, which saves waiting, else spread finishes the straddling nodes
// of different ranges on different neighbours.
func PlanTree(micros int, nodes [][]tree.Node, owner, spread int) (TreePlan, error) {
	p := treePlanner{owner: owner, spread: spread, at: make(map[tree.Node]int)}
	if micros < 1 || owner < 0 || owner >= len(nodes) {
		return TreePlan{}, fmt.Errorf("%w: no tree of %d micro-batches with owner %d of %d ranks", ErrUsage, micros, owner, len(nodes))
	}
	root := tree.Root(micros)
	covered := 0
	for rank, held := range nodes {
		for _, n := range held {
			if _, _, ok := n.Parent(root); !ok && n != root {
				return TreePlan{}, fmt.Errorf("%w: %v of rank %d is no node of %v", ErrUsage, n, rank, root)
			}
			if _, twice := p.at[n]; twice {
				return TreePlan{}, fmt.Errorf("%w: %v is held twice", ErrUsage, n)
			}
			p.at[n] = rank
			covered += n.Size()
		}
	}
	if !p.covers(root) || covered != micros {
		return TreePlan{}, fmt.Errorf("%w: the nodes of all ranks are not disjoint or do not cover %v", ErrUsage, root)
	}
	c := p.cost(root)
	p.place(root, c, owner)
	slices.SortFunc(p.moves, func(a, b Move) int {
		if a.Node.Lo != b.Node.Lo {
			return a.Node.Lo - b.Node.Lo
		}
		return a.Node.Hi - b.Node.Hi
	})
	return TreePlan{owner, p.moves}, nil
}

type treePlanner struct {
	owner, spread int
	at            map[tree.Node]int
	moves         []Move
}

// covers reports whether the held nodes cover n, each once.
func (p *treePlanner) covers(n tree.Node) bool {
	if _, ok := p.at[n]; ok {
		return true
	}
	if n.Size() < 2 {
		return false
	}
	l, r := n.Split()
	return p.covers(l) && p.covers(r)
}

// treeCost is the fewest messages after which a node's sum is made on a rank.
type treeCost struct {
	made        map[int]int // by rank, the candidates
	least       int
	left, right *treeCost
}

// on is the fewest messages after which the sum is there, made or sent.
func (c *treeCost) on(rank int) int {
	if made, ok := c.made[rank]; ok {
		return min(made, c.least+1)
	}
	return c.least + 1
}

func (p *treePlanner) cost(n tree.Node) *treeCost {
	if rank, held := p.at[n]; held {
		return &treeCost{made: map[int]int{rank: 0}}
	}
	l, r := n.Split()
	c := &treeCost{made: make(map[int]int), left: p.cost(l), right: p.cost(r)}
	candidate := func(rank int) { c.made[rank] = c.left.on(rank) + c.right.on(rank) }
	candidate(p.owner)
	for rank := range c.left.made {
		candidate(rank)
	}
	for rank := range c.right.made {
		candidate(rank)
	}
	c.least = c.made[p.owner]
	for _, made := range c.made {
		c.least = min(c.least, made)
	}
	return c
}

// place brings the node to a rank.
func (p *treePlanner) place(n tree.Node, c *treeCost, rank int) {
	from := rank
	if made, ok := c.made[rank]; !ok || made > c.least+1 || made == c.least+1 && rank != p.owner {
		var best []int
		for r, made := range c.made {
			if made == c.least {
				best = append(best, r)
			}
		}
		slices.Sort(best)
		from = best[mod(p.spread, len(best))]
		p.moves = append(p.moves, Move{n, from, rank})
	}
	if c.left != nil {
		l, r := n.Split()
		p.place(l, c.left, from)
		p.place(r, c.right, from)
	}
}

// TreeShard is a range of one layer's parameters and the rank that owns it.
type TreeShard struct {
	Layer  int
	Lo, Hi int // elements of the layer
	Owner  int
}

// Tree describes a canonical reduction: all members give the same.
type Tree struct {
	Micros int           // micro-batches of the step
	Nodes  [][]tree.Node // by rank, the nodes whose sums it holds; see [PlanTree]
	Shards []TreeShard
}

// treeWindow bounds the bytes of sums that a member expects at the same time,
// but for those of its first unfinished shard.
const treeWindow = 16 << 20

// TreeReduce adds up the sums of all micro-batches in the order of package
// tree, so that the bits depend neither on who holds which node nor on what
// arrives when. sum returns our sum of a node for a shard, Hi-Lo elements that
// are read until TreeReduce returns; out returns the place, which sum's memory
// must not overlap, for the total of a shard that we own.
//
// Shards are worked on side by side, in the order of their list; out is
// complete for a shard once done, if it is not nil, was called with it.
func (g *Group) TreeReduce(ctx context.Context, call Call, t Tree, sum func(shard int, n tree.Node) []float32, out func(shard int) []float32, done func(shard int)) error {
	o, err := g.begin(ctx, OpTreeReduce, call)
	if err != nil {
		return err
	}
	if len(t.Nodes) != o.n() {
		return o.error(fmt.Errorf("%w: nodes of %d ranks for %d members", ErrUsage, len(t.Nodes), o.n()))
	}
	for i, s := range t.Shards {
		if s.Lo < 0 || s.Hi < s.Lo || s.Owner < 0 || s.Owner >= o.n() {
			return o.error(fmt.Errorf("%w: shard %d is %+v", ErrUsage, i, s))
		}
	}
	r := treeReduction{o: o, t: t, root: tree.Root(t.Micros), sum: sum, out: out, done: done}
	plans := make(map[[2]int]TreePlan)
	for i, s := range t.Shards {
		// The same few plans serve all shards.
		spread := i % 2
		p, ok := plans[[2]int{s.Owner, spread}]
		if !ok {
			if p, err = PlanTree(t.Micros, t.Nodes, s.Owner, spread); err != nil {
				return o.error(err)
			}
			plans[[2]int{s.Owner, spread}] = p
		}
		r.plans = append(r.plans, p)
	}
	return o.finish(r.run())
}

type treeReduction struct {
	o       *operation
	t       Tree
	root    tree.Node
	plans   []TreePlan
	sum     func(int, tree.Node) []float32
	out     func(int) []float32
	done    func(int)
	arrived chan arrival
	free    [][]float32 // scratch for sums that come
}

type arrival struct {
	shard int
	move  Move
	r     *Receiving
	data  []float32
}

// value is a sum; own says that its memory may be overwritten.
type value struct {
	data []float32
	own  bool
}

// shardSums is what we hold of a shard.
type shardSums struct {
	held map[tree.Node]value
	to   map[tree.Node]int // where a node goes
	left int               // sums still to come
}

func (r *treeReduction) run() error {
	o := r.o
	sums := make([]*shardSums, len(r.t.Shards))
	incoming := make([][]Move, len(sums))
	var coming int
	for i, p := range r.plans {
		sums[i] = &shardSums{held: make(map[tree.Node]value), to: make(map[tree.Node]int)}
		for _, m := range p.Moves {
			if m.From == o.rank() {
				sums[i].to[m.Node] = m.To
			}
			if m.To == o.rank() {
				incoming[i] = append(incoming[i], m)
				coming++
			}
		}
		sums[i].left = len(incoming[i])
	}
	r.arrived = make(chan arrival, coming) // never blocks the endpoint
	next, open := 0, 0
	expect := func() {
		for ; next < len(sums); next++ {
			size := 4 * (r.t.Shards[next].Hi - r.t.Shards[next].Lo) * len(incoming[next])
			if open > 0 && open+size > treeWindow {
				return
			}
			open += size
			for _, m := range incoming[next] {
				a := arrival{shard: next, move: m, data: r.scratch(r.t.Shards[next].Hi - r.t.Shards[next].Lo)}
				a.r = o.receive(r.key(next, m.Node), Bytes(a.data))
				a.r.OnDone(func() { r.arrived <- a })
			}
		}
	}
	expect()
	for i := range sums {
		for _, n := range r.t.Nodes[o.rank()] {
			v := r.sum(i, n)
			if len(v) != r.t.Shards[i].Hi-r.t.Shards[i].Lo {
				return fmt.Errorf("%w: the sum of %v for shard %d has %d elements", ErrUsage, n, i, len(v))
			}
			if err := r.add(sums[i], i, n, value{data: v}); err != nil {
				return err
			}
		}
	}
	for range coming {
		select {
		case a := <-r.arrived:
			if err := o.received(a.r); err != nil {
				return err
			}
			s := sums[a.shard]
			if err := r.add(s, a.shard, a.move.Node, value{a.data, true}); err != nil {
				return err
			}
			open -= 4 * len(a.data)
			if s.left--; s.left == 0 {
				expect()
			}
		case <-o.ed.ended:
			return o.ed.err
		case <-o.ctx.Done():
			return o.ctx.Err()
		}
	}
	return nil
}

func (r *treeReduction) key(shard int, n tree.Node) Key {
	o := r.o
	return opKey(o.g.id, o.call.Version, o.op, o.call.Step, o.call.Tag, shard, n)
}

// scratch returns memory for a sum.
func (r *treeReduction) scratch(n int) []float32 {
	for i, have := range r.free {
		if cap(have) >= n {
			r.free = slices.Delete(r.free, i, i+1)
			return have[:n]
		}
	}
	return make([]float32, n)
}

// add takes a node's sum and merges, sends, or ends what is complete.
func (r *treeReduction) add(s *shardSums, shard int, n tree.Node, v value) error {
	for {
		if to, moves := s.to[n]; moves {
			r.o.post(to, r.key(shard, n), Bytes(v.data))
			return nil
		}
		parent, sibling, ok := n.Parent(r.root)
		if !ok {
			break
		}
		other, have := s.held[sibling]
		if !have {
			s.held[n] = v
			return nil
		}
		delete(s.held, sibling)
		left, right := v, other
		if sibling.Lo < n.Lo {
			left, right = other, v
		}
		var dst []float32
		switch {
		case parent == r.root && r.t.Shards[shard].Owner == r.o.rank():
			dst = r.out(shard)
		case left.own:
			dst = left.data
		case right.own:
			dst = right.data
		default:
			dst = r.scratch(len(v.data))
		}
		if len(dst) != len(v.data) {
			return fmt.Errorf("%w: the place for shard %d has %d elements", ErrUsage, shard, len(dst))
		}
		kernel.Add(dst, left.data, right.data)
		for _, used := range []value{left, right} {
			if used.own && len(dst) > 0 && &used.data[0] != &dst[0] {
				r.free = append(r.free, used.data)
			}
		}
		n, v = parent, value{dst, true}
	}
	// The root.
	dst := r.out(shard)
	if len(dst) != len(v.data) {
		return fmt.Errorf("%w: the place for shard %d has %d elements", ErrUsage, shard, len(dst))
	}
	if len(dst) > 0 && &dst[0] != &v.data[0] {
		copy(dst, v.data)
	}
	if r.done != nil {
		r.done(shard)
	}
	return nil
}
