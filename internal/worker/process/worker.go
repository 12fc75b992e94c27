package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/internal/chaos"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/timing"
	"github.com/soliton-train/soliton/internal/worker/engine"
	"github.com/soliton-train/soliton/internal/worker/meter"
)

// errAgentLost ends a worker whose agent is gone.
var errAgentLost = errors.New("the connection to the agent has ended")

// errFenced ends a session of a worker, without which the run continues.
var errFenced = errors.New("the worker has missed heartbeats, and joins again")

// Worker runs one job in one session and talks to its agent; see package control. When it is fenced, another one follows.
type Worker struct {
	conn *control.Conn
	self Self

	ctx  context.Context // of the session
	over context.CancelCauseFunc

	speaking sync.RWMutex // held while a message is sent; next is set with it
	next     *Worker      // that follows, once this one is fenced: it says nothing more

	net *comm.Endpoint
	// groups are those of all engines, one after the other.
	groups map[uint16]*group.Group

	// The agent sends each of these once.
	start      chan control.Start
	stop       chan string
	release    chan struct{}
	stopReason string

	// recovery passes messages between the agent and the current engine.
	recovery recovery

	spans     *spans      // nil before Start, and where no spans are wanted
	saver     *saver      // nil before Start
	saveAsked atomic.Bool // the agent wants a checkpoint

	meter     *meter.Meter
	pace      meter.Pace
	committed atomic.Int64                  // steps
	links     atomic.Pointer[comm.Endpoint] // net, once there is one

	times timeline  // of the steps that the agent asks for
	late  lateSpans // for the agent

	sources *sources // of all sessions

	faults *chaos.Trigger // faults that this worker injects into itself; nil for none
	clock  emulatedClock

	step  int                 // that runs, for the message if it panics
	under id.Version          // the plan of the step before
	calls *Calls              // of all sessions
	job   atomic.Pointer[Job] // once it is made

	mu    sync.Mutex
	whole engine.Stage // the one with all layers, if any

	deliveries deliveries

	samples  *samples // from Start on
	verdicts verdicts // of the agent, on samples
}

// New returns a worker that talks to its agent over conn, on which Hello was said.
func New(conn *control.Conn, me Self) *Worker {
	w := &Worker{
		conn: conn, self: me, calls: new(Calls), meter: meter.New(), groups: make(map[uint16]*group.Group),
		start: make(chan control.Start, 1), stop: make(chan string, 1), release: make(chan struct{}),
	}
	w.sources = &sources{first: w, waits: make(map[uint64]chan control.Got)}
	w.deliveries.came = make(chan struct{}, 1)
	w.recovery = recovery{w: w, first: true, signal: make(chan struct{}), broken: make(chan id.Session, 64)}
	return w
}

// Serve runs the job that makeJob returns to its end. It tells the agent of every error, a panic in user code included. A worker that
// is fenced keeps its job and its process, and continues as one that joins.
func (w *Worker) Serve(ctx context.Context, makeJob Make) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var beside sync.WaitGroup
	begin := func(w *Worker) {
		w.ctx, w.over = context.WithCancelCause(ctx)
		beside.Go(w.beat)
	}
	begin(w)
	first := w
	beside.Go(func() {
		if err := first.receive(ctx, begin); err != nil && ctx.Err() == nil {
			cancel(errAgentLost)
			if w.self.own != nil {
				complain(errAgentLost) // what runs is of no use any more
				os.Exit(exitFailed)
			}
		}
	})
	defer func() {
		cancel(nil)
		beside.Wait()
	}()
	var j *Job
	err := w.guard(&j, makeJob)
	for next := w.successor(); next != nil; next = w.successor() {
		if w = next; err != nil && errors.As(err, new(*PanicError)) {
			break
		}
		err = w.guard(&j, makeJob)
	}
	if cause := context.Cause(w.ctx); cause != nil && errors.Is(err, w.ctx.Err()) {
		err = cause
	}
	if err != nil && !errors.Is(err, errAgentLost) { // else it would hear of a fault of the program, if it hears of it at all
		_ = w.send(Failure(err, w.step))
	}
	return err
}

// send sends one message to the agent.
func (w *Worker) send(m control.Message) error {
	w.speaking.RLock()
	defer w.speaking.RUnlock()
	if w.next != nil {
		return errFenced
	}
	err := w.conn.Send(m)
	if err != nil && !errors.Is(err, control.ErrFrameSize) {
		return fmt.Errorf("%w: %w", errAgentLost, err)
	}
	return err
}

// fence ends the session of this worker, and returns the worker that follows, which has said Hello.
func (w *Worker) fence(f control.Fence, begin func(*Worker)) (*Worker, error) {
	if f.Worker != int(w.self.id()) || f.Incarnation != w.self.Session.Incarnation || f.Next <= f.Incarnation {
		return nil, fmt.Errorf("the agent fences worker %d.%d, which is to be %d next", f.Worker, f.Incarnation, f.Next)
	}
	me := w.self
	me.Session.Incarnation = f.Next
	if host, ok := me.Transport.(transport.Host); ok { // links to the session before end at its own socket
		host.Name = me.Session.String()
		me.Transport = host
	}
	next := New(w.conn, me)
	next.calls, next.sources = w.calls, w.sources
	w.speaking.Lock()
	defer w.speaking.Unlock()
	if err := w.conn.Send(control.Identity{WorkerID: f.Worker, Incarnation: f.Next}.Hello()); err != nil {
		return nil, err
	}
	begin(next)
	w.next = next
	w.over(errFenced)
	return next, nil
}

// successor returns the worker that follows this one, nil if it is not fenced.
func (w *Worker) successor() *Worker {
	w.speaking.RLock()
	defer w.speaking.RUnlock()
	return w.next
}

// beat sends heartbeats and broken links to the agent.
func (w *Worker) beat() {
	tick := time.NewTicker(timing.Heartbeat)
	defer tick.Stop()
	var last measured
	for {
		if errors.Join(w.send(w.measure(&last)), w.sendLate()) != nil {
			return // the agent is gone, which receive notices too, or the worker is fenced
		}
		select {
		case s := <-w.recovery.broken:
			if w.send(control.LinkLost{Peer: s}) != nil {
				return
			}
		case <-tick.C:
		case <-w.ctx.Done():
			return
		}
	}
}

// receive handles the messages of the agent, to this worker and to those that follow it.
func (w *Worker) receive(ctx context.Context, begin func(*Worker)) error {
	for {
		m, err := w.conn.Receive(ctx)
		if err != nil {
			return err
		}
		switch m := m.(type) {
		case control.Start:
			if w.spans = newSpans(w, m.TraceEvery); w.spans != nil && w.self.own != nil {
				w.self.own.progress.Time()
			}
			w.recovery.hear(m)
			w.start <- m
		case control.Stop:
			w.stop <- m.Reason
		case control.Watch:
			w.times.every.Store(int64(max(m.Every, 0)))
		case control.Beat:
			w.recovery.beaten()
		case control.Clock:
			if !(m.Share >= control.MinShare && m.Share <= 1) {
				return fmt.Errorf("the agent sent a clock of %v", m.Share)
			}
			w.clock.set(m.Share)
		case control.Deliver:
			w.deliveries.put(m)
		case control.Save:
			w.saveAsked.Store(true)
		case control.Got:
			w.sources.put(m)
		case control.Hold:
			w.recovery.hold(m.On)
		case control.Release:
			close(w.release)
		case control.Fence:
			if w, err = w.fence(m, begin); err != nil {
				return err
			}
		case control.BadSample:
			if err := w.verdicts.put(m); err != nil {
				return err
			}
		case control.Query, control.Order, control.Fill:
			w.recovery.hear(m)
		default:
			return fmt.Errorf("the agent sent %T", m)
		}
	}
}

// guard turns a panic into an error.
func (w *Worker) guard(j **Job, makeJob Make) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = Panicked(w.step, w.doing(w.calls.Lane(laneOf(v)).Running()), v)
		}
	}()
	if *j == nil {
		if *j, err = w.make(makeJob); err != nil {
			return err
		}
	}
	return w.run(w.ctx, *j)
}

// doing names a call of user code, "" if it is none.
func (w *Worker) doing(call control.Call) string {
	layer := ""
	if j := w.job.Load(); j != nil && call.Layer < len(j.Params.Layers) {
		layer = j.Params.Layers[call.Layer].Name
	}
	return call.Text(layer)
}

// user records a call for the time of f, which calls user code.
func (w *Worker) user(kind control.CallKind, f func() error) error {
	before := w.calls.Enter(kind, 0, 0)
	err := f()
	w.calls.Leave(before) // not deferred: a panic keeps it
	return err
}

// make makes the job.
func (w *Worker) make(makeJob Make) (j *Job, err error) {
	err = w.user(control.CallJob, func() (err error) {
		j, err = makeJob(w.calls, func(text string) error {
			if err := w.send(control.Note{Text: text}); !errors.Is(err, errFenced) {
				return err
			}
			return nil // the next session has the same job
		})
		return err
	})
	return j, err
}

func (w *Worker) run(ctx context.Context, j *Job) (err error) {
	w.job.Store(j)
	if j.Free != nil {
		defer j.Free() // after the network has ended
	}
	if w.net, err = comm.Listen(comm.Config{Self: w.self.Session, Transport: w.self.Transport, Key: w.self.Key, Rejected: w.self.Rejected, OnLink: w.recovery.link}); err != nil {
		return err
	}
	defer w.net.Close()
	w.links.Store(w.net)
	control.Warm()
	if err := w.send(control.Ready{
		Job: j.Job, Data: j.Files, Addr: w.net.Addr(), Layers: j.controlLayers(), CheckpointEvery: j.CheckpointEvery, CheckpointSteps: j.CheckpointSteps, OnStep: j.OnStep != nil,
	}); err != nil {
		return err
	}
	select {
	case start := <-w.start:
		return w.train(ctx, j, start)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// controlLayers describes the layers to the agent, planLayers to a plan.
func (j *Job) controlLayers() (layers []control.Layer) {
	for i, l := range j.Params.Layers {
		c := control.Layer{Name: l.Name}
		c.Names, c.Shapes = j.Params.Describe(i)
		for _, t := range l.Tensors {
			c.Tensors = append(c.Tensors, t.Size)
		}
		layers = append(layers, c)
	}
	return layers
}

func (j *Job) planLayers() (layers []plan.Layer) {
	for _, l := range j.controlLayers() {
		layers = append(layers, plan.Layer{Tensors: l.Tensors})
	}
	return layers
}
