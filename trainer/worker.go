package trainer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/soliton-train/soliton/elastic/agent"
	"github.com/soliton-train/soliton/internal/control"
	"github.com/soliton-train/soliton/internal/engine"
	"github.com/soliton-train/soliton/internal/kernel"
	"github.com/soliton-train/soliton/internal/rundir"
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
	conn    *control.Conn
	process bool

	// start and stop are what the agent says, once each.
	start chan control.Start
	stop  chan string

	// For the message if user code panics: the step, and what runs.
	step  int
	doing string
	stage *stage
}

// serve runs the job to its end, over a connection on which Hello was said.
// Whatever goes wrong, a panic in user code included, it tells the agent.
// process says that the worker is all there is in this process, which then
// ends at once when the agent is gone.
func serve(ctx context.Context, conn *control.Conn, process bool, makeJob func() (Job, error)) error {
	w := &worker{conn: conn, process: process, start: make(chan control.Start, 1), stop: make(chan string, 1)}
	ctx, cancel := context.WithCancelCause(ctx)
	received := make(chan struct{})
	go func() {
		defer close(received)
		if err := w.receive(ctx); err != nil && ctx.Err() == nil {
			cancel(errAgentLost)
			if process {
				// Whatever runs at the moment, nobody waits for it.
				fmt.Fprintf(os.Stderr, "%s: %v\n", program(), errAgentLost)
				os.Exit(agent.ExitFailed)
			}
		}
	}()
	defer func() {
		cancel(nil)
		<-received
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

// receive takes in what the agent says.
func (w *worker) receive(ctx context.Context) error {
	for {
		m, err := w.conn.Receive(ctx)
		if err != nil {
			return err
		}
		switch m := m.(type) {
		case control.Start:
			w.start <- m
		case control.Stop:
			w.stop <- m.Reason
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
	if w.stage != nil && e.Where == "" {
		e.Where = w.stage.where()
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
	switch {
	case errors.As(err, &panicked):
		f.Kind, f.Stack = control.UserPanic, panicked.Stack
	case errors.As(err, &nonFinite):
		f.Kind = control.NonFinite
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
	if err := w.send(control.Ready{Job: p.describe(), Data: p.files}); err != nil {
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

// train runs the steps and writes the files of the worker.
func (w *worker) train(ctx context.Context, p *prepared, start control.Start) error {
	if w.process {
		// One more than computes, so that messages never wait for a compute
		// thread.
		runtime.GOMAXPROCS(start.Threads + 1)
	}
	pool := kernel.NewPool(start.Threads)
	defer pool.Close()
	p.params.init(p.Seed)
	if p.InitFrom != "" {
		if err := p.params.load(p.InitFrom); err != nil {
			return err
		}
	}
	w.stage = newStage(&p.Model, p.params, pool, p.Seed)
	rule, schedule := p.Optimizer.rule(), p.Optimizer.schedule()
	order := newShuffle(p.Seed, p.data.Len())
	e, err := engine.New(engine.Config{
		Stage:       w.stage,
		Layers:      p.params.layers,
		Input:       p.Model.Input,
		Target:      p.Model.Target,
		GlobalBatch: p.GlobalBatch,
		MicroBatch:  p.MicroBatch,
		Rule:        rule,
		LR:          func(step int) float64 { return schedule.At(step, p.Steps) },
		ClipNorm:    p.ClipNorm,
		Load:        func(i uint64, in, target Tensor) error { return w.sample(p.data, order.at(i), in, target) },
		Pool:        pool,
	})
	if err != nil {
		return err
	}

	var loss float64
	var val *float64
	stoppedBy := ""
	done := 0
	for done < p.Steps && stoppedBy == "" {
		w.step = done + 1
		began := time.Now()
		r, err := e.Step(ctx, w.step)
		if err != nil {
			return err
		}
		took := time.Since(began)
		done, loss = r.Step, r.Loss
		info := StepInfo{
			Step: r.Step, Steps: p.Steps, Loss: r.Loss, LR: r.LR, GradNorm: r.GradNorm,
			Targets: r.Targets, Duration: took,
		}
		if p.evalDue(done) {
			if info.ValLoss, err = w.evaluate(ctx, p, e); err != nil {
				return err
			}
			val = info.ValLoss
		}
		if err := w.send(control.Step{
			Step: r.Step, Loss: r.Loss, LR: r.LR, GradNorm: r.GradNorm, Tokens: r.Targets,
			MS: float64(took.Microseconds()) / 1000, Time: time.Now(), ValLoss: info.ValLoss,
		}); err != nil {
			return err
		}
		if p.OnStep != nil {
			_ = w.user("OnStep", func() error { p.OnStep(info); return nil }) // a panic is caught further out
		}
		select {
		case stoppedBy = <-w.stop:
		default:
		}
	}
	if done == p.Steps {
		stoppedBy = ""
	}

	params, state := p.params.hashes(rule, e.Moments)
	if start.RunDir != "" {
		if err := p.params.save(filepath.Join(start.RunDir, modelFile), map[string]string{"format": "pt", "params_sha256": params}); err != nil {
			return plainPathError(err)
		}
		if err := p.writeConfig(start.RunDir); err != nil {
			return plainPathError(err)
		}
	}
	layers := make([]int, len(p.Model.Layers))
	for i := range layers {
		layers[i] = i
	}
	if err := w.send(control.Done{
		Steps: done, Loss: loss, ValLoss: val, ParamsSHA256: params, StateSHA256: state, StoppedBy: stoppedBy,
		Worker: rundir.Worker{
			Stages: []int{0}, Layers: layers, Forwards: e.Forwards, Backwards: e.Backwards,
			ParamBytes: 4 * int64(p.params.count()),
		},
	}); err != nil {
		return err
	}
	if p.OnEnd == nil {
		return nil
	}
	return w.user("OnEnd", func() error {
		return p.OnEnd(End{RunDir: start.RunDir, Steps: done, Net: &Net{w.stage, func() {}}, Out: output{w}})
	})
}

// sample reads one sample, and says which one it was if it fails.
func (w *worker) sample(d Dataset, i int, in, target Tensor) error {
	return w.user("Sample of the data set", func() error {
		if err := d.Sample(i, in, target); err != nil {
			return fmt.Errorf("sample %d of the data: %w", i, err)
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
	loss, err := e.Evaluate(ctx, w.step, k, func(j int, in, target Tensor) error {
		return w.sample(p.eval, spread(j, k, n), in, target)
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
