package engine

import (
	"cmp"
	"context"
	"fmt"

	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// inFlight bounds the boundary tensors of an evaluation that a worker has under way to others.
const inFlight = 4

// Evaluate returns the loss over n samples, and the metrics, with layers such as dropout in evaluation mode. The samples form micro-batches in order,
// the last of which may be short, and their losses are added over the tree. The workers of a stage take micro-batches in turn. All
// workers call Evaluate with the same arguments after the same step, and get the same result.
func (e *Engine) Evaluate(ctx context.Context, step, n int, sample func(i int, in, target tensor.Tensor) error) (core.Loss, []core.Loss, error) {
	micros := (n + e.c.MicroBatch - 1) / e.c.MicroBatch
	if micros < 1 {
		return core.Loss{}, nil, fmt.Errorf("step %d: the evaluation has no samples", step)
	}
	// The loop may still conclude when ctx has ended the call: these are its own until the call succeeds.
	var measured core.Measured
	size := core.EvalSize(e.c.Metrics)
	suspect := -1 // a layer, if this worker ran it
	if err := e.do(ctx, &request{
		ask: core.Ask{Point: id.Point{Step: step, Gate: id.Evaluated}, Micros: micros, Words: size},
		job: func(ctx context.Context, at view) ([]byte, error) {
			v := &evaluator{e: e, view: at, step: step, n: n, micros: micros, sample: sample, suspect: -1}
			said, err := v.run(ctx)
			suspect = v.suspect
			return said, err
		},
		conclude: func(said [][]byte) error {
			sums := tree.NewSums(micros, core.Measured.Add)
			for _, b := range said {
				for ; len(b) >= size; b = b[size:] {
					m, x := core.ParseEvaluated(b, e.c.Metrics)
					if m >= uint64(micros) {
						return fmt.Errorf("step %d: the evaluation of %d micro-batches has the loss of number %d", step, micros, m)
					}
					sums.Put(tree.Leaf(int(m)), x)
				}
			}
			var ok bool
			if measured, ok = sums.Total(); !ok {
				return fmt.Errorf("step %d: the losses of the workers do not make up the evaluation", step)
			}
			if measured.Count < 1 {
				return fmt.Errorf("step %d: the evaluation counted no target, so its loss has no mean", step)
			}
			if !finite(measured.Sum) {
				err := &core.NonFiniteError{Step: step, What: "loss of the evaluation"}
				if suspect >= 0 {
					err.Layer = e.c.Layers[suspect].Name
				}
				return err
			}
			return nil
		},
	}); err != nil {
		return core.Loss{}, nil, err
	}
	return measured.Loss, measured.Metrics, nil
}

// evaluator runs this worker's part of an evaluation, in the computing goroutine, under the plan of its beginning.
type evaluator struct {
	e *Engine
	view
	step      int
	n, micros int
	sample    func(i int, in, target tensor.Tensor) error
	local     tensor.Tensor // the output of the stage before, where this worker ran it
	under     []underWay
	said      []byte
	suspect   int // a layer that may have caused a loss that is not finite
}

// underWay is a boundary tensor, and its shape, on their way to another worker.
type underWay struct {
	shape, tensor *comm.Sending
	buf           []float32
}

// worker returns the worker that runs micro-batch m in stage s.
func (v *evaluator) worker(s, m int) id.WorkerID { return core.Evaluator(v.plan, s, m) }

// key names a boundary tensor. Under another plan, or after a repair, the evaluation restarts with other names.
func (v *evaluator) key(s, m int) comm.Key {
	return key.Evaluation(v.after(v.step), v.plan.Version, v.repair, s, m)
}

func (v *evaluator) run(ctx context.Context) ([]byte, error) {
	// All workers go through micro-batches, and the stages of each, in ascending order. So one of them can always continue.
	for m := range v.micros {
		for s := range v.plan.Stages {
			if v.worker(s, m) != v.e.c.Self.ID {
				continue
			}
			if err := v.pass(ctx, s, m); err != nil {
				return nil, err
			}
		}
	}
	for len(v.under) > 0 {
		if err := v.wait(ctx); err != nil {
			return nil, err
		}
	}
	return v.said, nil
}

// wait waits for the oldest tensor that is under way.
func (v *evaluator) wait(ctx context.Context) error {
	for _, s := range []*comm.Sending{v.under[0].shape, v.under[0].tensor} {
		if err := s.Wait(ctx); err != nil {
			return err
		}
	}
	v.e.free.put(v.under[0].buf)
	v.under = v.under[1:]
	return nil
}

// pass runs a micro-batch through a stage.
func (v *evaluator) pass(ctx context.Context, s, m int) error {
	e, last := v.e, len(v.plan.Stages)-1
	first := m * e.c.MicroBatch
	micro := Micro{
		Step: v.step, Index: m, First: first, Samples: min(e.c.MicroBatch, v.n-first), Values: e.values,
		Ready: func(layer int) error {
			// A stopped evaluation computes no further layer: it restarts under the next plan.
			return cmp.Or(ctx.Err(), e.gates[layer].wait(ctx))
		},
	}
	measured := core.Measured{Metrics: e.measure(&micro)}
	var in, target tensor.Tensor
	if s == 0 || s == last {
		b := e.batches.get()
		defer e.batches.put(b)
		if err := b.load(micro.Samples, func(i int, in, target tensor.Tensor) error { return v.sample(first+i, in, target) }); err != nil {
			return err
		}
		in, target = head(b.in, micro.Samples), head(b.target, micro.Samples)
	}
	if s == last {
		micro.Target = target
	}
	if s > 0 {
		in = v.local
		if v.worker(s-1, m) != e.c.Self.ID {
			var err error
			if in, err = v.receive(ctx, v.key(s, m)); err != nil {
				return err
			}
		}
		defer e.free.put(in.F)
	}
	pass, out, err := e.stages[s].Forward(micro, in)
	if err != nil {
		return err
	}
	defer e.stages[s].Drop(pass)
	if s == last {
		measured.Sum, measured.Count, _ = e.stages[s].Loss(pass, target)
		if !finite(measured.Sum) {
			v.suspect = e.stages[s].Suspect(pass)
		}
		v.said = core.AppendEvaluated(v.said, m, measured)
		return nil
	}
	out = e.keep(out)
	to := v.worker(s+1, m)
	if to == e.c.Self.ID {
		v.local = out
		return nil
	}
	if len(v.under) == inFlight {
		if err := v.wait(ctx); err != nil {
			return err
		}
	}
	k := v.key(s+1, m)
	post := func(k comm.Key, b []byte) *comm.Sending { return e.c.Network.Post(v.session(to), k, b, comm.Bulk) }
	v.under = append(v.under, underWay{
		post(key.EvaluationShape(k), core.AppendShape(nil, out.Shape)), post(k, comm.Bytes(out.F)), out.F,
	})
	return nil
}

// receive receives a boundary tensor. Its shape comes with it: the workers that told the shape in a training step may be lost.
func (v *evaluator) receive(ctx context.Context, k comm.Key) (t tensor.Tensor, err error) {
	b := make([]byte, core.ShapeSize)
	n, from, err := v.e.c.Network.Receive(ctx, key.EvaluationShape(k), b)
	if err != nil {
		return t, err
	}
	dims, ok := core.ParseShape(b[:n])
	if !ok {
		return t, fmt.Errorf("step %d: worker %v sent the shape %x", v.step, from, b[:n])
	}
	t = tensor.Of(v.e.free.get(tensor.Size(dims)), dims...)
	if n, from, err = v.e.c.Network.Receive(ctx, k, comm.Bytes(t.F)); err == nil && n != 4*len(t.F) {
		err = fmt.Errorf("step %d: worker %v sent %d bytes of a boundary tensor of %v", v.step, from, n, dims)
	}
	return t, err
}
