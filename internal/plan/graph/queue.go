package graph

import (
	"cmp"
	"fmt"
	"slices"
)

// Phase is how far a pair is on its worker.
type Phase uint8

// The phases, in their order.
const (
	Absent    Phase = iota // not assigned to this worker
	Waiting                // its forward pass has not begun
	Forwarded              // its forward pass has begun or is done
	Backing                // its backward pass has begun
	Finished               // its backward pass is done
)

func (p Phase) String() string {
	return [...]string{"absent", "waiting", "forwarded", "backing", "finished"}[p]
}

// Status is what a worker knows of a pair assigned to it.
type Status struct {
	Pair
	Phase Phase
	// Input and Gradient: what the forward and the backward pass need has
	// arrived.
	Input, Gradient bool
}

func (s Status) String() string {
	return fmt.Sprintf("%v: %v, input %v, gradient %v", s.Pair, s.Phase, s.Input, s.Gradient)
}

// Begun reports whether the pair has to stay where it is.
func (s Status) Begun() bool { return s.Phase >= Forwarded }

// Queue holds the tasks assigned to a worker for one step and says which
// begins next, by the rules of admission in the package comment.
//
// The owner assigns pairs, tells what arrives, takes tasks with Next and
// tells when they are done. Several tasks may run at a time.
type Queue struct {
	limits, inFlight []int // by stage
	leads            []int // by stage
	side             int   // passes that may run beside another one
	pairs            map[Pair]*entry
	rank             func(Pair) int // of forward passes, nil: all the same
	left             int            // pairs not finished

	// Each sorted by priority.
	urgent   []Task   // backward passes that follow their forward pass at once
	backward []Task   // ready
	again    []Task   // forward passes whose gradient waits: the limit does not hold
	forward  [][]Task // by stage; input is there
	other    []Task
}

type entry struct {
	phase           Phase
	input, gradient bool
	ran             bool // the forward pass is done
	again           bool // admitted by rule 4
}

// NewQueue returns the queue for a step of a pipeline with a number of stages, on a worker
// that runs so many passes at a time.
// The limit of stage s is stages - s until SetLimit raises it, and one more for each pass that runs beside another one.
func NewQueue(stages, passes int) *Queue {
	q := &Queue{
		side:     max(passes, 1) - 1,
		limits:   make([]int, stages),
		leads:    make([]int, stages),
		inFlight: make([]int, stages),
		pairs:    make(map[Pair]*entry),
		forward:  make([][]Task, stages),
	}
	for s := range stages {
		q.limits[s] = stages - s + q.side
	}
	return q
}

// SetLimit sets how many micro-batches may be in flight in a stage on this
// worker that runs one pass at a time; the least is stages - s. While fewer than lead are, forward passes come before backward
// passes. It may change at any time.
func (q *Queue) SetLimit(stage, forwards, lead int) {
	q.limits[stage] = max(forwards, len(q.limits)-stage) + q.side
	q.leads[stage] = min(lead, q.limits[stage])
}

// Rank lets forward passes begin by rank, the least first, and those of one rank by micro-batch; those of
// a rank below 0 before backward passes. nil gives all rank 0. What a pair's rank is must not change before Rank is called again.
func (q *Queue) Rank(rank func(Pair) int) {
	q.rank = rank
	slices.SortFunc(q.again, q.compare)
	for _, ready := range q.forward {
		slices.SortFunc(ready, q.compare)
	}
}

// compare orders forward passes.
func (q *Queue) compare(a, b Task) int {
	if q.rank != nil {
		if c := cmp.Compare(q.rank(a.Pair), q.rank(b.Pair)); c != 0 {
			return c
		}
	}
	return a.Compare(b)
}

// Assign makes a pair this worker's. A pair it already has stays as it is.
func (q *Queue) Assign(p Pair) {
	if q.pairs[p] == nil {
		q.pairs[p] = &entry{phase: Waiting}
		q.left++
	}
}

// Withdraw takes back a pair whose forward pass has not begun. It reports
// whether the pair is not here any more; what has begun stays.
func (q *Queue) Withdraw(p Pair) bool {
	e := q.pairs[p]
	if e == nil {
		return true
	}
	if e.phase != Waiting {
		return false
	}
	remove(&q.again, ForwardOf(p), q.compare)
	remove(&q.forward[p.Stage], ForwardOf(p), q.compare)
	delete(q.pairs, p)
	q.left--
	return true
}

// Arrive says that what a forward or backward task needs from elsewhere is
// there: for Forward its input and the parameters, for Backward the gradient
// of its output (in the last stage: the loss, which the forward pass itself
// gives). It reports whether the pair is assigned to this worker and this is
// news.
func (q *Queue) Arrive(t Task) bool {
	e := q.pairs[t.Pair]
	if e == nil {
		return false
	}
	switch t.Kind {
	case Forward:
		if e.input {
			return false
		}
		e.input = true
	case Backward:
		if e.gradient {
			return false
		}
		e.gradient = true
	default:
		panic(fmt.Sprintf("graph: Arrive(%v)", t))
	}
	switch {
	case e.phase == Waiting && e.input && e.gradient:
		remove(&q.forward[t.Stage], ForwardOf(t.Pair), q.compare)
		insert(&q.again, ForwardOf(t.Pair), q.compare)
	case e.phase == Waiting && e.input:
		insert(&q.forward[t.Stage], ForwardOf(t.Pair), q.compare)
	case e.phase == Forwarded && e.ran && t.Kind == Backward:
		insert(&q.backward, t, Task.Compare)
	}
	return true
}

// Add adds a ready task of another kind than Forward and Backward. These
// begin when no pass can.
func (q *Queue) Add(t Task) {
	if t.Kind == Forward || t.Kind == Backward {
		panic(fmt.Sprintf("graph: Add(%v)", t))
	}
	insert(&q.other, t, Task.Compare)
}

// Next returns the task to begin now, and counts it as begun. ok is false if
// none can begin before something arrives or is done.
func (q *Queue) Next() (t Task, ok bool) {
	switch {
	case len(q.urgent) > 0:
		t = pop(&q.urgent)
		q.pairs[t.Pair].phase = Backing
		return t, true
	}
	awaited := func(t Task) bool { return q.rank != nil && q.rank(t.Pair) < 0 }
	if t, ok = q.nextForward(q.limits, awaited); ok {
		return t, true
	}
	if t, ok = q.nextForward(q.leads, anyTask); ok {
		return t, true
	}
	if len(q.backward) > 0 {
		t = pop(&q.backward)
		q.pairs[t.Pair].phase = Backing
		return t, true
	}
	if t, ok = q.nextAgain(1); ok {
		return t, true
	}
	if t, ok = q.nextForward(q.limits, anyTask); ok {
		return t, true
	}
	if t, ok = q.nextAgain(0); ok {
		return t, true
	}
	if len(q.other) > 0 {
		return pop(&q.other), true
	}
	return Task{}, false
}

func anyTask(Task) bool { return true }

// nextAgain begins the first forward pass of rule 4 of a stage from lo on.
func (q *Queue) nextAgain(lo int) (t Task, ok bool) {
	i := slices.IndexFunc(q.again, func(t Task) bool { return t.Stage >= lo })
	if i < 0 {
		return Task{}, false
	}
	t = q.again[i]
	q.again = slices.Delete(q.again, i, i+1)
	q.pairs[t.Pair].again = true
	q.begin(t)
	return t, true
}

// nextForward begins the first forward pass of a stage with fewer in flight than it may have, if that is one of some.
func (q *Queue) nextForward(may []int, some func(Task) bool) (t Task, ok bool) {
	best := -1
	for s, ready := range q.forward {
		if len(ready) > 0 && q.inFlight[s] < may[s] && some(ready[0]) && (best < 0 || q.compare(ready[0], q.forward[best][0]) < 0) {
			best = s
		}
	}
	if best < 0 {
		return Task{}, false
	}
	t = pop(&q.forward[best])
	q.begin(t)
	return t, true
}

func (q *Queue) begin(t Task) {
	q.pairs[t.Pair].phase = Forwarded
	q.inFlight[t.Stage]++
}

// Done says that a task that Next returned is done.
func (q *Queue) Done(t Task) {
	switch e := q.pairs[t.Pair]; t.Kind {
	case Forward:
		if e == nil || e.phase != Forwarded || e.ran {
			panic(fmt.Sprintf("graph: %v is done but was not begun", t))
		}
		e.ran = true
		switch {
		case e.again:
			insert(&q.urgent, BackwardOf(t.Pair), Task.Compare)
		case e.gradient:
			insert(&q.backward, BackwardOf(t.Pair), Task.Compare)
		}
	case Backward:
		if e == nil || e.phase != Backing {
			panic(fmt.Sprintf("graph: %v is done but was not begun", t))
		}
		e.phase = Finished
		q.inFlight[t.Stage]--
		q.left--
	}
}

// Before returns how many other pairs of its stage there are whose backward passes have not begun.
func (q *Queue) Before(p Pair) (n int) {
	for other, e := range q.pairs {
		if other.Stage == p.Stage && other != p && e.phase < Backing {
			n++
		}
	}
	return n
}

// Left returns the number of assigned pairs that are not finished.
func (q *Queue) Left() int { return q.left }

// Ready returns the number of forward passes that could begin, but for the limits.
func (q *Queue) Ready() (n int) {
	for _, ready := range q.forward {
		n += len(ready)
	}
	return n + len(q.again)
}

// Spare reports whether a pass that begins may give way to those of other workers on the same processors. Not so a forward pass beside which at
// most one pair of its stage waits for its gradient, nor a pass of a later stage where input for another one has come, or all have begun.
func (q *Queue) Spare(t Task) bool {
	last := len(q.limits) - 1
	if last == 0 {
		return false
	}
	behind, dry := 0, len(q.forward[t.Stage])+len(q.again) == 0
	begun := true
	for p, e := range q.pairs {
		if p.Stage == t.Stage && p != t.Pair {
			if e.phase == Forwarded && !e.gradient {
				behind++
			}
			begun = begun && e.phase >= Forwarded
		}
	}
	feeds := t.Kind == Forward && t.Stage < last && behind <= 1
	return !feeds && (t.Stage == 0 || dry && !begun)
}

// Status returns what is known of a pair.
func (q *Queue) Status(p Pair) Status {
	e := q.pairs[p]
	if e == nil {
		return Status{Pair: p}
	}
	return Status{Pair: p, Phase: e.phase, Input: e.input, Gradient: e.gradient}
}

// Statuses returns what is known of all assigned pairs, by stage and
// micro-batch.
func (q *Queue) Statuses() []Status {
	all := make([]Status, 0, len(q.pairs))
	for p := range q.pairs {
		all = append(all, q.Status(p))
	}
	slices.SortFunc(all, func(a, b Status) int { return a.Pair.Compare(b.Pair) })
	return all
}

func insert(list *[]Task, t Task, compare func(a, b Task) int) {
	i, _ := slices.BinarySearchFunc(*list, t, compare)
	*list = slices.Insert(*list, i, t)
}

func remove(list *[]Task, t Task, compare func(a, b Task) int) {
	if i, found := slices.BinarySearchFunc(*list, t, compare); found {
		*list = slices.Delete(*list, i, i+1)
	}
}

func pop(list *[]Task) Task {
	t := (*list)[0]
	*list = slices.Delete(*list, 0, 1)
	return t
}
