package graph

import (
	"fmt"
	"slices"
	"time"
)

// Step is what a graph is made of. Workers are numbered from 0 here; a plan
// knows their names.
type Step struct {
	Workers int
	Micros  int
	Stages  []Stage
	Shards  []Shard // may be empty: passes and commit only

	// Time returns how long a task takes on a worker. For a Forward it is
	// the whole stage.
	Time func(t Task, worker int) time.Duration
	// Delay returns how long it takes until what task t of worker from has
	// made is there for worker to. nil means no time.
	Delay func(t Task, from, to int) time.Duration
	// Card returns the network card that sends what a pass has made from one worker to
	// another, counted from 0, and for how long it is busy with that; -1 if it needs none.
	// What is sent comes after the Delay from then on. nil means that no card is ever busy.
	Card func(t Task, from, to int) (card int, busy time.Duration)
	// Into returns how long after the begin of a stage's forward pass on a
	// worker a layer is first needed. nil means at once.
	Into func(layer, worker int) time.Duration
}

// Stage is a contiguous range of layers and its workers.
type Stage struct {
	Lo, Hi  int   // layers [Lo, Hi)
	Workers []int // that hold the layers
	Limits  []int // forwards in flight, for each of Workers
	Leads   []int // in flight up to which forward passes come first, for each of Workers; nil means 0
	Route   []int // worker of each micro-batch
}

// Shard is a part of a layer's parameters.
type Shard struct {
	Layer   int
	Owner   int
	Mirrors []int
}

// Node is a task on a worker.
type Node struct {
	Task
	Worker int // that sends, of a transfer
	Time   time.Duration
	Card   int // of a transfer
}

// Edge says that node To can begin Lag after the end of node From. Late says
// that To needs the result only on its way: it can begin before, but ends Lag
// after the end of From at the earliest.
type Edge struct {
	From, To int
	Lag      time.Duration
	Late     bool
}

// Graph is a step: nodes in an order in which every edge goes forward.
type Graph struct {
	Nodes []Node
	Edges []Edge // by From

	step  Step
	cards int
	first []int // first[n] is the index of the first edge from node n
}

// New lays a step out. Gather tasks bring the parameters of the step before,
// so they are the first.
func New(s Step) (*Graph, error) {
	if len(s.Stages) == 0 || s.Micros < 1 || s.Workers < 1 {
		return nil, fmt.Errorf("graph: step with %d stages, %d micro-batches and %d workers", len(s.Stages), s.Micros, s.Workers)
	}
	b := builder{s: s, g: &Graph{step: s}}
	for i, st := range s.Stages {
		if len(st.Route) != s.Micros || len(st.Limits) != len(st.Workers) || st.Leads != nil && len(st.Leads) != len(st.Workers) {
			return nil, fmt.Errorf("graph: stage %d routes %d of %d micro-batches and has %d limits and %d leads for %d workers",
				i, len(st.Route), s.Micros, len(st.Limits), len(st.Leads), len(st.Workers))
		}
		for _, w := range slices.Concat(st.Workers, st.Route) {
			if w < 0 || w >= s.Workers {
				return nil, fmt.Errorf("graph: stage %d names worker %d of %d", i, w, s.Workers)
			}
		}
	}
	for i, sh := range s.Shards {
		for _, w := range append([]int{sh.Owner}, sh.Mirrors...) {
			if w < 0 || w >= s.Workers {
				return nil, fmt.Errorf("graph: shard %d names worker %d of %d", i, w, s.Workers)
			}
		}
	}
	b.build()
	return b.g, nil
}

type builder struct {
	s   Step
	g   *Graph
	out [][]Edge // by node
}

func (b *builder) node(t Task, worker int) int {
	b.g.Nodes = append(b.g.Nodes, Node{Task: t, Worker: worker, Time: b.s.Time(t, worker)})
	b.out = append(b.out, nil)
	return len(b.g.Nodes) - 1
}

// send adds the transfer of what a pass has made to a worker, if a card is busy with it, and
// returns the node after which it is on its way.
func (b *builder) send(from, to int) int {
	f := b.g.Nodes[from]
	if f.Worker == to || b.s.Card == nil {
		return from
	}
	card, busy := b.s.Card(f.Task, f.Worker, to)
	if card < 0 || busy <= 0 {
		return from
	}
	t := Task{Kind: SendActivation, Pair: f.Pair}
	if f.Kind == Backward {
		t.Kind = SendGradient
	}
	b.g.Nodes = append(b.g.Nodes, Node{t, f.Worker, busy, card})
	b.out = append(b.out, nil)
	n := len(b.g.Nodes) - 1
	b.out[from] = append(b.out[from], Edge{From: from, To: n})
	b.g.cards = max(b.g.cards, card+1)
	return n
}

// edge adds an edge that takes the delay between the workers.
func (b *builder) edge(from, to int) {
	e := Edge{From: from, To: to}
	f, t := b.g.Nodes[from], b.g.Nodes[to]
	if f.Worker != t.Worker && b.s.Delay != nil {
		e.Lag = b.s.Delay(f.Task, f.Worker, t.Worker)
	}
	b.out[from] = append(b.out[from], e)
}

// parameters adds the edge from a gathering to a forward pass.
func (b *builder) parameters(gather, forward int) {
	var into time.Duration
	if f := b.g.Nodes[forward]; b.s.Into != nil {
		into = min(b.s.Into(b.g.Nodes[gather].Layer, f.Worker), f.Time)
	}
	e := Edge{From: gather, To: forward}
	if into > 0 {
		e.Late, e.Lag = true, b.g.Nodes[forward].Time-into
	}
	b.out[gather] = append(b.out[gather], e)
}

func (b *builder) build() {
	type at struct{ stage, worker int }
	gathers := make(map[at][]int)
	if len(b.s.Shards) > 0 {
		for i, st := range b.s.Stages {
			for _, w := range st.Workers {
				for l := st.Lo; l < st.Hi; l++ {
					p := at{i, w}
					gathers[p] = append(gathers[p], b.node(Task{Kind: Gather, Layer: l}, w))
				}
			}
		}
	}
	last := len(b.s.Stages) - 1
	forward := make([][]int, last+1)
	for i, st := range b.s.Stages {
		for m, w := range st.Route {
			sent := -1
			if i > 0 {
				sent = b.send(forward[i-1][m], w)
			}
			f := b.node(ForwardOf(Pair{i, m}), w)
			forward[i] = append(forward[i], f)
			if i > 0 {
				b.edge(sent, f)
			}
			for _, g := range gathers[at{i, w}] {
				b.parameters(g, f)
			}
		}
	}
	backward := make([][]int, last+1)
	for i := last; i >= 0; i-- {
		for m, w := range b.s.Stages[i].Route {
			sent := -1
			if i < last {
				sent = b.send(backward[i+1][m], w)
			}
			n := b.node(BackwardOf(Pair{i, m}), w)
			backward[i] = append(backward[i], n)
			b.edge(forward[i][m], n)
			if i < last {
				b.edge(sent, n)
			}
		}
	}
	stageOf := make(map[int]int)
	for i, st := range b.s.Stages {
		for l := st.Lo; l < st.Hi; l++ {
			stageOf[l] = i
		}
	}
	// Most edges of a large step are those from all backward passes to all shards: their room is made at once.
	shards := make([]int, last+1)
	for _, sh := range b.s.Shards {
		shards[stageOf[sh.Layer]]++
	}
	for i, nodes := range backward {
		for _, n := range nodes {
			b.out[n] = slices.Grow(b.out[n], shards[i])
		}
	}
	var reduced []int
	for i, sh := range b.s.Shards {
		r := b.node(Task{Kind: Reduce, Layer: sh.Layer, Shard: i}, sh.Owner)
		reduced = append(reduced, r)
		for _, n := range backward[stageOf[sh.Layer]] {
			b.edge(n, r)
		}
	}
	commit := b.node(Task{Kind: Commit}, 0)
	for _, r := range reduced {
		b.edge(r, commit)
	}
	if len(reduced) == 0 {
		for _, n := range backward[0] {
			b.edge(n, commit)
		}
	}
	for i, sh := range b.s.Shards {
		for _, w := range append([]int{sh.Owner}, sh.Mirrors...) {
			b.edge(commit, b.node(Task{Kind: Update, Layer: sh.Layer, Shard: i}, w))
		}
	}
	total := 0
	for _, edges := range b.out {
		total += len(edges)
	}
	b.g.Edges = make([]Edge, 0, total)
	for n, edges := range b.out {
		b.g.first = append(b.g.first, len(b.g.Edges))
		b.g.Edges = append(b.g.Edges, edges...)
		b.out[n] = nil
	}
	b.g.first = append(b.g.first, len(b.g.Edges))
}

// from returns the edges that leave a node.
func (g *Graph) from(n int) []Edge { return g.Edges[g.first[n]:g.first[n+1]] }

// inputs knows when nodes have what they need.
type inputs struct {
	at         []time.Duration // when the node can begin
	cause      []int           // the node it waits for last; -1: none
	floor      []time.Duration // when it can end
	floorCause []int
}

func newInputs(g *Graph) inputs {
	n := len(g.Nodes)
	in := inputs{make([]time.Duration, n), make([]int, n), make([]time.Duration, n), make([]int, n)}
	for i := range n {
		in.cause[i], in.floorCause[i] = -1, -1
	}
	return in
}

// add counts an edge whose From ends at done.
func (in *inputs) add(e Edge, done time.Duration) {
	at, cause := &in.at[e.To], &in.cause[e.To]
	if e.Late {
		at, cause = &in.floor[e.To], &in.floorCause[e.To]
	}
	if t := done + e.Lag; *cause < 0 || t > *at {
		*at, *cause = t, e.From
	}
}

// end returns when a node ends that could end at t if nothing came late, and
// what decides it.
func (in *inputs) end(n int, t time.Duration) (end time.Duration, cause int) {
	if in.floor[n] > t {
		return in.floor[n], in.floorCause[n]
	}
	return t, in.cause[n]
}

// chain follows the causes back to the first.
func chain(cause []int, end int) []int {
	var nodes []int
	for n := end; n >= 0; n = cause[n] {
		nodes = append(nodes, n)
	}
	slices.Reverse(nodes)
	return nodes
}
