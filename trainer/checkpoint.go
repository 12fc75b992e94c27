package trainer

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/worker/engine"
	"github.com/soliton-train/soliton/zero"
)

// saver writes this worker's part of checkpoints beside the training. It outlives
// engines.
type saver struct {
	w   *worker
	p   *prepared
	dir string
	ctx context.Context

	writing atomic.Int32
	order   sync.Mutex // one is written at a time
	writers sync.WaitGroup
}

// newSaver returns nil for a run without checkpoints.
func newSaver(ctx context.Context, w *worker, p *prepared, start control.Start) (s *saver, closeIt func()) {
	if !start.Checkpoints {
		return nil, func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	s = &saver{w: w, p: p, dir: start.RunDir, ctx: ctx}
	return s, func() {
		cancel()
		s.wait()
	}
}

// wait returns when nothing is being written.
func (s *saver) wait() {
	if s != nil {
		s.writers.Wait()
	}
}

// install makes an engine use it.
func (s *saver) install(c *engine.Config) {
	if s == nil {
		return
	}
	c.Saving = func() (wanted, busy bool) { return s.w.saveAsked.Load(), s.writing.Load() > 0 }
	c.Save = s.save
}

// save writes a part in the background. The state after the last step needs none:
// it is the model.
func (s *saver) save(c engine.Checkpoint) {
	s.w.saveAsked.Store(false)
	if c.Step == s.p.Steps || len(c.Shards) == 0 {
		return
	}
	s.writing.Add(1)
	s.writers.Go(func() {
		s.order.Lock()
		m := s.write(c)
		s.order.Unlock()
		s.writing.Add(-1)
		_ = s.w.send(m) // without an agent, this worker ends
	})
}

func (s *saver) write(c engine.Checkpoint) control.Saved {
	part := checkpoint.Part{
		Job: s.p.id(), Step: c.Step, Plan: c.Plan, Worker: int(s.w.self.id()), Rule: s.p.ruleName(),
	}
	for _, sh := range c.Shards {
		part.Shards = append(part.Shards, checkpoint.Shard{
			Range: sh.Range, Params: sh.Params, Moments: sh.Moments,
		})
	}
	m := control.Saved{Step: c.Step, Generation: c.Plan.Generation, N: c.Plan.N, Rule: part.Rule}
	file, err := checkpoint.Write(s.ctx, s.dir, part)
	if err == nil {
		m.File, err = json.Marshal(file)
	}
	if err != nil {
		m.Err = err.Error()
	}
	return m
}

// id names the job in checkpoints.
func (p *prepared) id() string { return p.describe().ID() }

// ruleName is what package checkpoint calls the optimizer.
func (p *prepared) ruleName() string {
	if _, ok := p.Optimizer.rule().(zero.SGD); ok {
		return "sgd"
	}
	return "adamw"
}

// beginning returns what fills in the state with which an order begins, and how to close it.
func (p *prepared) beginning(ctx context.Context, o controller.Order) (begin func(id.Range, []float32, [][]float32) error, closeIt func(), err error) {
	if o.From == "" {
		return p.firstValues(), func() {}, nil
	}
	r, err := checkpoint.At(o.From, p.id(), o.Passed.Step)
	if err != nil {
		return nil, nil, err
	}
	var sizes []int
	for _, l := range p.params.layers {
		sizes = append(sizes, l.Size())
	}
	if m := r.Manifest(); m.Rule != p.ruleName() || !slices.Equal(m.Layers, sizes) {
		r.Close()
		return nil, nil, fmt.Errorf("the checkpoint of step %d is of layers with %v parameters and %s: the job has %v and %s", m.Step, m.Layers, m.Rule, sizes, p.ruleName())
	}
	return func(x id.Range, params []float32, moments [][]float32) error {
		if moments == nil {
			moments = make([][]float32, len(r.Moments()))
		}
		return r.Read(ctx, x.Layer, x.Lo, x.Hi, params, moments)
	}, func() { r.Close() }, nil
}
