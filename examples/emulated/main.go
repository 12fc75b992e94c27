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
		return func() (trainer.Job, error) { return job(*layers, *ms) }
	})
}

// maxMS bounds the time of a layer, whose pass nothing can interrupt.
const maxMS = 10_000

func job(layers int, ms float64) (trainer.Job, error) {
	if layers < 1 {
		return trainer.Job{}, fmt.Errorf("--layers is %d; give at least 1", layers)
	}
	if !(ms >= 0 && ms <= maxMS) {
		return trainer.Job{}, fmt.Errorf("--layer-ms is %v; give milliseconds from 0 to %d", ms, maxMS)
	}
	m := trainer.Model{
		Name: "emulated devices", Config: map[string]any{"emulated": true, "layers": layers, "layer_ms": ms},
		Input:  trainer.Spec{Shape: []int{width}},
		Target: trainer.Spec{Shape: []int{1}, Kind: trainer.Int32},
		Loss:   nn.CrossEntropy{},
	}
	d := newDevice()
	for range layers {
		m.Layers = append(m.Layers, newLayer(d, time.Duration(ms*float64(time.Millisecond))))
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

func newLayer(d *device, forward time.Duration) layer {
	return layer{nn.Residual(nn.LayerNorm{Width: width}, nn.Linear{In: width, Out: width}, nn.GELU{}, nn.Dropout{Prob: 0.1}), d, forward}
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
