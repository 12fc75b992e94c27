package core

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// step is a step until its commit.
type step struct {
	number  int
	attempt key.Attempt
	queue   *graph.Queue

	// Boundary tensors that this worker made or got are kept until the commit: should their receiver be lost, another can have
	// them.
	tensors map[key.Tensor]*boundary

	again     map[graph.Pair]bool // pairs here in place of another worker that had them in this step
	tainted   bool                // a tensor was wrong
	comparing int                 // tensors that are being compared

	layers map[int]*layerState // of those that the plan has this worker run

	spot *spot // nil if no pair runs twice; see spot.go
}

// layerState is how far the gradient of a layer is on this worker.
type layerState struct {
	have    map[int]bool // micro-batches whose gradients are in the tree
	reduced bool         // its reduction goes on or is done, or need not be
}

// boundary is a boundary tensor that this worker makes or gets.
type boundary struct {
	here   bool
	ticket Ticket // it is expected
	sentTo map[id.WorkerID]bool

	// See attest.go.
	attestedTo  map[id.WorkerID]bool
	doubted     bool       // its maker is lost, or one that it was compared with, and it is to be compared
	attestation Ticket     // the digest is expected
	attester    id.Session // from this one
	awaited     bool       // and the commit waits for it
}

// runner returns the worker that runs a pair under the plan.
func (w *Worker) runner(p graph.Pair) id.WorkerID { return w.plan.Route[p.Stage][p.Micro] }

// mine reports whether a pair is assigned to this worker in the step.
func (st *step) mine(p graph.Pair) bool { return st.queue.Status(p).Phase != graph.Absent }

// advanceStep does what can be done in a step.
func (w *Worker) advanceStep() {
	r := w.req
	if w.step == nil {
		w.beginStep(r.Point.Step)
	}
	st := w.step
	for w.beginPass() {
	}
	if w.idle() {
		if s := w.keeping(); s >= 0 {
			w.occupy(onKept)
			w.emit(HandOver{s})
		}
	}
	w.repeat()
	w.reduce()
	if w.over() || w.broken || r.exchanging || st.queue.Left() > 0 || st.repeats(w.me) || !w.ready() {
		return
	}
	if r.said == nil {
		if w.idle() {
			w.occupy(onJob)
			w.operating = true
			w.emit(Say{Step: st.number, Tainted: st.tainted, Nodes: w.plan.Nodes(len(w.plan.Stages)-1, w.me, st.number)})
		}
		return
	}
	if !w.held {
		w.exchange()
	}
}

// beginPass begins the next pass, and reports whether one can begin.
func (w *Worker) beginPass() bool {
	st, at := w.step, w.free()
	if at < 0 {
		return false
	}
	t, ok := st.queue.Next()
	if !ok {
		return false
	}
	w.lanes[at] = lane{onPass, t}
	d := Run{
		Lane: at, Task: t, Step: st.number,
		Spare: st.queue.Spare(t),
		Learn: t.Kind == graph.Forward && !w.knowsWithin(t.Stage),
	}
	if t.Kind == graph.Backward {
		before := st.queue.Before(t.Pair)
		d.Last, d.Soon = before == 0, before < len(w.lanes)
	}
	if st.spot != nil && st.spot.pair == t.Pair {
		d.Digests = st.spot.digests
	}
	w.emit(d)
	return true
}

// ready reports whether this worker may enter the commit: the gradients of the shards it owns and mirrors are complete, and all
// parameters of the step before have come.
func (w *Worker) ready() bool {
	for _, sh := range w.all {
		if !sh.complete && (sh.holds || !sh.reduces) {
			return false
		}
	}
	return w.arrived() && !w.step.doubts()
}

// beginStep sets up a step: what runs here, and what will come from others.
func (w *Worker) beginStep(number int) {
	// Parameters of the step before are still on their way under its name.
	w.emit(Begin{w.after(max(number-1, 0)).Word()})
	w.step = &step{
		number:  number,
		attempt: w.attempt(),
		queue:   graph.NewQueue(len(w.plan.Stages), len(w.lanes)),
		tensors: make(map[key.Tensor]*boundary),
		layers:  make(map[int]*layerState),
		again:   make(map[graph.Pair]bool),
		spot:    w.drawSpot(number),
	}
	if w.plan.InStep && w.plan.FromStep == number {
		w.step.assigned(nil, w.plan, w.me)
	}
	for _, sh := range w.inOrder() {
		sh.complete, sh.told = false, nil
		w.expectGradient(sh)
	}
	w.assign()
}

// assign brings the step in line with the plan: what runs here, what is expected, and what others still need from here.
func (w *Worker) assign() {
	st, p := w.step, w.plan
	st.queue.Rank(p.Ranks(st.number))
	for _, s := range st.queue.Statuses() {
		if w.runner(s.Pair) != w.me && !st.queue.Withdraw(s.Pair) {
			w.fail(fmt.Errorf("step %d: %v was begun here and goes to worker %d", st.number, s.Pair, w.runner(s.Pair)))
			return
		}
	}
	for _, s := range w.served {
		limit := p.Limit(s, w.me)
		st.queue.SetLimit(s, limit.Forwards, limit.Lead)
		for l := p.Stages[s].Lo; l < p.Stages[s].Hi; l++ {
			if st.layers[l] == nil {
				st.layers[l] = &layerState{have: make(map[int]bool)}
			}
		}
		for m, x := range p.Route[s] {
			pair := graph.Pair{Stage: s, Micro: m}
			if x != w.me || !p.Runs(pair, st.number) {
				continue
			}
			st.queue.Assign(pair)
			if s == 0 {
				st.queue.Arrive(graph.ForwardOf(pair))
			}
			w.wantInputs(pair)
		}
	}
	if st.repeats(w.me) {
		w.wantInputs(st.spot.pair)
	}
	for t, b := range st.tensors {
		if b.here {
			w.hand(t, b)
		}
	}
}

// wantInputs makes the boundary tensors come here that a pair's passes start from.
func (w *Worker) wantInputs(p graph.Pair) {
	for _, t := range w.inputs(p) {
		w.want(t)
	}
}

// want makes a boundary tensor come here, as soon as its shape is known.
func (w *Worker) want(t key.Tensor) {
	st := w.step
	b := st.tensors[t]
	if b != nil {
		if b.here {
			w.arrive(t)
		}
		return
	}
	dims := w.shapeOf(t.Boundary).dims
	if dims == nil || w.runner(t.Producer()) == w.me {
		return // when it is, assign wants it again; or it is made here
	}
	b = &boundary{sentTo: make(map[id.WorkerID]bool)}
	st.tensors[t] = b
	b.ticket = w.expect(key.Boundary(st.attempt, t), Buffer{Content: Boundary, Tensor: t}, 0, expected{content: aTensor, tensor: t, dims: dims})
}

// tensorCame takes a boundary tensor from another worker.
func (w *Worker) tensorCame(x expected, ev Received) {
	b := w.step.tensors[x.tensor]
	b.ticket = 0
	if ev.Bytes != 4*tensor.Size(x.dims) {
		w.fail(fmt.Errorf("step %d: worker %v sent %d bytes of a boundary tensor of %v", w.step.number, ev.From, ev.Bytes, x.dims))
		return
	}
	b.here = true
	w.arrive(x.tensor)
}

// arrive tells the queue of a boundary tensor that is here.
func (w *Worker) arrive(t key.Tensor) {
	if t.Back {
		w.step.queue.Arrive(graph.BackwardOf(t.Consumer()))
	} else {
		w.step.queue.Arrive(graph.ForwardOf(t.Consumer()))
	}
}

// passDone takes the end of a pass.
func (w *Worker) passDone(ev PassDone) {
	st, t := w.step, ev.Task
	st.queue.Done(t)
	for i, dims := range ev.Within {
		w.knowShape(w.plan.Stages[t.Stage].Lo+1+i, dims)
	}
	switch {
	case t.Kind == graph.Backward:
		if t.Stage > 0 {
			w.made(key.Tensor{Boundary: t.Stage, Micro: t.Micro, Back: true})
		}
	case t.Stage == len(w.plan.Stages)-1:
		st.queue.Arrive(graph.BackwardOf(t.Pair))
	default:
		w.knowShape(w.plan.Stages[t.Stage].Hi, ev.Made)
		w.made(key.Tensor{Boundary: t.Stage + 1, Micro: t.Micro})
		w.want(key.Tensor{Boundary: t.Stage + 1, Micro: t.Micro, Back: true})
	}
}

// made takes a boundary tensor that was computed here.
func (w *Worker) made(t key.Tensor) {
	st := w.step
	b := st.tensors[t]
	switch {
	case b == nil:
		b = &boundary{here: true, sentTo: make(map[id.WorkerID]bool)}
		st.tensors[t] = b
		w.emit(Keep{Tensor: t})
	case b.here: // it had come from another worker that is lost
		b.doubted = false
		w.compare(t, nil)
	default: // and this one never will
		delete(w.tickets, b.ticket)
		w.emit(Keep{Tensor: t, Cancel: b.ticket})
		b.ticket, b.here = 0, true
	}
	w.hand(t, b)
}

// hand brings a boundary tensor that was made here to the worker that goes on with it, and to the one that repeats its passes.
func (w *Worker) hand(t key.Tensor, b *boundary) {
	w.handTo(t, b, w.runner(t.Consumer()))
	if x := w.step.spot; x != nil && x.pair == t.Consumer() && x.repeater != x.runner {
		w.handTo(t, b, x.repeater)
	}
}

func (w *Worker) handTo(t key.Tensor, b *boundary, to id.WorkerID) {
	st := w.step
	if to == w.me {
		w.arrive(t)
		return
	}
	// What came from another worker, the plan may have come to want elsewhere, but then it makes it be computed again.
	if !st.mine(t.Producer()) {
		return
	}
	w.attest(t, b, to)
	if b.sentTo[to] {
		return
	}
	b.sentTo[to] = true
	w.emit(Send{To: w.session(to), Key: key.Boundary(st.attempt, t), From: Buffer{Content: Boundary, Tensor: t}, Priority: comm.Bulk})
}

// through reports whether all micro-batches routed here are through a layer.
func (w *Worker) through(s int, ls *layerState) bool {
	for m, x := range w.plan.Route[s] {
		if x == w.me && !ls.have[m] && w.plan.Runs(graph.Pair{Stage: s, Micro: m}, w.step.number) {
			return false
		}
	}
	return true
}

// keeping returns a stage all of whose pairs here are finished and whose passes have kept gradients, or -1.
func (w *Worker) keeping() int {
	for _, s := range w.served {
		if w.step.queue.Before(graph.Pair{Stage: s, Micro: -1}) == 0 && w.keeps(s) {
			return s
		}
	}
	return -1
}

// keeps reports whether a pair of the stage is finished here and its gradients are not in the sums.
func (w *Worker) keeps(s int) bool {
	have := w.step.layers[w.plan.Stages[s].Lo].have
	for m, x := range w.plan.Route[s] {
		if x == w.me && !have[m] && w.step.queue.Status(graph.Pair{Stage: s, Micro: m}).Phase == graph.Finished {
			return true
		}
	}
	return false
}

// endStep forgets the step that all have come to the end of. Its memory is cleared once it is of no more use.
func (w *Worker) endStep() {
	for _, b := range w.step.tensors {
		delete(w.tickets, b.ticket)
		w.cancel(b.attestation, false)
	}
	w.step = nil
}

// shape is the shape of the input of a layer for one micro-batch. A worker that has run the layer before it knows it, and tells
// all others if a stage begins with the layer.
type shape struct {
	dims   []int
	told   map[id.Session]bool
	ticket Ticket
}

// maxDims bounds the dimensions of a boundary tensor.
const maxDims = 8

// ShapeSize bounds a shape in a message, in bytes.
const ShapeSize = 8 * maxDims

// AppendShape appends a shape, as it is in messages.
func AppendShape(b []byte, dims []int) []byte {
	for _, d := range dims {
		b = binary.NativeEndian.AppendUint64(b, uint64(d))
	}
	return b
}

// ParseShape reads a shape.
func ParseShape(b []byte) (dims []int, ok bool) {
	size := 1
	for ; len(b) >= 8; b = b[8:] {
		d := int64(binary.NativeEndian.Uint64(b))
		if d < 1 || d > 1<<31 || size > 1<<34/int(d) {
			return nil, false
		}
		dims = append(dims, int(d))
		size *= int(d)
	}
	return dims, true
}

// shapeOf returns the shape of the input of stage s.
func (w *Worker) shapeOf(s int) *shape { return &w.shapes[w.plan.Stages[s].Lo] }

// askShapes expects the shapes between layers that are not known.
func (w *Worker) askShapes() {
	for layer := 1; layer < len(w.shapes); layer++ {
		if sh := &w.shapes[layer]; sh.dims == nil && sh.ticket == 0 {
			sh.ticket = w.expect(key.Shape(w.c.First.Epoch, layer), Buffer{}, ShapeSize, expected{content: aShape, layer: layer})
		}
	}
}

func (w *Worker) learnShape(layer int, words []byte) {
	if w.shapes[layer].dims != nil {
		return
	}
	dims, ok := ParseShape(words)
	if !ok {
		w.fail(fmt.Errorf("layer %q was told the shape %x for its input", w.c.Layers[layer].Name, words))
		return
	}
	w.knowShape(layer, dims)
}

// knowShape takes the shape of the input of a layer.
func (w *Worker) knowShape(layer int, dims []int) {
	if w.shapes[layer].dims != nil {
		return
	}
	if len(dims) > maxDims {
		w.fail(fmt.Errorf("the input of layer %q has %d dimensions; at most %d are supported", w.c.Layers[layer].Name, len(dims), maxDims))
		return
	}
	w.shapes[layer].dims = dims
	w.tellShapes(nil)
	if w.step == nil {
		return
	}
	wanted := func(p graph.Pair) {
		if st := w.plan.Stages[p.Stage]; st.Lo == layer || st.Hi == layer {
			w.wantInputs(p)
		}
	}
	for _, s := range w.step.queue.Statuses() {
		wanted(s.Pair)
	}
	if w.step.repeats(w.me) {
		wanted(w.step.spot.pair)
	}
}

// knowsWithin reports whether the shapes between the layers of a stage are known.
func (w *Worker) knowsWithin(s int) bool {
	for l := w.plan.Stages[s].Lo + 1; l < w.plan.Stages[s].Hi; l++ {
		if w.shapes[l].dims == nil {
			return false
		}
	}
	return true
}

// tellShapes tells the shapes between layers that are known here. A worker that runs or has run the layer before tells all workers,
// which may have to take the stage over, or get another border of stages and lose the worker that knew it at once. And every worker
// tells those that are new, because the one that computed it may be gone. old is the plan before, nil if there is no new one.
func (w *Worker) tellShapes(old *plan.Plan) {
	for layer := 1; layer < len(w.shapes); layer++ {
		if w.shapes[layer].dims == nil {
			continue
		}
		ran := w.serves(layer - 1)
		if old != nil {
			was := old.StageOf(layer - 1)
			ran = ran || was >= 0 && slices.Contains(old.Stages[was].Workers, w.me)
		}
		for _, x := range w.plan.Workers {
			if ran || old != nil && !slices.Contains(old.Workers, x) {
				w.tellShape(layer, x.ID)
			}
		}
	}
}

// tellShape tells a worker the shape of the input of a layer, once.
func (w *Worker) tellShape(layer int, x id.WorkerID) {
	sh, to := &w.shapes[layer], w.session(x)
	if x == w.me || sh.told[to] {
		return
	}
	if sh.told == nil {
		sh.told = make(map[id.Session]bool)
	}
	sh.told[to] = true
	w.emit(Send{To: to, Key: key.Shape(w.c.First.Epoch, layer), Data: AppendShape(nil, sh.dims), Priority: comm.Control})
}
