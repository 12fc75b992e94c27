package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/soliton-train/soliton/comm"
	"github.com/soliton-train/soliton/elastic/plan"
	"github.com/soliton-train/soliton/internal/tensor"
	"github.com/soliton-train/soliton/internal/tree"
)

// evaluation is the direction of the boundary tensors of an evaluation.
const evaluation uint8 = 2

// inFlight is how many boundary tensors of an evaluation a worker has under
// way to others.
const inFlight = 4

// Evaluate returns the loss over n samples, without training: what layers
// such as dropout do differently. The samples form micro-batches in order, the
// last of which may be short, and their losses are added over the tree. The
// workers of a stage take micro-batches in turn. All workers call it, with the
// same arguments and after the same step, and get the same result.
func (e *Engine) Evaluate(ctx context.Context, step, n int, sample func(i int, in, target tensor.Tensor) error) (Loss, error) {
	v := &evaluator{e: e, step: step, n: n, micros: (n + e.c.MicroBatch - 1) / e.c.MicroBatch, sample: sample}
	v.losses = make([]Loss, v.micros)
	if v.micros < 1 {
		return Loss{}, fmt.Errorf("step %d: the evaluation has no samples", step)
	}
	// Stage by stage for each micro-batch, in ascending order on all workers: so
	// there is always one that can go on.
	for m := range v.micros {
		for s := range e.plan.Stages {
			if v.worker(s, m) != e.c.Self {
				continue
			}
			if err := v.run(ctx, s, m); err != nil {
				return Loss{}, err
			}
		}
	}
	for _, s := range v.under {
		if err := s.sending.Wait(ctx); err != nil {
			return Loss{}, err
		}
		e.free.put(s.buf)
	}
	return v.total(ctx)
}

type evaluator struct {
	e         *Engine
	step      int
	n, micros int
	sample    func(i int, in, target tensor.Tensor) error
	losses    []Loss // of the micro-batches whose last stage ran here
	local     tensor.Tensor
	under     []underWay
}

type underWay struct {
	sending *comm.Sending
	buf     []float32
}

// worker returns who runs micro-batch m in stage s.
func (v *evaluator) worker(s, m int) plan.WorkerID {
	w := v.e.plan.Stages[s].Workers
	return w[m%len(w)]
}

func (v *evaluator) run(ctx context.Context, s, m int) error {
	e, last := v.e, len(v.e.plan.Stages)-1
	first := m * e.c.MicroBatch
	micro := Micro{
		Step: v.step, Index: m, First: first, Samples: min(e.c.MicroBatch, v.n-first),
		Ready: func(layer int) error { return e.params[layer].wait(ctx) },
	}
	var in, target tensor.Tensor
	if s == 0 || s == last {
		b := e.batch()
		defer func() { e.batches = append(e.batches, b) }()
		if err := b.load(micro.Samples, func(i int, in, target tensor.Tensor) error { return v.sample(first+i, in, target) }); err != nil {
			return err
		}
		in, target = head(b.in, micro.Samples), head(b.target, micro.Samples)
	}
	if s > 0 {
		dims, err := e.inputShape(ctx, s)
		if err != nil {
			return err
		}
		in = tensor.Tensor{Shape: append([]int{micro.Samples}, dims[1:]...)}
		size := tensor.Size(in.Shape)
		buf := e.free.get(size)
		defer e.free.put(buf)
		in.F = buf
		if v.worker(s-1, m) == e.c.Self {
			copy(buf, v.local.F)
		} else {
			n, _, err := e.c.Network.Receive(ctx, boundaryKey(v.step, s, m, evaluation), comm.Bytes(buf))
			if err != nil {
				return err
			}
			if n != 4*size {
				return fmt.Errorf("step %d: %d bytes of a boundary tensor of %v", v.step, n, in.Shape)
			}
		}
	}
	pass, out, err := e.c.Stages[s].Forward(micro, in)
	if err != nil {
		return err
	}
	defer e.c.Stages[s].Drop(pass)
	if s == last {
		sum, count, _ := e.c.Stages[s].Loss(pass, target)
		if !finite(sum) {
			return e.nonFinite(v.step, e.c.Stages[s].Suspect(pass), "loss of the evaluation")
		}
		v.losses[m] = Loss{sum, count}
		return nil
	}
	buf := e.free.get(len(out.F))
	copy(buf, out.F)
	to := v.worker(s+1, m)
	if to == e.c.Self {
		if v.local.F != nil {
			e.free.put(v.local.F)
		}
		v.local = tensor.Of(buf, out.Shape...)
		return nil
	}
	if len(v.under) == inFlight {
		if err := v.under[0].sending.Wait(ctx); err != nil {
			return err
		}
		e.free.put(v.under[0].buf)
		v.under = v.under[1:]
	}
	v.under = append(v.under, underWay{e.c.Network.Post(e.session(to), boundaryKey(v.step, s+1, m, evaluation), comm.Bytes(buf), comm.Bulk), buf})
	return nil
}

// inputShape returns the shape of the input of stage s, which the first step
// has told or is about to tell.
func (e *Engine) inputShape(ctx context.Context, s int) ([]int, error) {
	for e.shapes[s].dims == nil {
		if err := e.deliver(); err != nil {
			return nil, err
		}
		if e.shapes[s].dims != nil {
			break
		}
		select {
		case <-e.mail.signal:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return e.shapes[s].dims, nil
}

// total adds up the losses of all workers.
func (v *evaluator) total(ctx context.Context) (Loss, error) {
	e, last := v.e, len(v.e.plan.Stages)-1
	var mine []byte
	count := func(w plan.WorkerID) (n int) {
		for m := range v.micros {
			if v.worker(last, m) == w {
				n++
			}
		}
		return n
	}
	for m, l := range v.losses {
		if v.worker(last, m) == e.c.Self {
			mine = binary.LittleEndian.AppendUint64(mine, math.Float64bits(l.Sum))
			mine = binary.LittleEndian.AppendUint64(mine, uint64(l.Count))
		}
	}
	said, err := e.exchange(ctx, v.step, tagEvaluate, mine, func(w plan.WorkerID) int { return 16 * count(w) })
	if err != nil {
		return Loss{}, err
	}
	losses := tree.NewSums(v.micros, Loss.add)
	for m := range v.micros {
		w := v.worker(last, m)
		for i, x := range e.plan.Workers {
			if x.ID == w {
				b := said[i]
				losses.Put(tree.Leaf(m), Loss{math.Float64frombits(binary.LittleEndian.Uint64(b)), int64(binary.LittleEndian.Uint64(b[8:]))})
				said[i] = b[16:]
			}
		}
	}
	total, _ := losses.Total()
	if total.Count < 1 {
		return Loss{}, fmt.Errorf("step %d: the evaluation counted no target, so its loss has no mean", v.step)
	}
	return total, nil
}
