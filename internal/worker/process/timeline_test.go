package process

import (
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/worker/engine"
)

// plainStage is a stage whose passes are their micro-batches.
type plainStage struct {
	engine.Stage
	t *testing.T
}

func (s plainStage) Forward(m engine.Micro, in tensor.Tensor) (engine.Pass, tensor.Tensor, error) {
	if m.Ready != nil {
		if err := m.Ready(0); err != nil {
			return nil, in, err
		}
	}
	return m.Index, in, nil
}

func (s plainStage) pass(p engine.Pass) {
	if _, ok := p.(int); !ok {
		s.t.Errorf("the stage gets a pass of type %T, which is not its own", p)
	}
}

func (s plainStage) Loss(p engine.Pass, _ tensor.Tensor) (sum float64, count int64, dout tensor.Tensor) {
	s.pass(p)
	return 1, 1, dout
}

func (s plainStage) Backward(p engine.Pass, dout tensor.Tensor, _ engine.Gradients) tensor.Tensor {
	s.pass(p)
	return dout
}
func (s plainStage) Shapes(p engine.Pass) [][]int {
	s.pass(p)
	return nil
}
func (s plainStage) Drop(p engine.Pass)        { s.pass(p) }
func (s plainStage) Suspect(p engine.Pass) int { s.pass(p); return -1 }

func TestTimeline(t *testing.T) {
	var log timeline
	s := timed{plainStage{t: t}, 3, &log}
	step := func(n int, train bool) (control.Timeline, bool) {
		log.begin(n, time.Now())
		for m := range 2 {
			p, _, err := s.Forward(engine.Micro{Step: n, Index: m, Train: train, Ready: func(int) error { return nil }}, tensor.Tensor{})
			if err != nil {
				t.Fatal(err)
			}
			s.Loss(p, tensor.Tensor{})
			s.Suspect(p)
			s.Shapes(p)
			if train {
				s.Backward(p, tensor.Tensor{}, nil)
			} else {
				s.Drop(p)
			}
		}
		log.phase(n, engine.PhaseCommit)
		return log.end(n, time.Now())
	}
	if _, ok := step(4, true); ok {
		t.Error("a step is told of that nobody asked for")
	}
	log.every.Store(2)
	if _, ok := step(5, true); ok {
		t.Error("step 5 is told of, and 2 does not divide it")
	}
	got, ok := step(6, true)
	if !ok || got.Step != 6 || len(got.Passes) != 4 || got.Commit > got.End || got.Cut {
		t.Fatalf("%+v, %v", got, ok)
	}
	for i, p := range got.Passes {
		if p.Layer != 3 || p.Micro != i/2 || p.Backward != (i%2 == 1) || p.From > p.To || p.From < 0 || p.To > got.End {
			t.Errorf("pass %d is %+v", i, p)
		}
	}
	if got, ok := step(8, false); !ok || len(got.Passes) != 0 {
		t.Errorf("evaluation counts as work of the step: %+v", got)
	}
	// What is more than fits is said to be missing.
	log.begin(10, time.Now())
	for m := range control.MaxPasses + 1 {
		if _, _, err := s.Forward(engine.Micro{Step: 10, Index: m, Train: true}, tensor.Tensor{}); err != nil {
			t.Fatal(err)
		}
	}
	if got, _ := log.end(10, time.Now()); len(got.Passes) != control.MaxPasses || !got.Cut {
		t.Errorf("%d passes are kept, cut is %v", len(got.Passes), got.Cut)
	}
}
