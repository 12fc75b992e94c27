package trainer

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"reflect"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/process"
)

// Job describes a training run. Its result, to the last bit, depends on
// Model, Data, Optimizer, GlobalBatch, MicroBatch, Steps, ClipNorm, Seed and
// InitFrom, and on nothing else.
type Job struct {
	Model Model
	Data  Dataset // samples to train on

	// Optimizer is AdamW or SGD, with the schedule of the learning rate.
	Optimizer Optimizer

	// GlobalBatch is the number of samples of a step. The gradient is that of
	// the mean loss over all their targets. --global-batch
	GlobalBatch int

	// MicroBatch is the number of samples that go through the model at once.
	// It divides GlobalBatch; 0 means GlobalBatch. --micro-batch
	MicroBatch int

	// Steps is the number of updates of the run. --steps
	Steps int

	// ClipNorm is the largest norm of the whole gradient; a longer gradient is
	// scaled down to it, as PyTorch's clip_grad_norm_ does. 0 means no limit.
	ClipNorm float64

	// Seed is the key of every random number: initial parameters, order of the
	// samples, dropout. 0 is a seed like any other. --seed
	Seed uint64

	// InitFrom is a model.safetensors file, or a run directory with one, with the
	// first parameters. "" means that they follow from the seed. --init-from
	InitFrom string

	// InitOptimizer is a file of the optimizer's state, as launcher export --optimizer writes it, or a directory with one as
	// optimizer.safetensors. It goes with InitFrom. The state knows how many updates are in it, and AdamW's correction of the bias goes on from
	// there; steps, schedule and order of the data begin anew. "" means that the state begins as zeros. --init-optimizer
	InitOptimizer string

	// Eval is held-out data; nil means that there is no evaluation.
	Eval Dataset

	// EvalEvery is the number of steps between evaluations; one follows the
	// last step in any case. 0 means only that one. --eval-every
	EvalEvery int

	// EvalSamples is the number of samples of an evaluation, taken from Eval
	// at even distances. 0 means 512, a negative number all.
	EvalSamples int

	// CheckpointEvery is the time between checkpoints of the whole state in the run
	// directory. A run rolls back to the newest one when all holders of a part of the
	// state are lost, and resumes from it after it ended. 0 means a minute, a negative
	// time none but the one of a run that is stopped; the same holds for the flag. [Run], and a program that go run
	// started, write none. The state after the last step is saved as well, unless the time is negative. --checkpoint-every
	CheckpointEvery time.Duration

	// CheckpointSteps has a checkpoint made after each multiple of so many steps instead; a multiple at which the one before is
	// still being written is left out. 0 means that CheckpointEvery counts. --checkpoint-every with a whole number
	CheckpointSteps int

	// RunDir is the directory for the run's files. "" means none for [Run],
	// and runs/PROGRAM-TIME for [Main]. --run-dir
	RunDir string

	// Threads is the number of compute threads; 0 means one for each core. The
	// result does not depend on it. Where they are 2 to 8 and the machine has as many cores, each runs a micro-batch of its own,
	// so layers hold as many times the memory between Forward and Backward; more share one. --threads
	Threads int

	// OnStep is called for every committed step in order, by the goroutine that
	// trains, in one worker at a time. If that worker's process ends, another one goes on;
	// the run writes down which calls have returned. So a call is repeated only if the
	// process may have ended during it, see [StepInfo.Redelivered], also after rollbacks
	// and after the run was resumed. A [LineWriter] writes each line once all the same.
	// An error ends the run.
	OnStep func(StepInfo) error

	// OnEnd is called once after the last step, or the step at which the run was
	// stopped, when all files of the model are written. Its error becomes the
	// run's.
	OnEnd func(End) error
}

// StepInfo is a committed step.
type StepInfo struct {
	Step     int     // from 1
	Steps    int     // of the job
	Loss     float64 // mean over the targets of the step
	LR       float64
	GradNorm float64 // of the gradient of the mean loss, before clipping
	Targets  int64   // targets that counted, such as tokens
	Duration time.Duration
	ValLoss  *float64 // mean loss over the evaluation that followed the step; nil if none did

	// Metrics are the means of that evaluation besides the loss, by name: [Model].Metrics, or those of a PyTorch job. One that is not
	// finite, or counted no target, is missing.
	Metrics map[string]float64

	// TrainMetrics are the same means over the step itself.
	TrainMetrics map[string]float64

	// Redelivered reports whether OnStep may have been called for this step before, in a
	// process that ended before the call was known to have returned.
	Redelivered bool

	lines *process.Lines // nil outside of a run
	time  time.Time      // of the commit
}

// End is the end of a run.
type End struct {
	RunDir string    // absolute path of the run directory, "" if there is none
	Steps  int       // committed
	Net    *Net      // the trained model; valid during the call
	Out    io.Writer // text for the user, shown on standard output after the run
}

// DefaultEvalSamples is what 0 means for Job.EvalSamples.
const DefaultEvalSamples = 512

// DefaultCheckpointEvery is what 0 means for Job.CheckpointEvery.
const DefaultCheckpointEvery = time.Minute

// Summary is the outcome of a run, as summary.json has it.
//
// ParamsSHA256 is the SHA-256 over all parameters as little-endian float32, in
// the order of model.safetensors: layers in model order, the tensors of each
// as it declares them, each row-major. StateSHA256 is the SHA-256 over the
// parameters and the moments of the optimizer behind them, in the same order:
// for AdamW the means of all gradients, then the means of all their squares;
// for SGD the momentum.
//
// DataSHA256 is, for data that have a [Manifest], the SHA-256 over a line
// "size sha256" for each file. For others it is that over a line with the
// number of samples and the little-endian bytes, input before target, of all
// samples up to 64 MiB, or of 1,024 evenly spaced ones beyond, read as for an
// evaluation.
type Summary = rundir.Summary

// Fault is one error in a job.
type Fault struct {
	Field string // of Job, such as "MicroBatch" or "Optimizer.LR"
	Flag  string // standard flag that sets it, without dashes, or ""
	Text  string // what is wrong and what would be right
}

// String renders the fault as one line.
func (f Fault) String() string {
	if f.Flag == "" {
		return "Job." + f.Field + " " + f.Text
	}
	return "--" + f.Flag + " (Job." + f.Field + ") " + f.Text
}

// faultList collects the faults of a job.
type faultList []Fault

// when adds a fault of a field, which flag sets, if wrong is true.
func (l *faultList) when(wrong bool, field, flag, format string, args ...any) {
	if wrong {
		*l = append(*l, Fault{field, flag, fmt.Sprintf(format, args...)})
	}
}

// ValidationError lists all faults of a job.
type ValidationError struct{ Faults []Fault }

func (e *ValidationError) Error() string {
	lines := make([]string, len(e.Faults))
	for i, f := range e.Faults {
		lines[i] = f.String()
	}
	return strings.Join(lines, "\n")
}

// Validate reports all faults of the job together, as a [*ValidationError]. It
// reads the data. On Linux, a model that takes more memory than the machine has to
// spare is a fault.
func (j Job) Validate() error {
	_, err := prepare(j, nil)
	return err
}

func (j Job) withDefaults() Job {
	j.MicroBatch = cmp.Or(j.MicroBatch, j.GlobalBatch)
	j.EvalSamples = cmp.Or(j.EvalSamples, DefaultEvalSamples)
	j.CheckpointEvery = cmp.Or(j.CheckpointEvery, DefaultCheckpointEvery)
	return j
}

// prepared is a valid job with its data bound.
type prepared struct {
	Job
	data, eval Dataset     // bound; eval may be nil
	run        process.Job // what is known of the job as a worker runs it
	calls      *process.Calls
}

// prepare checks a job and binds its data. It calls user code.
func prepare(j Job, calls *process.Calls) (*prepared, error) {
	p := &prepared{Job: j.withDefaults(), calls: calls}
	faults := p.Job.plainFaults()
	modelFaults := p.Model.faults()
	faults = append(faults, modelFaults...)
	if len(modelFaults) == 0 {
		p.run.Params = describeParams(&p.Model, p.Seed)
		var err error
		if p.run.ModelConfig, err = json.Marshal(p.Model.Config); err == nil {
			p.run.Config, err = json.MarshalIndent(savedConfig{p.Model.Name, p.run.ModelConfig, p.Model.Tied}, "", "  ")
			p.run.Config = append(p.run.Config, '\n')
		}
		if err == nil && len(p.Model.Tied) > 0 { // they decide the bits
			p.run.ModelConfig, err = json.Marshal(map[string]any{"config": p.run.ModelConfig, "tied": p.Model.Tied})
		}
		faults.when(err != nil, "Model.Config", "", "cannot be written as JSON: %v", err)
		if j.InitFrom != "" {
			f, err := p.run.Params.Open(j.InitFrom)
			if err == nil {
				if err = f.Finite(nil); err == nil {
					p.run.InitSHA256, err = f.SHA256()
				}
				f.Close()
			}
			faults.when(err != nil, "InitFrom", "init-from", "cannot be used: %v", err)
		}
		p.openMoments(&faults)
		if available, ok := platform.AvailableMemory(); ok && j.Optimizer != nil {
			// Parameters, their gradient and the optimizer's moments.
			modelFaults = memoryFault(&p.Model, p.run.Params, 2+j.Optimizer.rule().Moments(), max(p.MicroBatch, 1), available)
			faults = append(faults, modelFaults...)
		}
	}
	p.data, p.run.DataSHA256 = p.bind(&faults, "Data", j.Data, len(modelFaults) == 0)
	p.run.DataFiles = len(p.run.Files)
	if j.Eval != nil {
		p.eval, p.run.EvalSHA256 = p.bind(&faults, "Eval", j.Eval, len(modelFaults) == 0)
	}
	if len(faults) > 0 {
		return nil, &ValidationError{faults}
	}
	return p, nil
}

// openMoments describes the optimizer's state that the run begins with.
func (p *prepared) openMoments(faults *faultList) {
	if p.InitOptimizer == "" || p.Optimizer == nil {
		return
	}
	if _, away := p.Model.Loss.(remote); p.InitFrom == "" && !away {
		faults.when(true, "InitOptimizer", "init-optimizer", "is the state of parameters that the run does not begin with; give --init-from (Job.InitFrom) as well")
		return
	}
	m, err := p.run.Params.OpenMoments(p.InitOptimizer, process.Moments(p.Optimizer.rule()))
	if err == nil {
		p.run.InitUpdates = m.Updates
		p.run.InitOptimizerSHA256, err = m.Sum()
		m.Close()
	}
	faults.when(err != nil, "InitOptimizer", "init-optimizer", "cannot be used: %v", err)
}

// bind binds one data set, if there is a model to bind it to.
func (p *prepared) bind(faults *faultList, field string, d Dataset, model bool) (bound Dataset, sum string) {
	faults.when(isNil(d), field, "", "is nil; give a data set")
	if isNil(d) || !model {
		return nil, ""
	}
	bound, err := Bind(d, p.Model.Input, p.Model.Target)
	var files []DataFile
	if err == nil {
		sum, files, err = p.fingerprint(bound)
	}
	faults.when(err != nil, field, "", "cannot be used: %v", err)
	p.run.Files = append(p.run.Files, files...)
	return bound, sum
}

// isNil also recognises a nil pointer, which a constructor may return with an
// error.
func isNil(d Dataset) bool {
	v := reflect.ValueOf(d)
	return d == nil || v.Kind() == reflect.Pointer && v.IsNil()
}

// plainFaults checks everything but model and data.
func (j *Job) plainFaults() (f faultList) {
	noKernel, notNice := kernel.Err(), platform.NiceErr()
	f.when(noKernel != nil, "Model", "", "cannot be computed: %v", noKernel)
	f.when(notNice != nil, "Threads", "", "cannot give way: %v", notNice)
	f.when(j.Optimizer == nil, "Optimizer", "", "is nil; give trainer.AdamW{...} or trainer.SGD{...}")
	if j.Optimizer != nil {
		f = append(f, j.Optimizer.faults()...)
	}
	const most = math.MaxInt32
	f.when(j.Steps < 1 || j.Steps > most, "Steps", "steps", "is %d; it must be at least 1 and at most %d", j.Steps, most)
	if j.GlobalBatch < 1 || j.GlobalBatch > most {
		f.when(true, "GlobalBatch", "global-batch", "is %d; it must be at least 1 and at most %d", j.GlobalBatch, most)
	} else if j.MicroBatch < 1 || j.GlobalBatch%j.MicroBatch != 0 {
		f.when(true, "MicroBatch", "micro-batch", "is %d, which does not divide the global batch of %d; %s", j.MicroBatch, j.GlobalBatch, divisorHint(j.GlobalBatch, j.MicroBatch))
	}
	f.when(j.CheckpointSteps < 0 || j.CheckpointSteps > most, "CheckpointSteps", "checkpoint-every", "is %d; it must be 0 (CheckpointEvery counts) to %d", j.CheckpointSteps, most)
	f.when(!(j.ClipNorm >= 0) || math.IsInf(j.ClipNorm, 0), "ClipNorm", "", "is %v; it must be 0 (no limit) or more", j.ClipNorm)
	f.when(j.EvalEvery < 0, "EvalEvery", "eval-every", "is %d; it must be 0 (only at the end) or more", j.EvalEvery)
	f.when(j.EvalEvery > 0 && j.Eval == nil, "EvalEvery", "eval-every", "is %d, but there is no held-out data: set Job.Eval", j.EvalEvery)
	return append(f, threadsFault(j.Threads)...)
}

func threadsFault(threads int) (f faultList) {
	f.when(threads < 0 || threads > process.MaxThreads, "Threads", "threads", "is %d; it must be 0 (one for each core) to %d", threads, process.MaxThreads)
	return f
}

// divisorHint names the divisors of n around m.
func divisorHint(n, m int) string {
	below, above := 1, n
	for d := 1; d <= n/d; d++ {
		if n%d != 0 {
			continue
		}
		for _, x := range []int{d, n / d} {
			if x <= m {
				below = max(below, x)
			} else {
				above = min(above, x)
			}
		}
	}
	if below == above {
		return fmt.Sprintf("%d does", below)
	}
	return fmt.Sprintf("%d and %d do", below, above)
}
