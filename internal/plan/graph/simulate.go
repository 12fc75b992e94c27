package graph

import (
	"container/heap"
	"errors"
	"fmt"
	"time"
)

// ErrStuck is the error of a simulation in which tasks are left and none can
// begin.
var ErrStuck = errors.New("no task can begin")

// Schedule is what a simulation has found. Times count from the begin of the
// step.
type Schedule struct {
	Begin, End []time.Duration // of each node
	Makespan   time.Duration   // end of the last node

	// Busy is, for each worker, the time in which it computes: passes and
	// updates. Idle is the rest of the makespan: its bubbles.
	Busy, Idle []time.Duration

	// Critical is the chain of nodes that decided the makespan, each of which
	// began when the one before it was done: because it needed its result, or
	// the worker it ran on.
	Critical []int
}

// Simulate executes the graph: every worker computes one task at a time and
// moves one reduction or gathering at a time beside it, every network card sends one thing at
// a time, and each takes the next from a [Queue]. The result depends on the graph only.
func (g *Graph) Simulate() (Schedule, error) {
	s := newSimulation(g)
	for len(s.events) > 0 {
		s.advance()
	}
	if s.begun < len(g.Nodes) {
		for n, begun := range s.started {
			if !begun {
				return s.Schedule, fmt.Errorf("graph: %w: %d of %d tasks have, %v on worker %d has not",
					ErrStuck, s.begun, len(g.Nodes), g.Nodes[n].Task, g.Nodes[n].Worker)
			}
		}
	}
	s.Critical = chain(s.cause, s.last)
	for w := range s.Idle {
		s.Idle[w] = s.Makespan - s.Busy[w]
	}
	return s.Schedule, nil
}

// lane is one of the two things a worker does at a time: it computes, or it
// moves gradients and parameters. Or it is a network card, which sends.
type lane struct {
	worker  int
	q       *Queue
	running bool
	last    int // the node that ran last, -1 for none
	touched bool
}

// event: a node has all it needs, or is done.
type event struct {
	at   time.Duration
	done bool
	node int
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	if e[i].at != e[j].at {
		return e[i].at < e[j].at
	}
	if e[i].done != e[j].done {
		return e[i].done
	}
	return e[i].node < e[j].node
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// place names a node by what and where it is.
type place struct {
	Task
	worker int
}

type simulation struct {
	Schedule
	g *Graph
	inputs
	missing, late []int // edges into each node the end of whose From is not known
	started       []bool
	begun         int
	last          int // the node that ends last
	lanes         []lane
	nodes         map[place]int
	events        events
}

func newSimulation(g *Graph) *simulation {
	s := &simulation{
		g: g,
		Schedule: Schedule{
			Begin: make([]time.Duration, len(g.Nodes)),
			End:   make([]time.Duration, len(g.Nodes)),
			Busy:  make([]time.Duration, g.step.Workers),
			Idle:  make([]time.Duration, g.step.Workers),
		},
		inputs:  newInputs(g),
		missing: make([]int, len(g.Nodes)),
		late:    make([]int, len(g.Nodes)),
		started: make([]bool, len(g.Nodes)),
		last:    -1,
		lanes:   make([]lane, 2*g.step.Workers+g.cards),
		nodes:   make(map[place]int, len(g.Nodes)),
	}
	for i := range s.lanes {
		s.lanes[i] = lane{worker: i / 2, q: NewQueue(len(g.step.Stages), 1), last: -1}
	}
	for i, st := range g.step.Stages {
		for j, w := range st.Workers {
			lead := 0
			if st.Leads != nil {
				lead = st.Leads[j]
			}
			s.lanes[2*w].q.SetLimit(i, st.Limits[j], lead)
		}
	}
	for n, node := range g.Nodes {
		s.nodes[place{node.Task, s.lane(n).worker}] = n
		if node.Kind == Forward {
			s.lane(n).q.Assign(node.Pair)
		}
	}
	for _, e := range g.Edges {
		if e.Late {
			s.late[e.To]++
		} else {
			s.missing[e.To]++
		}
	}
	for n, m := range s.missing {
		if m == 0 {
			s.events = append(s.events, event{node: n})
		}
	}
	heap.Init(&s.events)
	return s
}

// lane returns the lane on which a node runs.
func (s *simulation) lane(n int) *lane {
	node := s.g.Nodes[n]
	if node.Kind == SendActivation || node.Kind == SendGradient {
		return &s.lanes[2*s.g.step.Workers+node.Card]
	}
	if node.Kind == Reduce || node.Kind == Gather {
		return &s.lanes[2*node.Worker+1]
	}
	return &s.lanes[2*node.Worker]
}

// advance handles all events of the next point in time. All that happens then
// is known before anything begins, so their order does not matter.
func (s *simulation) advance() {
	now := s.events[0].at
	for len(s.events) > 0 && s.events[0].at == now {
		e := heap.Pop(&s.events).(event)
		l, t := s.lane(e.node), s.g.Nodes[e.node].Task
		l.touched = true
		switch {
		case e.done:
			l.q.Done(t)
			l.running, l.last = false, e.node
		case t.Kind == Forward || t.Kind == Backward:
			l.q.Arrive(t)
		default:
			l.q.Add(t)
		}
	}
	for i := range s.lanes {
		l := &s.lanes[i]
		if l.touched && !l.running {
			s.begin(l, now)
		}
		l.touched = false
	}
}

// begin lets a lane begin its next task.
func (s *simulation) begin(l *lane, now time.Duration) {
	t, ok := l.q.Next()
	if !ok {
		return
	}
	n := s.nodes[place{t, l.worker}]
	s.Begin[n], s.started[n], l.running = now, true, true
	s.begun++
	if s.at[n] < now && l.last >= 0 && s.End[l.last] == now {
		s.cause[n] = l.last
	}
	if t.Kind != Reduce && t.Kind != Gather && l.worker < s.g.step.Workers {
		s.Busy[l.worker] += s.g.Nodes[n].Time
	}
	if s.late[n] == 0 {
		s.finish(n)
	}
}

// finish decides when a node that has begun ends, and tells those that wait
// for it when they will have its result.
func (s *simulation) finish(n int) {
	end, cause := s.inputs.end(n, s.Begin[n]+s.g.Nodes[n].Time)
	s.End[n], s.cause[n] = end, cause
	if s.last < 0 || end > s.Makespan {
		s.last, s.Makespan = n, end
	}
	heap.Push(&s.events, event{end, true, n})
	for _, e := range s.g.from(n) {
		s.add(e, end)
		if e.Late {
			if s.late[e.To]--; s.late[e.To] == 0 && s.started[e.To] {
				s.finish(e.To)
			}
		} else if s.missing[e.To]--; s.missing[e.To] == 0 {
			heap.Push(&s.events, event{s.at[e.To], false, e.To})
		}
	}
}
