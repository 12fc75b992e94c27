package process

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/chaos"
	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/engine"
	"github.com/soliton-train/soliton/internal/worker/model"
)

// train runs the worker's part of the steps.
func (w *Worker) train(ctx context.Context, j *Job, start control.Start) error {
	// Under the launcher, the number of threads is the launcher's flag.
	if n := start.Threads; n < 0 || n > MaxThreads {
		return &JobError{control.Usage, fmt.Errorf("--threads (Job.Threads) is %d; it must be 0 (one for each core) to %d", n, MaxThreads)}
	}
	var compute []func() // each computing thread calls them first
	if w.self.own != nil {
		// Two more than compute, so that messages hardly ever wait for a compute
		// thread; and hardly for those of other workers.
		runtime.GOMAXPROCS(start.Threads + 2)
		compute = append(compute, platform.ComputeThread)
		if os.Getenv("GOGC") == "" {
			collectLater(gcFloor(j.Params.Layers), gcPercent(j.Params.Layers))
		}
	}
	order, err := w.first(ctx, j, start)
	if err != nil {
		return err
	}
	if w.self.own != nil && !start.Joins {
		w.under = order.Plan.Version
		platform.Spread(order.Plan.OnHost(w.self.id()))
	}
	defer joinRing(ctx, start.Ring, w.self, w.net.Addr())()
	pool := kernel.NewPool(start.Threads, compute...)
	defer pool.Close()
	var closeSamples func()
	w.samples, closeSamples = newSamples(w, j, start)
	defer closeSamples()
	if err := w.verdicts.open(w.samples); err != nil {
		return err
	}
	saver, closeSaver := newSaver(ctx, w, j, start)
	defer closeSaver()
	defer w.deliveries.lines.close()
	w.saver = saver
	if w.self.own != nil {
		defer w.heedTerm()()
	}
	return w.armed(ctx, start.Chaos, start.RunDir, func() error {
		for {
			err := w.trainFrom(ctx, j, start, pool, order)
			if !errors.Is(err, errRollback) {
				return err
			}
			order = w.recovery.begin()
		}
	})
}

// collectLater puts the first collection of garbage off until memory has grown to a floor, in bytes; after it, memory may grow by so many percent.
// A collection stops the whole process twice until its computing threads have come to a point at which they can stop, and where others have
// the processors that takes up to 16 ms (docs/performance.md). In the first steps memory only grows.
func collectLater(floor, percent int) {
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(live)
	const goLeast = 4 << 20 // Go collects first at this times GOGC / 100, and from then on at what lives times 1 + GOGC / 100
	late := 100 * floor / max(int(live[0].Value.Uint64()), goLeast)
	if late <= percent {
		debug.SetGCPercent(percent)
		return
	}
	debug.SetGCPercent(late)
	runtime.AddCleanup(new([]byte), func(percent int) { debug.SetGCPercent(percent) }, percent) // the first collection finds it
}

// gcFloor returns how large memory is when garbage is collected first, in bytes: what a worker of a small model has in use, and once the parameters.
func gcFloor(layers []engine.Layer) int { return 128<<20 + paramBytes(layers) }

// gcPercent returns by how many percent memory may grow before garbage is collected: as Go has it for small models, and less the larger the
// model is. Nearly all memory is numbers, which a collection does not look at, so that it costs as much for a large one; and a worker whose
// shards move holds more than in a step.
func gcPercent(layers []engine.Layer) int {
	const small, least = 64 << 20, 20 // bytes of parameters, percent
	return min(max(100*small/(paramBytes(layers)+1), least), 100)
}

// paramBytes returns the size of a model's parameters.
func paramBytes(layers []engine.Layer) (n int) {
	for i := range layers {
		n += 4 * layers[i].Size()
	}
	return n
}

// first returns the order that the worker begins with. A worker that joins has none yet.
func (w *Worker) first(ctx context.Context, j *Job, start control.Start) (o control.Order, err error) {
	if start.Joins {
		return o, nil
	}
	select {
	case <-w.recovery.ordered():
	case <-ctx.Done():
		return o, ctx.Err()
	}
	o = w.recovery.begin()
	if err := o.Plan.Validate(j.planLayers()); err != nil {
		return o, err
	}
	if _, ok := o.Plan.Worker(w.self.id()); !ok {
		return o, fmt.Errorf("the plan does not have worker %d", w.self.id())
	}
	return o, nil
}

// trainFrom runs the worker's part of the steps from the point of an order.
func (w *Worker) trainFrom(ctx context.Context, j *Job, start control.Start, pool *kernel.Pool, order control.Order) error {
	w.whole = nil
	w.samples.begin()
	j.Params.Release()
	begin, closeBegin, err := j.beginning(ctx, j.eras(start), order)
	if err != nil {
		return err
	}
	defer closeBegin()
	me := plan.Worker{ID: w.self.id(), Incarnation: w.self.Session.Incarnation}
	job := j.Job
	job.Zero, job.NoDigests, job.Verify = start.Zero, start.NoDigests, start.Verify
	loading, stopLoading := context.WithCancel(ctx)
	defer stopLoading()
	config := engine.Config{
		Job:     job,
		Self:    me,
		Network: w.net,
		Groups:  w.groups,
		First:   order,
		Stage: func(lo, hi int) engine.Stage {
			j.Params.Hold(lo, hi)
			s := j.Stage(lo, hi, pool)
			if hi-lo == j.Layers {
				w.mu.Lock()
				w.whole = s
				w.mu.Unlock()
			}
			if w.faults != nil {
				return slowed{s, w.faults, &w.clock}
			}
			return s
		},
		Memory:  j.Memory,
		Layers:  j.Params.Layers,
		Begin:   begin,
		Zeros:   order.From == "" && j.InitOptimizer == "",
		Beside:  !j.OnePass, // a program in Python makes them, which does one thing at a time
		Input:   j.Input,
		Target:  j.Target,
		Metrics: len(j.Metrics),
		Rule:    j.Rule,
		LR:      j.LR,
		Load: func(lane int, i uint64, in, target tensor.Tensor) error {
			return w.samples.load(loading, lane, i, in, target)
		},
		Ahead:   w.samples.ahead,
		Readers: j.Readers,
		Await:   w.samples.await,
		Passes:  j.passes(pool.Threads()),
		Pool:    pool,
		Meter:   w.meter,
		Pace:    &w.pace,
		Fast:    start.Reduction == "fast",
		Yield:   w.self.own != nil,
		Stop:    w.stopped,
		Held:    w.recovery.held(start.Detect),
		Tell:    w.recovery.tell,
		Span: func(x engine.Span) {
			w.times.add(x)
			w.spans.add(x)
		},
		Phase: func(step int, phase string) {
			w.times.phase(step, phase)
			w.faults.Phase(step, chaos.Phase(phase))
		},
	}
	if w.self.own != nil {
		config.Progress = w.self.own.progress
	}
	if start.Checkpoints {
		config.Saving, config.Room, config.Save = w.saver.saving, w.saver.room, w.saver.save
	}
	e, err := engine.New(config)
	if err != nil {
		return err
	}
	defer e.Close()
	defer stopLoading() // before Close, which waits for all passes
	defer w.recovery.leave()
	w.recovery.enter(e)
	done := control.Done{Steps: order.Passed.Step}
	working, end := w.untilReleased(ctx)
	defer end() // after a panic
	err = w.work(working, j, e, &done, start)
	gone := errors.Is(context.Cause(working), core.ErrLeft)
	if end(); gone {
		return w.left(ctx, j, core.ErrLeft)
	}
	if err != nil {
		return w.left(ctx, j, w.recovery.cause(err))
	}
	done.Worker = rundir.Worker{ID: int(me.ID), Incarnation: me.Incarnation, Layers: j.Params.Held()}
	e.Describe(&done)
	for _, s := range w.net.Stats() {
		done.Worker.BytesSent += s.BytesSent
	}
	w.saver.finish()
	if err := w.send(done); err != nil {
		return err
	}
	for {
		released, err := w.waitAsked(ctx)
		if err == nil && !released {
			err = w.deliver(ctx, j, 0)
		}
		if err != nil {
			return err
		}
		if released {
			break
		}
	}
	if j.OnEnd == nil || !e.Collects() {
		return nil
	}
	return w.user(control.CallOnEnd, func() error {
		return j.OnEnd(End{RunDir: cmp.Or(done.ModelDir, start.RunDir), Steps: done.Steps, Whole: w.whole, Out: output{w}})
	})
}

// untilReleased returns a context that ends with [core.ErrLeft] when the agent releases this worker: the run goes on without it, and what it may be
// waiting for does not come. end is to be called before a release means something else.
func (w *Worker) untilReleased(ctx context.Context) (until context.Context, end func()) {
	until, cancel := context.WithCancelCause(ctx)
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-w.release:
			cancel(core.ErrLeft)
		case <-until.Done():
		}
	})
	return until, func() {
		cancel(nil)
		watch.Wait()
	}
}

// work does this worker's part of all steps, and of what the run keeps of them.
func (w *Worker) work(ctx context.Context, j *Job, e *engine.Engine, done *control.Done, start control.Start) error {
	if err := w.begin(ctx, j, e, done); err != nil {
		return err
	}
	for done.Steps < j.Steps && done.StoppedBy == "" {
		if err := w.trainStep(ctx, j, e, start.Shift, done); err != nil {
			return err
		}
	}
	if done.Steps == j.Steps {
		done.StoppedBy = ""
	}
	return w.keep(ctx, j, e, done, start)
}

// begin waits until the worker has a part in the run. A worker that joins takes
// part in what follows the last commit: the evaluation, and the report of the step,
// for it may be the only one left that knows the step.
func (w *Worker) begin(ctx context.Context, j *Job, e *engine.Engine, done *control.Done) error {
	at, committed, err := e.Begun(ctx)
	if err != nil {
		return err
	}
	joined := at.Step > done.Steps
	done.Steps = at.Step
	if !joined {
		return nil
	}
	w.step = at.Step
	return w.report(ctx, j, e, done, committed, control.Step{Joined: true, Time: time.Now()})
}

// report tells the agent of a committed step, after the evaluation that may follow it. said has what only a worker that ran the
// step knows.
func (w *Worker) report(ctx context.Context, j *Job, e *engine.Engine, done *control.Done, r core.Result, said control.Step) error {
	done.Steps, done.Loss, done.StoppedBy = r.Step, r.Loss, r.Stop
	said.Step, said.Loss, said.LR, said.GradNorm, said.Tokens, said.Plan = r.Step, r.Loss, r.LR, r.GradNorm, r.Targets, uint64(r.Plan.N)
	said.TrainMetrics = j.means(r.Metrics)
	said.Forwards, said.Backwards, said.Reading = r.Forwards, r.Backwards, r.Reading
	if j.evalDue(r.Step) {
		var err error
		done.ValLoss, said.Metrics, err = w.evaluate(ctx, j, e)
		if said.Left = errors.Is(err, core.ErrLeft); err != nil && !said.Left {
			return err
		}
		said.ValLoss = done.ValLoss
	}
	w.spans.sums(&said)
	if err := w.send(said); err != nil || said.Left {
		return cmp.Or(err, core.ErrLeft)
	}
	if w.self.own != nil && w.under != r.Plan {
		w.under = r.Plan
		platform.Spread(e.OnHost())
	}
	return nil
}

// left waits for the agent's release if the run continues without this worker.
func (w *Worker) left(ctx context.Context, j *Job, err error) error {
	if !errors.Is(err, core.ErrLeft) {
		return err
	}
	w.saver.finish() // the checkpoint needs this worker's part
	for {
		if err := w.leaveCalls(j); err != nil {
			return err
		}
		if released, err := w.waitAsked(ctx); err != nil || released { // rolled back, if all others are lost
			return err
		}
	}
}

// trainStep runs one step and reports it.
func (w *Worker) trainStep(ctx context.Context, j *Job, e *engine.Engine, shift uint64, done *control.Done) error {
	w.step = done.Steps + 1
	began := time.Now()
	w.times.begin(w.step, began)
	w.faults.StepBegan(w.step)
	r, err := e.Step(ctx, w.step)
	if mismatch := new(core.MismatchError); errors.As(err, &mismatch) && mismatch.Sample >= 0 {
		err = fmt.Errorf("sample %d of the data: %w", w.samples.index(uint64(mismatch.Sample)+shift), err)
	}
	if err != nil {
		return err
	}
	took := time.Since(began)
	w.committed.Store(int64(r.Step))
	if t, ok := w.times.end(r.Step, began.Add(took)); ok {
		if err := w.send(t); err != nil {
			return err
		}
	}
	if err := w.report(ctx, j, e, done, r, control.Step{MS: float64(took.Microseconds()) / 1000, Time: began.Add(took)}); err != nil {
		return err
	}
	if err := w.spans.tell(r.Step, uint64(r.Plan.N), began, took); err != nil {
		return err
	}
	return w.deliver(ctx, j, r.Step)
}

// stopped returns why the agent asked the worker to end, or "".
func (w *Worker) stopped() string {
	select {
	case w.stopReason = <-w.stop:
	default:
	}
	return w.stopReason
}

// keep sends the state of the job to the worker that the plan names, which hashes it
// and writes the files of the model. All workers get the hashes.
func (w *Worker) keep(ctx context.Context, j *Job, e *engine.Engine, done *control.Done, start control.Start) error {
	said, by, err := e.Keep(ctx, done.Steps, model.HashSize, func(ctx context.Context) (engine.Collector, error) {
		return awaitSpace(ctx, start.RunDir, func(text string) { _ = w.send(control.Note{Text: text}) }, func() (c engine.Collector, err error) {
			c, done.ModelDir, err = collector(j, j.eras(start), start.RunDir)
			return c, err
		})
	})
	if err != nil {
		return model.PathError(err)
	}
	done.ParamsSHA256, done.StateSHA256 = model.Hashes(said)
	done.Collector = int(by)
	return nil
}

// collector opens what writes the files of the model into the run directory, which it makes again if it was removed, or into another
// folder if that fails, or if the directory has become another run's.
func collector(j *Job, eras rundir.Eras, runDir string) (c engine.Collector, elsewhere string, err error) {
	if runDir == "" {
		c, err = j.Params.Collector("", j.Config)
		return c, "", err
	}
	if err = eras.Own(runDir); !errors.Is(err, rundir.ErrInUse) {
		err = os.MkdirAll(runDir, 0o700)
	}
	if err == nil {
		c, err = j.Params.Collector(runDir, j.Config)
	}
	if err == nil || platform.MayPass(err) && !errors.Is(err, fs.ErrPermission) {
		return c, "", err
	}
	elsewhere, err2 := rundir.Elsewhere(runDir)
	if err2 == nil {
		c, err2 = j.Params.Collector(elsewhere, j.Config)
	}
	if err2 != nil {
		return nil, "", errors.Join(err, err2)
	}
	return c, elsewhere, nil
}

// awaitSpace opens what writes the files of the model. For them, it gives the reserve of the run directory back; where the disk does not
// take them all the same, it waits and says so.
func awaitSpace(ctx context.Context, runDir string, say func(string), open func() (engine.Collector, error)) (engine.Collector, error) {
	for said := false; ; {
		c, err := open()
		switch {
		case !platform.MayPass(err):
			return c, err
		case platform.IsFull(err) && rundir.FreeReserve(runDir):
			continue
		case !said:
			said = true
			say(fmt.Sprintf("the model waits until it can be written: %v", model.PathError(err)))
		}
		select {
		case <-time.After(timing.Disk):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (w *Worker) evaluate(ctx context.Context, j *Job, e *engine.Engine) (val *float64, metrics map[string]float64, err error) {
	defer w.spans.evaluated(w.spans.now())
	loss, sums, err := e.Evaluate(ctx, w.step, j.Evaluations, w.samples.evaluate)
	if err != nil {
		return nil, nil, err
	}
	mean := loss.Mean()
	return &mean, j.means(sums), nil
}

// means returns the means of metrics by name, of those that have a finite one; nil if none does.
func (j *Job) means(sums []core.Loss) (means map[string]float64) {
	for i, s := range sums {
		if mean := s.Mean(); !math.IsNaN(mean) && !math.IsInf(mean, 0) {
			if means == nil {
				means = make(map[string]float64)
			}
			means[j.Metrics[i]] = mean
		}
	}
	return means
}

// output sends what a program prints in OnEnd.
type output struct{ w *Worker }

func (o output) Write(b []byte) (int, error) {
	for part := range slices.Chunk(b, 1<<20) {
		if err := o.w.send(control.Output{Text: string(part)}); err != nil {
			return 0, err
		}
	}
	return len(b), nil
}

// evalDue reports whether an evaluation follows the step.
func (j *Job) evalDue(step int) bool {
	return j.Evaluate != nil && (step == j.Steps || j.EvalEvery > 0 && step%j.EvalEvery == 0)
}

// MaxThreads is far above what helps. It bounds the memory that a typing error in a
// flag takes.
const MaxThreads = 4096
