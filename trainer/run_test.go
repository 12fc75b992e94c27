package trainer_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/safetensors"
	"github.com/soliton-train/soliton/internal/worker/engine"
	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

// writeText writes a file of n letters in which each depends on the one
// before, so that there is something to learn.
func writeText(t testing.TB, n int) string {
	t.Helper()
	draw := rng.New(4, rng.Place{})
	b := make([]byte, n)
	for i := 1; i < n; i++ {
		b[i] = (b[i-1]*3 + 1 + byte(draw.IntN(2))) % 16
	}
	for i := range b {
		b[i] += 'a'
	}
	path := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// gptJob is a small job with everything in it that could go wrong: dropout,
// odd sizes, epochs that end within a batch, evaluation, clipping.
func gptJob(t testing.TB, path string, dropout float64) trainer.Job {
	t.Helper()
	text, err := trainer.Text(path)
	if err != nil {
		t.Fatal(err)
	}
	train, held := text.HoldOut(10)
	return trainer.Job{
		Model:     nn.GPT(nn.GPTConfig{Layers: 2, Width: 24, Heads: 3, Context: 25, Dropout: dropout}),
		Data:      train,
		Eval:      held,
		Optimizer: trainer.AdamW{LR: trainer.Cosine(1e-2, 2), WeightDecay: 0.1},

		GlobalBatch: 15, MicroBatch: 3, Steps: 6, ClipNorm: 1, Seed: 7, EvalEvery: 4, EvalSamples: 5,
		Threads: 1,
	}
}

func run(t testing.TB, job trainer.Job) trainer.Summary {
	t.Helper()
	s, err := trainer.Run(context.Background(), job)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSameBits(t *testing.T) {
	path := writeText(t, 2000)
	want := run(t, gptJob(t, path, 0.1))
	if want.Steps != 6 || want.ValLoss == nil || len(want.ParamsSHA256) != 64 || len(want.StateSHA256) != 64 {
		t.Fatalf("summary %+v", want)
	}
	same := func(what string, job trainer.Job) {
		t.Helper()
		got := run(t, job)
		if got.ParamsSHA256 != want.ParamsSHA256 || got.StateSHA256 != want.StateSHA256 || *got.ValLoss != *want.ValLoss || got.Loss != want.Loss || got.DataSHA256 != want.DataSHA256 {
			t.Errorf("%s: other bits", what)
		}
	}
	same("run again", gptJob(t, path, 0.1))
	for threads := 2; threads <= 3; threads++ {
		job := gptJob(t, path, 0.1)
		job.Threads = threads
		same(fmt.Sprintf("%d threads", threads), job)
	}
	moved := filepath.Join(t.TempDir(), "moved")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(moved, text, 0o600); err != nil {
		t.Fatal(err)
	}
	same("data elsewhere", gptJob(t, moved, 0.1))
	if testing.Short() {
		return // what follows has no more goroutines
	}
	for _, p := range kernel.Available() {
		restore, err := kernel.Use(p)
		if err != nil {
			t.Fatal(err)
		}
		same(p.String(), gptJob(t, path, 0.1))
		restore()
	}
	job := gptJob(t, path, 0.1)
	job.RunDir = filepath.Join(t.TempDir(), "run")
	same("with files", job)

	// Whatever is part of the job changes the bits.
	text[700] ^= 1
	if err := os.WriteFile(moved, text, 0o600); err != nil {
		t.Fatal(err)
	}
	other := map[string]func(j *trainer.Job){
		"dropout":     func(j *trainer.Job) { *j = gptJob(t, path, 0) },
		"data":        func(j *trainer.Job) { *j = gptJob(t, moved, 0.1) },
		"seed":        func(j *trainer.Job) { j.Seed++ },
		"micro-batch": func(j *trainer.Job) { j.MicroBatch = 5 },
		"clip":        func(j *trainer.Job) { j.ClipNorm = 0.5 },
	}
	for what, change := range other {
		job := gptJob(t, path, 0.1)
		change(&job)
		if got := run(t, job); got.ParamsSHA256 == want.ParamsSHA256 {
			t.Errorf("another %s gave the same parameters", what)
		}
	}
}

func TestRunDirectory(t *testing.T) {
	job := gptJob(t, writeText(t, 2000), 0.1)
	job.RunDir = filepath.Join(t.TempDir(), "run")
	var steps []trainer.StepInfo
	var logits []float32
	ends := 0
	probe := trainer.Tensor{Shape: []int{1, 4}, I: []int32{'a', 'b', 'c', 'd'}}
	job.OnStep = func(s trainer.StepInfo) error {
		steps = append(steps, s)
		return nil
	}
	job.OnEnd = func(e trainer.End) error {
		ends++
		if _, err := os.Stat(filepath.Join(e.RunDir, "model.safetensors")); err != nil {
			t.Error(err)
		}
		if e.Steps != 6 {
			t.Errorf("OnEnd was told of %d steps", e.Steps)
		}
		logits = e.Net.Forward(probe).F
		return nil
	}
	s := run(t, job)

	if ends != 1 || len(steps) != 6 {
		t.Fatalf("OnEnd was called %d times, OnStep %d times", ends, len(steps))
	}
	for i, step := range steps {
		if step.Step != i+1 || step.Steps != 6 || step.Targets != 15*25 || !(step.Loss > 0) || !(step.GradNorm > 0) {
			t.Errorf("step %d: %+v", i+1, step)
		}
		if evaluated := step.ValLoss != nil; evaluated != (i+1 == 4 || i+1 == 6) {
			t.Errorf("step %d: evaluated: %v", i+1, evaluated)
		}
	}
	if steps[5].Loss != s.Loss || *steps[5].ValLoss != *s.ValLoss || !(s.Loss < steps[0].Loss) {
		t.Errorf("losses from %v to %v, summary %v", steps[0].Loss, steps[5].Loss, s.Loss)
	}
	w := s.Workers[0]
	if w.Forwards != 30 || w.Backwards != 30 || w.ParamBytes == 0 || !slices.Equal(w.Layers, []int{0, 1, 2, 3}) {
		t.Errorf("worker %+v", w)
	}

	// The hash is that of the file's data.
	file, err := os.ReadFile(filepath.Join(job.RunDir, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(file[int64(len(file))-w.ParamBytes:])
	if hex.EncodeToString(sum[:]) != s.ParamsSHA256 {
		t.Error("params_sha256 is not the hash of the data of model.safetensors")
	}
	summary, err := os.ReadFile(filepath.Join(job.RunDir, "summary.json"))
	if err != nil {
		t.Fatal(err)
	}
	var onDisk trainer.Summary
	if err := json.Unmarshal(summary, &onDisk); err != nil || !reflect.DeepEqual(onDisk, s) {
		t.Errorf("summary.json (%v) differs from what Run returned:\n%s\n%+v", err, summary, s)
	}
	metrics, err := os.ReadFile(filepath.Join(job.RunDir, "metrics.jsonl"))
	if err != nil || bytes.Count(metrics, []byte("\n")) != 6 {
		t.Errorf("metrics.jsonl (%v):\n%s", err, metrics)
	}

	// A saved model can be opened again, and trained on.
	var config nn.GPTConfig
	name, err := trainer.ReadConfig(job.RunDir, &config)
	if err != nil || name != job.Model.Name {
		t.Fatalf("config.json holds %q: %v", name, err)
	}
	for _, path := range []string{job.RunDir, filepath.Join(job.RunDir, "model.safetensors")} {
		net, err := trainer.Open(nn.GPT(config), path)
		if err != nil {
			t.Fatal(err)
		}
		if got := net.Forward(probe).F; !slices.Equal(got, logits) {
			t.Errorf("%s computes something else than the trained model", path)
		}
		net.Close()
	}
	again := gptJob(t, writeText(t, 2000), 0)
	again.InitFrom, again.Optimizer = job.RunDir, trainer.SGD{LR: trainer.Constant(1e-30)}
	again.RunDir = filepath.Join(t.TempDir(), "again")
	if got := run(t, again); got.ParamsSHA256 != s.ParamsSHA256 {
		t.Error("a run with a vanishing learning rate does not end with the parameters it was given")
	}
	sum = sha256.Sum256(file)
	description, err := os.ReadFile(filepath.Join(again.RunDir, "job.json"))
	if err != nil || !strings.Contains(string(description), fmt.Sprintf(`"init_sha256": "%x"`, sum)) {
		t.Errorf("job.json (%v) lacks the SHA-256 of the initial parameters:\n%s", err, description)
	}
}

// counts is a data set that records which samples are asked for.
type counts struct {
	n    int
	seen *[]int
}

func (c counts) Len() int { return c.n }
func (c counts) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	i := s.Index
	if c.seen != nil {
		*c.seen = append(*c.seen, i)
	}
	in.F[0], in.F[1] = float32(i%5)-2, float32(i%3)-1
	target.I[0] = int32(i % 2)
	return nil
}

func smallJob() trainer.Job {
	return trainer.Job{
		Model:     nn.Classifier(nn.ClassifierConfig{Inputs: 2, Hidden: []int{8}, Classes: 2}),
		Data:      counts{n: 40},
		Optimizer: trainer.SGD{LR: trainer.Constant(0.1), Momentum: 0.9},

		GlobalBatch: 8, MicroBatch: 4, Steps: 5, Threads: 1,
	}
}

// numbered is a data set whose samples are their numbers.
type numbered struct{ counts }

func (d numbered) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	err := d.counts.Sample(s, in, target)
	in.F[0] = float32(s.Index)
	return err
}

// seeing is a layer that records which samples of a numbered data set it gets.
type seeing struct {
	trainer.Layer
	seen *[]int
}

func (l seeing) Forward(c *trainer.Context, params []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	for i := range c.Samples() {
		*l.seen = append(*l.seen, int(in.F[2*i]))
	}
	return l.Layer.Forward(c, params, in)
}

// Samples are computed in their order, whenever they are read.
func TestSampleOrder(t *testing.T) {
	const n = 13
	var seen []int
	job := smallJob()
	job.Data, job.Seed = numbered{counts{n: n}}, 3
	job.Model.Layers[0] = seeing{job.Model.Layers[0], &seen}
	run(t, job)
	// The spot check of step 1 computes one of its two micro-batches once more.
	if again := seen[8:12]; !slices.Equal(again, seen[:4]) && !slices.Equal(again, seen[4:8]) {
		t.Fatalf("step 1 has %v, and then %v", seen[:8], again)
	}
	seen = slices.Delete(seen, 8, 12)
	if len(seen) != 40 {
		t.Fatalf("%d samples were computed", len(seen))
	}
	for s, got := range seen {
		want := rng.NewPerm(3, uint64(s/n), n).At(uint64(s % n))
		if uint64(got) != want {
			t.Fatalf("sample %d of the run is number %d of the data, want %d", s, got, want)
		}
	}
}

// augmented moves its samples at random, and records what it is asked for: also ahead of time, by another goroutine.
type augmented struct {
	counts
	asked *asked
}

type asked struct {
	mu      sync.Mutex
	samples []trainer.Sample
}

func (a augmented) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	a.asked.mu.Lock()
	a.asked.samples = append(a.asked.samples, s)
	a.asked.mu.Unlock()
	err := a.counts.Sample(s, in, target)
	if s.Train {
		in.F[0] += float32(s.Rand.Normal())
	}
	return err
}

// What a data set draws follows from seed, epoch and sample, so random samples give the same bits.
func TestRandomSamples(t *testing.T) {
	const n = 13
	was := new(asked)
	job := smallJob()
	job.Data, job.Seed, job.Eval, job.EvalSamples = augmented{counts{n: n}, was}, 3, augmented{counts{n: n}, was}, -1
	first := run(t, job)
	type place struct{ epoch, index int }
	trained, others := make(map[place]bool), 0
	for _, s := range was.samples {
		if s.Rand != rng.ForSample(3, uint64(s.Epoch), uint64(s.Index)) || !s.Train && s.Epoch != 0 {
			t.Fatalf("the data set was asked for %+v", s)
		}
		if s.Train {
			trained[place{s.Epoch, s.Index}] = true
		} else {
			others++
		}
	}
	for i := range 40 {
		at := place{i / n, int(rng.NewPerm(3, uint64(i/n), n).At(uint64(i % n)))}
		if !trained[at] {
			t.Errorf("sample %d of the run was not asked for", i)
		}
		delete(trained, at)
	}
	if len(trained) > 0 || others != 3*n { // two checks of the data, and one evaluation
		t.Errorf("the data sets were asked for %v besides, and for %d samples out of training", trained, others)
	}
	job.Threads = 2
	if again := run(t, job); again.ParamsSHA256 != first.ParamsSHA256 {
		t.Error("a second run has other bits")
	}
	job.Data = counts{n: n}
	if plain := run(t, job); plain.ParamsSHA256 == first.ParamsSHA256 {
		t.Error("augmentation changes nothing")
	}
}

func TestOnStepFails(t *testing.T) {
	full, calls := errors.New("no space left"), 0
	job := smallJob()
	job.OnStep = func(s trainer.StepInfo) error {
		if calls++; s.Step == 2 {
			return full
		}
		return nil
	}
	_, err := trainer.Run(context.Background(), job)
	if !errors.Is(err, full) || !strings.Contains(err.Error(), "OnStep of step 2") || calls != 2 {
		t.Errorf("error %v after %d calls", err, calls)
	}
}

func TestEvaluationSamples(t *testing.T) {
	for _, c := range []struct {
		samples int
		want    []int
	}{
		{3, []int{0, 3, 6}}, {-1, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}}, {0, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}},
	} {
		var seen []int
		job := smallJob()
		job.Steps, job.Eval, job.EvalSamples = 1, counts{10, &seen}, c.samples
		run(t, job)
		if got := seen[10:]; !slices.Equal(got, c.want) {
			t.Errorf("EvalSamples %d: samples %v, want %v", c.samples, got, c.want)
		}
	}
}

func TestStop(t *testing.T) {
	ctx, cancel := context.WithCancelCause(context.Background())
	reason := errors.New("enough")
	job := smallJob()
	job.Steps = 1 << 20
	job.RunDir = filepath.Join(t.TempDir(), "run")
	job.OnStep = func(s trainer.StepInfo) error {
		if s.Step == 3 {
			cancel(reason)
		}
		return nil
	}
	ends := 0
	job.OnEnd = func(trainer.End) error { ends++; return nil }
	s, err := trainer.Run(ctx, job)
	var stopped *trainer.StoppedError
	if !errors.As(err, &stopped) || !errors.Is(err, reason) {
		t.Fatalf("error %v", err)
	}
	if s.Steps < 3 || s.StoppedBy == "" || s.ParamsSHA256 == "" || ends != 1 {
		t.Errorf("OnEnd was called %d times; summary %+v", ends, s)
	}
	net, err := trainer.Open(job.Model, job.RunDir)
	if err != nil {
		t.Fatalf("the stopped run left no model: %v", err)
	}
	net.Close()
}

// odd is a layer that misbehaves.
type odd struct {
	forward, backward func(c *trainer.Context, x trainer.Tensor)
}

func (o *odd) Params() []trainer.Param { return nil }
func (o *odd) Forward(c *trainer.Context, _ []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	out := c.Tensor(in.Shape...)
	copy(out.F, in.F)
	if o.forward != nil {
		o.forward(c, out)
	}
	return out, nil
}
func (o *odd) Backward(c *trainer.Context, _ []trainer.Tensor, _ any, dout trainer.Tensor, _ []trainer.Tensor) trainer.Tensor {
	din := c.Tensor(dout.Shape...)
	copy(din.F, dout.F)
	if o.backward != nil {
		o.backward(c, din)
	}
	return din
}

// withOdd puts o behind the first layer, under the name "odd".
func withOdd(o *odd) trainer.Job {
	job := smallJob()
	m := &job.Model
	m.Layers = slices.Insert(slices.Clone(m.Layers), 1, trainer.Layer(o))
	m.LayerNames = slices.Insert(slices.Clone(m.LayerNames), 1, "odd")
	return job
}

func TestPanics(t *testing.T) {
	atStep := func(n int, f func(*trainer.Context, trainer.Tensor)) func(*trainer.Context, trainer.Tensor) {
		var calls atomic.Int64
		return func(c *trainer.Context, x trainer.Tensor) {
			if calls.Add(1) > int64(1+2*(n-1)) { // two micro-batches a step, and one of the first once more
				f(c, x)
			}
		}
	}
	explode := func(*trainer.Context, trainer.Tensor) { panic("boom") }
	inThread := func(c *trainer.Context, x trainer.Tensor) {
		c.For(1000, func(lo, hi int) {
			if lo > 0 {
				panic("boom")
			}
		})
	}
	onStep := smallJob()
	onStep.OnStep = func(s trainer.StepInfo) error {
		if s.Step == 2 {
			panic("boom")
		}
		return nil
	}
	onEnd := smallJob()
	onEnd.OnEnd = func(trainer.End) error { panic("boom") }
	data := smallJob()
	data.Data = &brittle{counts: counts{n: 40}, after: 40 + 8 + 4}
	shape := withOdd(&odd{})
	shape.Model.Layers[1] = flat{}
	loss := smallJob()
	loss.Model.Loss = explosive{}
	gradient := smallJob()
	gradient.Model.Loss = explosive{returns: true}
	for _, c := range []struct {
		name        string
		job         trainer.Job
		step        int
		where, text string
	}{
		{"forward", withOdd(&odd{forward: atStep(2, explode)}), 2, `Forward of layer "odd"`, "boom"},
		{"backward", withOdd(&odd{backward: atStep(3, explode)}), 3, `Backward of layer "odd"`, "boom"},
		{"thread", withOdd(&odd{backward: atStep(3, inThread)}), 3, `Backward of layer "odd"`, "boom"},
		{"OnStep", onStep, 2, "OnStep", "boom"},
		{"OnEnd", onEnd, 5, "OnEnd", "boom"},
		{"data", data, 2, "Sample(23)", "boom"},
		{"loss", loss, 1, "the loss", "boom"},
		{"loss without gradient", gradient, 1, "the loss", "returned a gradient of 0 numbers"},
		{"shape", shape, 1, `Forward of layer "odd"`, "of shape [2 16] for 4 samples"},
	} {
		t.Run(c.name, func(t *testing.T) {
			switch c.name {
			case "data": // in order
				c.job.Threads = 1
			case "thread": // so many that one pass has them all
				c.job.Threads = engine.Lanes + 1
			default:
				c.job.Threads = 2
			}
			_, err := trainer.Run(context.Background(), c.job)
			var p *trainer.PanicError
			if !errors.As(err, &p) {
				t.Fatalf("error %v", err)
			}
			if p.Step != c.step || p.Where != c.where || !strings.Contains(fmt.Sprint(p.Value), c.text) {
				t.Errorf("step %d, where %q, value %v; want %d, %q, %q", p.Step, p.Where, p.Value, c.step, c.where, c.text)
			}
			if want := fmt.Sprintf("panic in step %d, in %s: ", c.step, c.where); !strings.HasPrefix(err.Error(), want) {
				t.Errorf("the error is %q, want it to begin with %q", err, want)
			}
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("the error has several lines: %v", err)
			}
			// The place is at the top of the stack.
			if top := strings.SplitN(p.Stack, "\n", 4); !strings.Contains(c.text, "return") && c.name != "shape" && (len(top) < 4 || !strings.Contains(top[1], "trainer_test")) {
				t.Errorf("stack:\n%s", p.Stack)
			}
		})
	}
}

// explosive is a loss that panics, or returns no gradient.
type explosive struct{ returns bool }

func (e explosive) Loss(*trainer.Context, trainer.Tensor, trainer.Tensor) (float64, int64, trainer.Tensor) {
	if !e.returns {
		panic("boom")
	}
	return 1, 1, trainer.Tensor{}
}

type brittle struct {
	counts
	after int
}

func (b *brittle) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	if b.after--; b.after < 0 {
		panic("boom")
	}
	return b.counts.Sample(s, in, target)
}

// flat returns a wrong shape.
type flat struct{}

func (flat) Params() []trainer.Param { return nil }
func (flat) Forward(c *trainer.Context, _ []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	return in.Reshape(2, in.Len()/2), nil
}
func (flat) Backward(*trainer.Context, []trainer.Tensor, any, trainer.Tensor, []trainer.Tensor) trainer.Tensor {
	return trainer.Tensor{}
}

func TestNonFinite(t *testing.T) {
	inf := float32(math.Inf(1))
	step := 0
	spoil := func(from int, x float32) func(*trainer.Context, trainer.Tensor) {
		return func(_ *trainer.Context, t trainer.Tensor) {
			if step >= from-1 { // committed
				t.F[1] = x
			}
		}
	}
	huge := smallJob()
	huge.Optimizer = trainer.SGD{LR: trainer.Constant(1e30)}
	for _, c := range []struct {
		name        string
		job         trainer.Job
		step        int
		layer, what string
	}{
		{"NaN forward", withOdd(&odd{forward: spoil(3, float32(math.NaN()))}), 3, "odd", "loss"},
		{"Inf backward", withOdd(&odd{backward: spoil(4, inf)}), 4, "hidden.0", "gradient"},
		{"divergence", huge, 2, "hidden.0", "loss"},
	} {
		t.Run(c.name, func(t *testing.T) {
			step = 0
			c.job.OnStep = func(s trainer.StepInfo) error {
				step = s.Step
				return nil
			}
			s, err := trainer.Run(context.Background(), c.job)
			var e *trainer.NonFiniteError
			if !errors.As(err, &e) {
				t.Fatalf("error %v", err)
			}
			if c.name == "divergence" {
				if e.Step < 2 {
					t.Errorf("%v", err)
				}
				return
			}
			if e.Step != c.step || e.Layer != c.layer || e.What != c.what {
				t.Errorf("%+v, want step %d, layer %q, %s", e, c.step, c.layer, c.what)
			}
			if step != c.step-1 || s.Steps != c.step-1 {
				t.Errorf("%d steps were committed, the summary says %d", step, s.Steps)
			}
		})
	}
}

func TestDataErrorNamesSample(t *testing.T) {
	job := smallJob()
	job.Data = failing{counts{n: 1 << 26}}
	_, err := trainer.Run(context.Background(), job)
	if err == nil || !strings.Contains(err.Error(), "disk on fire") || !strings.Contains(err.Error(), "step 1: sample ") {
		t.Errorf("error %v", err)
	}
}

// failing can be fingerprinted, which reads evenly spaced samples, and fails
// elsewhere.
type failing struct{ counts }

func (f failing) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	if s.Index%(f.n/1024) != 0 {
		return errors.New("disk on fire")
	}
	return f.counts.Sample(s, in, target)
}

func TestFaults(t *testing.T) {
	dir := t.TempDir()
	good := smallJob()
	good.RunDir = filepath.Join(dir, "good")
	run(t, good)
	model := filepath.Join(good.RunDir, "model.safetensors")
	file, err := os.ReadFile(model)
	if err != nil {
		t.Fatal(err)
	}
	cut := filepath.Join(dir, "cut.safetensors")
	if err := os.WriteFile(cut, file[:len(file)-9], 0o600); err != nil {
		t.Fatal(err)
	}
	shared := &odd{}
	sharedParams := &withParam{odd: *shared}
	adamw := func(change func(a *trainer.AdamW)) func(*trainer.Job) {
		return func(j *trainer.Job) {
			a := trainer.AdamW{LR: trainer.Constant(0.1)}
			change(&a)
			j.Optimizer = a
		}
	}
	tied := func(further, first string) func(*trainer.Job) {
		return func(j *trainer.Job) { j.Model.Tied = map[string]string{further: first} }
	}
	for _, c := range []struct {
		name   string
		change func(j *trainer.Job)
		want   string // the one fault
	}{
		{"steps", func(j *trainer.Job) { j.Steps = 0 }, "--steps (Job.Steps) is 0"},
		{"global batch", func(j *trainer.Job) { j.GlobalBatch = -8 }, "--global-batch (Job.GlobalBatch) is -8"},
		{"micro-batch", func(j *trainer.Job) { j.MicroBatch = 3 }, "--micro-batch (Job.MicroBatch) is 3, which does not divide the global batch of 8; 2 and 4 do"},
		{"large micro-batch", func(j *trainer.Job) { j.MicroBatch = 9 }, "8 does"},
		{"negative micro-batch", func(j *trainer.Job) { j.MicroBatch = -1 }, "is -1"},
		{"clip", func(j *trainer.Job) { j.ClipNorm = math.NaN() }, "Job.ClipNorm is NaN"},
		{"eval every", func(j *trainer.Job) { j.EvalEvery = -1 }, "--eval-every (Job.EvalEvery) is -1"},
		{"eval nothing", func(j *trainer.Job) { j.EvalEvery = 5 }, "Job.Eval"},
		{"threads", func(j *trainer.Job) { j.Threads = -2 }, "--threads (Job.Threads) is -2"},
		{"optimizer", func(j *trainer.Job) { j.Optimizer = nil }, "Job.Optimizer is nil"},
		{"lr", adamw(func(a *trainer.AdamW) { a.LR.Peak = 0 }), "--lr (Job.Optimizer.LR) has the peak 0"},
		{"warm-up", adamw(func(a *trainer.AdamW) { a.LR.Warmup = -1 }), "warm-up of -1"},
		{"final", adamw(func(a *trainer.AdamW) { a.LR.Final = 2 }), "Job.Optimizer.LR falls to 2"},
		{"kind", adamw(func(a *trainer.AdamW) { a.LR.Kind = 9 }), "unknown kind 9"},
		{"beta", adamw(func(a *trainer.AdamW) { a.Beta2 = 1 }), "Job.Optimizer.Beta2 is 1"},
		{"eps", adamw(func(a *trainer.AdamW) { a.Eps = -1 }), "Job.Optimizer.Eps is -1"},
		{"decay", adamw(func(a *trainer.AdamW) { a.WeightDecay = -1 }), "Job.Optimizer.WeightDecay is -1"},
		{"momentum", func(j *trainer.Job) { j.Optimizer = trainer.SGD{LR: trainer.Constant(1), Momentum: 1} }, "Job.Optimizer.Momentum is 1"},
		{"data", func(j *trainer.Job) { j.Data = nil }, "Job.Data is nil"},
		{"nil text", func(j *trainer.Job) { j.Data = (*trainer.TextSet)(nil) }, "Job.Data is nil"},
		{"no samples", func(j *trainer.Job) { j.Data = counts{} }, "Job.Data cannot be used: has no samples"},
		{"no held-out samples", func(j *trainer.Job) { j.Eval = counts{} }, "Job.Eval cannot be used: has no samples"},
		{"impossible model", func(j *trainer.Job) { j.Model = nn.Classifier(nn.ClassifierConfig{Inputs: 2, Classes: 1}) }, "Job.Model is impossible"},
		{"config", func(j *trainer.Job) { j.Model.Config = func() {} }, "Job.Model.Config cannot be written"},
		{"no layers", func(j *trainer.Job) { j.Model.Layers, j.Model.LayerNames = nil, nil }, "Job.Model.Layers is empty"},
		{"nil layer", func(j *trainer.Job) { j.Model.Layers = []trainer.Layer{nil, j.Model.Layers[1]} }, `nil at 0 ("hidden.0")`},
		{"loss", func(j *trainer.Job) { j.Model.Loss = nil }, "Job.Model.Loss is nil"},
		{"input", func(j *trainer.Job) { j.Model.Input.Shape = []int{0} }, "Job.Model.Input is float32[0]"},
		{"names", func(j *trainer.Job) { j.Model.LayerNames = []string{"a"} }, "1 names for 2 layers"},
		{"same names", func(j *trainer.Job) { j.Model.LayerNames = []string{"a", "a"} }, `has "a" at 1`},
		{"shared", func(j *trainer.Job) {
			j.Model.Layers = []trainer.Layer{j.Model.Layers[0], sharedParams, sharedParams, j.Model.Layers[1]}
			j.Model.LayerNames = []string{"a", "b", "c", "d"}
		}, `one layer as "b" and as "c"`},
		{"tied to nothing", tied("output.weight", "hidden.0.gain"), `has "hidden.0.gain" for "output.weight": no layer has "hidden.0.gain"`},
		{"nothing tied", tied("output.gain", "hidden.0.weight"), `no layer has "output.gain"`},
		{"tied forward", tied("hidden.0.weight", "output.weight"), "the layer of the first name must come before the other one"},
		{"tied shapes", tied("output.weight", "hidden.0.weight"), "their shapes are [2 8] and [8 2]"},
		{"shape", func(j *trainer.Job) {
			j.Model.Layers = []trainer.Layer{&withParam{shape: []int{3, -1}}, j.Model.Layers[1]}
		}, `layer "hidden.0" gives parameter "p" the shape [3 -1]`},
		{"too large", func(j *trainer.Job) {
			j.Model = nn.GPT(nn.GPTConfig{Width: 1 << 20})
		}, `layer "block.0" has more than 1099511627776 parameters with "attention.qkv.weight" of shape [1048576 3145728]; `},
		{"missing weights", func(j *trainer.Job) { j.InitFrom = filepath.Join(dir, "none") }, "none: no such file"},
		{"cut weights", func(j *trainer.Job) { j.InitFrom = cut }, `cut.safetensors: tensor "output.weight" is cut short`},
		{"other weights", func(j *trainer.Job) {
			j.Model = nn.Classifier(nn.ClassifierConfig{Inputs: 2, Hidden: []int{9}, Classes: 2})
			j.InitFrom = model
		}, `tensor "hidden.0.weight" has shape [2 8] in the file and [2 9] in the model`},
		{"fewer weights", func(j *trainer.Job) {
			j.Model = nn.Classifier(nn.ClassifierConfig{Inputs: 2, Hidden: []int{8, 8}, Classes: 2})
			j.InitFrom = model
		}, `tensor "hidden.1.weight" is missing`},
		{"more weights", func(j *trainer.Job) {
			j.Model = nn.Classifier(nn.ClassifierConfig{Inputs: 2, Classes: 2})
			j.Model.LayerNames = []string{"hidden.0"}
			j.Model.Layers = []trainer.Layer{nn.Linear{In: 2, Out: 8}}
			j.InitFrom = model
		}, `is not part of the model`},
	} {
		t.Run(c.name, func(t *testing.T) {
			job := smallJob()
			c.change(&job)
			err := job.Validate()
			var v *trainer.ValidationError
			if !errors.As(err, &v) || len(v.Faults) != 1 || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("faults:\n%v\nwant one with %q", err, c.want)
			}
			if _, runErr := trainer.Run(context.Background(), job); runErr == nil || runErr.Error() != err.Error() {
				t.Errorf("Run says %v", runErr)
			}
		})
	}

	if err := smallJob().Validate(); err != nil {
		t.Errorf("a good job: %v", err)
	}
	var v *trainer.ValidationError
	two := smallJob()
	two.Model = nn.Classifier(nn.ClassifierConfig{Classes: 1, Inputs: -1})
	if err := two.Validate(); !errors.As(err, &v) || len(v.Faults) != 2 || !strings.Contains(v.Faults[1].Text, "Classes") || strings.Count(err.Error(), "\n") != 1 {
		t.Errorf("a model with two faults:\n%v", err)
	}
	if err := (trainer.Job{}).Validate(); !errors.As(err, &v) || len(v.Faults) < 6 || strings.Count(err.Error(), "\n") != len(v.Faults)-1 {
		t.Errorf("an empty job:\n%v", err)
	}
}

// withParam is a layer with one parameter.
type withParam struct {
	odd
	shape []int
}

func (w *withParam) Params() []trainer.Param {
	if w.shape == nil {
		return []trainer.Param{{Name: "p", Shape: []int{1}}}
	}
	return []trainer.Param{{Name: "p", Shape: w.shape}}
}

func TestOpenErrors(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "model.safetensors")
	if err := os.WriteFile(path, []byte("not a model, but long enough to be one"), 0o600); err != nil {
		t.Fatal(err)
	}
	var e *safetensors.Error
	if _, err := trainer.Open(smallJob().Model, dir); !errors.As(err, &e) || e.Path != path {
		t.Errorf("error %v", err)
	}
	// What a configuration asks for must not be believed before the file is seen.
	good := gptJob(t, writeText(t, 500), 0)
	good.Model, good.RunDir = nn.GPT(nn.GPTConfig{Layers: 1, Width: 4, Heads: 1, Context: 4}), filepath.Join(dir, "good")
	good.Steps, good.Eval, good.EvalEvery = 1, nil, 0
	run(t, good)
	for _, hostile := range []nn.GPTConfig{
		{Layers: 1, Width: 1 << 18, Heads: 1, Context: 4}, {Layers: 4000, Width: 4, Heads: 1, Context: 4},
	} {
		_, err := trainer.Open(nn.GPT(hostile), good.RunDir)
		if !errors.As(err, &e) || !strings.Contains(err.Error(), "model") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%+v: error %v", hostile, err)
		}
	}
	if _, ok := platform.AvailableMemory(); ok {
		big := good
		big.RunDir, big.Model = "", nn.GPT(nn.GPTConfig{Layers: 1, Width: 1 << 18, Heads: 1, Context: 4})
		if _, err := trainer.Run(context.Background(), big); err == nil || !strings.HasPrefix(err.Error(), "Job.Model takes at least ") {
			t.Errorf("a model larger than the machine: error %v", err)
		}
	}
	var v *trainer.ValidationError
	if _, err := trainer.Open(trainer.Model{}, dir); !errors.As(err, &v) {
		t.Errorf("error %v", err)
	}
	if _, err := trainer.ReadConfig(dir, nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v", err)
	}
}

// TestPassedOnGradients runs layers that hand on what they are given, in every
// place: memory must not be reused under them.
func TestPassedOnGradients(t *testing.T) {
	base := smallJob()
	base.Model = trainer.Model{
		Input: base.Model.Input, Target: base.Model.Target, Loss: nn.CrossEntropy{},
		Layers:     []trainer.Layer{ramp{2, 6}, nn.GELU{}, ramp{6, 5}, nn.GELU{}, ramp{5, 2}},
		LayerNames: []string{"a", "b", "c", "d", "e"},
	}
	want := run(t, base)
	for mask := 1; mask < 1<<5; mask++ {
		job := base
		job.Model.Layers, job.Model.LayerNames = nil, nil
		for i, l := range base.Model.Layers {
			job.Model.Layers = append(job.Model.Layers, l)
			if mask>>i&1 == 1 {
				job.Model.Layers = append(job.Model.Layers, nn.Dropout{})
			}
		}
		if got := run(t, job); got.ParamsSHA256 != want.ParamsSHA256 {
			t.Errorf("layers that do nothing, mask %b, change the result", mask)
		}
	}
}

// ramp is a linear layer whose first weights do not depend on its place.
type ramp struct{ in, out int }

func (r ramp) Params() []trainer.Param {
	p := nn.Linear{In: r.in, Out: r.out}.Params()
	p[0].Init = trainer.Init{Kind: trainer.InitConstant, Scale: 0.1}
	return p
}
func (r ramp) Forward(c *trainer.Context, p []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	out, stash := nn.Linear{In: r.in, Out: r.out}.Forward(c, p, in)
	for i := range out.F {
		out.F[i] += float32(i%r.out) / 8
	}
	return out, stash
}
func (r ramp) Backward(c *trainer.Context, p []trainer.Tensor, stash any, dout trainer.Tensor, dp []trainer.Tensor) trainer.Tensor {
	return nn.Linear{In: r.in, Out: r.out}.Backward(c, p, stash, dout, dp)
}

// Frozen results of a small job. They change when any bit of the random
// streams, the kernels, the layers, the gradient tree or the optimizer does,
// which must not happen by accident: weights and curves of users change too.
const (
	goldenParams = "95a13e9559929cd44f0e6ee56306c4d3949908bc676c51ac3a6c515dc124b9a2"
	goldenState  = "69f54260be159a54137b5dab773af448d74a5f6793604f54649641e1ccd5a851"
	goldenData   = "decdd95ddd04ddcf1953dac66a8dc016aa45959e29b192c95d74f45877d7f146"
)

func TestFrozenBits(t *testing.T) {
	got := run(t, gptJob(t, "testdata/corpus.txt", 0.1))
	if got.ParamsSHA256 != goldenParams || got.StateSHA256 != goldenState || got.DataSHA256 != goldenData {
		t.Errorf("params_sha256 %s\nstate_sha256 %s\ndata_sha256 %s\nare not the frozen ones", got.ParamsSHA256, got.StateSHA256, got.DataSHA256)
	}
}
