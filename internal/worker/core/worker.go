package core

import (
	"errors"
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// Config describes a job, and the worker's part in it.
type Config struct {
	// Job has the numbers of the job: MicroBatch, ClipNorm, Seed, Zero, NoDigests and Verify are used here. A worker repeats one
	// micro-batch for every Verify that it runs, on average; 0 means none.
	rundir.Job

	Self   plan.Worker
	Layers []Layer // of the whole model
	Micros int     // micro-batches of a step

	Metrics int // numbers that are measured beside the loss

	// Passes is how many passes this worker runs at a time; 0 means 1.
	Passes int

	// First brings the first plan; see [controller.Order]. Its Passed is the point from which the run goes on. A plan without
	// workers is that of a worker that joins.
	First     control.Order
	Moments   int // arrays of the optimizer's state
	Flying    int // numbers in bases that are copied and not sent yet, but for the first; 0 means 16 Mi, which are 64 MiB
	NormScale int // see [zero.NormScale]
	// Derive says that the run begins with moments that are zeros: then shards of the layers that are served here need no Prepare.
	Derive bool
	// Beside says that the first values of the layers that are served here can be made beside passes, and are not made by Prepare. It takes Derive.
	Beside bool
}

// Layer is what the core knows of a layer.
type Layer struct {
	Name   string
	Blocks []zero.Block // of the parameters
}

// ErrLeft is the error of operations after a plan without this worker is live.
var ErrLeft = errors.New("engine: the plan goes on without this worker")

// Worker is the state machine. It is not for use by several goroutines.
type Worker struct {
	c     Config
	me    id.WorkerID
	state State
	err   error // why nothing goes on
	out   []Duty
	spare []Duty

	plan      *plan.Plan // applied; no workers before the first
	live      id.Version // under which to go on after passed
	start     id.Point
	passed    id.Point
	result    []byte // of the exchange of passed
	committed Result // of the newest commit
	held      bool   // no exchange may be entered

	req  *request // the operation, nil between two
	step *step    // nil before its first event, and from its commit on

	recovery
	groups
	computing
	shards
	fills
	shapes  []shape // of the input of each layer
	repairs []*repair

	tickets map[Ticket]expected
	last    Ticket
}

// request is the operation that was asked for.
type request struct {
	Ask
	said       []byte  // by this worker, nil before it is known
	lr         float64 // the same, of a step
	exchanging bool
	result     Result
	save       bool // it makes a checkpoint
}

// computing is what the computing goroutines do, each in its lane, but for one beside them.
type computing struct {
	lanes     []lane
	beside    work // onFill or onFirst
	operating bool // the job of the operation, which is what is said in a step
	stopping  bool // it was cancelled
}

type lane struct {
	on   work
	task graph.Task // where that is a pass
}

// work is a kind of task.
type work uint8

const (
	idle     work = iota
	onPass        // a forward or backward pass; others may run beside it
	onKept        // what passes have kept
	onFill        // state that comes or goes, beside passes; a plan is applied after it
	onFirst       // first values of a layer, beside passes
	onRepeat      // both passes of a pair once more, beside nothing
	onUpdate      // of a step, beside nothing; a plan that leaves what is here as it is does not wait for it
	onJob         // anything else, beside nothing; a plan is applied after it, but for operations other than a step as for onUpdate
)

// idle reports whether nothing is computed.
func (c *computing) idle() bool {
	return !c.has(onPass, onKept, onFill, onFirst, onRepeat, onUpdate, onJob)
}

// has reports whether there is such work.
func (c *computing) has(kinds ...work) bool {
	return slices.Contains(kinds, c.beside) || slices.ContainsFunc(c.lanes, func(l lane) bool { return slices.Contains(kinds, l.on) })
}

// free returns a lane in which work can begin beside that of others, -1 if there is none.
func (c *computing) free() int {
	if c.has(onKept, onRepeat, onUpdate, onJob) {
		return -1
	}
	return slices.IndexFunc(c.lanes, func(l lane) bool { return l.on == idle })
}

// startBeside begins work beside passes, if there is none and nothing runs that it must not run beside.
func (c *computing) startBeside(on work) bool {
	if c.beside != idle || c.has(onKept, onRepeat, onUpdate, onJob) {
		return false
	}
	c.beside = on
	return true
}

// occupy gives work that nothing runs beside the first lane.
func (c *computing) occupy(on work) { c.lanes[0].on = on }

// release takes the end of a task.
func (c *computing) release(ev Event) {
	switch ev.(type) {
	case Replayed, CaughtUp, BasesCopied, FirstMade, Failed:
		c.beside = idle
	}
	for i := range c.lanes {
		ended := false
		switch l := &c.lanes[i]; ev := ev.(type) {
		case PassDone:
			ended = l.on == onPass && l.task == ev.Task
		case HandedOver:
			ended = l.on == onKept
		case Repeated:
			ended = l.on == onRepeat
		case Updated:
			ended = l.on == onUpdate
		case Replayed, CaughtUp, BasesCopied, FirstMade:
		case Failed: // of a pass, or beside it: all ends; or of a job, beside which nothing runs
			ended = true
		default:
			ended = l.on == onJob
		}
		if ended {
			c.lanes[i] = lane{}
		}
	}
}

// groups is what the core knows of operations of groups.
type groups struct {
	ops    map[Op]operation
	lastOp Op
	broken bool // one has failed: no other is begun before the next plan
}

// operation is an operation that goes on.
type operation struct {
	kind      opKind
	layer     int
	ballot    id.Ballot
	req       *request
	cancelled bool
}

type opKind uint8

const (
	opEdit opKind = iota
	opReduce
	opExchange
)

// expected is what a message is for.
type expected struct {
	content content
	tensor  key.Tensor
	layer   int
	sh      *shard
	in      *incoming
	repair  *repair
	at      id.Point
	order   control.Order
	dims    []int
}

type content uint8

const (
	aTensor content = iota
	anAttestation
	aGradient
	params
	aBlock
	aBase
	anUpdate
	anIncrement
	aShape
	aLive
)

// New returns a worker that goes on from c.First.Passed. It panics if the first plan is not one of c.Micros micro-batches.
func New(c Config) *Worker {
	w := &Worker{
		c: c, me: c.Self.ID,
		plan:    new(plan.Plan),
		start:   c.First.Passed,
		passed:  c.First.Passed,
		live:    c.First.Plan.Version,
		tickets: make(map[Ticket]expected),
		shapes:  make([]shape, len(c.Layers)),
	}
	w.recovery.lossy = make(map[id.WorkerID]bool)
	w.computing.lanes = make([]lane, max(c.Passes, 1))
	w.groups.ops = make(map[Op]operation)
	w.shards = shards{all: make(map[id.Range]*shard), arrivals: make([]arrivals, len(c.Layers))}
	if len(c.First.Plan.Workers) == 0 {
		// No point of the run is its beginning here: nothing is made from nothing.
		w.start = id.Point{Step: -1}
	} else {
		w.setOrder(c.First)
	}
	return w
}

// State returns the state.
func (w *Worker) State() State { return w.state }

// Err returns why nothing goes on, or nil.
func (w *Worker) Err() error { return w.err }

// Plan returns the plan that is applied. It has no workers before the first one.
func (w *Worker) Plan() *plan.Plan { return w.plan }

// Passed returns the point passed last, and what was said in its exchange.
func (w *Worker) Passed() (id.Point, []byte) { return w.passed, w.result }

// Committed returns the result of the newest commit. A worker that joins gets it from the others; Forwards and Backwards are 0 there.
func (w *Worker) Committed() Result { return w.committed }

// Backlog returns the step that the worker is in, 0 for none, how many of its pairs are not finished, and how many of these could begin.
func (w *Worker) Backlog() (step, left, ready int) {
	if w.step == nil {
		return 0, 0, 0
	}
	return w.step.number, w.step.queue.Left(), w.step.queue.Ready()
}

// Epoch counts restarts from a checkpoint.
func (w *Worker) Epoch() int { return w.c.First.Epoch }

// Quiet reports whether no parameters change or are on their way here: what chaos may alter memory in.
func (w *Worker) Quiet() bool {
	return !w.over() && w.idle() && w.order == nil && w.state == Working && w.arrived() && !w.repairing()
}

// Arrived reports whether no parameters are on their way here.
func (w *Worker) Arrived() bool { return w.arrived() }

// Exchanging reports whether the worker has what it says at the next point, and whether it has entered the exchange.
func (w *Worker) Exchanging() (said, entered bool) {
	return w.req != nil && w.req.said != nil, w.req != nil && w.req.exchanging
}

// Shape returns the shape of the input of a layer, nil if it is not known.
func (w *Worker) Shape(layer int) []int { return w.shapes[layer].dims }

// Ready does what can be done now, and returns the duties since the last call in the order in which they must be done. The
// list is valid until the next call.
func (w *Worker) Ready() []Duty {
	w.advance()
	out := w.out
	w.out, w.spare = w.spare[:0], out
	return out
}

func (w *Worker) emit(d Duty) { w.out = append(w.out, d) }

// Step takes an event. What follows from it comes with the next Ready.
func (w *Worker) Step(ev Event) {
	switch ev := ev.(type) {
	case control.Query:
		w.query(ev)
	case control.Order:
		w.receiveOrder(ev)
	case control.Fill:
		w.fill(ev)
	case LinkLost:
		w.linkLost(ev.Session)
	case Hold:
		w.held = ev.On
	case Ask:
		w.ask(ev)
	case Abandon:
		w.fail(ev.Err)
	case Received:
		w.received(ev)
	case OpDone:
		w.opDone(ev)
	case Compared:
		w.compared(ev)
	case GradientDone:
		if w.step != nil {
			w.step.layers[ev.Layer].have[ev.Micro] = true
		}
	case ShardUpdated:
		if sh := w.all[ev.Range]; sh != nil {
			w.shardUpdated(sh)
		}
	case BaseSent:
		w.baseSent(ev.Transfer)
	case Copied:
		w.copied(ev.Transfers)
	default:
		w.taskDone(ev)
	}
}

// taskDone takes the end of a task of the computing goroutine.
func (w *Worker) taskDone(ev Event) {
	failed, isFailed := ev.(Failed)
	if isFailed && !failed.Task {
		w.fail(failed.Err)
		return
	}
	w.release(ev)
	operated, stopped := w.operating, w.stopping
	w.operating, w.stopping = false, false
	if w.over() {
		return
	}
	switch ev := ev.(type) {
	case Failed:
		if !operated || !stopped || ev.Panic {
			w.fail(ev.Err)
		}
	case PassDone:
		w.passDone(ev)
	case HandedOver:
		if w.step != nil && w.keeps(ev.Stage) {
			w.fail(fmt.Errorf("step %d: stage %d has kept gradients", w.step.number, ev.Stage))
		}
	case Said:
		w.sayCommit(ev)
	case Answered:
		switch {
		case stopped:
		case ev.Broken:
			w.broken = true // until the next plan
		case w.req != nil:
			w.req.said = append([]byte{}, ev.Said...) // not nil
		}
	case Prepared:
		w.madeStages, w.madeRanges = append(w.madeStages, ev.Stages...), append(w.madeRanges, ev.Ranges...)
	case FirstMade:
		w.firstMade(ev.Layer)
	case Replayed:
		w.replayed()
	case CaughtUp:
		w.caughtUp(ev.Range)
	case BasesCopied:
	case Repeated:
		if w.step != nil && w.step.spot != nil && !ev.Stopped { // else a plan within the step has overtaken it, or it is begun again
			w.step.spot.repeated = true
		}
	case Updated:
		r := w.req
		w.emit(Clear{})
		w.req = nil
		w.emit(End{Result: r.result})
	default:
		panic(fmt.Sprintf("core: unknown event %T", ev))
	}
}

// advance does all that can be done now.
func (w *Worker) advance() {
	if w.over() {
		return
	}
	obeys := w.order == nil || w.obey()
	if w.over() {
		return
	}
	if w.makeFirst(); !obeys {
		return
	}
	// Between what this worker says in a commit and the update nothing else is computed: the update begins as soon as the
	// commit is passed.
	if w.req == nil || w.req.said == nil {
		_ = w.catchUpShard() || w.replay() || w.base()
	}
	if w.state != Working {
		return
	}
	if w.req != nil && !w.repairing() && !w.has(onUpdate) {
		if w.req.Point.Gate == id.Committed {
			w.advanceStep()
		} else {
			w.advanceJob()
		}
	}
	w.resumed()
}

// ask begins an operation.
func (w *Worker) ask(a Ask) {
	if w.over() {
		w.emit(End{Err: w.err})
		return
	}
	w.req = &request{Ask: a}
}

// advanceJob does what can be done in an operation other than a step: its job, which begins again under every plan, and the
// exchange.
func (w *Worker) advanceJob() {
	r := w.req
	switch {
	case !w.idle() || w.broken || r.exchanging || w.begins() || w.isLate():
	case r.said == nil:
		w.occupy(onJob)
		w.operating = true
		w.emit(Operate{Point: r.Point, Repair: w.passed.Repair})
	case !w.held:
		w.exchange()
	}
}

// stopJob cancels the job of the operation. It begins again under the plan that comes.
func (w *Worker) stopJob() {
	if w.operating && !w.stopping {
		w.stopping = true
		w.emit(StopOperate{})
	}
}

// fail ends the operation; no other is begun.
func (w *Worker) fail(err error) {
	if w.err == nil {
		w.err = err
		if errors.Is(err, ErrLeft) {
			w.to(Left)
		} else {
			w.to(Dead)
		}
	}
	if w.req != nil {
		w.req = nil
		w.emit(End{Err: w.err})
	}
}

// expect posts a receive.
func (w *Worker) expect(k comm.Key, into Buffer, size int, what expected) Ticket {
	w.last++
	w.tickets[w.last] = what
	w.emit(Expect{Ticket: w.last, Key: k, Into: into, Size: size, Dims: what.dims})
	return w.last
}

// cancel gives an expected message up.
func (w *Worker) cancel(t Ticket, wait bool) {
	if _, ok := w.tickets[t]; ok {
		delete(w.tickets, t)
		w.emit(Cancel{Ticket: t, Wait: wait})
	}
}

// received takes a message. One that was cancelled meanwhile counts for nothing.
func (w *Worker) received(ev Received) {
	x, ok := w.tickets[ev.Ticket]
	if !ok {
		return
	}
	delete(w.tickets, ev.Ticket)
	if w.state == Dead || ev.Duplicate && x.content != params {
		return
	}
	switch x.content {
	case aTensor:
		w.tensorCame(x, ev)
	case anAttestation:
		w.attested(x.tensor, ev.Data)
	case aGradient:
		x.sh.ticket = 0
		w.completed(x.sh)
	case params:
		delete(w.arrivals[x.layer].missing, ev.Ticket)
		w.checkArrivals(x.layer)
	case aBlock:
		w.blockCame(x, ev)
	case aBase:
		w.baseCame(x.in, ev)
	case anUpdate:
		w.numbersCame(x.in, ev.Data)
	case anIncrement:
		w.incrementCame(x.in, ev.Bytes)
	case aShape:
		w.learnShape(x.layer, ev.Data)
	case aLive:
		w.liveCame(x.order, ev.Data)
	}
}

// begin counts an operation of a group as begun.
func (w *Worker) begin(o operation) Op {
	w.lastOp++
	w.ops[w.lastOp] = o
	return w.lastOp
}

// cancelOps cancels all operations of groups.
func (w *Worker) cancelOps() {
	for op, o := range w.ops {
		if o.cancelled {
			return // all are
		}
		o.cancelled = true
		w.ops[op] = o
	}
	w.emit(CancelOps{})
}

// opDone takes the end of an operation. One that fails because something about the group has changed waits for the next plan.
func (w *Worker) opDone(ev OpDone) {
	o := w.ops[ev.Op]
	delete(w.ops, ev.Op)
	switch {
	case ev.Err != nil:
		w.fail(ev.Err)
	case ev.Broken || o.cancelled:
		w.broken = true
	case o.kind == opEdit:
		w.opened = ev.Opened
	case o.kind == opReduce:
		w.reduced(o.layer)
	case o.kind == opExchange:
		w.exchanged(o, ev.All)
	}
}

// attempt names the execution of the step that follows the point passed last.
func (w *Worker) attempt() key.Attempt {
	return key.Attempt{Epoch: w.c.First.Epoch, Step: w.passed.Step + 1, Repair: w.passed.Repair}
}

// after names what follows the commit of a step.
func (w *Worker) after(step int) key.Attempt { return key.After(w.c.First.Epoch, step) }

// session returns the session of a worker of the plan.
func (w *Worker) session(of id.WorkerID) id.Session {
	x, _ := w.plan.Worker(of)
	return SessionOf(x)
}

// SessionOf returns a worker's session.
func SessionOf(w plan.Worker) id.Session {
	return id.Session{Worker: w.ID, Incarnation: w.Incarnation}
}

// RangeOf returns the range of a shard.
func RangeOf(s plan.Shard) id.Range { return id.Range{Layer: s.Layer, Lo: s.Lo, Hi: s.Hi} }
