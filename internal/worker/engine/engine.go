package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/platform/progress"
	"github.com/soliton-train/soliton/internal/worker/key"
	"github.com/soliton-train/soliton/internal/worker/meter"
)

// Layer describes the parameters of one layer.
type Layer struct {
	Name    string
	Tensors []zero.Tensor
	// Params holds all tensors, one after the other, once Config.Stage has made
	// a stage with the layer, else it is nil. The engine updates them.
	Params []float32
}

// Size returns the number of parameters.
func (l Layer) Size() (n int) {
	for _, t := range l.Tensors {
		n += t.Size
	}
	return n
}

// Load fills in and target, tensors without the sample dimension, with sample
// i of the run, which counts on over steps and epochs.
type Load func(i uint64, in, target tensor.Tensor) error

// Config describes a job, and a worker's part in it, to the engine. Every
// field is needed but Progress, Fast, Zero and Level.
type Config struct {
	Self plan.Worker // our session
	// Network is the engine's: it says who is admitted, and makes groups. An
	// engine that follows another one on a network goes on with its groups, which
	// Groups holds; it begins empty.
	Network *comm.Endpoint
	Groups  map[uint16]*comm.Group
	// First brings the first plan, which is valid. Its Passed is the point
	// from which the run goes on. One without workers is that of a worker that
	// joins: it waits for a Fill, and for an Order with its first plan.
	First controller.Order

	// Stage makes layers [lo, hi) run here, and sets their Params in Layers to
	// memory of unspecified content.
	Stage  func(lo, hi int) Stage
	Layers []Layer // of the whole model
	// Begin fills in the state of a range at the point First.Passed. moments
	// are zero before; nil where they are not wanted.
	Begin func(r id.Range, params []float32, moments [][]float32) error

	Input, Target tensor.Spec
	GlobalBatch   int // samples of a step
	MicroBatch    int // samples of a micro-batch; divides GlobalBatch
	Rule          zero.Rule
	LR            func(step int) float64 // the same bits on every worker
	ClipNorm      float64                // largest norm of the mean gradient; 0: no limit
	Load          Load
	Pool          *kernel.Pool
	// Meter measures passes; nil is one that nobody reads.
	Meter *meter.Meter
	// Progress gets what is begun, where it is not nil.
	Progress *progress.Record
	// Fast adds gradients up in the order in which they come, with a plain
	// reduce-scatter between the workers of a stage, instead of over the tree. The
	// results of all workers still agree, but their last bits depend on the plan
	// and on chance.
	Fast bool
	// Zero is the stage of ZeRO, 1 or 2; 0 means 2. In stage 2 the complete
	// gradient of a shard is at its owner and its mirrors only, in stage 1 at all
	// workers of its stage. The bits are the same.
	Zero int
	// Yield lets the computing thread give way to all others, of whatever process.
	Yield bool
	// NoDigests lets the engine trust its memory. All workers agree on it.
	NoDigests bool
	// Repaired, if it is not nil, is told of every block that was altered here, by
	// the engine's goroutine: it must not wait.
	Repaired func(Repair)
	// Stop returns why this worker was asked to end the run, in at most 24
	// bytes, or "". The commit brings all workers to end after the same step.
	Stop func() string
	// Held, if it is not nil, reports whether this worker must not enter an exchange now, because
	// it may have been given up. When that ends, Wake makes the engine look again.
	Held func() bool
	// Saving, if it is not nil, says at every commit whether a checkpoint was asked
	// for here, and whether one is still being written here, which puts the next
	// one off. Save gets this worker's part of each that is made, after the update
	// of the step, by the computing goroutine: it must not wait. The memory is its
	// own to keep, but not to change.
	Saving func() (wanted, busy bool)
	Save   func(Checkpoint)
	// Level, if it is not nil, is told when all that a Fill is to bring here has
	// come, and the step that it is of.
	Level func(id id.Fill, step int)
	// Applied is told of every plan that is live here, by the engine's
	// goroutine: it must not wait.
	Applied func(Applied)
	// Span, if it is not nil, is told what this worker has done, by any goroutine: it must
	// not wait. Otherwise nothing is measured.
	Span func(Span)
	// Phase, if it is not nil, is told when the worker begins with a phase of a
	// step, and may be told so again. The loop calls it.
	Phase func(step int, phase string)
}

// Span is a stretch of time in which this worker did something. What it is not about is -1.
type Span struct {
	Name                string // see package trace
	Start, End          time.Time
	Stage, Micro, Layer int
	Peer                id.WorkerID
	Back                bool  // a boundary tensor on its way back
	Bytes               int64 // 0: not known
}

// now is the time where somebody wants to know of spans. Otherwise the clock is not read.
func (e *Engine) now() (t time.Time) {
	if e.c.Span != nil {
		t = time.Now()
	}
	return t
}

// span tells of something that has ended now.
func (e *Engine) span(name string, began time.Time, of Span) {
	if e.c.Span != nil {
		of.Name, of.Start, of.End = name, began, time.Now()
		e.c.Span(of)
	}
}

// spanOf is a span about a layer, or about nothing if that is -1.
func spanOf(layer int, bytes int64) Span {
	return Span{Stage: -1, Micro: -1, Layer: layer, Peer: -1, Bytes: bytes}
}

// The phases of a step on one worker, which overlap.
const (
	PhaseForward  = "forward"  // its first forward pass
	PhaseBackward = "backward" // its first backward pass
	PhaseReduce   = "reduce"   // the gradient of its first layer goes to the owners
	PhaseCommit   = "commit"   // it enters the commit
	PhaseGather   = "gather"   // after the commit, parameters come and go
)

func (e *Engine) phase(step int, phase string) {
	if e.c.Phase != nil {
		e.c.Phase(step, phase)
	}
}

// Applied says that a plan is live on this worker, and that there is work
// under it or none left.
type Applied struct {
	Ballot  id.Ballot // of the order that brought it
	Version id.Version
	Opened  int // links that were made for it
	// Edit is the time from the order's arrival, or from the commit that made
	// a boundary plan live, until the plan was applied; Resume the time from
	// then until a task was running, or ready, or none was left.
	Edit, Resume time.Duration
}

// Engine executes a worker's part of the steps. One goroutine, its loop, owns
// all its state; another one computes. Methods may be called from any
// goroutine, but there is one operation (Step, Evaluate, Keep) at a time.
type Engine struct {
	c      Config
	micros int

	mail    mailbox
	ctx     context.Context // of the whole engine
	cancel  context.CancelFunc
	ended   chan struct{} // the loop has ended
	compute chan func()
	tasks   sync.WaitGroup // goroutines besides the loop

	// All below belongs to the loop.
	err error    // why nothing goes on
	req *request // the operation, nil between two

	plan   *plan.Plan // applied; no workers before the first
	rank   int        // of this worker in plan.Workers
	live   id.Version // under which to go on after passed
	start  id.Point
	passed id.Point
	result []byte // of the exchange of passed

	sealed   bool
	ballot   id.Ballot
	order    *controller.Order // to be applied now
	admitted bool              // its workers are, and others evicted
	edited   bool              // its groups are
	opened   int               // links for it
	came     time.Time         // when it did
	resuming *Applied          // applied, but no task began yet
	at       time.Time         // when it was applied
	pending  []controller.Order
	joins    id.Version           // of a worker that joins: the plan whose beginning it waits for
	begun    chan struct{}        // to be closed when there is a plan
	lossy    map[id.WorkerID]bool // links that broke since the plan was applied
	peers    []comm.Peer          // that are admitted for a plan

	// Operations of groups that go on, and what ends them.
	ops       int
	opsCtx    context.Context
	opsCancel context.CancelFunc
	broken    bool // one has failed: nothing works before the next plan

	everyone *comm.Group
	groups   map[int]*comm.Group // of stages this worker serves with others
	stages   map[int]Stage
	shards   map[id.Range]*shard
	index    map[id.Range]int // of all shards of the plan
	former   []*shard         // handed over; kept until the next commit, for a recovery before it
	arrivals []arrivals       // of each layer: parameters on their way from their owners
	sent     []*comm.Sending  // of memory that the update changes

	busy    work
	jobStop context.CancelFunc // ends a job that goes on
	// When the newest of what was computed began and ended; the loop reads it once that is over.
	jobBegan, jobEnded time.Time

	normScale int
	grads     []*tree.Sums[[]float32] // of each layer that this worker holds
	plain     [][]float32             // the same where reduction is fast: one sum, nil before the first gradient
	losses    *tree.Sums[Loss]
	free      pool
	late      []lateBuffer
	batches   []*batch // not in use; of the computing goroutine

	shapes []shape // of the input of each layer
	step   *stepState

	forwards, backwards int64

	initial beginnings
	guard   *guard   // nil without digests
	flips   []Target // that were asked for
	drawn   uint64   // state of their random numbers

	// State on its way to and from holders that are to come.
	fillID    id.Fill // of the newest Fill
	outgoing  []*outgoing
	incoming  []*incoming
	fillRecvs []*comm.Receiving
	fillSends []*comm.Sending
	chores    []*incoming // with an update to be replayed
	levelSaid bool
	putOff    int // commits for which a plan was put off that this worker is behind for
}

// work is what the computing goroutine does.
type work uint8

const (
	idle   work = iota
	onPass      // a forward or backward pass
	onJob       // anything else; a plan is applied after it
)

// New returns an engine, which goes on from c.First.Passed.
func New(c Config) (*Engine, error) {
	p := &c.First.Plan
	micros := c.GlobalBatch / c.MicroBatch
	joins := len(p.Workers) == 0
	if c.GlobalBatch%c.MicroBatch != 0 || !joins && p.Micros() != micros {
		return nil, fmt.Errorf("engine: micro-batches of %d of a global batch of %d are not the %d of the plan", c.MicroBatch, c.GlobalBatch, p.Micros())
	}
	e := &Engine{
		c:         c,
		micros:    micros,
		mail:      newMailbox(),
		ended:     make(chan struct{}),
		compute:   make(chan func(), 1),
		plan:      new(plan.Plan),
		start:     c.First.Passed,
		passed:    c.First.Passed,
		live:      p.Version,
		lossy:     make(map[id.WorkerID]bool),
		groups:    make(map[int]*comm.Group),
		stages:    make(map[int]Stage),
		shards:    make(map[id.Range]*shard),
		arrivals:  make([]arrivals, len(c.Layers)),
		normScale: zero.NormScale(int64(c.GlobalBatch) * int64(c.Target.Len())),
		grads:     make([]*tree.Sums[[]float32], len(c.Layers)),
		initial:   beginnings{make(map[id.Range]*shard), make(map[[2]int]Stage)},
		plain:     make([][]float32, len(c.Layers)),
		shapes:    make([]shape, len(c.Layers)),
		losses:    tree.NewSums(micros, Loss.add),
	}
	if c.Meter == nil {
		e.c.Meter = meter.New()
	}
	if !c.NoDigests {
		e.guard = newGuard(&c)
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	e.opsCtx, e.opsCancel = context.WithCancel(e.ctx)
	if joins {
		// No point of the run is its beginning here: nothing is made from nothing.
		e.start = id.Point{Step: -1}
	} else {
		e.setOrder(c.First)
	}
	e.tasks.Go(e.runCompute)
	go e.loop()
	e.mail.put(func() {})
	return e, nil
}

// Close ends the engine where it is, and returns when all its goroutines have
// ended. The computing one ends after what it runs.
func (e *Engine) Close() {
	e.cancel()
	<-e.ended
}

// Abandon ends the operation of the moment, and every one after it, with err.
func (e *Engine) Abandon(err error) { e.mail.put(func() { e.fail(err) }) }

// Wake makes the engine look at what it waits for.
func (e *Engine) Wake() { e.mail.put(func() {}) }

// held reports whether this worker must not enter an exchange.
func (e *Engine) held() bool { return e.c.Held != nil && e.c.Held() }

// loop owns the engine's state.
func (e *Engine) loop() {
	defer close(e.ended)
	defer func() {
		e.opsCancel()
		close(e.compute)
		e.tasks.Wait()
		for range e.mail.take() { // what they leave is about an engine that is no more
		}
		e.fail(errClosed)
		e.discard()
	}()
	for {
		select {
		case <-e.mail.signal:
		case <-e.ctx.Done():
			return
		}
		for _, f := range e.mail.take() {
			f()
		}
		e.advance()
	}
}

// advance does all that can be done now.
func (e *Engine) advance() {
	if e.err != nil {
		return
	}
	if e.order != nil && !e.obey() {
		return
	}
	// Between what this worker says in a commit and the update nothing else is
	// computed: the update begins as soon as the commit is passed.
	if e.busy == idle && (e.req == nil || e.req.said == nil) && e.doChore() || e.sealed || e.order != nil || len(e.plan.Workers) == 0 {
		return
	}
	e.flip()
	if e.req != nil && !e.mending() {
		switch e.req.point.Gate {
		case id.Committed:
			e.advanceStep()
		default:
			e.advanceJob()
		}
	}
	e.resumed()
}

// fail ends the operation; no other is begun.
func (e *Engine) fail(err error) {
	if e.err == nil {
		e.err = err
	}
	if e.req != nil {
		e.req.end(e.err)
		e.req = nil
	}
	if e.begun != nil {
		close(e.begun)
		e.begun = nil
	}
}

var errClosed = errors.New("engine: closed")

// ErrLeft is the error of operations after a plan without this worker is
// live. Others may still read from it, until they have applied the plan, too.
var ErrLeft = errors.New("engine: the plan goes on without this worker")

// discard gives up the step in flight.
func (e *Engine) discard() {
	if e.step == nil {
		return
	}
	for p, w := range e.step.works {
		if w.pass != nil {
			e.stages[p.Stage].Drop(w.pass)
		}
	}
	e.step = nil
}

// runCompute is the goroutine that computes. It keeps its OS thread: on a busy
// machine, the other goroutines wait less for one of theirs then (bench control). And where they are to give way,
// that thread does.
func (e *Engine) runCompute() {
	if e.c.Yield {
		platform.ComputeThread()
	} else {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
	}
	defer e.c.Meter.Attach()()
	for f := range e.compute {
		f()
	}
}

// do computes f, and then calls after in the loop. A panic in f ends the
// operation, whose caller gets it.
func (e *Engine) do(kind work, f func() error, after func(error)) {
	e.busy = kind
	job := func() {
		var err error
		defer func() {
			if v := recover(); v != nil {
				err = newPanic(v)
			}
			e.mail.put(func() {
				e.busy = idle
				switch p := new(panicError); {
				case e.err != nil: // it has failed meanwhile, and nobody waits any more
				case errors.As(err, &p):
					e.fail(p)
				default:
					after(err)
				}
			})
		}()
		e.jobBegan = e.now()
		err = f()
		e.jobEnded = e.now()
	}
	e.compute <- job // there is room: it was idle
}

// request is an operation that was asked for.
type request struct {
	point id.Point // at which it ends
	done  chan struct{}
	err   error

	result Result // of a step
	save   bool   // it makes a checkpoint

	// Of other operations: job computes what this worker says in the exchange
	// at the end, as many bytes as size says; conclude reads what all said.
	job      func(ctx context.Context) ([]byte, error)
	size     func(id.WorkerID) int
	conclude func(said [][]byte) error

	said       []byte // by this worker, nil before it is known
	exchanging bool
}

func (r *request) end(err error) {
	r.err = err
	close(r.done)
}

// ask hands an operation to the loop and waits for its end.
func (e *Engine) ask(ctx context.Context, r *request) error {
	r.done = make(chan struct{})
	e.mail.put(func() {
		switch {
		case e.err != nil:
			r.end(e.err)
		case e.req != nil:
			r.end(errors.New("engine: two operations at a time"))
		default:
			e.req = r
		}
	})
	select {
	case <-r.done:
	case <-ctx.Done():
		return ctx.Err()
	case <-e.ended:
		return errClosed
	}
	if p := new(panicError); errors.As(r.err, &p) {
		panic(p.Panic)
	}
	return r.err
}

// panicError is a panic of the computing goroutine on its way to the caller of
// the operation, who panics with it.
type panicError struct{ *kernel.Panic }

func (*panicError) Error() string { return "panic" }

// Loss is a sum of losses over some targets.
type Loss struct {
	Sum   float64
	Count int64
}

func (l Loss) add(o Loss) Loss { return Loss{l.Sum + o.Sum, l.Count + o.Count} }

// Mean returns the mean loss, NaN over no targets.
func (l Loss) Mean() float64 { return l.Sum / float64(l.Count) }

// Result is what a committed step gives, the same on every worker.
type Result struct {
	Step     int
	Loss     float64 // mean over the targets
	Targets  int64
	LR       float64
	GradNorm float64 // norm of the gradient of the mean loss, before clipping
	Stop     string  // why a worker was asked to end the run, "" if none was

	// Of this worker:
	Plan                id.Version // under which the step was committed
	Forwards, Backwards int64      // passes of training that it has run so far
}

// Step executes the step that follows what was passed, numbered from 1. Like
// every operation it goes on through the loss of other workers, for as long as
// orders come. After an error no other operation can be executed. A panic in
// the stages is one here.
func (e *Engine) Step(ctx context.Context, step int) (Result, error) {
	r := &request{point: id.Point{Step: step, Gate: id.Committed}}
	if err := e.ask(ctx, r); err != nil {
		return Result{}, err // the loop may still be at it
	}
	return r.result, nil
}

// Begun waits until the first plan is live here, and returns the point from
// which the run goes on and, of a worker that joined, why the commit before
// ended the run, or "".
func (e *Engine) Begun(ctx context.Context) (p id.Point, stop string, err error) {
	begun := make(chan struct{})
	e.mail.put(func() {
		if len(e.plan.Workers) > 0 || e.err != nil {
			close(begun)
		} else {
			e.begun = begun
		}
	})
	select {
	case <-begun:
	case <-ctx.Done():
		return p, "", ctx.Err()
	case <-e.ended:
		return p, "", errClosed
	}
	e.inspect(func() {
		p, err = e.passed, e.err
		said, _ := decodeSaid(e.result) // told by a worker that had passed
		for _, b := range said {
			if rec, err := parseRecord(b, e.micros); err == nil {
				stop = cmp.Or(stop, rec.stop)
			}
		}
	})
	return p, stop, err
}

// Moments returns the optimizer's numbers for a range that is owned or
// mirrored here, nil for others. There must be no operation.
func (e *Engine) Moments(r id.Range) (moments [][]float32) {
	e.inspect(func() {
		if sh := e.shards[r]; sh != nil && sh.state != nil {
			moments = sh.state.Moments
		}
	})
	return moments
}

// Holds returns the stages that this worker serves and the bytes of the
// parameters and of the optimizer's numbers that it holds, mirrors included.
func (e *Engine) Holds() (stages []int, params, moments int64) {
	e.inspect(func() {
		stages = e.plan.StagesOf(e.c.Self.ID)
		for _, s := range stages {
			for l := e.plan.Stages[s].Lo; l < e.plan.Stages[s].Hi; l++ {
				params += 4 * int64(e.c.Layers[l].Size())
			}
		}
		for _, sh := range e.shards {
			if sh.state == nil {
				continue
			}
			for _, m := range sh.state.Moments {
				moments += 4 * int64(len(m))
			}
			if !e.serves(sh.Layer) {
				params += 4 * int64(len(sh.params))
			}
		}
	})
	return stages, params, moments
}

// Result returns what was said in the exchange of the point passed last.
func (e *Engine) Result() (result []byte) {
	e.inspect(func() { result = e.result })
	return result
}

// Passes returns how many passes of training this worker has run.
func (e *Engine) Passes() (forwards, backwards int64) {
	e.inspect(func() { forwards, backwards = e.forwards, e.backwards })
	return forwards, backwards
}

// First reports whether this worker is the first of the live plan.
func (e *Engine) First() (first bool) {
	e.inspect(func() { first = e.rank == 0 })
	return first
}

// Version returns the version of the live plan.
func (e *Engine) Version() (v id.Version) {
	e.inspect(func() { v = e.plan.Version })
	return v
}

// computed tells of what the computing goroutine has just ended.
func (e *Engine) computed(name string, of Span) {
	if e.c.Span != nil {
		of.Name, of.Start, of.End = name, e.jobBegan, e.jobEnded
		e.c.Span(of)
	}
}

// inspect calls f in the loop, or here when that has ended.
func (e *Engine) inspect(f func()) {
	done := make(chan struct{})
	e.mail.put(func() {
		f()
		close(done)
	})
	select {
	case <-done:
	case <-e.ended:
		f()
	}
}

// session returns the session of a worker of the plan.
func (e *Engine) session(id id.WorkerID) id.Session {
	w, _ := e.plan.Worker(id)
	return sessionOf(w)
}

func sessionOf(w plan.Worker) id.Session {
	return id.Session{Worker: w.ID, Incarnation: w.Incarnation}
}

// serves reports whether the plan has this worker run the layer.
func (e *Engine) serves(layer int) bool {
	return e.stages[e.plan.StageOf(layer)] != nil
}

// attempt names the execution of the step that follows the point passed last.
func (e *Engine) attempt() key.Attempt {
	return key.Attempt{Epoch: e.c.First.Epoch, Step: e.passed.Step + 1, Repair: e.passed.Repair}
}

// after names what follows the commit of a step.
func (e *Engine) after(step int) key.Attempt { return key.After(e.c.First.Epoch, step) }

// nonFinite makes the error of a number that is not finite; layer may be -1.
func (e *Engine) nonFinite(step, layer int, what string) error {
	err := &NonFiniteError{Step: step, What: what}
	if layer >= 0 {
		err.Layer = e.c.Layers[layer].Name
	}
	return err
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
