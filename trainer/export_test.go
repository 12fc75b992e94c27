package trainer

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/worker/process"
)

// History is all that a run gives: it must not depend on which worker computes it.
type History struct {
	Done  control.Done
	Steps []control.Step
}

// RunWorkers trains a job on several workers of this process over a network in
// memory, and returns what each of them said. start has the mode of reduction,
// the stage of ZeRO and the rate of spot checks.
func RunWorkers(t *testing.T, workers, stages int, start control.Start, job func() Job) []History {
	t.Helper()
	all, err := TryWorkers(t, workers, stages, start, job)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TryWorkers is RunWorkers, and returns the error with which training ends.
func TryWorkers(t *testing.T, workers, stages int, start control.Start, job func() Job) ([]History, error) {
	t.Helper()
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	network := transport.NewMem()
	conns := make([]*control.Conn, workers)
	ended := make(chan error, workers)
	for i := range workers {
		ours, theirs := net.Pipe()
		conns[i] = control.New(ours)
		defer conns[i].Close()
		go func() {
			me := process.Self{Session: id.Session{Worker: id.WorkerID(i)}, Transport: network}
			err := process.New(control.New(theirs), me).Serve(ctx, maker(func() (Job, error) { return job(), nil }))
			if err != nil {
				cancel(fmt.Errorf("worker %d: %w", i, err))
			}
			ended <- err
		}()
	}
	// Nothing of what is left of a failed run is read.
	defer context.AfterFunc(ctx, func() {
		for _, c := range conns {
			c.Close()
		}
	})()
	receive := func(i int) control.Message {
		m, err := conns[i].Receive(ctx)
		if err != nil {
			t.Fatalf("worker %d: %v (%v)", i, err, context.Cause(ctx))
		}
		if f, ok := m.(control.Failed); ok {
			t.Fatalf("worker %d failed: %s\n%s", i, f.Text, f.Stack)
		}
		return m
	}

	start.Threads = 1
	var peers []control.Peer
	var view plan.View
	var prof plan.Profile
	j := job().withDefaults()
	for i := range workers {
		for {
			r, ok := receive(i).(control.Ready)
			if !ok {
				continue
			}
			view.Workers = append(view.Workers, plan.Worker{ID: id.WorkerID(i)})
			peers = append(peers, control.Peer{Worker: view.Workers[i], Addr: r.Addr})
			if i == 0 {
				for _, l := range r.Layers {
					prof.Layers = append(prof.Layers, plan.Layer{Tensors: l.Tensors})
				}
			}
			break
		}
	}
	p, _, err := planner.Next(plan.Plan{}, view, prof, planner.Event{Kind: planner.Start, Micros: j.GlobalBatch / j.MicroBatch, Stages: stages})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range conns {
		if err := errors.Join(c.Send(start), c.Send(control.Order{Plan: p, Peers: peers})); err != nil {
			t.Fatal(err)
		}
	}
	all := make([]History, workers)
	var listeners sync.WaitGroup
	var left atomic.Int32
	left.Store(int32(workers))
	for i := range workers {
		listeners.Go(func() {
			for { // heartbeats too, until the worker's end, or its sends would block
				m, err := conns[i].Receive(ctx)
				if err != nil {
					return
				}
				switch m := m.(type) {
				case control.Step:
					all[i].Steps = append(all[i].Steps, m)
				case control.Done:
					all[i].Done = m
					if left.Add(-1) == 0 {
						for _, c := range conns {
							if err := c.Send(control.Release{}); err != nil {
								cancel(err)
							}
						}
					}
				case control.Failed:
					cancel(fmt.Errorf("worker %d: %s %s", i, m.Text, m.Stack))
					return
				}
			}
		})
	}
	for range workers {
		<-ended
	}
	for _, c := range conns {
		c.Close()
	}
	listeners.Wait()
	return all, context.Cause(ctx)
}

// SameHistory reports whether two runs gave the same bits.
func SameHistory(a, b History) bool {
	if a.Done.ParamsSHA256 != b.Done.ParamsSHA256 || a.Done.StateSHA256 != b.Done.StateSHA256 || len(a.Steps) != len(b.Steps) {
		return false
	}
	same := func(x, y float64) bool { return math.Float64bits(x) == math.Float64bits(y) }
	for i, s := range a.Steps {
		o := b.Steps[i]
		if !same(s.Loss, o.Loss) || !same(s.LR, o.LR) || !same(s.GradNorm, o.GradNorm) || s.Tokens != o.Tokens || (s.ValLoss == nil) != (o.ValLoss == nil) {
			return false
		}
		if s.ValLoss != nil && !same(*s.ValLoss, *o.ValLoss) {
			return false
		}
	}
	return true
}

// WithoutGradient is a layer that loses the gradient of one micro-batch of the
// first step, that which begins with the sample First of the global batch.
type WithoutGradient struct {
	Layer
	First int
}

// Backward implements [Layer].
func (l WithoutGradient) Backward(c *Context, p []Tensor, stash any, dout Tensor, dp []Tensor) Tensor {
	din := l.Layer.Backward(c, p, stash, dout, dp)
	if c.call.Step == 1 && c.call.First == l.First {
		for _, g := range dp {
			clear(g.F)
		}
	}
	return din
}

// StartWith plays the agent of a worker that fails after Start.
func StartWith(t *testing.T, job Job, start control.Start) control.Failed {
	t.Helper()
	ours, theirs := net.Pipe()
	conn := control.New(ours)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = process.New(control.New(theirs), process.Alone()).Serve(t.Context(), maker(func() (Job, error) { return job, nil }))
	}()
	defer func() {
		conn.Close() // it may be beating
		<-ended
	}()
	for {
		m, err := conn.Receive(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		switch m := m.(type) {
		case control.Ready:
			if err := conn.Send(start); err != nil {
				t.Fatal(err)
			}
		case control.Failed:
			return m
		}
	}
}

// LaunchedArgs returns the arguments that remain of a program's own when the launcher starts it.
func LaunchedArgs(define func(*flag.FlagSet) func() (Job, error), args ...string) []string {
	c := newCommand("program", true, define)
	if _, err := c.job(args); err != nil {
		return []string{err.Error()}
	}
	return c.launched(args)
}
