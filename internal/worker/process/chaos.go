package process

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/chaos"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/engine"
)

// arm makes the trigger of the faults that this worker injects into itself. It
// is nil if there are none and no signal can ask for any.
func (w *Worker) arm(specs []string) (*chaos.Trigger, error) {
	all, err := chaos.Parse(strings.Join(specs, ","))
	if err != nil {
		return nil, err
	}
	mine := all.Worker(int(w.self.id()))
	if len(mine) == 0 && w.self.own == nil {
		return nil, nil
	}
	if w.self.own == nil && slices.ContainsFunc(mine, func(h chaos.Fault) bool {
		return h.Kind == chaos.KindKill || h.Kind == chaos.KindFreeze || h.Kind == chaos.KindLeave
	}) {
		return nil, errors.New("chaos would hit the whole program: this worker shares its process, so it cannot be killed, frozen or asked to leave")
	}
	return chaos.NewTrigger(mine, victimProcess{w}, chaos.Hooks{Stamp: w.stamp, Flip: w.flip, SlowLink: w.slowLink}), nil
}

// stamp tells the agent which fault comes now. It is written to the socket when
// send returns, so that it outlives this process.
func (w *Worker) stamp(h chaos.Fault, moment int64) {
	m := control.Fault{Kind: string(h.Kind), Text: h.String()}
	if h.Kind == chaos.KindKill || h.Kind == chaos.KindFreeze {
		m.At = moment
	}
	_ = w.send(m) // without an agent, this worker ends
}

// slowLink limits what this worker sends on its link to another one.
func (w *Worker) slowLink(a, b int, factor float64) {
	if a == int(w.self.id()) {
		a = b
	}
	rate := comm.FullSpeed * factor
	if factor == 1 {
		rate = 0
	}
	w.net.Shape(id.WorkerID(a), rate)
}

// heedSlow slows the worker down as launcher slow asks.
func (w *Worker) heedSlow(runDir string) (stop func()) {
	file := chaos.SlowFile(runDir, int(w.self.id()), w.self.Session.Incarnation)
	return heed(w.self.own.slow, func() {
		if factor, err := chaos.ReadSlow(file); err != nil {
			complain(err)
		} else {
			w.faults.Slow(factor)
		}
	})
}

// heedTerm asks the agent to leave the run on SIGTERM, which was caught since the process began: an early signal counts.
func (w *Worker) heedTerm() (stop func()) {
	signal.Notify(w.self.own.leave, syscall.SIGTERM)
	quit := heed(w.self.own.leave, func() { _ = w.send(control.Leave{}) }) // without an agent, this worker exits
	return func() {
		if w.successor() == nil {
			signal.Stop(w.self.own.leave)
		}
		quit()
	}
}

// heed calls f at each signal until stop is called, which waits for f.
func heed(signals <-chan os.Signal, f func()) (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-signals:
				f()
			case <-quit:
				return
			}
		}
	}()
	return func() {
		close(quit)
		<-done
	}
}

// Flip flips a bit of the state that this worker holds, once there is state of the kind.
func (w *Worker) Flip(t core.Target) { w.recovery.flip(t) }

// flip is [Worker.Flip] for a fault.
func (w *Worker) flip(t chaos.Target) {
	target, ok := core.ParseTarget(string(t))
	if !ok {
		panic(fmt.Sprintf("process: flip of %q", t))
	}
	w.Flip(target)
}

// victimProcess is this process as the target of faults.
type victimProcess struct{ w *Worker }

func (v victimProcess) Signal(sig os.Signal) error {
	err := chaos.Self().Signal(sig)
	if sig == syscall.SIGSTOP && err == nil {
		// It was thawed in time: if it ends later, that has another cause.
		_ = v.w.send(control.Fault{Kind: control.Thaw})
	}
	return err
}

// armed runs f with faults armed. When ctx ends, pauses of the trigger end too.
func (w *Worker) armed(ctx context.Context, specs []string, runDir string, f func() error) error {
	var err error
	if w.faults, err = w.arm(specs); err != nil {
		return err
	}
	if w.faults == nil {
		return f()
	}
	// The engine closes after the pass that runs, and its pause.
	stop := context.AfterFunc(ctx, w.faults.Close)
	defer stop()
	defer w.faults.Close()
	if w.self.own != nil {
		defer w.heedSlow(runDir)()
	}
	return f()
}

// slowed is a stage that takes longer while its worker is slowed, or its emulated device runs at a
// lower clock.
type slowed struct {
	engine.Stage
	faults *chaos.Trigger
	clock  *emulatedClock
}

func (s slowed) pause(took time.Duration) { s.faults.Throttle(took, s.clock.share()) }

// emulatedClock is the speed of an emulated device at its clock. The zero value is full speed.
type emulatedClock struct{ less atomic.Uint64 } // bits of 1 - share

func (c *emulatedClock) set(share float64) { c.less.Store(math.Float64bits(1 - share)) }

func (c *emulatedClock) share() float64 { return 1 - math.Float64frombits(c.less.Load()) }

func (s slowed) Forward(m engine.Micro, in tensor.Tensor) (engine.Pass, tensor.Tensor, error) {
	began := time.Now()
	if ready := m.Ready; ready != nil {
		m.Ready = func(layer int) error {
			s.pause(time.Since(began))
			err := ready(layer)
			began = time.Now() // waiting is not slowed
			return err
		}
	}
	p, out, err := s.Stage.Forward(m, in)
	s.pause(time.Since(began))
	return p, out, err
}

func (s slowed) Loss(p engine.Pass, target tensor.Tensor) (sum float64, count int64, dout tensor.Tensor) {
	began := time.Now()
	sum, count, dout = s.Stage.Loss(p, target)
	s.pause(time.Since(began))
	return sum, count, dout
}

func (s slowed) Backward(p engine.Pass, dout tensor.Tensor, grads engine.Gradients) tensor.Tensor {
	t := &throttled{grads, s, time.Now()}
	din := s.Stage.Backward(p, dout, t)
	t.pause()
	return din
}

// throttled pauses between two layers of a backward pass.
type throttled struct {
	engine.Gradients
	stage slowed
	began time.Time
}

func (t *throttled) pause() {
	t.stage.pause(time.Since(t.began))
	t.began = time.Now()
}

func (t *throttled) Buffer(layer int) []float32 {
	t.pause()
	return t.Gradients.Buffer(layer)
}
