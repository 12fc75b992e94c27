package planner_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/plan/planner/plannertest"
	"github.com/soliton-train/soliton/internal/plan/plantest"
	"pgregory.net/rapid"
)

// cluster executes one step the way workers do, with every order of events
// that the network and the machines may bring about: tasks take any time,
// messages overtake each other, workers die at any moment, and survivors apply
// a new plan one after the other.
type cluster struct {
	rand   *rand.Rand
	plan   plan.Plan
	layers []plan.Layer
	step   int
	nodes  map[id.WorkerID]*node
	wire   []message
	ran    map[graph.Pair]int // forward passes begun
	died   map[graph.Pair]int // times a pair's worker died
	fault  string
}

// node is a worker. What it made it keeps until the commit.
type node struct {
	id      id.WorkerID
	q       *graph.Queue
	plan    *plan.Plan // that it has applied
	sealed  bool
	running []graph.Task
	early   map[graph.Task]bool // arrived for pairs that are not here (yet)
	made    map[graph.Task]bool // boundary tensors, by the task that made them
	sent    map[sum]bool
	holds   map[int]*holding // by shard
}

type sum struct {
	stage int
	tree.Node
}

// holding is the gradient of a shard at its owner or at a mirror.
type holding struct {
	sums   *tree.Sums[[]int]
	leaves map[int]bool
	nodes  []tree.Node // all that came
}

// message is a boundary tensor (task is what it lets begin) or a node of the
// gradient of a shard.
type message struct {
	from, to id.WorkerID
	task     graph.Task
	shard    int
	node     tree.Node
}

func newCluster(r *rand.Rand, p plan.Plan, layers []plan.Layer) *cluster {
	c := &cluster{rand: r, plan: p, layers: layers, step: p.FromStep, nodes: map[id.WorkerID]*node{},
		ran: map[graph.Pair]int{}, died: map[graph.Pair]int{}}
	for _, w := range p.Workers {
		c.nodes[w.ID] = &node{id: w.ID, q: graph.NewQueue(len(p.Stages), 1), early: map[graph.Task]bool{},
			made: map[graph.Task]bool{}, sent: map[sum]bool{}, holds: map[int]*holding{}}
	}
	for _, n := range c.inOrder() {
		c.apply(n)
	}
	return c
}

func (c *cluster) inOrder() []*node {
	var all []*node
	for _, n := range c.nodes {
		all = append(all, n)
	}
	slices.SortFunc(all, func(a, b *node) int { return int(a.id - b.id) })
	return all
}

func (c *cluster) failf(format string, args ...any) {
	if c.fault == "" {
		c.fault = fmt.Sprintf(format, args...)
	}
}

// apply lets a worker go on under the newest plan, and sends again what
// others may miss.
func (c *cluster) apply(n *node) {
	p := &c.plan
	n.q.Rank(p.Ranks(c.step))
	for _, s := range n.q.Statuses() {
		if p.Route[s.Stage][s.Micro] != n.id && !n.q.Withdraw(s.Pair) {
			c.failf("worker %d has begun %v, which goes to another worker", n.id, s.Pair)
		}
	}
	for s, route := range p.Route {
		if l := p.Limit(s, n.id).Forwards; l > 0 {
			n.q.SetLimit(s, l, p.Limit(s, n.id).Lead)
		}
		for m, w := range route {
			pair := graph.Pair{Stage: s, Micro: m}
			if w != n.id || !p.Runs(pair, c.step) {
				continue
			}
			n.q.Assign(pair)
			if s == 0 {
				n.q.Arrive(graph.ForwardOf(pair))
			}
			for _, t := range []graph.Task{graph.ForwardOf(pair), graph.BackwardOf(pair)} {
				if n.early[t] {
					n.q.Arrive(t)
				}
			}
		}
	}
	n.plan, n.sealed = p, false
	for t := range n.made {
		c.hand(n, t)
	}
	var owned, mirrored []int
	for i, s := range p.Shards {
		if s.Owner == n.id {
			owned = append(owned, i)
		} else if s.Holds(n.id) {
			mirrored = append(mirrored, i)
		}
	}
	for _, i := range append(owned, mirrored...) {
		if n.holds[i] == nil {
			n.holds[i] = &holding{tree.NewSums(p.Micros(), func(a, b []int) []int { return append(slices.Clone(a), b...) }), map[int]bool{}, nil}
		}
	}
	for _, i := range owned {
		for _, nd := range n.holds[i].nodes {
			c.forward(n, i, nd)
		}
	}
	clear(n.sent)
	c.sums(n)
}

// hand sends what a task made to whom the worker's plan says.
func (c *cluster) hand(n *node, t graph.Task) {
	next := t
	if t.Kind == graph.Forward {
		next.Stage++
	} else {
		next.Stage--
	}
	if next.Stage >= 0 && next.Stage < len(n.plan.Route) {
		c.wire = append(c.wire, message{from: n.id, to: n.plan.Route[next.Stage][next.Micro], task: next, shard: -1})
	}
}

// sums sends the gradients of nodes that are complete.
func (c *cluster) sums(n *node) {
	for s, st := range n.plan.Stages {
		for _, nd := range n.plan.Nodes(s, n.id, c.step) {
			complete := true
			for m := nd.Lo; m < nd.Hi; m++ {
				complete = complete && n.q.Status(graph.Pair{Stage: s, Micro: m}).Phase == graph.Finished
			}
			if !complete || n.sent[sum{s, nd}] {
				continue
			}
			n.sent[sum{s, nd}] = true
			for i, sh := range n.plan.Shards {
				if st.Lo <= sh.Layer && sh.Layer < st.Hi {
					c.wire = append(c.wire, message{from: n.id, to: sh.Owner, shard: i, node: nd})
				}
			}
		}
	}
}

// Forward sends a node of a shard's gradient from its owner to its mirrors.
func (c *cluster) forward(n *node, shard int, nd tree.Node) {
	for _, m := range n.plan.Shards[shard].Mirrors {
		c.wire = append(c.wire, message{from: n.id, to: m, shard: shard, node: nd})
	}
}

func (c *cluster) deliver(i int) {
	m := c.wire[i]
	c.wire = slices.Delete(c.wire, i, i+1)
	n := c.nodes[m.to]
	if n == nil {
		return // to the dead
	}
	if m.shard < 0 {
		n.early[m.task] = true
		n.q.Arrive(m.task)
		return
	}
	h := n.holds[m.shard]
	if h == nil {
		h = &holding{tree.NewSums(c.plan.Micros(), func(a, b []int) []int { return append(slices.Clone(a), b...) }), map[int]bool{}, nil}
		n.holds[m.shard] = h
	}
	var leaves []int
	for l := m.node.Lo; l < m.node.Hi; l++ {
		leaves = append(leaves, l)
		h.leaves[l] = true
	}
	h.sums.Put(m.node, leaves)
	h.nodes = append(h.nodes, m.node)
	if n.plan.Shards[m.shard].Owner == n.id {
		c.forward(n, m.shard, m.node)
	}
}

func (c *cluster) done(n *node, i int) {
	t := n.running[i]
	n.running = slices.Delete(n.running, i, i+1)
	n.q.Done(t)
	n.made[t] = true
	if n.sealed {
		// What it made goes out when the new plan says where to.
		if t.Kind == graph.Forward && t.Stage == len(c.plan.Stages)-1 {
			n.q.Arrive(graph.BackwardOf(t.Pair))
		}
		return
	}
	c.hand(n, t)
	if t.Kind == graph.Forward && t.Stage == len(c.plan.Stages)-1 {
		n.q.Arrive(graph.BackwardOf(t.Pair))
	}
	if t.Kind == graph.Backward {
		c.sums(n)
	}
}

// settled returns the pairs whose gradients all living holders have. Losses
// are only with the worker that ran the last stage.
func (c *cluster) settled() (pairs []graph.Pair) {
	for s, st := range c.plan.Stages[:len(c.plan.Stages)-1] {
		for m := range c.plan.Route[s] {
			all := true
			for i, sh := range c.plan.Shards {
				if sh.Layer < st.Lo || sh.Layer >= st.Hi {
					continue
				}
				for _, w := range append([]id.WorkerID{sh.Owner}, sh.Mirrors...) {
					if n := c.nodes[w]; n != nil && (n.holds[i] == nil || !n.holds[i].leaves[m]) {
						all = false
					}
				}
			}
			if all {
				pairs = append(pairs, graph.Pair{Stage: s, Micro: m})
			}
		}
	}
	return pairs
}

// whole returns the holders of whole gradients of shards.
func (c *cluster) whole() (list []plan.Complete) {
	for _, n := range c.inOrder() {
		for i := range c.plan.Shards {
			if h := n.holds[i]; h != nil {
				if _, ok := h.sums.Total(); ok {
					list = append(list, plan.Complete{Shard: i, Worker: n.id})
				}
			}
		}
	}
	return list
}

// kill takes workers away and makes the plan after it. ok is false if the
// step is lost.
func (c *cluster) kill(dead []id.WorkerID) (ok bool, err error) {
	for _, id := range dead {
		for s, route := range c.plan.Route {
			for m, w := range route {
				if w == id {
					c.died[graph.Pair{Stage: s, Micro: m}]++
				}
			}
		}
		delete(c.nodes, id)
	}
	c.wire = slices.DeleteFunc(c.wire, func(m message) bool { return slices.Contains(dead, m.from) })
	v := plan.View{Step: c.step}
	if c.rand.IntN(3) > 0 {
		v.Settled = c.settled()
	}
	if c.rand.IntN(3) > 0 {
		v.Complete = c.whole()
	}
	for _, w := range c.plan.Workers {
		if n := c.nodes[w.ID]; n != nil {
			v.Workers = append(v.Workers, w)
			n.sealed = true
			for _, s := range n.q.Statuses() {
				v.Works = append(v.Works, plan.Work{Worker: n.id, Status: s})
			}
		}
	}
	old := c.plan
	p, _, err := planner.Next(old, v, plan.Profile{Layers: c.layers}, planner.Event{Kind: planner.Lost})
	if lost := new(planner.LostError); errors.As(err, &lost) {
		held := func(w id.WorkerID) bool { return c.nodes[w] != nil }
		if held(lost.Shard.Owner) || slices.ContainsFunc(lost.Shard.Mirrors, held) {
			return false, fmt.Errorf("a holder lives: %w", err)
		}
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if err := c.spared(&old, &p, &v); err != nil {
		return false, err
	}
	c.shuffle(&p)
	if err := p.Validate(c.layers); err != nil {
		return false, err
	}
	if err := plantest.ValidateAfter(&p, &old); err != nil {
		return false, err
	}
	for s, route := range p.Route {
		for m := range route {
			pair := graph.Pair{Stage: s, Micro: m}
			if !p.Runs(pair, c.step) {
				c.died[pair]++ // it may have to run again later
			}
		}
	}
	c.plan = p
	return true, nil
}

// spared checks that a holder of the whole gradient is promoted, and that a
// pair of a stage whose owners have it runs again only if a worker needs it.
func (c *cluster) spared(old, p *plan.Plan, v *plan.View) error {
	has := map[plan.Complete]bool{}
	for _, w := range v.Complete {
		has[w] = true
	}
	for s, st := range p.Stages[:len(p.Stages)-1] {
		whole := true
		for i, sh := range p.Shards {
			if sh.Layer < st.Lo || sh.Layer >= st.Hi {
				continue
			}
			if !has[plan.Complete{Shard: i, Worker: sh.Owner}] {
				whole = false
				for _, m := range sh.Mirrors {
					if has[plan.Complete{Shard: i, Worker: m}] && old.Shards[i].Owner != sh.Owner {
						return fmt.Errorf("worker %d owns shard %d, whose gradient worker %d has", sh.Owner, i, m)
					}
				}
			}
		}
		if !whole {
			continue
		}
		for m, w := range old.Route[s] {
			pair := graph.Pair{Stage: s, Micro: m}
			if c.nodes[w] != nil && old.Runs(pair, c.step) || !p.Runs(pair, c.step) {
				continue
			}
			// It runs again: then a neighbour does, or waits for it.
			needed := false
			for _, o := range []int{s - 1, s + 1} {
				if o < 0 || o >= len(p.Stages) {
					continue
				}
				next := graph.Pair{Stage: o, Micro: m}
				n := c.nodes[old.Route[o][m]]
				if !p.Runs(next, c.step) {
					continue
				}
				st := graph.Status{}
				if n != nil && old.Runs(next, c.step) {
					st = n.q.Status(next)
				}
				needed = needed || o > s && !st.Begun() && !st.Input || o < s && st.Phase < graph.Backing && !st.Gradient
			}
			if !needed {
				return fmt.Errorf("%v runs again, and no worker needs it", pair)
			}
		}
	}
	return nil
}

// shuffle routes some of what has not begun elsewhere.
func (c *cluster) shuffle(p *plan.Plan) {
	for s, route := range p.Route {
		for m, w := range route {
			pair := graph.Pair{Stage: s, Micro: m}
			if c.rand.IntN(4) > 0 || !p.Runs(pair, c.step) || c.nodes[w].q.Status(pair).Begun() {
				continue
			}
			route[m] = p.Stages[s].Workers[c.rand.IntN(len(p.Stages[s].Workers))]
		}
		p.Buffers = max(p.Buffers, p.MostSums(s))
	}
}

// Run plays the step to its end, with a number of losses on the way.
func (c *cluster) run(losses int) error {
	for c.fault == "" {
		type action func()
		var actions []action
		if len(c.wire) > 0 {
			actions = append(actions, func() { c.deliver(c.rand.IntN(len(c.wire))) })
		}
		for _, n := range c.inOrder() {
			if n.sealed {
				actions = append(actions, func() { c.apply(n) })
			}
			if len(n.running) > 0 {
				actions = append(actions, func() { c.done(n, c.rand.IntN(len(n.running))) })
			} else if !n.sealed {
				actions = append(actions, func() {
					if t, ok := n.q.Next(); ok {
						n.running = append(n.running, t)
						if t.Kind == graph.Forward {
							c.ran[t.Pair]++
						}
					}
				})
			}
		}
		idle := c.idle()
		canLose := losses > 0 && len(c.nodes) > 1
		if idle && (!canLose || c.rand.IntN(2) == 0) {
			return c.complete()
		}
		if idle || canLose && c.rand.IntN(60) == 0 {
			losses--
			var dead []id.WorkerID
			all := c.inOrder()
			for range 1 + c.rand.IntN(2) {
				if id := all[c.rand.IntN(len(all))].id; len(all)-len(dead) > 1 && !slices.Contains(dead, id) {
					dead = append(dead, id)
				}
			}
			if ok, err := c.kill(dead); !ok || err != nil {
				return err
			}
			continue
		}
		actions[c.rand.IntN(len(actions))]()
	}
	return errors.New(c.fault)
}

// idle reports whether nothing happens any more: no message, no task that
// runs or can begin.
func (c *cluster) idle() bool {
	if len(c.wire) > 0 {
		return false
	}
	for _, n := range c.nodes {
		if n.sealed || len(n.running) > 0 {
			return false
		}
	}
	for _, n := range c.inOrder() {
		if t, ok := n.q.Next(); ok {
			n.running = append(n.running, t)
			if t.Kind == graph.Forward {
				c.ran[t.Pair]++
			}
			return false
		}
	}
	return true
}

// complete checks that all holders have all gradients, that all losses are
// there, and that nothing ran more often than workers died.
func (c *cluster) complete() error {
	last := len(c.plan.Stages) - 1
	for m := range c.plan.Micros() {
		if pair := (graph.Pair{Stage: last, Micro: m}); !c.plan.Runs(pair, c.step) {
			return fmt.Errorf("%v did not run again, and no worker has its loss", pair)
		}
	}
	for _, n := range c.inOrder() {
		if left := n.q.Left(); left > 0 {
			return fmt.Errorf("stuck: worker %d has %d left: %v", n.id, left, n.q.Statuses())
		}
	}
	for i, sh := range c.plan.Shards {
		for _, w := range append([]id.WorkerID{sh.Owner}, sh.Mirrors...) {
			total, ok := c.nodes[w].holds[i].sums.Total()
			if !ok || len(total) != c.plan.Micros() || !slices.IsSorted(total) {
				return fmt.Errorf("shard %d on worker %d has %v (%v)", i, w, total, ok)
			}
		}
	}
	for p, n := range c.ran {
		if n > 1+c.died[p] {
			return fmt.Errorf("%v ran %d times, and its worker died %d times", p, n, c.died[p])
		}
	}
	return nil
}

// TestEveryStepFinishes is the property of liveness: random plans, orders of
// events, losses and routes.
func TestEveryStepFinishes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		layers := rapid.IntRange(1, 6).Draw(t, "layers")
		n := rapid.IntRange(1, 8).Draw(t, "workers")
		stages := rapid.IntRange(1, min(4, layers, n)).Draw(t, "stages")
		micros := rapid.IntRange(1, 14).Draw(t, "micro-batches")
		prof := plan.Profile{Layers: plantest.Model(layers)}
		for i := range prof.Layers {
			prof.Layers[i].Forward *= time.Duration(1 + 3*rapid.IntRange(0, 3).Draw(t, "cost"))
		}
		ws := plantest.Workers(n, rapid.IntRange(1, 3).Draw(t, "per host"))
		p := plannertest.First(t, ws, prof, stages, micros, rapid.IntRange(0, 2).Draw(t, "mirrors"))
		losses := rapid.IntRange(0, 4).Draw(t, "losses")
		seed := rapid.Uint64().Draw(t, "seed")
		r := rand.New(rand.NewPCG(seed, 0))
		if rapid.Bool().Draw(t, "any route") {
			for s, route := range p.Route {
				for m := range route {
					route[m] = p.Stages[s].Workers[r.IntN(len(p.Stages[s].Workers))]
				}
			}
			for i, l := range p.Limits {
				p.Limits[i].Forwards = stages - l.Stage + r.IntN(2)
			}
			p.Buffers = micros
		}
		for i := range uint64(8) {
			c := newCluster(rand.New(rand.NewPCG(seed, 1+i)), p, prof.Layers)
			if err := c.run(losses); err != nil {
				t.Fatalf("order %d: %v\n%v", i, err, &p)
			}
		}
	})
}
