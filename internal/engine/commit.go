package engine

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"unsafe"

	"github.com/soliton-train/soliton/comm"
	"github.com/soliton-train/soliton/elastic/plan"
	"github.com/soliton-train/soliton/internal/tree"
	"github.com/soliton-train/soliton/zero"
)

// record is what a worker says in the commit. All records have one size but
// for the sums of losses, whose number follows from the plan.
type record struct {
	squares  zero.Fixed // of the gradients of the owned shards
	lr       float64
	stop     string
	spoiled  int // a layer whose gradient is not finite, -1 if there is none
	lossSums []lossSum
}

type lossSum struct {
	node tree.Node
	loss Loss
}

const (
	stopSize    = 24
	recordSize  = 32 + stopSize
	lossSumSize = 32
)

func (r record) append(b []byte) []byte {
	le := binary.LittleEndian
	for _, v := range []uint64{r.squares.Hi, r.squares.Lo, math.Float64bits(r.lr), uint64(int64(r.spoiled))} {
		b = le.AppendUint64(b, v)
	}
	var stop [stopSize]byte
	copy(stop[:], r.stop)
	b = append(b, stop[:]...)
	for _, s := range r.lossSums {
		for _, v := range []uint64{uint64(s.node.Lo), uint64(s.node.Hi), math.Float64bits(s.loss.Sum), uint64(s.loss.Count)} {
			b = le.AppendUint64(b, v)
		}
	}
	return b
}

// parseRecord reads a record whose length is that of the plan.
func parseRecord(b []byte) record {
	word := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
	r := record{
		squares: zero.Fixed{Hi: word(0), Lo: word(1)},
		lr:      math.Float64frombits(word(2)),
		spoiled: int(int64(word(3))),
		stop:    string(bytes.TrimRight(b[32:recordSize], "\x00")),
	}
	for b = b[recordSize:]; len(b) > 0; b = b[lossSumSize:] {
		r.lossSums = append(r.lossSums, lossSum{
			tree.Node{Lo: int(word(0)), Hi: int(word(1))},
			Loss{math.Float64frombits(word(2)), int64(word(3))},
		})
	}
	return r
}

// Tags of operations of the group of all workers.
const (
	tagCommit = iota
	tagEvaluate
	tagCollect
)

// exchange lets every worker know what all of them say. size gives the bytes
// that each one says.
func (e *Engine) exchange(ctx context.Context, step, tag int, mine []byte, size func(plan.WorkerID) int) ([][]byte, error) {
	parts := []int{0}
	for _, w := range e.plan.Workers {
		parts = append(parts, parts[len(parts)-1]+size(w.ID))
	}
	all := make([]byte, parts[len(parts)-1])
	copy(all[parts[e.rank]:], mine)
	call := e.call(step, tag)
	call.Priority = comm.Control
	if err := e.everyone.AllGather(ctx, call, all, parts); err != nil {
		return nil, err
	}
	said := make([][]byte, len(e.plan.Workers))
	for i := range said {
		said[i] = all[parts[i]:parts[i+1]]
	}
	return said, nil
}

// commit is the point after which a step can only go forward. Nobody has
// changed a parameter before, and all workers come to the same result.
func (e *Engine) commit(ctx context.Context, step int) (Result, zero.Update, error) {
	lr := e.c.LR(step)
	mine := record{lr: lr, stop: e.c.Stop(), spoiled: -1}
	for i := len(e.shards) - 1; i >= 0; i-- {
		if e.shards[i] == nil {
			continue
		}
		s, err := e.shards[i].Squares(e.c.Pool, e.total(i), e.normScale)
		sum, fits := mine.squares.Add(s)
		if err != nil && !errors.Is(err, zero.ErrNonFinite) {
			return Result{}, zero.Update{}, err
		}
		if err != nil || !fits {
			// NaN spreads from the layer it comes up in to the layers before, so
			// the last layer is the one to name.
			mine.spoiled = max(mine.spoiled, e.plan.Shards[i].Layer)
			continue
		}
		mine.squares = sum
	}
	last := len(e.plan.Stages) - 1
	for _, n := range e.plan.Nodes(last, e.c.Self, step) {
		loss, ok := e.losses.At(n)
		if !ok {
			panic("engine: commit of an incomplete step")
		}
		mine.lossSums = append(mine.lossSums, lossSum{n, loss})
	}
	said, err := e.exchange(ctx, step, tagCommit, mine.append(nil), func(w plan.WorkerID) int {
		return recordSize + lossSumSize*len(e.plan.Nodes(last, w, step))
	})
	if err != nil {
		return Result{}, zero.Update{}, err
	}
	return e.decide(step, lr, said)
}

// decide draws the conclusions from what all workers said.
func (e *Engine) decide(step int, lr float64, said [][]byte) (Result, zero.Update, error) {
	r := Result{Step: step, LR: lr}
	losses := tree.NewSums(e.plan.Micros(), Loss.add)
	var squares zero.Fixed
	spoiled := -1
	for i, b := range said {
		rec := parseRecord(b)
		if math.Float64bits(rec.lr) != math.Float64bits(lr) {
			return Result{}, zero.Update{}, fmt.Errorf("step %d: worker %d has the learning rate %v, and worker %d has %v",
				step, e.c.Self, lr, e.plan.Workers[i].ID, rec.lr)
		}
		r.Stop = cmp.Or(r.Stop, rec.stop)
		spoiled = max(spoiled, rec.spoiled)
		sum, fits := squares.Add(rec.squares)
		if !fits {
			return Result{}, zero.Update{}, e.nonFinite(step, len(e.c.Layers)-1, "gradient")
		}
		squares = sum
		for _, s := range rec.lossSums {
			losses.Put(s.node, s.loss)
		}
	}
	loss, ok := losses.Total()
	switch {
	case !ok:
		return Result{}, zero.Update{}, fmt.Errorf("step %d: the losses of the workers do not make up the step", step)
	case loss.Count < 1:
		return Result{}, zero.Update{}, fmt.Errorf("step %d: the loss counted no target, so it has no mean", step)
	case !finite(loss.Sum):
		return Result{}, zero.Update{}, e.nonFinite(step, -1, "loss")
	case spoiled >= 0:
		return Result{}, zero.Update{}, e.nonFinite(step, spoiled, "gradient")
	}
	r.Loss, r.Targets = loss.Mean(), loss.Count
	r.GradNorm = zero.Norm(squares, e.normScale) / float64(loss.Count)
	factor := 1.0
	if clip := e.c.ClipNorm; clip > 0 {
		factor = min(1, clip/(r.GradNorm+1e-6))
	}
	return r, zero.Update{Step: step, LR: float32(lr), GradScale: float32(factor / float64(loss.Count))}, nil
}

// total returns the complete gradient of an owned shard, or the place for that
// of another.
func (e *Engine) total(shard int) []float32 {
	if e.totals[shard] != nil {
		return e.totals[shard]
	}
	sh := e.plan.Shards[shard]
	if e.c.Fast {
		return e.plain[sh.Layer][sh.Lo:sh.Hi]
	}
	g, ok := e.grads[sh.Layer].Total()
	if !ok {
		panic("engine: commit of an incomplete step")
	}
	return g[sh.Lo:sh.Hi]
}

// update applies a committed update to the owned shards, and begins to bring
// the new parameters to all workers of their stages, first layers first.
func (e *Engine) update(ctx context.Context, step int, u zero.Update) error {
	// What others still read of the old parameters must be with them, and what
	// is on its way here must have arrived.
	if err := e.settle(ctx); err != nil {
		return err
	}
	st := e.step
	e.step = nil
	for i, sh := range e.plan.Shards {
		stage := e.plan.StageOf(sh.Layer)
		if _, held := e.c.Stages[stage]; !held {
			continue
		}
		params := e.c.Layers[sh.Layer].Params[sh.Lo:sh.Hi]
		key := comm.Key{Kind: comm.KindParams, Step: uint64(step), Layer: int32(sh.Layer), Lo: int64(sh.Lo), Hi: int64(sh.Hi)}
		if e.shards[i] == nil {
			e.params[sh.Layer] = append(e.params[sh.Layer], e.c.Network.Expect(key, comm.Bytes(params)))
			continue
		}
		e.shards[i].Update(e.c.Pool, params, e.total(i), u)
		for _, w := range e.plan.Stages[stage].Workers {
			if w != e.c.Self {
				e.sent = append(e.sent, e.c.Network.Post(e.session(w), key, comm.Bytes(params), comm.Bulk+comm.Priority(sh.Layer)))
			}
		}
	}
	e.losses.Clear()
	for _, s := range st.sends {
		if err := s.Wait(ctx); err != nil {
			return err
		}
	}
	e.clearGrads() // which sends may have read
	for _, b := range st.kept {
		e.free.put(b)
	}
	return nil
}

// arrivals are the parameters of a layer on their way here.
type arrivals []*comm.Receiving

// wait returns when all are there.
func (a *arrivals) wait(ctx context.Context) error {
	for _, r := range *a {
		if _, _, err := r.Wait(ctx); err != nil {
			return err
		}
	}
	*a = (*a)[:0]
	return nil
}

// settle waits until no parameters are on their way, neither from here nor to
// here.
func (e *Engine) settle(ctx context.Context) error {
	for l := range e.params {
		if err := e.params[l].wait(ctx); err != nil {
			return err
		}
	}
	for _, s := range e.sent {
		if err := s.Wait(ctx); err != nil {
			return err
		}
	}
	e.sent = e.sent[:0]
	return nil
}

// int64Bytes returns the memory of x; workers have one byte order.
func int64Bytes(x []int64) []byte {
	if len(x) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), 8*len(x))
}
