package group

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/pages"
	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/net/comm"
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
		return TreePlan{}, fmt.Errorf("%w: no tree of %d micro-batches with owner %d of %d ranks", comm.ErrUsage, micros, owner, len(nodes))
	}
	root := tree.Root(micros)
	covered := 0
	for rank, held := range nodes {
		for _, n := range held {
			if _, _, ok := n.Parent(root); !ok && n != root {
				return TreePlan{}, fmt.Errorf("%w: %v of rank %d is no node of %v", comm.ErrUsage, n, rank, root)
			}
			if _, twice := p.at[n]; twice {
				return TreePlan{}, fmt.Errorf("%w: %v is held twice", comm.ErrUsage, n)
			}
			p.at[n] = rank
			covered += n.Size()
		}
	}
	if !p.covers(root) || covered != micros {
		return TreePlan{}, fmt.Errorf("%w: the nodes of all ranks are not disjoint or do not cover %v", comm.ErrUsage, root)
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

// treePlans are the plans that reductions under one version of a group have used. The same few serve all shards, layers and
// steps, as long as ranks hold the same nodes.
type treePlans struct {
	mu     sync.Mutex
	micros int
	nodes  [][]tree.Node
	by     map[treeWay]TreePlan
}

// treeWay is what the plans for the same nodes differ in.
type treeWay struct{ owner, spread int }

// of returns [PlanTree] for each shard of a tree. The plans are read only.
func (c *treePlans) of(t Tree) ([]TreePlan, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.micros != t.Micros || !slices.EqualFunc(c.nodes, t.Nodes, slices.Equal) {
		c.micros, c.by = t.Micros, make(map[treeWay]TreePlan)
		c.nodes = make([][]tree.Node, len(t.Nodes))
		for rank, held := range t.Nodes {
			c.nodes[rank] = slices.Clone(held)
		}
	}
	all := make([]TreePlan, len(t.Shards))
	for i, s := range t.Shards {
		way := treeWay{s.Owner, i % 2}
		p, ok := c.by[way]
		if !ok {
			var err error
			if p, err = PlanTree(t.Micros, t.Nodes, way.owner, way.spread); err != nil {
				return nil, err
			}
			c.by[way] = p
		}
		all[i] = p
	}
	return all, nil
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
// but for those of its first unfinished piece. All members work on the pieces
// in one order, and every member expects all of its first unfinished one, so
// the window cannot make them wait for each other for ever.
const treeWindow = 2 << 20

// TreeReduce adds up the sums of all micro-batches in the order of package
// tree, so that the bits depend neither on which rank holds which node nor on
// the order of arrival. sum returns our sum of a node for a shard, Hi-Lo elements that
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
		return o.error(fmt.Errorf("%w: nodes of %d ranks for %d members", comm.ErrUsage, len(t.Nodes), o.n()))
	}
	for i, s := range t.Shards {
		if s.Lo < 0 || s.Hi < s.Lo || s.Owner < 0 || s.Owner >= o.n() {
			return o.error(fmt.Errorf("%w: shard %d is %+v", comm.ErrUsage, i, s))
		}
	}
	r := treeReduction{o: o, t: t, root: tree.Root(t.Micros), sum: sum, out: out, done: done}
	r.left = make([]int, len(t.Shards))
	plans, err := o.ed.trees.of(t)
	if err != nil {
		return o.error(err)
	}
	for i, s := range t.Shards {
		for _, s := range split(s.Hi-s.Lo, g.scope.Config().Segment/4) {
			r.pieces = append(r.pieces, treePiece{shard: i, span: s, plan: plans[i]})
			r.left[i]++
		}
	}
	return o.finish(r.run())
}

// treeReduction is the work of one member. It cuts shards into pieces, each
// with a tree of its own.
type treeReduction struct {
	o       *operation
	t       Tree
	root    tree.Node
	sum     func(int, tree.Node) []float32
	out     func(int) []float32
	done    func(int)
	pieces  []treePiece
	left    []int // by shard, pieces without their total
	arrived chan arrival
	free    [][]float32 // scratch that is not in use
}

// treePiece is a segment of a shard, and what we hold of it.
type treePiece struct {
	shard int
	span
	plan   TreePlan
	held   map[tree.Node]value
	to     map[tree.Node]int // where a node goes
	coming int               // sums still to come
}

// value is a sum; own says that its memory may be overwritten.
type value struct {
	data []float32
	own  bool
}

// arrival is a sum that came for a piece.
type arrival struct {
	piece int
	node  tree.Node
	r     *comm.Receiving
	data  []float32
}

func (r *treeReduction) run() error {
	o := r.o
	total := 0
	for i := range r.pieces {
		p := &r.pieces[i]
		p.held, p.to = make(map[tree.Node]value), make(map[tree.Node]int)
		for _, m := range p.plan.Moves {
			if m.From == o.rank() {
				p.to[m.Node] = m.To
			}
			if m.To == o.rank() {
				p.coming++
				total++
			}
		}
	}
	r.arrived = make(chan arrival, total) // never blocks the endpoint
	next, open := 0, 0
	expect := func() {
		for ; next < len(r.pieces); next++ {
			p := &r.pieces[next]
			size := 4 * (p.hi - p.lo) * p.coming
			if open > 0 && open+size > treeWindow {
				return
			}
			open += size
			for _, m := range p.plan.Moves {
				if m.To != o.rank() {
					continue
				}
				a := arrival{piece: next, node: m.Node, data: r.scratch(p.hi - p.lo)}
				a.r = o.receive(r.o.key(next, m.Node), comm.Bytes(a.data))
				a.r.OnDone(func() { r.arrived <- a })
			}
		}
	}
	expect()
	for i := range r.pieces {
		p := &r.pieces[i]
		for _, n := range r.t.Nodes[o.rank()] {
			v := r.sum(p.shard, n)
			if s := r.t.Shards[p.shard]; len(v) != s.Hi-s.Lo {
				return fmt.Errorf("%w: the sum of %v for shard %d has %d elements", comm.ErrUsage, n, p.shard, len(v))
			}
			if err := r.add(i, n, value{data: v[p.lo:p.hi]}); err != nil {
				return err
			}
		}
	}
	for range total {
		select {
		case a := <-r.arrived:
			if err := o.filled(a.r); err != nil {
				return err
			}
			if err := r.add(a.piece, a.node, value{a.data, true}); err != nil {
				return err
			}
			open -= 4 * len(a.data)
			p := &r.pieces[a.piece]
			if p.coming--; p.coming == 0 {
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

// scratch returns memory for a sum.
func (r *treeReduction) scratch(n int) []float32 {
	if last := len(r.free) - 1; last >= 0 {
		x := r.free[last]
		r.free = r.free[:last]
		return x[:n]
	}
	return r.o.scratch(n)
}

// place returns where the total of a piece goes.
func (r *treeReduction) place(p *treePiece) ([]float32, error) {
	s, dst := r.t.Shards[p.shard], r.out(p.shard)
	if len(dst) != s.Hi-s.Lo {
		return nil, fmt.Errorf("%w: the place for shard %d has %d elements", comm.ErrUsage, p.shard, len(dst))
	}
	return dst[p.lo:p.hi], nil
}

// add takes a node's sum and merges, sends, or ends what is complete.
func (r *treeReduction) add(piece int, n tree.Node, v value) (err error) {
	p := &r.pieces[piece]
	for {
		if to, moves := p.to[n]; moves { // of the root, if it was made elsewhere than at its owner
			r.o.post(to, r.o.key(piece, n), comm.Bytes(v.data))
			return nil
		}
		if n == r.root {
			break
		}
		parent, sibling, _ := n.Parent(r.root)
		other, have := p.held[sibling]
		if !have {
			p.held[n] = v
			return nil
		}
		delete(p.held, sibling)
		left, right := v, other
		if sibling.Lo < n.Lo {
			left, right = other, v
		}
		var dst []float32
		switch {
		case parent == r.root && p.plan.Owner == r.o.rank():
			if dst, err = r.place(p); err != nil {
				return err
			}
		case left.own:
			dst = left.data
		case right.own:
			dst = right.data
		default:
			dst = r.scratch(len(v.data))
		}
		kernel.Add(dst, left.data, right.data)
		for _, used := range []value{left, right} {
			if used.own && !overlap(used.data, dst) {
				r.free = append(r.free, used.data)
			}
		}
		n, v = parent, value{dst, true}
	}
	dst, err := r.place(p)
	if err != nil {
		return err
	}
	if !overlap(dst, v.data) {
		pages.Copy(dst, v.data)
	}
	if r.left[p.shard]--; r.left[p.shard] == 0 && r.done != nil {
		r.done(p.shard)
	}
	return nil
}

// overlap reports whether two slices of one length are the same memory.
func overlap(a, b []float32) bool { return len(a) > 0 && &a[0] == &b[0] }
