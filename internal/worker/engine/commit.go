package engine

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"unsafe"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// record is what a worker says in the commit. All records have one size but
// for the sums of losses, whose number follows from the plan.
type record struct {
	squares  zero.Fixed // of the gradients of the owned shards
	lr       float64
	suspect  int        // a layer from which on the output is not finite, -1 if there is none
	spoiled  int        // a layer whose gradient is not finite, -1 if there is none
	newest   id.Version // of the plans that have come
	stop     string
	saving   uint64 // see checkpoint.go
	lossSums []lossSum
}

type lossSum struct {
	node tree.Node
	loss Loss
}

const (
	stopSize    = 24
	recordSize  = 56 + stopSize + 8
	lossSumSize = 32
)

func (r record) append(b []byte) []byte {
	le := binary.LittleEndian
	for _, v := range []uint64{r.squares.Hi, r.squares.Lo, math.Float64bits(r.lr), uint64(int64(r.spoiled)), uint64(int64(r.suspect)),
		uint64(r.newest.Generation), uint64(r.newest.N)} {
		b = le.AppendUint64(b, v)
	}
	var stop [stopSize]byte
	copy(stop[:], r.stop)
	b = append(b, stop[:]...)
	b = le.AppendUint64(b, r.saving)
	for _, s := range r.lossSums {
		for _, v := range []uint64{uint64(s.node.Lo), uint64(s.node.Hi), math.Float64bits(s.loss.Sum), uint64(s.loss.Count)} {
			b = le.AppendUint64(b, v)
		}
	}
	return b
}

// parseRecord reads a record of a step of so many micro-batches.
func parseRecord(b []byte, micros int) (record, error) {
	if len(b) < recordSize || (len(b)-recordSize)%lossSumSize != 0 {
		return record{}, fmt.Errorf("a record of %d bytes", len(b))
	}
	word := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
	r := record{
		squares: zero.Fixed{Hi: word(0), Lo: word(1)},
		lr:      math.Float64frombits(word(2)),
		spoiled: int(int64(word(3))),
		suspect: int(int64(word(4))),
		newest:  id.Version{Generation: int(word(5)), N: int(word(6))},
		stop:    string(bytes.TrimRight(b[56:56+stopSize], "\x00")),
		saving:  word((56 + stopSize) / 8),
	}
	root := tree.Root(micros)
	for b = b[recordSize:]; len(b) > 0; b = b[lossSumSize:] {
		n := tree.Node{Lo: int(word(0)), Hi: int(word(1))}
		if _, _, ok := n.Parent(root); !ok && n != root {
			return record{}, fmt.Errorf("a loss of %v, which is no node of %v", n, root)
		}
		r.lossSums = append(r.lossSums, lossSum{n, Loss{math.Float64frombits(word(2)), int64(word(3))}})
	}
	return r, nil
}

// operate runs an operation of a group beside the loop, which calls done when
// it has succeeded. One that fails because something about the group has
// changed waits for the next plan.
func (e *Engine) operate(f func() error, done func()) {
	e.ops++
	ctx := e.opsCtx
	e.tasks.Go(func() {
		err := f()
		e.mail.put(func() {
			e.ops--
			switch {
			case err == nil && ctx.Err() == nil:
				done()
			case err == nil, passing(err):
				e.broken = true
			default:
				e.fail(err)
			}
		})
	})
}

// passing reports whether an error is about links and members, which the next
// plan puts right.
func passing(err error) bool {
	for _, class := range []error{comm.ErrLink, comm.ErrAborted, comm.ErrVersion, comm.ErrRefused, comm.ErrNotMember, comm.ErrStale, comm.ErrClosed} {
		if errors.Is(err, class) {
			return true
		}
	}
	return errors.Is(err, context.Canceled)
}

// sayCommit computes what this worker says in the commit.
func (e *Engine) sayCommit(r *request) {
	step := r.point.Step
	lr := e.c.LR(step)
	mine := record{lr: lr, stop: e.c.Stop(), saving: e.saving(), suspect: e.step.suspect, spoiled: -1}
	last := len(e.plan.Stages) - 1
	for _, n := range e.plan.Nodes(last, e.c.Self.ID, step) {
		loss, ok := e.losses.At(n)
		if !ok {
			panic("engine: commit of an incomplete step")
		}
		mine.lossSums = append(mine.lossSums, lossSum{n, loss})
	}
	spans, tainted, checked := e.spans(), e.step.tainted, []byte(nil)
	shards := e.inOrder()
	totals := make([][]float32, len(shards))
	for i, sh := range shards {
		totals[i] = sh.total
	}
	e.do(onJob, func() error {
		checked = e.check(spans, tainted)
		for i, sh := range slices.Backward(shards) {
			if !sh.owner {
				continue
			}
			s, err := sh.state.Squares(e.c.Pool, totals[i], e.normScale)
			sum, fits := mine.squares.Add(s)
			if err != nil && !errors.Is(err, zero.ErrNonFinite) {
				return err
			}
			if err != nil || !fits {
				// NaN spreads from the layer it comes up in to the layers before, so
				// the last layer is the one to name.
				mine.spoiled = max(mine.spoiled, sh.Layer)
				continue
			}
			mine.squares = sum
		}
		return nil
	}, func(err error) {
		if err != nil {
			e.fail(err)
			return
		}
		e.computed(trace.Check, spanOf(-1, 0))
		mine.newest = e.newest()
		if mine.newest == e.plan.Version && len(e.pending) > 0 {
			e.putOff++
		}
		r.said = mine.append(checked)
		r.size = func(w id.WorkerID) int { return recordSize + lossSumSize*len(e.plan.Nodes(last, w, step)) }
	})
}

// maxPutOff is for how many commits a plan is put off for which updates of steps before are
// still to be replayed here. A link may be too slow for that ever to end.
const maxPutOff = 4

// newest returns the newest plan that has come, and could go live here without a wait for
// more than the gradient of this step.
func (e *Engine) newest() id.Version {
	v := e.plan.Version
	for i := range e.pending {
		if o := &e.pending[i]; v.Compare(o.Plan.Version) < 0 && (e.putOff >= maxPutOff || !e.behind(o)) {
			v = o.Plan.Version
		}
	}
	return v
}

// startExchange lets every worker know what all of them say, which takes them
// past the operation's point together.
func (e *Engine) startExchange(r *request) {
	parts, checks := []int{0}, e.checkSizes()
	for _, w := range e.plan.Workers {
		parts = append(parts, parts[len(parts)-1]+checks[w.ID]+r.size(w.ID))
	}
	all := make([]byte, parts[len(parts)-1])
	if copy(all[parts[e.rank]:parts[e.rank+1]], r.said) != len(r.said) {
		panic("engine: a worker says more in an exchange than it may")
	}
	if r.point.Gate == id.Committed {
		e.phase(r.point.Step, PhaseCommit)
	}
	call := key.Exchange(e.attempt(), e.plan.Version, r.point.Gate)
	r.exchanging = true
	g, ctx := e.everyone, e.opsCtx
	ballot, began, name := e.ballot, e.now(), trace.Exchange
	if r.point.Gate == id.Committed {
		name = trace.Commit
	}
	e.operate(func() error { return g.AllGather(ctx, call, all, parts) }, func() {
		e.span(name, began, spanOf(-1, int64(len(all))))
		if e.sealed || e.ballot != ballot || e.req != r {
			return // it has said that it did not pass
		}
		said := make([][]byte, len(e.plan.Workers))
		for i := range said {
			said[i] = all[parts[i]:parts[i+1]]
		}
		e.pass(said)
	})
}

// pass takes this worker past the point of its operation, or, if blocks were
// altered, to their repair. said is what each worker of the plan said.
func (e *Engine) pass(said [][]byte) {
	r := e.req
	words, mends, again, err := e.judge(said)
	switch others := new(othersError); {
	case errors.As(err, &others):
		e.broken = true // until the plan goes on without them
		return
	case err != nil:
		e.fail(err)
		return
	case again:
		e.repair(said, mends)
		return
	}
	try := e.try()
	e.passed, e.result = r.point, encodeSaid(said)
	said = words
	if e.guard != nil {
		e.guard.mends = nil
	}
	if r.point.Gate != id.Committed {
		if err := r.conclude(said); err != nil {
			e.fail(err)
			return
		}
		e.req = nil
		r.end(nil)
		return
	}
	u, next, err := e.decide(r, said)
	if err != nil {
		e.fail(err)
		return
	}
	r.result.Plan = e.plan.Version
	r.result.Forwards, r.result.Backwards = e.forwards, e.backwards
	if next != e.plan.Version {
		e.goLive(next)
	}
	e.update(r.point.Step, try, u, e.capture(r), func() {
		e.clearStep()
		e.req = nil
		r.end(nil)
	})
}

// clearStep forgets the step that all have come to the end of.
func (e *Engine) clearStep() {
	for l, sums := range e.grads {
		if sums != nil {
			for _, g := range sums.Clear() {
				e.free.put(g)
			}
		}
		if e.plain[l] != nil {
			e.free.put(e.plain[l])
			e.plain[l] = nil
		}
	}
	e.losses.Clear()
	e.step.release(e)
	e.step = nil
}

// encodeSaid and decodeSaid turn what all workers said into bytes and back.
func encodeSaid(said [][]byte) []byte {
	b := []byte{}
	for _, s := range said {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(s)))
		b = append(b, s...)
	}
	return b
}

func decodeSaid(b []byte) (said [][]byte, err error) {
	for len(b) > 0 {
		if len(b) < 4 || uint64(binary.LittleEndian.Uint32(b)) > uint64(len(b)-4) {
			return nil, errors.New("a result that is cut off")
		}
		n := int(binary.LittleEndian.Uint32(b))
		said = append(said, b[4:4+n])
		b = b[4+n:]
	}
	return said, nil
}

// decide draws the conclusions from what all workers said. next is the plan of
// the next step.
func (e *Engine) decide(req *request, said [][]byte) (u zero.Update, next id.Version, err error) {
	step := req.point.Step
	lr := e.c.LR(step)
	r := Result{Step: step, LR: lr}
	losses := tree.NewSums(e.micros, Loss.add)
	var squares zero.Fixed
	suspect, spoiled := -1, -1
	var records []record
	for i, b := range said {
		rec, err := parseRecord(b, e.micros)
		if err != nil {
			return u, next, fmt.Errorf("step %d: worker %d sent %w", step, e.plan.Workers[i].ID, err)
		}
		if math.Float64bits(rec.lr) != math.Float64bits(lr) {
			return u, next, fmt.Errorf("step %d: worker %d has the learning rate %v, and worker %d has %v",
				step, e.c.Self.ID, lr, e.plan.Workers[i].ID, rec.lr)
		}
		records = append(records, rec)
		r.Stop = cmp.Or(r.Stop, rec.stop)
		spoiled = max(spoiled, rec.spoiled)
		if suspect < 0 {
			suspect = rec.suspect
		}
		if i == 0 || rec.newest.Compare(next) < 0 {
			next = rec.newest
		}
		sum, fits := squares.Add(rec.squares)
		if !fits {
			return u, next, e.nonFinite(step, len(e.c.Layers)-1, "gradient")
		}
		squares = sum
		for _, s := range rec.lossSums {
			losses.Put(s.node, s.loss)
		}
	}
	loss, ok := losses.Total()
	switch {
	case !ok:
		return u, next, fmt.Errorf("step %d: the losses of the workers do not make up the step", step)
	case loss.Count < 1:
		return u, next, fmt.Errorf("step %d: the loss counted no target, so it has no mean", step)
	case max(suspect, spoiled) >= len(e.c.Layers):
		return u, next, fmt.Errorf("step %d: a worker speaks of layer %d of %d", step, max(suspect, spoiled), len(e.c.Layers))
	case !finite(loss.Sum):
		return u, next, e.nonFinite(step, suspect, "loss")
	case spoiled >= 0:
		return u, next, e.nonFinite(step, spoiled, "gradient")
	}
	r.Loss, r.Targets = loss.Mean(), loss.Count
	r.GradNorm = zero.Norm(squares, e.normScale) / float64(loss.Count)
	factor := 1.0
	if clip := e.c.ClipNorm; clip > 0 {
		factor = min(1, clip/(r.GradNorm+1e-6))
	}
	req.result, req.save = r, saves(records)
	return zero.Update{Step: step, LR: float32(lr), GradScale: float32(factor / float64(loss.Count))}, next, nil
}

// int64Bytes returns the memory of x; workers have one byte order.
func int64Bytes(x []int64) []byte {
	if len(x) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), 8*len(x))
}
