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
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/timing"
	"github.com/soliton-train/soliton/internal/worker/engine"
	"github.com/soliton-train/soliton/internal/worker/meter"
)

// errAgentLost ends a worker whose agent is gone.
var errAgentLost = errors.New("the connection to the agent has ended")

// Worker runs one job and talks to its agent; see package control.
type Worker struct {
	conn *control.Conn
	self Self
	net  *comm.Endpoint
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
	saver     *saver      // nil before Start, and for a run without checkpoints
	saveAsked atomic.Bool // the agent wants a checkpoint

	meter     *meter.Meter
	committed atomic.Int64                  // steps
	links     atomic.Pointer[comm.Endpoint] // net, once there is one

	times timeline // of the steps that the agent asks for

	faults *chaos.Trigger // faults that this worker injects into itself; nil for none
	clock  emulatedClock

	step  int // that runs, for the message if it panics
	calls Calls
	job   atomic.Pointer[Job] // once it is made

	mu    sync.Mutex
	whole engine.Stage // the one with all layers, if any

	deliveries deliveries
}

// New returns a worker that talks to its agent over conn, on which Hello was said.
func New(conn *control.Conn, me Self) *Worker {
	w := &Worker{
		conn: conn, self: me, meter: meter.New(), groups: make(map[uint16]*group.Group),
		start: make(chan control.Start, 1), stop: make(chan string, 1), release: make(chan struct{}),
	}
	w.deliveries.came = make(chan struct{}, 1)
	w.recovery = recovery{w: w, first: true, signal: make(chan struct{}), broken: make(chan id.Session, 64)}
	return w
}

// Serve runs the job that makeJob returns to its end. It tells the agent of every error, a panic in user code included.
func (w *Worker) Serve(ctx context.Context, makeJob Make) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var beside sync.WaitGroup
	beside.Go(func() {
		if err := w.receive(ctx); err != nil && ctx.Err() == nil {
			cancel(errAgentLost)
			if w.self.own != nil {
				complain(errAgentLost) // what runs is of no use any more
				os.Exit(exitFailed)
			}
		}
	})
	beside.Go(func() { w.beat(ctx) })
	defer func() {
		cancel(nil)
		beside.Wait()
	}()
	err := w.guard(ctx, makeJob)
	if cause := context.Cause(ctx); cause != nil && errors.Is(err, ctx.Err()) {
		err = cause
	}
	if err != nil {
		_ = w.send(Failure(err, w.step)) // it fails if the agent is gone
	}
	return err
}

// send sends one message to the agent.
func (w *Worker) send(m control.Message) error {
	err := w.conn.Send(m)
	if err != nil && !errors.Is(err, control.ErrFrameSize) {
		return fmt.Errorf("%w: %w", errAgentLost, err)
	}
	return err
}

// beat sends heartbeats and broken links to the agent.
func (w *Worker) beat(ctx context.Context) {
	tick := time.NewTicker(timing.Heartbeat)
	defer tick.Stop()
	var last measured
	for {
		if w.conn.Send(w.measure(&last)) != nil {
			return // the agent is gone, which receive notices too
		}
		select {
		case s := <-w.recovery.broken:
			if w.conn.Send(control.LinkLost{Peer: s}) != nil {
				return
			}
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// receive handles the messages of the agent.
func (w *Worker) receive(ctx context.Context) error {
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
		case control.Hold:
			w.recovery.hold(m.On)
		case control.Release:
			close(w.release)
		case control.Query, control.Order, control.Fill:
			w.recovery.hear(m)
		default:
			return fmt.Errorf("the agent sent %T", m)
		}
	}
}

// guard turns a panic into an error.
func (w *Worker) guard(ctx context.Context, makeJob Make) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = Panicked(w.step, w.doing(), v)
		}
	}()
	return w.run(ctx, makeJob)
}

// doing names the call of user code that runs, "" if none does.
func (w *Worker) doing() string {
	call, layer := w.calls.Running(), ""
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

func (w *Worker) run(ctx context.Context, makeJob Make) error {
	var j *Job
	err := w.user(control.CallJob, func() (err error) {
		j, err = makeJob(&w.calls, func(text string) error { return w.send(control.Note{Text: text}) })
		return err
	})
	if err != nil {
		return err
	}
	w.job.Store(j)
	if w.net, err = comm.Listen(comm.Config{Self: w.self.Session, Transport: w.self.Transport, Key: w.self.Key, OnLink: w.recovery.link}); err != nil {
		return err
	}
	defer w.net.Close()
	w.links.Store(w.net)
	control.Warm()
	if err := w.send(control.Ready{
		Job: j.Job, Data: j.Files, Addr: w.net.Addr(), Layers: j.controlLayers(), CheckpointEvery: j.CheckpointEvery, OnStep: j.OnStep != nil,
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
	for _, l := range j.Params.Layers {
		c := control.Layer{Name: l.Name}
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
