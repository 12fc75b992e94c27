// Command emulated trains a small model on emulated devices: each layer takes the
// time that it is told, by waiting, so that many workers run on few cores, and
// what a plan is worth can be seen. The numbers are real: parameters,
// gradients and dropout give the bits that any other run of the job gives.
//
//	go run ./launcher run --workers 32 --stages 4 ./examples/emulated --layers 32 --layer-ms 4
package main

import (
	"flag"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

// width is the number of elements of an activation, and of classes.
const width = 16

func main() {
	trainer.Main(func(f *flag.FlagSet) func() (trainer.Job, error) {
		layers := f.Int("layers", 32, "layers of the model")
		ms := f.Float64("layer-ms", 4, "milliseconds that the forward pass of a layer takes for one micro-batch; backward takes twice that")
		hidden := f.Int("hidden", 0, "width of a block in each layer that is there for its parameters, 33 for each; 0 for none")
		return func() (trainer.Job, error) { return job(*layers, *ms, *hidden) }
	})
}

// maxMS bounds the time of a layer, whose pass nothing can interrupt.
const maxMS = 10_000

// maxHidden bounds the parameters of a layer to 2 GiB.
const maxHidden = 1 << 24

func job(layers int, ms float64, hidden int) (trainer.Job, error) {
	if layers < 1 {
		return trainer.Job{}, fmt.Errorf("--layers is %d; give at least 1", layers)
	}
	if !(ms >= 0 && ms <= maxMS) {
		return trainer.Job{}, fmt.Errorf("--layer-ms is %v; give milliseconds from 0 to %d", ms, maxMS)
	}
	if hidden < 0 || hidden > maxHidden {
		return trainer.Job{}, fmt.Errorf("--hidden is %d; give 0 to %d", hidden, maxHidden)
	}
	config := map[string]any{"emulated": true, "layers": layers, "layer_ms": ms}
	if hidden > 0 {
		config["hidden"] = hidden
	}
	m := trainer.Model{
		Name: "emulated devices", Config: config,
		Input:  trainer.Spec{Shape: []int{width}},
		Target: trainer.Spec{Shape: []int{1}, Kind: trainer.Int32},
		Loss:   nn.CrossEntropy{},
	}
	d := newDevice()
	for range layers {
		m.Layers = append(m.Layers, newLayer(d, time.Duration(ms*float64(time.Millisecond)), hidden))
	}
	return trainer.Job{
		Model: m, Data: points{},
		Optimizer:   trainer.AdamW{LR: trainer.Cosine(3e-3, 5)},
		GlobalBatch: 128, MicroBatch: 1, Steps: 20, ClipNorm: 1,
		OnEnd: func(e trainer.End) error {
			_, err := fmt.Fprintf(e.Out, "emulated devices: %d layers of %v forward and %v backward for each micro-batch\n",
				layers, time.Duration(ms*float64(time.Millisecond)), time.Duration(2*ms*float64(time.Millisecond)))
			return err
		},
	}, nil
}

// layer is a small block that takes a set time.
type layer struct {
	trainer.Layer
	device  *device
	forward time.Duration
}

func newLayer(d *device, forward time.Duration, hidden int) layer {
	block := nn.Residual(nn.LayerNorm{Width: width}, nn.Linear{In: width, Out: width}, nn.GELU{}, nn.Dropout{Prob: 0.1})
	if hidden > 0 {
		block = nn.Sequence(block, nn.Residual(nn.MLP{Width: width, Hidden: hidden}, shrink(1/float32(hidden))))
	}
	return layer{block, d, forward}
}

// Forward keeps the shape [samples, width].
func (l layer) Forward(c *trainer.Context, p []trainer.Tensor, in trainer.Tensor) (out trainer.Tensor, stash any) {
	defer l.device.take(time.Now(), l.forward)
	return l.Layer.Forward(c, p, in)
}

// Backward takes twice the time of Forward.
func (l layer) Backward(c *trainer.Context, p []trainer.Tensor, stash any, dout trainer.Tensor, dp []trainer.Tensor) trainer.Tensor {
	defer l.device.take(time.Now(), 2*l.forward)
	return l.Layer.Backward(c, p, stash, dout, dp)
}

// shrink multiplies, so that a block as wide as it may be does not drown what it is added to.
type shrink float32

func (shrink) Params() []trainer.Param { return nil }

// Forward keeps the shape of its input.
func (s shrink) Forward(_ *trainer.Context, _ []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	return s.times(in), nil
}

// Backward is Forward's.
func (s shrink) Backward(_ *trainer.Context, _ []trainer.Tensor, _ any, dout trainer.Tensor, _ []trainer.Tensor) trainer.Tensor {
	return s.times(dout)
}

func (s shrink) times(x trainer.Tensor) trainer.Tensor {
	y := trainer.NewTensor(trainer.Float32, x.Shape...)
	for i, v := range x.F {
		y.F[i] = float32(s) * v
	}
	return y
}

// device makes layers take their time. It is shared by all of a worker, since it
// keeps how late it is: never a number that training depends on.
type device struct {
	mu   sync.Mutex
	late time.Duration // by which the wait before ended too late
	wait func(time.Duration)
}

func newDevice() *device { return &device{wait: time.Sleep} }

// take returns when a task that began then has taken its time. What timers
// are late, the next task is shorter by, at most by all of its time.
func (d *device) take(began time.Time, t time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	end := began.Add(t - min(d.late, t))
	d.wait(time.Until(end))
	d.late = max(0, min(time.Since(end), t))
}

// points are random; the class of one is its largest element.
type points struct{}

func (points) Len() int { return 1 << 14 }

func (points) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	draw := rng.New(1, rng.Place{Sample: uint32(s.Index)})
	best := float32(math.Inf(-1))
	for k := range in.F {
		in.F[k] = float32(draw.Normal())
		if in.F[k] > best {
			best, target.I[0] = in.F[k], int32(k)
		}
	}
	return nil
}
