package torch

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/worker/process"
	"github.com/soliton-train/soliton/trainer"
)

// Worker is the argument with which the launcher's own executable is the program that computes a Python program: Worker, the
// interpreter, the folder of the package soliton, the file of first values, the program, and its flags.
const Worker = "torch-worker"

// Main is the main function of a worker. It ends the process.
func Main() {
	if len(os.Args) < 6 {
		fmt.Fprintf(os.Stderr, "%s is for workers of the launcher\n", Worker)
		os.Exit(2)
	}
	c := command{python: os.Args[2], folder: os.Args[3]}
	first, script, args := os.Args[4], os.Args[5], os.Args[6:]
	standard, own, given := split(args)
	c.setup = given
	c.setup.First = first
	c.setup.Script, c.setup.Args = script, own
	if os.Args[1] == Values {
		os.Exit(c.writeValues())
	}
	os.Args = append([]string{script}, standard...)
	trainer.Main(func(*flag.FlagSet) func() (trainer.Job, error) {
		return func() (trainer.Job, error) {
			os.Args = append([]string{script}, args...) // as people gave them, for job.json
			var help *trainer.Done
			if slices.Contains(standard, "--help") || slices.Contains(standard, "-h") {
				help = c.help()
			}
			p, err := start(c)
			var job trainer.Job
			if err == nil {
				job, err = p.trainerJob(strings.TrimSuffix(filepath.Base(script), ".py"))
			}
			if help != nil {
				return job, help
			}
			return job, ended(err, script)
		}
	})
}

// help returns what the program says of its own flags, or nil.
func (c command) help() *trainer.Done {
	c.setup.Args, c.setup.First = append(slices.Clip(c.setup.Args), "--help"), ""
	p, err := start(c)
	f := new(failure)
	if err == nil {
		p.close()
	} else if errors.As(err, &f) && f.Exit != nil && *f.Exit == 0 && f.Text != "" {
		return &trainer.Done{Text: f.Text + "\n"}
	}
	return nil
}

// ended turns the error of a program that makes no job into that of a Go program. A refused job is wrong usage, other exceptions are
// like panics.
func ended(err error, script string) error {
	f := new(failure)
	if !errors.As(err, &f) {
		return err
	}
	if f.Trace != "" && !f.Refused {
		fmt.Fprint(os.Stderr, f.Trace)
	}
	if f.Exit != nil && *f.Exit == 0 {
		return &trainer.Done{Text: f.Text + "\n"}
	}
	err = fmt.Errorf("%s: %w", script, err)
	if f.Exit != nil && *f.Exit > 0 && *f.Exit < 256 {
		err = &process.ExitError{Status: *f.Exit, Err: err}
	}
	return err
}

// valueFlags are the standard flags of a program under the launcher, which all have a value.
var valueFlags = []string{"steps", "global-batch", "micro-batch", "seed", "lr", "lr-steps", "eval-every", "checkpoint-every", "init-from", "init-optimizer"}

// split separates the standard flags from the program's own arguments, and returns what of them the program needs.
// --init-from is the program's: it knows more files than package trainer.
func split(args []string) (standard, own []string, given setup) {
	own = []string{}
	for i := 0; i < len(args); i++ {
		if args[i] == "--" {
			own = append(own, args[i:]...)
			break
		}
		name, value, whole := strings.Cut(strings.TrimPrefix(args[i], "--"), "=")
		isStandard := strings.HasPrefix(args[i], "--") && slices.Contains(valueFlags, name)
		switch {
		case isStandard && !whole && i+1 < len(args):
			i++
			if value = args[i]; name != "init-from" {
				standard = append(standard, args[i-1], value)
			}
		case isStandard && whole && name == "init-from":
		case isStandard, args[i] == "--help", args[i] == "-h":
			standard = append(standard, args[i])
		default:
			own = append(own, args[i])
		}
		// The standard flags are parsed once more: mistakes in them show there.
		switch {
		case !isStandard:
		case name == "seed":
			given.Seed, _ = strconv.ParseUint(value, 0, 64)
		case name == "steps" && given.Rates == 0:
			given.Rates, _ = strconv.Atoi(value)
		case name == "lr-steps":
			given.Rates, _ = strconv.Atoi(value)
		case name == "init-from":
			given.InitFrom = value
		}
	}
	return standard, own, given
}

// description is what the program says of its job. It comes from outside: parse checks what later code relies on.
type description struct {
	Layers []layer `json:"layers"`
	Input  spec    `json:"input"`
	Target spec    `json:"target"`

	Samples     int    `json:"samples"`
	DataSHA256  string `json:"data_sha256"`
	EvalSize    int    `json:"eval_samples_there"`
	EvalSHA256  string `json:"eval_sha256"`
	GlobalBatch int    `json:"global_batch"`
	MicroBatch  int    `json:"micro_batch"`
	Steps       int    `json:"steps"`
	Seed        uint64 `json:"seed"`
	EvalEvery   int    `json:"eval_every"`
	EvalSamples int    `json:"eval_samples"`

	ClipNorm  float64 `json:"clip_norm"`
	Optimizer struct {
		Kind        string  `json:"kind"`
		Beta1       float64 `json:"beta1"`
		Beta2       float64 `json:"beta2"`
		Eps         float64 `json:"eps"`
		Momentum    float64 `json:"momentum"`
		WeightDecay float64 `json:"weight_decay"`
	} `json:"optimizer"`
	Schedule struct {
		Kind   string    `json:"kind"`
		Peak   float64   `json:"peak"`
		Warmup int       `json:"warmup"`
		Final  float64   `json:"final"`
		Rates  []float64 `json:"rates"`
	} `json:"schedule"`
	Metrics []string `json:"metrics"` // names
	OnStep  bool     `json:"on_step"` // there is a function for it
	OnEnd   bool     `json:"on_end"`
	Readers int      `json:"data_workers"` // processes that read samples; 0: the one that computes

	Identity Config `json:"identity"`
}

// Config is what decides the bits besides the numbers of the job. It is the model_config of job.json.
type Config struct {
	Torch   string `json:"torch"`
	Python  string `json:"python"`
	Machine string `json:"machine"`
	CPU     string `json:"cpu"`  // instructions that PyTorch's own kernels use
	BLAS    string `json:"blas"` // OPENBLAS_CORETYPE
	Threads int    `json:"threads"`
	Device  string `json:"device,omitempty"` // GPU, and the software and settings that decide its bits; "" for the CPU

	SourceSHA256  string            `json:"source_sha256"`  // of the program and the modules beside it
	FirstSHA256   string            `json:"first_sha256"`   // of the first values of all parameters
	BuffersSHA256 string            `json:"buffers_sha256"` // of all buffers
	ProbeSHA256   string            `json:"probe_sha256"`   // of loss and gradients of the first samples
	Tied          map[string]string `json:"tied,omitempty"` // further names of parameters, with the names that model.safetensors has

	TuningSHA256 string `json:"tuning_sha256"` // of what Job.param_groups says of each parameter; "" for none
}

type layer struct {
	Name    string  `json:"name"`
	Out     []int   `json:"out"`     // shape of the output of one sample
	Carries int     `json:"carries"` // numbers that cross to the next layer behind all samples: values of shared parameters
	Params  []param `json:"params"`
}

type param struct {
	Name        string  `json:"name"`
	Shape       []int   `json:"shape"`
	Decay       bool    `json:"decay"`
	LRScale     float64 `json:"lr_scale"`
	WeightDecay float64 `json:"weight_decay"` // 0: that of the optimizer
}

type spec struct {
	Shape   []int `json:"shape"`
	Integer bool  `json:"integer"`
}

// size returns the number of parameters.
func (l layer) size() (n int) {
	for _, p := range l.Params {
		n += tensor.Size(p.Shape)
	}
	return n
}

// parse reads a description.
func parse(text []byte) (*description, error) {
	d := new(description)
	if err := json.Unmarshal(text, d); err != nil {
		return nil, fmt.Errorf("the description of the job by Python: %w", err)
	}
	shapes := [][]int{d.Input.Shape, d.Target.Shape}
	total := 0
	for _, l := range d.Layers {
		shapes = append(shapes, l.Out)
		if l.Carries < 0 || l.Carries > math.MaxInt32 {
			return nil, fmt.Errorf("the description of the job by Python: layer %q carries %d numbers", l.Name, l.Carries)
		}
		for _, p := range l.Params {
			shapes = append(shapes, p.Shape)
			if n, ok := tensor.CheckedSize(p.Shape); ok && n <= tensor.MaxElements-total {
				total += n
			} else {
				return nil, fmt.Errorf("the description of the job by Python: parameter %q has the shape %v", p.Name, p.Shape)
			}
		}
	}
	for _, shape := range shapes {
		if n, ok := tensor.CheckedSize(shape); !ok || n > math.MaxInt32 {
			return nil, fmt.Errorf("the description of the job by Python has the shape %v", shape)
		}
	}
	if d.Readers < 0 || d.Readers > maxReaders {
		return nil, fmt.Errorf("the description of the job by Python has %d data workers, more than %d", d.Readers, maxReaders)
	}
	if len(d.Metrics) > control.MaxMetrics {
		return nil, fmt.Errorf("the description of the job by Python has %d metrics, more than %d", len(d.Metrics), control.MaxMetrics)
	}
	if len(d.Layers) == 0 || d.Samples < 1 || d.EvalSize < 0 {
		return nil, fmt.Errorf("the description of the job by Python has %d layers, %d samples and %d for evaluation", len(d.Layers), d.Samples, d.EvalSize)
	}
	return d, nil
}

// trainerJob returns the job for package trainer.
func (p *Program) trainerJob(name string) (trainer.Job, error) {
	d := p.job
	m := trainer.Model{Name: name, Config: d.Identity, Input: d.Input.spec(), Target: d.Target.spec(), Loss: p}
	for _, l := range d.Layers {
		m.Layers = append(m.Layers, declared{l})
		m.LayerNames = append(m.LayerNames, l.Name)
	}
	j := trainer.Job{
		Model: m, Data: &data{p: p, size: d.Samples, sum: d.DataSHA256},
		GlobalBatch: d.GlobalBatch, MicroBatch: d.MicroBatch, Steps: d.Steps, ClipNorm: d.ClipNorm, Seed: d.Seed,
		EvalEvery: d.EvalEvery, EvalSamples: d.EvalSamples,
	}
	if d.EvalSize > 0 {
		j.Eval = &data{p: p, size: d.EvalSize, sum: d.EvalSHA256, held: true}
	}
	if d.OnStep {
		j.OnStep = p.onStep
	}
	if d.OnEnd {
		j.OnEnd = p.onEnd
	}
	rate := trainer.Schedule{Peak: d.Schedule.Peak, Warmup: d.Schedule.Warmup, Final: d.Schedule.Final}
	switch d.Schedule.Kind {
	case "constant":
	case "table":
		rate = trainer.Table(d.Schedule.Rates...)
	case "linear":
		rate.Kind = trainer.LinearSchedule
	case "cosine":
		rate.Kind = trainer.CosineSchedule
	default:
		return j, fmt.Errorf("Job.optimizer has a schedule of the unknown kind %q", d.Schedule.Kind)
	}
	o := d.Optimizer
	switch o.Kind {
	case "adamw":
		j.Optimizer = trainer.AdamW{LR: rate, Beta1: o.Beta1, Beta2: o.Beta2, Eps: o.Eps, WeightDecay: o.WeightDecay}
	case "sgd":
		j.Optimizer = trainer.SGD{LR: rate, Momentum: o.Momentum, WeightDecay: o.WeightDecay}
	default:
		return j, fmt.Errorf("Job.optimizer is of the unknown kind %q", o.Kind)
	}
	return j, nil
}

func (s spec) spec() trainer.Spec {
	kind := trainer.Float32
	if s.Integer {
		kind = trainer.Int32
	}
	return trainer.Spec{Shape: s.Shape, Kind: kind}
}

// declared declares the parameters of a layer, which runs in its stage only.
type declared struct{ layer }

func (l declared) Params() (all []trainer.Param) {
	for i, p := range l.layer.Params {
		all = append(all, trainer.Param{Name: strconv.Itoa(i), Shape: p.Shape, NoDecay: !p.Decay, LRScale: p.LRScale, WeightDecay: p.WeightDecay})
	}
	return all
}

func (l declared) Forward(*trainer.Context, []trainer.Tensor, trainer.Tensor) (trainer.Tensor, any) {
	panic("a PyTorch layer runs in its stage only")
}

func (l declared) Backward(*trainer.Context, []trainer.Tensor, any, trainer.Tensor, []trainer.Tensor) trainer.Tensor {
	panic("a PyTorch layer runs in its stage only")
}

// Loss is there because a model has a loss; that of a PyTorch model runs in its last stage.
func (p *Program) Loss(*trainer.Context, trainer.Tensor, trainer.Tensor) (sum float64, count int64, dout trainer.Tensor) {
	panic("the loss of a PyTorch model runs in its stage only")
}

// Metrics returns the names of what is measured besides the loss.
func (p *Program) Metrics() []string { return p.job.Metrics }

// Param returns the name of a parameter in the model file.
func (p *Program) Param(layer, param int) string { return p.job.Layers[layer].Params[param].Name }

// First sets a parameter to its first values, which are those that the program made.
func (p *Program) First(layer, param int, x []float32) {
	b := p.gradient(layer)
	_, err := p.call(askFirst, layer, b.at)
	must(err)
	at := 0
	for _, before := range p.job.Layers[layer].Params[:param] {
		at += tensor.Size(before.Shape)
	}
	copy(x, b.f[at:])
}

// data is a data set of the program.
type data struct {
	p    *Program
	size int
	sum  string
	held bool // out of training
}

func (d *data) Len() int            { return d.size }
func (d *data) Fingerprint() string { return d.sum }
func (d *data) Readers() int        { return d.p.job.Readers }

func (d *data) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	x, y := d.p.memory.take(in.Len()), d.p.memory.take(target.Len())
	defer d.p.memory.give(x)
	defer d.p.memory.give(y)
	if err := d.p.sample(number(d.held), s.Index, int(s.Rand.Uint64()), x.at, y.at); err != nil {
		return err
	}
	fetch(in, x)
	fetch(target, y)
	return nil
}

// onStep calls the program's function for a step.
func (p *Program) onStep(s trainer.StepInfo) error {
	told := struct {
		Step        int                `json:"step"`
		Steps       int                `json:"steps"`
		Loss        float64            `json:"loss"`
		LR          float64            `json:"lr"`
		GradNorm    float64            `json:"grad_norm"`
		Targets     int64              `json:"targets"`
		ValLoss     *float64           `json:"val_loss"`
		Metrics     map[string]float64 `json:"metrics"`
		Train       map[string]float64 `json:"train_metrics"`
		Redelivered bool               `json:"redelivered"`
	}{s.Step, s.Steps, s.Loss, s.LR, s.GradNorm, s.Targets, s.ValLoss, s.Metrics, s.TrainMetrics, s.Redelivered}
	_, err := p.tell(askOnStep, func(again bool) any {
		told.Redelivered = told.Redelivered || again
		return told
	})
	return err
}

// onEnd calls the program's function at the end, and shows what it prints.
func (p *Program) onEnd(e trainer.End) error {
	text, err := p.tell(askOnEnd, func(bool) any { return e.RunDir })
	if err == nil {
		_, err = e.Out.Write(text)
	}
	return err
}

// fetch copies a block into a tensor.
func fetch(to trainer.Tensor, b block) {
	if to.I != nil {
		copy(to.I, b.ints())
		return
	}
	copy(to.F, b.f)
}
