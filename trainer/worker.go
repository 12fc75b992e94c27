package trainer

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/engine"
	"github.com/soliton-train/soliton/internal/worker/order"
	"github.com/soliton-train/soliton/internal/worker/process"
)

// NonFiniteError says that a step could not be committed because its loss or
// gradient is NaN, infinite or too large.
type NonFiniteError = core.NonFiniteError

// PanicError is a panic in user code: a layer, a loss, a data set, a callback, or
// the function that makes the job.
type PanicError = process.PanicError

// maker returns what makes the job in a worker.
func maker(makeJob func() (Job, error)) process.Make {
	return func(calls *process.Calls, note func(string) error) (*process.Job, error) {
		job, err := makeJob()
		if err != nil {
			return nil, jobError(err)
		}
		if err := note("reading data"); err != nil {
			return nil, err
		}
		p, err := prepare(job, calls)
		if err != nil {
			return nil, jobError(err)
		}
		return p.worker(calls), nil
	}
}

// jobError marks errors that are not failures of the program: wrong usage, and --help.
func jobError(err error) error {
	if done := (*Done)(nil); errors.As(err, &done) {
		return &process.JobError{Kind: control.Help, Err: done}
	}
	if errors.As(err, new(*ValidationError)) || errors.As(err, new(*DataError)) {
		return &process.JobError{Kind: control.Usage, Err: err}
	}
	return err
}

// worker returns the job as a worker process runs it, which records its calls of user code.
func (p *prepared) worker(calls *process.Calls) *process.Job {
	n := p.data.Len() // not asked for again: other goroutines may be in Sample
	schedule, samples := p.Optimizer.schedule(), order.New(p.Seed, n)
	p.describe()
	j := &p.run
	j.CheckpointEvery, j.CheckpointSteps = max(p.CheckpointEvery, 0), p.CheckpointSteps
	j.Input, j.Target = p.Model.Input, p.Model.Target
	j.Rule = zero.After(p.Optimizer.rule(), j.InitUpdates)
	j.LR = func(step int) float64 { return schedule.At(step, p.Steps) }
	j.Stage = func(lo, hi int, pool *kernel.Pool) engine.Stage {
		if away, ok := p.Model.Loss.(remote); ok {
			return away.Stage(lo, hi, p.Seed, calls)
		}
		return newStage(&p.Model, lo, hi, j.Params, pool, p.Seed, calls)
	}
	var looking sync.Mutex // for a place in the order of the samples
	j.Load = func(calls *process.Calls, i uint64, skips int, in, target Tensor) error {
		looking.Lock()
		s := p.trainingSample(samples, n, i, skips)
		looking.Unlock()
		return read(calls, p.data, s, in, target)
	}
	if c, ok := p.data.(Concurrent); ok {
		j.Readers = c.Readers()
	}
	j.Index = func(i uint64, skips int) int {
		return p.trainingSample(order.New(p.Seed, n), n, i, skips).Index
	}
	for _, m := range p.Model.Metrics {
		j.Metrics = append(j.Metrics, m.Name)
	}
	if away, ok := p.Model.Loss.(remote); ok {
		j.Metrics, j.Memory, j.Free, j.OnePass = away.Metrics(), away.Memory, away.Free, true
	}
	if p.eval != nil {
		n := p.eval.Len()
		if j.Evaluations = n; p.EvalSamples > 0 {
			j.Evaluations = min(n, p.EvalSamples)
		}
		j.Evaluate = func(i int, in, target Tensor) error {
			return read(calls, p.eval, plainSample(p.Seed, spread(i, j.Evaluations, n)), in, target)
		}
	}
	if p.OnStep != nil {
		j.OnStep = func(c process.Call) error {
			return p.OnStep(StepInfo{
				Step: c.Step.Step, Steps: p.Steps, Loss: c.Loss, LR: c.LR, GradNorm: c.GradNorm, Targets: c.Tokens,
				Duration: time.Duration(c.MS * float64(time.Millisecond)), ValLoss: c.ValLoss, Metrics: c.Metrics,
				TrainMetrics: c.TrainMetrics, time: c.Time, Redelivered: c.Again, lines: c.Lines,
			})
		}
	}
	if p.OnEnd != nil {
		j.OnEnd = p.end
	}
	return j
}

// end calls OnEnd. The model is the one in memory where this worker holds all
// of it, else the one just written.
func (p *prepared) end(e process.End) error {
	if _, ok := p.Model.Loss.(remote); ok {
		return p.OnEnd(End{RunDir: e.RunDir, Steps: e.Steps, Out: e.Out})
	}
	net := &Net{close: func() {}}
	if e.Whole != nil {
		net.stage = e.Whole.(*stage)
	} else {
		var err error
		if net, err = Open(p.Model, e.RunDir); err != nil {
			return err
		}
	}
	defer net.Close()
	return p.OnEnd(End{RunDir: e.RunDir, Steps: e.Steps, Net: net, Out: e.Out})
}

// describe fills in the job as job.json has it.
func (p *prepared) describe() {
	d := &p.run.Job
	d.Program, d.Args = filepath.Base(os.Args[0]), os.Args[1:]
	d.Model, d.Layers, d.Parameters = p.Model.Name, len(p.Model.Layers), int64(p.run.Params.Count())
	d.Steps, d.GlobalBatch, d.MicroBatch, d.Seed = p.Steps, p.GlobalBatch, p.MicroBatch, p.Seed
	d.Optimizer, d.Schedule, d.ClipNorm = p.Optimizer.String(), p.Optimizer.schedule().String(), p.ClipNorm
	d.EvalEvery, d.EvalSamples, d.EvalFiles = p.EvalEvery, p.EvalSamples, len(p.run.Files)-p.run.DataFiles
	d.InitFrom, d.InitOptimizer, d.Samples = p.InitFrom, p.InitOptimizer, int64(p.data.Len())
	d.Kernel, d.GoVersion, d.Platform = kernel.Active().String(), runtime.Version(), runtime.GOOS+"/"+runtime.GOARCH
}
