package process

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/worker/engine"
)

// timeline records the passes of the steps that the agent watches. In other steps it costs one atomic load for
// each pass.
type timeline struct {
	every  atomic.Int64 // the agent watches every n-th step; 0: none
	active atomic.Int64 // the step that is recorded; 0: none

	mu    sync.Mutex
	began time.Time
	t     control.Timeline
}

// begin records the begin of a step.
func (l *timeline) begin(step int, now time.Time) {
	every := l.every.Load()
	if every == 0 || int64(step)%every != 0 {
		l.active.Store(0)
		return
	}
	l.mu.Lock()
	l.began, l.t = now, control.Timeline{Step: step, Began: now.UnixMicro()}
	l.mu.Unlock()
	l.active.Store(int64(step))
}

// end returns the record of a step that ended, if there is one.
func (l *timeline) end(step int, now time.Time) (t control.Timeline, ok bool) {
	if !l.active.CompareAndSwap(int64(step), 0) {
		return t, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.t.End = l.since(now)
	t, l.t = l.t, control.Timeline{}
	return t, true
}

func (l *timeline) keeps(step int) bool { return l.active.Load() == int64(step) }

func (l *timeline) since(at time.Time) int64 { return at.Sub(l.began).Microseconds() }

// phase records the begin of the commit.
func (l *timeline) phase(step int, phase string) {
	if phase != engine.PhaseCommit || !l.keeps(step) {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.t.Commit == 0 {
		l.t.Commit = l.since(time.Now())
	}
}

// pass records a pass that ended.
func (l *timeline) pass(p timedPass, backward bool, layer int, from time.Time, wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case !l.keeps(p.step):
	case len(l.t.Passes) == control.MaxPasses:
		l.t.Cut = true
	default:
		l.t.Passes = append(l.t.Passes, control.Pass{
			Backward: backward, Layer: layer, Micro: p.micro,
			From: l.since(from), To: l.since(time.Now()), Wait: wait.Microseconds(),
		})
	}
}

// timed is a stage that records its passes. It does not embed the stage, because every method that takes a pass
// has to unwrap it.
type timed struct {
	stage engine.Stage
	lo    int // its first layer
	log   *timeline
}

// timedPass is a pass whose times are recorded.
type timedPass struct {
	engine.Pass
	step, micro int
}

// own returns the stage's own pass.
func own(p engine.Pass) engine.Pass {
	if t, ok := p.(timedPass); ok {
		return t.Pass
	}
	return p
}

func (s timed) Forward(m engine.Micro, in tensor.Tensor) (engine.Pass, tensor.Tensor, error) {
	if !m.Train || !s.log.keeps(m.Step) {
		return s.stage.Forward(m, in)
	}
	var waited time.Duration
	if ready := m.Ready; ready != nil {
		m.Ready = func(layer int) error {
			began := time.Now()
			err := ready(layer)
			waited += time.Since(began)
			return err
		}
	}
	began := time.Now()
	p, out, err := s.stage.Forward(m, in)
	if err != nil {
		return p, out, err
	}
	t := timedPass{p, m.Step, m.Index}
	s.log.pass(t, false, s.lo, began, waited)
	return t, out, nil
}

func (s timed) Loss(p engine.Pass, target tensor.Tensor) (sum float64, count int64, dout tensor.Tensor) {
	return s.stage.Loss(own(p), target)
}

func (s timed) Backward(p engine.Pass, dout tensor.Tensor, grads engine.Gradients) tensor.Tensor {
	t, ok := p.(timedPass)
	if !ok {
		return s.stage.Backward(p, dout, grads)
	}
	began := time.Now()
	din := s.stage.Backward(t.Pass, dout, grads)
	s.log.pass(t, true, s.lo, began, 0)
	return din
}

func (s timed) Drop(p engine.Pass) { s.stage.Drop(own(p)) }

func (s timed) Shapes(p engine.Pass) [][]int { return s.stage.Shapes(own(p)) }

func (s timed) Suspect(p engine.Pass) int { return s.stage.Suspect(own(p)) }
