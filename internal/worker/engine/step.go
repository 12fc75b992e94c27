package engine

import (
	"fmt"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// stepState is a step until its commit.
type stepState struct {
	number  int
	attempt key.Attempt
	queue   *graph.Queue
	works   map[graph.Pair]*task

	// Boundary tensors that this worker made or got are kept until the commit:
	// should their receiver be lost, another can have them.
	tensors map[tensorID]*boundary

	anew    map[graph.Pair]bool // pairs here in place of another worker that had them in this step
	tainted bool                // a tensor was wrong

	suspect int // a layer that may have brought forth a loss that is not finite, -1 if there is none

	layers map[int]*layerState // of those that the plan has this worker run

	committed chan struct{} // closed at the commit; nil while nobody asks
}

// stepEnd returns a channel that is closed at the commit of the step.
func (e *Engine) stepEnd() <-chan struct{} {
	if e.step.committed == nil {
		e.step.committed = make(chan struct{})
	}
	return e.step.committed
}

// task is one micro-batch in one stage on this worker.
type task struct {
	batch *batch // in the first and the last stage
	pass  Pass
	dout  tensor.Tensor // in the last stage, from the loss
}

// layerState is how far the gradient of a layer is on this worker.
type layerState struct {
	have    map[int]bool // micro-batches whose gradients are in the tree
	reduced bool         // its reduction goes on or is done, or need not be
}

// tensorID names a boundary tensor of a step: what crosses from stage b-1 to
// b, or back.
type tensorID struct {
	b, m int
	dir  uint8
}

// boundary is a boundary tensor that this worker makes or gets.
type boundary struct {
	t      tensor.Tensor // t.F is of the engine's pool
	here   bool
	recv   *comm.Receiving // it is expected
	sends  []*comm.Sending
	sentTo map[id.WorkerID]bool

	// See vouch.go. Of a tensor that was made in place of a lost worker:
	digest    []byte
	vouchedTo map[id.WorkerID]bool
	// Of one that came from a worker which is lost: it is to be compared, the digest is
	// expected, and it has been.
	doubted bool
	vow     *comm.Receiving
	sure    bool
}

// consumer returns the pair that waits for the tensor.
func (id tensorID) consumer() graph.Pair {
	if id.dir == comm.Forward {
		return graph.Pair{Stage: id.b, Micro: id.m}
	}
	return graph.Pair{Stage: id.b - 1, Micro: id.m}
}

// producer returns the pair that makes the tensor.
func (id tensorID) producer() graph.Pair {
	if id.dir == comm.Forward {
		return graph.Pair{Stage: id.b - 1, Micro: id.m}
	}
	return graph.Pair{Stage: id.b, Micro: id.m}
}

// span is about the tensor and the other end of its way.
func (id tensorID) span(peer id.WorkerID, bytes int) Span {
	return Span{Stage: id.b, Micro: id.m, Layer: -1, Peer: peer, Back: id.dir != comm.Forward, Bytes: int64(bytes)}
}

func (id tensorID) named() key.Tensor {
	return key.Tensor{Boundary: id.b, Micro: id.m, Back: id.dir != comm.Forward}
}

func (id tensorID) key(a key.Attempt) comm.Key { return key.Boundary(a, id.named()) }

// runner returns who runs a pair under the plan.
func (e *Engine) runner(p graph.Pair) id.WorkerID { return e.plan.Route[p.Stage][p.Micro] }

// advanceStep does what can be done in a step.
func (e *Engine) advanceStep() {
	r := e.req
	if e.step == nil {
		e.begin(r.point.Step)
	}
	st := e.step
	if e.busy == idle {
		if t, ok := st.queue.Next(); ok {
			e.runPass(t)
		}
	}
	e.reduce()
	if e.err != nil || e.broken || r.exchanging || st.queue.Left() > 0 || !e.ready() {
		return
	}
	if r.said == nil {
		if e.busy == idle {
			e.sayCommit(r)
		}
		return
	}
	if !e.held() {
		e.startExchange(r)
	}
}

// ready reports whether this worker may enter the commit: the gradients of the
// shards it owns and mirrors are complete, and all parameters of the step
// before have come.
func (e *Engine) ready() bool {
	for _, sh := range e.shards {
		if !sh.complete && (sh.state != nil || !sh.reduces) {
			return false
		}
	}
	return e.arrived() && !e.step.doubts()
}

// arrived reports whether no parameters are on their way here.
func (e *Engine) arrived() bool {
	for l := range e.arrivals {
		if !e.arrivals[l].there() {
			return false
		}
	}
	return true
}

// begin sets up a step: what runs here, and what will come from others.
func (e *Engine) begin(step int) {
	// Parameters of the step before are still on their way under its name.
	e.c.Network.Advance(e.after(max(step-1, 0)).Word())
	e.reap()
	e.step = &stepState{
		number:  step,
		attempt: e.attempt(),
		suspect: -1,
		queue:   graph.NewQueue(len(e.plan.Stages)),
		works:   make(map[graph.Pair]*task),
		tensors: make(map[tensorID]*boundary),
		layers:  make(map[int]*layerState),
		anew:    make(map[graph.Pair]bool),
	}
	if e.plan.InStep && e.plan.FromStep == step {
		e.step.assigned(nil, e.plan, e.c.Self.ID)
	}
	for _, sh := range e.shards {
		sh.begin(e)
	}
	e.assign()
}

// assign brings the step in line with the plan: what runs here, what is
// expected, and what others still need from here.
func (e *Engine) assign() {
	st, p, me := e.step, e.plan, e.c.Self.ID
	st.queue.Rank(p.Ranks(st.number))
	for _, s := range st.queue.Statuses() {
		if e.runner(s.Pair) != me && !st.queue.Withdraw(s.Pair) {
			e.fail(fmt.Errorf("step %d: %v was begun here and goes to worker %d", st.number, s.Pair, e.runner(s.Pair)))
			return
		}
		if e.runner(s.Pair) != me {
			delete(st.works, s.Pair)
		}
	}
	for s := range e.stages {
		limit := p.Limit(s, me)
		st.queue.SetLimit(s, limit.Forwards, limit.Lead)
		for l := p.Stages[s].Lo; l < p.Stages[s].Hi; l++ {
			if st.layers[l] == nil {
				st.layers[l] = &layerState{have: make(map[int]bool)}
			}
		}
		for m, w := range p.Route[s] {
			pair := graph.Pair{Stage: s, Micro: m}
			if w != me || !p.Runs(pair, st.number) {
				continue
			}
			if st.works[pair] == nil {
				st.works[pair] = &task{}
			}
			st.queue.Assign(pair)
			if s == 0 {
				st.queue.Arrive(graph.ForwardOf(pair))
			} else {
				e.want(tensorID{s, m, comm.Forward})
			}
			if s < len(p.Stages)-1 {
				e.want(tensorID{s + 1, m, comm.Backward})
			}
		}
	}
	for id, b := range st.tensors {
		if b.here {
			e.hand(id, b)
		}
	}
}

// want sees to it that a boundary tensor comes here, as soon as its shape is
// known.
func (e *Engine) want(what tensorID) {
	st := e.step
	b := st.tensors[what]
	if b != nil {
		if b.here {
			e.arrive(what)
		}
		return
	}
	dims := e.shapeOf(what.b).dims
	if dims == nil || e.runner(what.producer()) == e.c.Self.ID {
		return // when it is, e.assign wants it again; or it is made here
	}
	b = &boundary{t: tensor.Of(e.free.get(tensor.Size(dims)), dims...), sentTo: make(map[id.WorkerID]bool)}
	st.tensors[what] = b
	r := e.c.Network.Expect(what.key(st.attempt), comm.Bytes(b.t.F))
	b.recv = r
	r.OnDone(func() {
		var arrived Span
		if e.c.Span != nil {
			arrived = what.span(-1, 4*len(b.t.F))
			arrived.Name, arrived.Start = trace.Arrive, time.Now()
			arrived.End = arrived.Start
		}
		e.mail.put(func() {
			n, from, err := r.Wait(e.ctx) // it has ended
			if e.step != st || b.recv != r || err != nil {
				return // it was made here, or is not wanted any more
			}
			b.recv, arrived.Peer = nil, from.Worker
			if n != 4*len(b.t.F) {
				e.fail(fmt.Errorf("step %d: worker %v sent %d bytes of a boundary tensor of %v", st.number, from, n, dims))
				return
			}
			b.here = true
			if e.c.Span != nil {
				e.c.Span(arrived)
			}
			e.arrive(what)
		})
	})
}

// arrive tells the queue of a boundary tensor that is here.
func (e *Engine) arrive(id tensorID) {
	pair := id.consumer()
	if id.dir == comm.Forward {
		e.step.queue.Arrive(graph.ForwardOf(pair))
	} else {
		e.step.queue.Arrive(graph.BackwardOf(pair))
	}
}

// made takes a boundary tensor that was computed here. buf is a copy, because
// the memory of passes is used again before the commit.
func (e *Engine) made(what tensorID, t tensor.Tensor) {
	st := e.step
	b := st.tensors[what]
	switch {
	case b == nil:
		b = &boundary{t: t, here: true, sentTo: make(map[id.WorkerID]bool)}
		st.tensors[what] = b
	case b.here: // it had come from another worker that is lost
		e.compare(what, b, t)
		e.free.put(t.F)
	default: // and this one never will
		r := b.recv
		b.recv = nil
		r.Cancel(errClosed)
		e.late = append(e.late, lateBuffer{b.t.F, []<-chan struct{}{r.Done()}})
		b.t, b.here = t, true
	}
	e.hand(what, b)
}

// hand brings a boundary tensor to who goes on with it, if it was made here.
func (e *Engine) hand(id tensorID, b *boundary) {
	st, to, me := e.step, e.runner(id.consumer()), e.c.Self.ID
	if to == me {
		e.arrive(id)
		return
	}
	// What came from another worker, the plan may have come to want elsewhere,
	// but then it makes it be computed again.
	if st.works[id.producer()] == nil {
		return
	}
	e.vouch(id, b, to)
	if b.sentTo[to] {
		return
	}
	b.sentTo[to] = true
	sending := e.c.Network.Post(e.session(to), id.key(st.attempt), comm.Bytes(b.t.F), comm.Bulk)
	b.sends = append(b.sends, sending)
	if e.c.Span != nil {
		began, of := time.Now(), id.span(to, 4*len(b.t.F))
		sending.OnDone(func() { e.span(trace.Transfer, began, of) })
	}
}

// shape is the shape of the input of a layer for one micro-batch. Who has run the layer before
// it knows it, and tells all others if a stage begins with the layer.
type shape struct {
	dims []int
	told map[id.Session]bool
	recv *comm.Receiving
}

// maxDims bounds the dimensions of a boundary tensor.
const maxDims = 8

// shapeOf returns the shape of the input of stage s.
func (e *Engine) shapeOf(s int) *shape { return &e.shapes[e.plan.Stages[s].Lo] }

// shapeKey names the message with the shape of a layer's input.
func (e *Engine) shapeKey(layer int) comm.Key {
	return key.Shape(e.c.First.Epoch, layer)
}

// askShapes expects the shapes between layers that are not known.
func (e *Engine) askShapes() {
	for layer := 1; layer < len(e.shapes); layer++ {
		sh := &e.shapes[layer]
		if sh.dims != nil || sh.recv != nil {
			continue
		}
		words := make([]int64, maxDims)
		r := e.c.Network.Expect(e.shapeKey(layer), int64Bytes(words))
		sh.recv = r
		r.OnDone(func() {
			e.mail.put(func() {
				n, _, err := r.Wait(e.ctx) // it has ended
				if err != nil || sh.dims != nil {
					return
				}
				e.learnShape(layer, words[:n/8])
			})
		})
	}
}

func (e *Engine) learnShape(layer int, words []int64) {
	size := 1
	var dims []int
	for _, d := range words {
		if d < 1 || d > 1<<31 || size > 1<<34/int(d) {
			e.fail(fmt.Errorf("layer %q was told the shape %v for its input", e.c.Layers[layer].Name, words))
			return
		}
		dims = append(dims, int(d))
		size *= int(d)
	}
	e.knowShape(layer, dims)
}

// knowShape takes the shape of the input of a layer.
func (e *Engine) knowShape(layer int, dims []int) {
	if e.shapes[layer].dims != nil {
		return
	}
	if len(dims) > maxDims {
		e.fail(fmt.Errorf("the input of layer %q has %d dimensions; at most %d are supported", e.c.Layers[layer].Name, len(dims), maxDims))
		return
	}
	e.shapes[layer].dims = dims
	e.tellShapes(nil)
	if e.step == nil {
		return
	}
	for p := range e.step.works {
		if e.plan.Stages[p.Stage].Lo == layer {
			e.want(tensorID{p.Stage, p.Micro, comm.Forward})
		}
		if e.plan.Stages[p.Stage].Hi == layer {
			e.want(tensorID{p.Stage, p.Micro, comm.Backward})
		}
	}
}

// knowsShapes reports whether the shapes of all inputs here are known.
func (e *Engine) knowsShapes() bool {
	for s := range e.stages {
		if s > 0 && e.shapeOf(s).dims == nil {
			return false
		}
	}
	return true
}

// knowsWithin reports whether the shapes between the layers of a stage are known.
func (e *Engine) knowsWithin(s int) bool {
	for l := e.plan.Stages[s].Lo + 1; l < e.plan.Stages[s].Hi; l++ {
		if e.shapes[l].dims == nil {
			return false
		}
	}
	return true
}

// tellShapes tells the shapes between layers that are known here: who runs or has run the
// layer before, to all workers, who may have to take the stage over, or get another border of stages and lose
// who knew it at once; and everybody, to those who
// are new, because who computed it may be gone. old is the plan before, nil if there is no new one.
func (e *Engine) tellShapes(old *plan.Plan) {
	for layer := 1; layer < len(e.shapes); layer++ {
		if e.shapes[layer].dims == nil {
			continue
		}
		ran := e.serves(layer - 1)
		if old != nil {
			was := old.StageOf(layer - 1)
			ran = ran || was >= 0 && slices.Contains(old.Stages[was].Workers, e.c.Self.ID)
		}
		for _, w := range e.plan.Workers {
			if ran || old != nil && !slices.Contains(old.Workers, w) {
				e.tellShape(layer, w.ID)
			}
		}
	}
}

// tellShape tells a worker the shape of the input of a layer, once.
func (e *Engine) tellShape(layer int, w id.WorkerID) {
	sh, to := &e.shapes[layer], e.session(w)
	if w == e.c.Self.ID || sh.told[to] {
		return
	}
	if sh.told == nil {
		sh.told = make(map[id.Session]bool)
	}
	sh.told[to] = true
	words := make([]int64, len(sh.dims))
	for i, d := range sh.dims {
		words[i] = int64(d)
	}
	e.c.Network.Post(to, e.shapeKey(layer), int64Bytes(words), comm.Control)
}

// lateBuffer is memory of the pool that the network may still use.
type lateBuffer struct {
	buf   []float32
	until []<-chan struct{}
}

// reap gives memory back that the network is done with.
func (e *Engine) reap() {
	left := e.late[:0]
	for _, l := range e.late {
		if allClosed(l.until) {
			e.free.put(l.buf)
		} else {
			left = append(left, l)
		}
	}
	clear(e.late[len(left):])
	e.late = left
}

func allClosed(all []<-chan struct{}) bool {
	for _, c := range all {
		if !isClosed(c) {
			return false
		}
	}
	return true
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// release gives the memory of boundary tensors back when the step is
// committed. A receiver that had one already may not have said so yet.
func (st *stepState) release(e *Engine) {
	if st.committed != nil {
		close(st.committed)
	}
	for _, b := range st.tensors {
		l := lateBuffer{buf: b.t.F}
		for _, s := range b.sends {
			l.until = append(l.until, s.Done())
		}
		if b.recv != nil {
			b.recv.Cancel(errClosed)
			l.until = append(l.until, b.recv.Done())
		}
		if b.vow != nil {
			b.vow.Cancel(errClosed)
		}
		e.late = append(e.late, l)
	}
	e.reap()
}
