package trainer

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/internal/chaos"
	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/host"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/platform/progress"
	"github.com/soliton-train/soliton/internal/platform/sched"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/engine"
	"github.com/soliton-train/soliton/internal/worker/meter"
)

// NonFiniteError says that a step could not be committed because its loss or
// gradient is NaN, infinite or too large.
type NonFiniteError = engine.NonFiniteError

// PanicError is a panic in code of the user's: a layer, a loss, a data set, a
// callback, or the function that makes the job.
type PanicError struct {
	Step  int    // in which it happened, from 1; 0 before the first
	Where string // what ran, such as `Forward of layer "0"`
	Value any
	Stack string
}

func (e *PanicError) Error() string {
	place := "before the first step"
	if e.Step > 0 {
		place = fmt.Sprintf("in step %d", e.Step)
	}
	if e.Where != "" {
		place += ", in " + e.Where
	}
	return fmt.Sprintf("panic %s: %v", place, e.Value)
}

// errAgentLost ends a worker whose agent is gone.
var errAgentLost = errors.New("the connection to the agent has ended")

// worker runs one job in conversation with its agent; see package control.
type worker struct {
	conn *control.Conn
	self self
	net  *comm.Endpoint
	// groups are those of all engines, one after the other.
	groups map[uint16]*comm.Group

	// start, stop and release are what the agent says, once each.
	start      chan control.Start
	stop       chan string
	release    chan struct{}
	stopReason string

	// recovery goes between the agent and the engine of the moment.
	recovery recovery
	gossip   ringMember

	spans     *spans      // nil before Start, and where nobody wants to know
	saver     *saver      // nil before Start, and for a run without checkpoints
	saveAsked atomic.Bool // the agent wants one

	meter     *meter.Meter
	committed atomic.Int64                  // steps
	links     atomic.Pointer[comm.Endpoint] // net, once there is one

	times timeline // of the steps that the agent asks for

	harm  *chaos.Trigger // what this worker is to do to itself; nil for nothing
	clock emulatedClock

	// For the message if user code panics: the step, and what runs.
	step   int
	doing  string
	mu     sync.Mutex
	stages []*stage

	told int // newest step of which OnStep was told
}

// self says who a worker is and how it reaches others.
type self struct {
	session   id.Session
	transport comm.Transport
	// process says that the worker is all there is in this process, which then
	// ends at once when the agent is gone.
	process bool
	// progress is a record that the agent reads after this worker's end, or nil.
	progress *progress.Record
	// slow gets the signal that says that this process is to read how slow it is
	// to be; nil if it is not a worker's own.
	slow <-chan os.Signal
	// leave gets the one that asks this process to leave; the same.
	leave chan os.Signal
}

func (s self) id() id.WorkerID { return s.session.Worker }

// alone is the only worker of a run, in the process of its agent.
func alone() self { return self{transport: comm.NewMem()} }

// serve runs the job to its end, over a connection on which Hello was said.
func serve(ctx context.Context, conn *control.Conn, me self, makeJob func() (Job, error)) error {
	return newWorker(conn, me).serve(ctx, makeJob)
}

func newWorker(conn *control.Conn, me self) *worker {
	w := &worker{conn: conn, self: me, meter: meter.New(), start: make(chan control.Start, 1), stop: make(chan string, 1), release: make(chan struct{}), groups: make(map[uint16]*comm.Group)}
	w.recovery.w, w.recovery.broken = w, make(chan id.Session, 64)
	return w
}

// serve runs the job to its end. Whatever goes wrong, a panic in user code
// included, it tells the agent.
func (w *worker) serve(ctx context.Context, makeJob func() (Job, error)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	received := make(chan struct{})
	go func() {
		defer close(received)
		if err := w.receive(ctx); err != nil && ctx.Err() == nil {
			cancel(errAgentLost)
			if w.self.process {
				// Whatever runs at the moment, nobody waits for it.
				fmt.Fprintf(os.Stderr, "%s: %v\n", program(), errAgentLost)
				os.Exit(host.ExitFailed)
			}
		}
	}()
	beaten := make(chan struct{})
	go func() {
		defer close(beaten)
		w.beat(ctx)
	}()
	defer func() {
		cancel(nil)
		<-received
		<-beaten
	}()
	err := w.guard(ctx, makeJob)
	if cause := context.Cause(ctx); cause != nil && errors.Is(err, ctx.Err()) {
		err = cause
	}
	if err != nil {
		_ = w.send(failure(err, w.step)) // if the agent is gone, there is nobody to tell
	}
	return err
}

// send sends one message to the agent.
func (w *worker) send(m control.Message) error {
	err := w.conn.Send(m)
	if err != nil && !errors.Is(err, control.ErrFrameSize) {
		return fmt.Errorf("%w: %w", errAgentLost, err)
	}
	return err
}

// beat tells the agent all the time that this worker lives.
func (w *worker) beat(ctx context.Context) {
	tick := time.NewTicker(control.BeatEvery)
	defer tick.Stop()
	var last measured
	for {
		if w.conn.Send(w.measure(&last)) != nil {
			return // the agent is gone, which receive notices too
		}
		select {
		case s := <-w.recovery.broken:
			if w.conn.Send(control.LinkLost{Worker: int(s.Worker), Incarnation: int(s.Incarnation)}) != nil {
				return
			}
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// receive takes in what the agent says.
func (w *worker) receive(ctx context.Context) error {
	for {
		m, err := w.conn.Receive(ctx)
		if err != nil {
			return err
		}
		switch m := m.(type) {
		case control.Start:
			if w.spans = newSpans(w, m.TraceEvery); w.spans != nil {
				w.self.progress.Time()
			}
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
		case control.Save:
			w.saveAsked.Store(true)
		case control.Release:
			close(w.release)
		case control.Query, control.Order, control.Fill:
			if err := w.recovery.hear(m); err != nil {
				return err
			}
		default:
			return fmt.Errorf("the agent sent %T", m)
		}
	}
}

// guard turns a panic into an error.
func (w *worker) guard(ctx context.Context, makeJob func() (Job, error)) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = w.panicError(v, debug.Stack())
		}
	}()
	return w.run(ctx, makeJob)
}

func (w *worker) panicError(v any, stack []byte) *PanicError {
	if p, ok := v.(*kernel.Panic); ok {
		v, stack = p.Value, p.Stack
	}
	e := &PanicError{Step: w.step, Where: w.doing, Value: v, Stack: trimStack(stack)}
	for _, s := range w.stages {
		if e.Where == "" {
			e.Where = s.where()
		}
	}
	return e
}

// trimStack drops the frames of the panic machinery, which lie above the one
// that panicked.
func trimStack(stack []byte) string {
	lines := strings.Split(strings.TrimSpace(string(stack)), "\n")
	for i := len(lines) - 1; i > 0; i-- {
		if strings.HasPrefix(lines[i], "panic(") && i+2 < len(lines) {
			lines = append(lines[:1], lines[i+2:]...)
			break
		}
	}
	return strings.Join(lines, "\n")
}

// failure is the message for an error.
func failure(err error, step int) control.Failed {
	f := control.Failed{Kind: control.Faulty, Text: err.Error(), Step: step}
	var panicked *PanicError
	var nonFinite *NonFiniteError
	var data *DataError
	var invalid *ValidationError
	var usage *usageError
	var done *Done
	var corrupt *engine.CorruptError
	switch {
	case errors.As(err, &panicked):
		f.Kind, f.Stack = control.UserPanic, panicked.Stack
	case errors.As(err, &nonFinite):
		f.Kind = control.NonFinite
	case errors.As(err, &corrupt):
		f.Kind = control.Corrupt
	case errors.Is(err, comm.ErrLink), errors.Is(err, comm.ErrAborted), errors.Is(err, comm.ErrRefused):
		f.Kind = control.PeerLost
	case errors.As(err, &done):
		f.Kind, f.Text = control.Help, done.Text
	case errors.As(err, &invalid), errors.As(err, &usage), errors.As(err, &data) && step == 0:
		f.Kind = control.Usage
		f.Text = strings.ReplaceAll(f.Text, "\n", "; ")
	}
	return f
}

// user marks what runs for the time of f, which calls user code.
func (w *worker) user(doing string, f func() error) error {
	w.doing = doing
	err := f()
	w.doing = "" // not deferred: a panic keeps it
	return err
}

func (w *worker) run(ctx context.Context, makeJob func() (Job, error)) error {
	var p *prepared
	if err := w.user("the job", func() error {
		job, err := makeJob()
		if err != nil {
			return err
		}
		if err := w.send(control.Note{Text: "reading data"}); err != nil {
			return err
		}
		p, err = prepare(job)
		return err
	}); err != nil {
		return err
	}
	var err error
	if w.net, err = comm.Listen(comm.Config{Self: w.self.session, Transport: w.self.transport, OnLink: w.recovery.link}); err != nil {
		return err
	}
	defer w.net.Close()
	w.links.Store(w.net)
	controller.Warm()
	control.Warm()
	if err := w.send(control.Ready{
		Job: p.describe(), Data: p.files, Addr: w.net.Addr(), Layers: p.params.controlLayers(), CheckpointEvery: max(p.CheckpointEvery, 0),
	}); err != nil {
		return err
	}
	select {
	case start := <-w.start:
		return w.train(ctx, p, start)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// describe returns what job.json says of the job.
func (p *prepared) describe() rundir.Job {
	return rundir.Job{
		Program:     filepath.Base(os.Args[0]),
		Args:        os.Args[1:],
		Model:       p.Model.Name,
		ModelConfig: p.config,
		Layers:      len(p.Model.Layers),
		Parameters:  int64(p.params.count()),
		Steps:       p.Steps,
		GlobalBatch: p.GlobalBatch,
		MicroBatch:  p.MicroBatch,
		Seed:        p.Seed,
		Optimizer:   p.Optimizer.String(),
		Schedule:    p.Optimizer.schedule().String(),
		ClipNorm:    p.ClipNorm,
		EvalEvery:   p.EvalEvery,
		EvalSamples: p.EvalSamples,
		InitFrom:    p.InitFrom,
		InitSHA256:  p.initSum,
		Samples:     int64(p.data.Len()),
		DataFiles:   p.trainFiles,
		EvalFiles:   len(p.files) - p.trainFiles,
		DataSHA256:  p.dataSum,
		EvalSHA256:  p.evalSum,
		Kernel:      kernel.Active().String(),
		GoVersion:   runtime.Version(),
		Platform:    runtime.GOOS + "/" + runtime.GOARCH,
	}
}

// train runs the worker's part of the steps.
func (w *worker) train(ctx context.Context, p *prepared, start control.Start) error {
	// Under the launcher, the number of threads is the launcher's flag.
	if f := threadsFault(start.Threads); f != nil {
		return &ValidationError{f}
	}
	var compute []func() // what a computing thread begins with
	if w.self.process {
		// Two more than compute, so that messages hardly ever wait for a compute
		// thread; and hardly for those of other workers.
		runtime.GOMAXPROCS(start.Threads + 2)
		compute = append(compute, sched.Compute)
	}
	order, err := w.first(p, start)
	if err != nil {
		return err
	}
	defer w.gossip.join(ctx, start.Ring, w.self, w.net.Addr())()
	w.gossip.applied(order.Plan.Version)
	pool := kernel.NewPool(start.Threads, compute...)
	defer pool.Close()
	saver, closeSaver := newSaver(ctx, w, p, start)
	defer closeSaver()
	w.saver = saver
	if w.self.process {
		defer w.heedTerm()()
	}
	return w.armed(ctx, start.Chaos, start.RunDir, func() error {
		for {
			err := w.trainFrom(ctx, p, start, pool, order)
			if !errors.Is(err, errRestart) {
				return err
			}
			order = w.recovery.restart()
		}
	})
}

// first returns the order that the agent's Start stands for. That of a worker
// that joins has no plan.
func (w *worker) first(p *prepared, start control.Start) (controller.Order, error) {
	if len(start.Plan) == 0 {
		return controller.Order{}, nil
	}
	pl, err := plan.Parse(start.Plan)
	if err != nil {
		return controller.Order{}, err
	}
	if err := pl.Validate(p.params.planLayers()); err != nil {
		return controller.Order{}, err
	}
	if pl.Micros() != p.GlobalBatch/p.MicroBatch {
		return controller.Order{}, fmt.Errorf("the plan has %d micro-batches, and the job %d", pl.Micros(), p.GlobalBatch/p.MicroBatch)
	}
	if _, ok := pl.Worker(w.self.id()); !ok {
		return controller.Order{}, fmt.Errorf("the plan has no place for worker %d", w.self.id())
	}
	o := controller.Order{Plan: pl, Passed: id.Point{Step: pl.FromStep - 1}, From: start.From}
	for _, x := range start.Peers {
		o.Peers = append(o.Peers, controller.Peer{Worker: plan.Worker{ID: id.WorkerID(x.ID), Incarnation: x.Incarnation}, Addr: x.Addr})
	}
	return o, nil
}

// trainFrom runs the worker's part of the steps from the point of an order on.
func (w *worker) trainFrom(ctx context.Context, p *prepared, start control.Start, pool *kernel.Pool, order controller.Order) error {
	schedule := p.Optimizer.schedule()
	shuffle := newShuffle(p.Seed, p.data.Len())
	w.stages = nil
	for i := range p.params.layers {
		p.params.release(i)
	}
	begin, closeBegin, err := p.beginning(ctx, order)
	if err != nil {
		return err
	}
	defer closeBegin()
	me := plan.Worker{ID: w.self.id(), Incarnation: int(w.self.session.Incarnation)}
	config := engine.Config{
		Self:    me,
		Network: w.net,
		Groups:  w.groups,
		First:   order,
		Stage: func(lo, hi int) engine.Stage {
			p.params.hold(lo, hi)
			s := newStage(&p.Model, lo, hi, p.params, pool, p.Seed)
			w.addStage(s)
			if w.harm != nil {
				return timed{slowed{s, w.harm, &w.clock}, lo, &w.times}
			}
			return timed{s, lo, &w.times}
		},
		Layers:      p.params.layers,
		Begin:       begin,
		Input:       p.Model.Input,
		Target:      p.Model.Target,
		GlobalBatch: p.GlobalBatch,
		MicroBatch:  p.MicroBatch,
		Rule:        p.Optimizer.rule(),
		LR:          func(step int) float64 { return schedule.At(step, p.Steps) },
		ClipNorm:    p.ClipNorm,
		Load:        func(i uint64, in, target Tensor) error { return w.sample(p.data, shuffle.at(i), in, target) },
		Pool:        pool,
		Progress:    w.self.progress,
		Meter:       w.meter,
		Fast:        start.Reduction == "fast",
		Zero:        start.Zero,
		NoDigests:   start.NoDigests,
		Yield:       w.self.process,
		Repaired:    func(r engine.Repair) { w.recovery.repaired(p.params.layers[r.Layer].Name, r) },
		Stop:        w.stopped,
		Held:        w.recovery.held(start.Detect),
		Applied:     w.recovery.applied,
		Level:       func(id id.Fill, step int) { _ = w.send(control.Level{Term: id.Term, N: id.N, Step: step}) },
		Phase: func(step int, phase string) {
			w.times.phase(step, phase)
			w.harm.Phase(step, chaos.Phase(phase))
		},
	}
	w.saver.install(&config)
	w.spans.install(&config)
	e, err := engine.New(config)
	if err != nil {
		return err
	}
	defer e.Close()
	defer w.recovery.leave(e)
	w.recovery.enter(e)
	done := control.Done{Steps: order.Passed.Step}
	if err := w.begin(ctx, p, e, &done); err != nil {
		return w.left(ctx, w.recovery.cause(err))
	}
	for done.Steps < p.Steps && done.StoppedBy == "" {
		if err := w.trainStep(ctx, p, e, &done); err != nil {
			return w.left(ctx, w.recovery.cause(err))
		}
	}
	if done.Steps == p.Steps {
		done.StoppedBy = ""
	}
	if done.ParamsSHA256, done.StateSHA256, err = w.keep(ctx, p, e, done.Steps, start.RunDir); err != nil {
		return w.left(ctx, w.recovery.cause(err))
	}
	done.Result, done.Plan = e.Result(), uint64(e.Version().N)
	done.Worker = rundir.Worker{ID: int(me.ID), Incarnation: me.Incarnation}
	done.Worker.Stages, done.Worker.ParamBytes, done.Worker.StateBytes = e.Holds()
	done.Worker.Layers, _ = p.params.held()
	done.Worker.Forwards, done.Worker.Backwards = e.Passes()
	for _, s := range w.net.Stats() {
		done.Worker.BytesSent += s.BytesSent
	}
	w.saver.wait()
	if err := w.send(done); err != nil {
		return err
	}
	select {
	case <-w.release:
	case <-w.recovery.restarted():
		return errRestart
	case <-ctx.Done():
		return ctx.Err()
	}
	if p.OnEnd == nil || !e.First() {
		return nil
	}
	return w.end(p, start.RunDir, done.Steps)
}

// begin waits until the worker has a part in the run. One that joins takes part
// in the evaluation after the step that was committed last.
func (w *worker) begin(ctx context.Context, p *prepared, e *engine.Engine, done *control.Done) error {
	waiting, cancel := context.WithCancelCause(ctx)
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-w.release:
			cancel(engine.ErrLeft) // the run ends without it
		case <-waiting.Done():
		}
	})
	defer watch.Wait()
	defer cancel(nil)
	at, stop, err := e.Begun(waiting)
	if err != nil {
		return cmp.Or(context.Cause(waiting), err)
	}
	joined := at.Step > done.Steps
	done.Steps = at.Step
	if !joined {
		return nil
	}
	w.step, w.told = at.Step, at.Step
	done.StoppedBy = stop
	if p.evalDue(at.Step) {
		done.ValLoss, err = w.evaluate(ctx, p, e)
	}
	return err
}

// left waits for the agent's word if the run goes on without this worker.
func (w *worker) left(ctx context.Context, err error) error {
	if !errors.Is(err, engine.ErrLeft) {
		return err
	}
	w.saver.wait() // others count on its part
	select {
	case <-w.release:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// firstValues returns what fills in the first values of a range of the
// parameters. Moments begin with zeros, as they are. Values are made by layers,
// so those of the last one are kept for its other ranges.
func (p *prepared) firstValues() func(r id.Range, params []float32, moments [][]float32) error {
	layer, values := -1, []float32(nil)
	return func(r id.Range, params []float32, _ [][]float32) error {
		if r.Layer != layer {
			layer, values = -1, make([]float32, p.params.layers[r.Layer].Size())
			if err := p.params.first(r.Layer, values, p.Seed, p.InitFrom, p.initSum); err != nil {
				return err
			}
			layer = r.Layer
		}
		copy(params, values[r.Lo:r.Hi])
		return nil
	}
}

// addStage takes note of a stage for the message if user code panics.
func (w *worker) addStage(s *stage) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stages = append(w.stages, s)
}

// trainStep runs one step and tells of it.
func (w *worker) trainStep(ctx context.Context, p *prepared, e *engine.Engine, done *control.Done) error {
	w.step = done.Steps + 1
	began := time.Now()
	w.times.begin(w.step, began)
	w.harm.StepBegan(w.step)
	r, err := e.Step(ctx, w.step)
	if err != nil {
		return err
	}
	took := time.Since(began)
	done.Steps, done.Loss, done.StoppedBy = r.Step, r.Loss, r.Stop
	w.committed.Store(int64(r.Step))
	info := StepInfo{
		Step: r.Step, Steps: p.Steps, Loss: r.Loss, LR: r.LR, GradNorm: r.GradNorm,
		Targets: r.Targets, Duration: took,
	}
	if t, ok := w.times.end(r.Step, began.Add(took)); ok {
		if err := w.send(t); err != nil {
			return err
		}
	}
	left := false
	if p.evalDue(r.Step) {
		info.ValLoss, err = w.evaluate(ctx, p, e)
		if left = errors.Is(err, engine.ErrLeft); err != nil && !left {
			return err
		}
		done.ValLoss = info.ValLoss
	}
	said := control.Step{
		Step: r.Step, Loss: r.Loss, LR: r.LR, GradNorm: r.GradNorm, Tokens: r.Targets,
		MS: float64(took.Microseconds()) / 1000, Time: began.Add(took), Plan: uint64(r.Plan.N), ValLoss: info.ValLoss, Left: left,
		Forwards: r.Forwards, Backwards: r.Backwards,
	}
	w.spans.sums(&said)
	if err := w.send(said); err != nil || left {
		return cmp.Or(err, engine.ErrLeft)
	}
	if err := w.spans.tell(r.Step, uint64(r.Plan.N), began, took); err != nil {
		return err
	}
	if p.OnStep != nil && r.Step > w.told && e.First() {
		if err := w.user("OnStep", func() error { return p.OnStep(info) }); err != nil {
			return fmt.Errorf("OnStep of step %d: %w", r.Step, err)
		}
	}
	w.told = max(w.told, r.Step)
	return nil
}

// stopped returns why the agent asked the worker to end, or "".
func (w *worker) stopped() string {
	select {
	case w.stopReason = <-w.stop:
	default:
	}
	return w.stopReason
}

// keep brings the state of the job to the first worker of the plan, which
// hashes it and writes the files of the model. All workers return the hashes.
func (w *worker) keep(ctx context.Context, p *prepared, e *engine.Engine, step int, runDir string) (params, state string, err error) {
	said, err := e.Keep(ctx, step, 2*sha256.Size, func() (engine.Collector, error) {
		c := &collector{p: p, h: newStateHash(), runDir: runDir}
		if runDir == "" {
			return c, nil
		}
		var err error
		if c.file, err = p.params.newModelWriter(filepath.Join(runDir, modelFile), map[string]string{"format": "pt"}); err != nil {
			return nil, err
		}
		return c, nil
	})
	if err != nil {
		return "", "", plainPathError(err)
	}
	return hex.EncodeToString(said[:sha256.Size]), hex.EncodeToString(said[sha256.Size:]), nil
}

// collector hashes the state of the job, and writes the files of the model
// where there is a run directory.
type collector struct {
	p      *prepared
	h      *stateHash
	runDir string
	file   *modelWriter // nil without one, and after Finish
}

func (c *collector) Take(part engine.Part, data []float32) error {
	c.h.add(part.Moment, data)
	if c.file == nil || part.Moment >= 0 {
		return nil
	}
	return c.p.params.pieces(part.Layer, part.Lo, data, c.file.w.Write)
}

func (c *collector) Finish() ([]byte, error) {
	if c.file != nil {
		file := c.file
		c.file = nil
		if err := file.commit(); err != nil {
			return nil, err
		}
		if err := c.p.writeConfig(c.runDir); err != nil {
			return nil, err
		}
	}
	return c.h.sums(), nil
}

func (c *collector) Discard() {
	if c.file != nil {
		c.file.discard()
	}
}

// end calls OnEnd. The model is the one in memory where this worker holds all
// of it, else the one just written.
func (w *worker) end(p *prepared, runDir string, steps int) error {
	var net *Net
	for _, s := range w.stages {
		if s.lo == 0 && s.hi == len(p.Model.Layers) {
			net = &Net{s, func() {}}
		}
	}
	if net == nil {
		var err error
		if net, err = Open(p.Model, runDir); err != nil {
			return err
		}
		defer net.Close()
	}
	return w.user("OnEnd", func() error {
		return p.OnEnd(End{RunDir: runDir, Steps: steps, Net: net, Out: output{w}})
	})
}

// sample reads one sample, and says which one it was if it fails.
func (w *worker) sample(d Dataset, s Sample, in, target Tensor) error {
	return w.user("Sample of the data set", func() error {
		if err := d.Sample(s, in, target); err != nil {
			return fmt.Errorf("sample %d of the data: %w", s.Index, err)
		}
		return nil
	})
}

func (w *worker) evaluate(ctx context.Context, p *prepared, e *engine.Engine) (*float64, error) {
	n := p.eval.Len()
	k := n
	if p.EvalSamples > 0 {
		k = min(n, p.EvalSamples)
	}
	defer w.spans.evaluated(w.spans.now())
	loss, err := e.Evaluate(ctx, w.step, k, func(j int, in, target Tensor) error {
		return w.sample(p.eval, plainSample(p.Seed, spread(j, k, n)), in, target)
	})
	if err != nil {
		return nil, err
	}
	mean := loss.Mean()
	return &mean, nil
}

// output sends what a program prints at its end.
type output struct{ w *worker }

func (o output) Write(b []byte) (int, error) {
	for part := range slices.Chunk(b, 1<<20) {
		if err := o.w.send(control.Output{Text: string(part)}); err != nil {
			return 0, err
		}
	}
	return len(b), nil
}
