package engine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/key"
	"github.com/soliton-train/soliton/internal/worker/meter"
)

// Engine executes a worker's part of the steps. Methods may be called from any goroutine, but there is one operation (Step,
// Evaluate, Keep) at a time.
type Engine struct {
	c      Config
	micros int

	mail   mailbox
	ctx    context.Context // of the whole engine
	cancel context.CancelFunc
	ended  chan struct{} // the loop has ended
	lanes  []*lane
	active atomic.Int32   // lanes with a task that does not wait for parameters
	tasks  sync.WaitGroup // goroutines besides the loop
	ahead  *prefetcher    // of the computing goroutines

	// All below belongs to the loop.
	core    *core.Worker
	req     *request      // the operation, nil between two
	begun   chan struct{} // closed when there is a plan, or none will come
	held    bool
	queries []query // not answered

	came, applied time.Time // an order came, and its plan was applied
	updated       time.Time // the last update ended

	opsCtx     context.Context // of operations of groups
	opsCancel  context.CancelFunc
	jobStop    context.CancelFunc // of the operation's job
	copyStop   atomic.Bool        // no more bases are copied by the task of the moment
	repeatStop atomic.Bool        // the pair that is being repeated ends before its next layer

	network
	memory
	forwards, backwards int64
	reading             int64 // nanoseconds

	guard *guard // nil without digests
	flipper
}

// New returns an engine, which goes on from c.First.Passed.
func New(c Config) (*Engine, error) {
	p := &c.First.Plan
	micros := c.GlobalBatch / c.MicroBatch
	if c.GlobalBatch%c.MicroBatch != 0 || len(p.Workers) > 0 && p.Micros() != micros {
		return nil, fmt.Errorf("engine: micro-batches of %d of a global batch of %d are not the %d of the plan", c.MicroBatch, c.GlobalBatch, p.Micros())
	}
	c.Beside = c.Beside && c.Zeros
	if c.Meter == nil {
		c.Meter = meter.New()
	}
	e := &Engine{
		c:       c,
		micros:  micros,
		mail:    mailbox{signal: make(chan struct{}, 1)},
		ended:   make(chan struct{}),
		begun:   make(chan struct{}),
		flipper: flipper{self: c.Self.ID},
		guard:   newGuard(&c),
	}
	e.ahead = newPrefetcher(4*c.MicroBatch*(c.Input.Len()+c.Target.Len()), c.Readers, func(k readKey, b *batch) error {
		return e.read(b, e.micro(0, k.step, graph.Pair{Micro: k.micro}), e.c.Ahead)
	})
	e.network.receiving = make(map[core.Ticket]*receiving)
	e.memory.init(&c, micros, e.mergeGrads)
	e.free.make = c.Memory
	e.ctx, e.cancel = context.WithCancel(context.Background())
	e.opsCtx, e.opsCancel = context.WithCancel(e.ctx)
	job := core.Config{
		Job: c.Job, Self: c.Self, Micros: micros, Metrics: c.Metrics, First: c.First, NormScale: zero.NormScale(int64(c.GlobalBatch) * int64(c.Target.Len())),
		Derive: c.Zeros, Beside: c.Beside, Passes: c.Passes,
	}
	if c.Rule != nil {
		job.Moments = c.Rule.Moments()
	}
	for _, l := range c.Layers {
		job.Layers = append(job.Layers, core.Layer{Name: l.Name, Blocks: zero.Blocks(l.Tensors)})
	}
	e.core = core.New(job)
	for i := range Lanes {
		c.Progress.End(i) // the engine before may have been left in the middle of passes
	}
	for range max(c.Passes, 1) {
		l := &lane{tasks: make(chan func(), 1), meter: c.Meter.Thread()}
		if e.lanes = append(e.lanes, l); c.Yield {
			l.spare = make(chan func(), 1)
			e.tasks.Go(func() { e.runCompute(l, l.spare) })
		}
		e.tasks.Go(func() { e.runCompute(l, l.tasks) })
	}
	go e.loop()
	e.Wake()
	return e, nil
}

// Close ends the engine where it is, and returns when all its goroutines have ended. The computing ones end after what they run.
func (e *Engine) Close() {
	e.cancel()
	<-e.ended
}

// Abandon ends the operation of the moment, and every one after it, with err.
func (e *Engine) Abandon(err error) { e.mail.put(core.Abandon{Err: err}) }

// Wake makes the engine look at what it waits for.
func (e *Engine) Wake() { e.mail.put(wake{}) }

// Query seals the worker and calls answer with its report. answer must not block. A worker that has seen a higher ballot does not
// answer.
func (e *Engine) Query(b id.Ballot, answer func(control.Report)) {
	e.mail.put(query{control.Query{Ballot: b}, answer})
}

// Order gives the worker a plan to apply; see [controller.Order]. One with a lower ballot than a query that was answered is
// dropped, and so is one whose plan is not newer than the live one.
func (e *Engine) Order(o control.Order) { e.mail.put(o) }

// Fill copies state in the background; see [controller.Fill].
func (e *Engine) Fill(f control.Fill) { e.mail.put(f) }

// LinkLost says that the link to a session broke, so that what was sent to it may be lost.
func (e *Engine) LinkLost(s id.Session) { e.mail.put(core.LinkLost{Session: s}) }

// Messages to the loop that are not for the core, or carry more than it is to know.
type (
	wake  struct{}
	query struct {
		control.Query
		answer func(control.Report)
	}
	look struct {
		read func()
		done chan struct{}
	}
)

// loop owns the engine's state.
func (e *Engine) loop() {
	defer close(e.ended)
	defer func() {
		e.opsCancel()
		for _, l := range e.lanes {
			close(l.tasks)
			if l.spare != nil {
				close(l.spare)
			}
		}
		e.tasks.Wait()
		e.ahead.close()
		e.mail.take() // what is left is about an engine that is no more
		e.core.Step(core.Abandon{Err: errClosed})
		if e.req != nil {
			e.endOperation(e.core.Err())
		}
		e.dropPasses()
	}()
	for {
		select {
		case <-e.mail.signal:
		case <-e.ctx.Done():
			return
		}
		for _, m := range e.mail.take() {
			e.handle(m)
		}
		if e.c.Held != nil {
			if held := e.c.Held(); held != e.held {
				e.held = held
				e.core.Step(core.Hold{On: held})
			}
		}
		e.flip()
		for _, d := range e.core.Ready() {
			e.perform(d)
		}
		e.c.Pace.Has(e.core.Backlog())
		if !comm.Closed(e.begun) && (len(e.plan.Workers) > 0 || e.core.Err() != nil) {
			close(e.begun)
		}
	}
}

// handle takes a message. What the core is told has its effects in [Engine.perform].
func (e *Engine) handle(m any) {
	switch m := m.(type) {
	case wake:
	case query:
		e.queries = append(e.queries, m)
		e.core.Step(m.Query)
	case look:
		m.read()
		close(m.done)
	case *request:
		if e.req != nil {
			m.err = errors.New("engine: two operations at a time")
			close(m.done)
			return
		}
		e.req = m
		e.core.Step(m.ask)
	case core.Target:
		e.flips = append(e.flips, m)
	case arrived:
		e.receive(m)
	case opEnded:
		e.endOp(m)
	case taskEnded:
		e.endTask(m)
	case baseSent:
		if e.copies {
			e.spares.put(m.base)
		}
		e.core.Step(core.BaseSent{Transfer: m.transfer})
	case copied:
		e.bases = m.bases
		e.core.Step(core.Copied{Transfers: slices.Collect(maps.Keys(m.bases))})
	default: // an event
		if u, ok := m.(core.ShardUpdated); ok && e.shards[u.Range] != nil && e.shards[u.Range].owner {
			e.phase(e.updating, trace.Gather)
		}
		e.core.Step(m)
	}
}

// perform does a duty, or begins with it.
func (e *Engine) perform(d core.Duty) {
	switch d := d.(type) {
	case core.Admit:
		e.fail(e.c.Network.SetMembers(d.Peers))
	case core.Expect:
		e.expect(d)
	case core.Cancel:
		e.cancelReceive(d.Ticket, d.Wait)
	case core.Send:
		e.send(d)
	case core.SendFill:
		e.sendFill(d)
	case core.Attest:
		e.c.Network.Post(d.To, d.Key, e.tensors[d.Tensor].digestBytes(), comm.Control)
	case core.Edit:
		e.edit(d)
	case core.Reduce:
		e.reduce(d)
	case core.Exchange:
		e.exchange(d)
	case core.CancelOps:
		e.opsCancel()
	case core.Run:
		e.run(d)
	case core.HandOver:
		e.handOver(d)
	case core.Repeat:
		e.repeat(d)
	case core.StopRepeat:
		e.repeatStop.Store(true)
	case core.Say:
		e.say(d)
	case core.Operate:
		e.changed()
		e.operate(d)
	case core.StopOperate:
		e.jobStop()
	case core.Prepare:
		e.prepare(d)
	case core.First:
		e.first(d)
	case core.Replay:
		e.replay(d)
	case core.CatchUp:
		e.catchUp(d)
	case core.CopyBases:
		e.copy(d)
	case core.StopCopies:
		e.copyStop.Store(true)
	case core.Update:
		e.update(d)
	case core.Begin:
		e.c.Network.Advance(d.Word)
		e.reap()
		e.changed()
		e.suspect = -1
	case core.Clear:
		e.clear()
	case core.Keep:
		e.keepTensor(d)
	case core.Compare:
		e.mail.put(core.Compared{Attempt: d.Attempt, Tensor: d.Tensor, Same: e.compare(d)})
	case core.Total:
		e.total(d)
	case core.Gate:
		if g := &e.gates[d.Layer]; d.Open {
			g.open()
		} else {
			g.shut()
		}
	case core.Found:
		e.fail(e.found(d.Range))
	case core.Forget:
		clear(e.incoming)
		e.copies = false
		e.spares.drop()
		if d.Sends {
			e.stopFills()
		}
	case core.Restore:
		e.restore(d)
		e.changed()
	case core.Apply:
		e.fail(e.apply(d))
		e.changed()
	case control.Answer:
		i := slices.IndexFunc(e.queries, func(q query) bool { return q.Ballot == d.Ballot }) // those before were refused
		e.queries[i].answer(d.Report)
		e.queries = e.queries[i+1:]
	case core.Mark:
		if e.applied = time.Now(); !d.Live {
			e.came = e.applied
		}
	case control.Applied:
		d.Edit, d.Resume = e.applied.Sub(e.came), time.Since(e.applied)
		d.Update = min(max(e.updated.Sub(e.came), 0), d.Edit)
		e.c.Tell(d)
	case control.Level, control.Repaired:
		e.c.Tell(d.(control.Message))
	case core.Conclude:
		err := e.req.conclude(d.Said)
		e.fail(err)
		e.endOperation(err)
	case core.End:
		if e.req != nil {
			e.req.result = d.Result
			e.req.result.Forwards, e.req.result.Backwards = e.forwards, e.backwards
			e.req.result.Reading, e.reading = e.reading, 0
			e.endOperation(d.Err)
		}
	default:
		panic(fmt.Sprintf("engine: unknown duty %T", d))
	}
}

// fail tells the core of a duty that could not be done.
func (e *Engine) fail(err error) {
	if err != nil {
		e.mail.put(core.Failed{Err: err})
	}
}

var errClosed = errors.New("engine: closed")

// request is an operation that was asked for.
type request struct {
	ask    core.Ask
	done   chan struct{}
	err    error
	result core.Result // of a step

	// Of other operations: job computes what this worker says in the exchange at the end; conclude reads what all said.
	job      func(ctx context.Context, v view) ([]byte, error)
	conclude func(said [][]byte) error
}

// view is what the job of an operation knows of the plan and of what is here. A plan that is applied while it runs leaves the ranges
// that are held and the layers that are served as they are.
type view struct {
	plan   *plan.Plan
	shards map[id.Range]*shard
	epoch  int
	repair int
}

// after names what follows the commit of a step.
func (v view) after(step int) key.Attempt { return key.After(v.epoch, step) }

// session returns the session of a worker of the plan.
func (v view) session(of id.WorkerID) id.Session {
	w, _ := v.plan.Worker(of)
	return core.SessionOf(w)
}

// endOperation ends the operation.
func (e *Engine) endOperation(err error) {
	e.req.err = err
	close(e.req.done)
	e.req = nil
}

// do hands an operation to the loop and waits for its end.
func (e *Engine) do(ctx context.Context, r *request) error {
	r.done = make(chan struct{})
	e.mail.put(r)
	select {
	case <-r.done:
	case <-ctx.Done():
		return ctx.Err()
	case <-e.ended:
		return errClosed
	}
	rethrow(r.err)
	return r.err
}

// rethrow panics if an error is a panic of the computing goroutine.
func rethrow(err error) {
	if p := new(panicError); errors.As(err, &p) {
		panic(p.Panic)
	}
}

// Step executes the step that follows what was passed, numbered from 1. Like every operation it goes on through the loss of other
// workers, for as long as orders come. After an error no other operation can be executed. A panic in the stages is one here.
func (e *Engine) Step(ctx context.Context, step int) (core.Result, error) {
	r := &request{ask: core.Ask{Point: id.Point{Step: step, Gate: id.Committed}}}
	if err := e.do(ctx, r); err != nil {
		return core.Result{}, err // the loop may still be at it
	}
	return r.result, nil
}

// Begun waits until the first plan is live here, and returns the point from which the run goes on and, of a worker that joined, the
// result of the commit before. A panic in what sets first values is one here.
func (e *Engine) Begun(ctx context.Context) (p id.Point, committed core.Result, err error) {
	select {
	case <-e.begun:
	case <-ctx.Done():
		return p, committed, ctx.Err()
	case <-e.ended:
		return p, committed, errClosed
	}
	e.inspect(func() {
		p, _ = e.core.Passed()
		committed, err = e.core.Committed(), e.core.Err()
	})
	rethrow(err)
	return p, committed, err
}

// Describe sets what this worker held and ran, mirrors included, and the result of the point passed last.
func (e *Engine) Describe(d *control.Done) {
	e.inspect(func() {
		_, d.Result = e.core.Passed()
		d.Plan = uint64(e.plan.Version.N)
		w := &d.Worker
		w.Forwards, w.Backwards = e.forwards, e.backwards
		w.Stages = e.plan.StagesOf(e.c.Self.ID)
		for _, s := range w.Stages {
			for l := e.plan.Stages[s].Lo; l < e.plan.Stages[s].Hi; l++ {
				w.ParamBytes += 4 * int64(e.c.Layers[l].Size())
			}
		}
		for _, sh := range e.shards {
			if sh.state == nil {
				continue
			}
			for _, m := range sh.state.Moments {
				w.StateBytes += 4 * int64(len(m))
			}
			if !e.serves(sh.Layer) {
				w.ParamBytes += 4 * int64(len(sh.params))
			}
		}
	})
}

// Collects reports whether this worker is the one that collects the state of the job under the live plan.
func (e *Engine) Collects() (collects bool) {
	e.inspect(func() { collects = len(e.plan.Workers) == 0 || e.plan.Collector().ID == e.c.Self.ID })
	return collects
}

// OnHost is [plan.Plan.OnHost] of this worker and the live plan.
func (e *Engine) OnHost() (i, n int) {
	e.inspect(func() { i, n = e.plan.OnHost(e.c.Self.ID) })
	return i, n
}

// inspect calls a function that reads the engine's state in the loop, or here when that has ended.
func (e *Engine) inspect(read func()) {
	done := make(chan struct{})
	e.mail.put(look{read, done})
	select {
	case <-done:
	case <-e.ended:
		read()
	}
}

// serves reports whether the plan has this worker run the layer.
func (e *Engine) serves(layer int) bool {
	return e.stages[e.plan.StageOf(layer)] != nil
}

// mailbox takes messages from any goroutine, for the loop to handle.
type mailbox struct {
	signal chan struct{}
	mu     sync.Mutex
	items  []any
}

// leave adds a message without waking the loop, which handles it with the next one that is put.
func (m *mailbox) leave(x any) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.items = append(m.items, x)
}

// put never blocks.
func (m *mailbox) put(x any) {
	m.leave(x)
	select {
	case m.signal <- struct{}{}:
	default:
	}
}

// take returns what has come since, in order.
func (m *mailbox) take() []any {
	m.mu.Lock()
	defer m.mu.Unlock()
	items := m.items
	m.items = nil
	return items
}
