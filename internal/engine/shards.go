package engine

import (
	"context"
	"slices"
	"sync"

	"github.com/soliton-train/soliton/comm"
	"github.com/soliton-train/soliton/elastic/plan"
	"github.com/soliton-train/soliton/internal/tree"
	"github.com/soliton-train/soliton/zero"
)

// shard is the state of a range that this worker owns or mirrors. Both do the
// same with it: they apply the same updates to the same bits. In stage 1 of
// ZeRO the other workers of the range's stage have its gradient, and no state.
type shard struct {
	plan.Range
	owner bool
	state *zero.Shard
	// params is part of the layer's Params where this worker serves it, else
	// memory of its own.
	params []float32

	// total is the gradient of the step, once it is complete.
	total    []float32
	complete bool
	own      []float32       // memory for it
	recv     *comm.Receiving // of a mirror: it is expected
	told     map[plan.WorkerID]bool
}

func rangeOf(s plan.Shard) plan.Range { return plan.Range{Layer: s.Layer, Lo: s.Lo, Hi: s.Hi} }

// key names data of the range of a step, whose wire name is given.
func (sh *shard) key(kind comm.Kind, step uint64) comm.Key { return rangeKey(sh.Range, kind, step) }

func rangeKey(r plan.Range, kind comm.Kind, step uint64) comm.Key {
	return comm.Key{Kind: kind, Step: step, Layer: int32(r.Layer), Lo: int64(r.Lo), Hi: int64(r.Hi)}
}

// gradientKey names the complete gradient of the range.
func (e *Engine) gradientKey(r plan.Range) comm.Key {
	k := rangeKey(r, comm.KindGradient, e.wireStep(e.step.number))
	k.Node = tree.Root(e.micros)
	return k
}

// memory returns memory for the complete gradient.
func (sh *shard) memory() []float32 {
	if sh.own == nil {
		sh.own = make([]float32, sh.Hi-sh.Lo)
	}
	return sh.own
}

// begin prepares for a step.
func (sh *shard) begin(e *Engine) {
	sh.complete, sh.total, sh.told = false, nil, nil
	sh.expect(e)
}

// expect lets a mirror wait for the complete gradient.
func (sh *shard) expect(e *Engine) {
	if sh.owner || sh.complete || sh.recv != nil {
		return
	}
	st := e.step
	r := e.c.Network.Expect(e.gradientKey(sh.Range), comm.Bytes(sh.memory()))
	sh.recv = r
	r.OnDone(func() {
		e.mail.put(func() {
			if _, _, err := r.Wait(e.ctx); err != nil || e.step != st || sh.recv != r {
				return
			}
			sh.recv = nil
			sh.completed(e, sh.own)
		})
	})
}

// completed says that the gradient is complete; an owner passes it on to the
// mirrors.
func (sh *shard) completed(e *Engine, total []float32) {
	sh.complete, sh.total = true, total
	sh.forward(e)
}

// forward sends the complete gradient to who is to have it, and was not sent it.
func (sh *shard) forward(e *Engine) {
	if !sh.owner || !sh.complete {
		return
	}
	p := e.planned(sh.Range)
	readers := p.Mirrors
	if e.c.Zero == 1 {
		readers = append(slices.Clone(readers), e.plan.Stages[e.plan.StageOf(sh.Layer)].Workers...)
	}
	for _, m := range readers {
		if sh.told[m] || m == p.Owner {
			continue
		}
		if sh.told == nil {
			sh.told = make(map[plan.WorkerID]bool)
		}
		sh.told[m] = true
		e.post(m, e.gradientKey(sh.Range), comm.Bytes(sh.total), comm.Bulk)
	}
}

// promote makes a mirror the owner.
func (sh *shard) promote() {
	sh.owner, sh.told = true, nil
	if sh.recv != nil {
		sh.recv.Cancel(errClosed)
		<-sh.recv.Done() // the reader of a link leaves the memory at once
		sh.recv = nil
	}
}

// post sends memory that the update changes, so that nobody here enters the
// commit before it is sent.
func (e *Engine) post(to plan.WorkerID, k comm.Key, data []byte, prio comm.Priority) {
	s := e.c.Network.Post(e.session(to), k, data, prio)
	e.sent = append(e.sent, s)
	s.OnDone(func() { e.mail.put(func() {}) })
}

// drained reports whether nothing of that kind is being sent any more.
func (e *Engine) drained() bool {
	left := e.sent[:0]
	for _, s := range e.sent {
		select {
		case <-s.Done():
		default:
			left = append(left, s)
		}
	}
	clear(e.sent[len(left):])
	e.sent = left
	return len(left) == 0
}

// update applies a committed update to the shards, and begins to bring the
// new parameters to all workers of their stages, first layers first.
func (e *Engine) update(step int, u zero.Update, after func()) {
	for l := range e.arrivals {
		e.expectParams(l, step)
	}
	order := e.inOrder()
	totals := make([][]float32, len(order))
	for i, sh := range order {
		totals[i] = sh.total
	}
	e.do(onJob, func() error {
		for i, sh := range order {
			if sh.state == nil {
				continue
			}
			sh.state.Update(e.c.Pool, sh.params, totals[i], u)
			if sh.owner {
				e.mail.put(func() {
					e.phase(step, PhaseGather)
					e.spread(sh, step, nil)
				})
			}
		}
		return nil
	}, func(error) {
		e.phase(step, PhaseGather) // of who spreads nothing
		after()
	})
}

// planned returns what the plan says of a range.
func (e *Engine) planned(r plan.Range) plan.Shard { return e.plan.Shards[e.index[r]] }

// inOrder returns the shards by layer, then range.
func (e *Engine) inOrder() []*shard {
	var all []*shard
	for _, p := range e.plan.Shards {
		if sh := e.shards[rangeOf(p)]; sh != nil {
			all = append(all, sh)
		}
	}
	return all
}

// expectParams expects the parameters of a layer after a step, as far as this
// worker serves the layer and does not compute them itself.
func (e *Engine) expectParams(layer, step int) {
	if !e.serves(layer) {
		return
	}
	params := e.c.Layers[layer].Params
	for _, p := range e.plan.Shards {
		if p.Layer == layer && !e.computes(rangeOf(p)) {
			e.arrivals[layer].expect(e, rangeKey(rangeOf(p), comm.KindParams, e.wireStep(step)), params[p.Lo:p.Hi])
		}
	}
}

// computes reports whether this worker updates a range itself.
func (e *Engine) computes(r plan.Range) bool {
	sh := e.shards[r]
	return sh != nil && sh.state != nil
}

// spread sends the parameters of an owned shard to the workers of its stage
// that do not compute them; only to some, if there is a choice.
func (e *Engine) spread(sh *shard, step int, choose func(plan.WorkerID) bool) {
	p := e.planned(sh.Range)
	for _, w := range e.plan.Stages[e.plan.StageOf(sh.Layer)].Workers {
		if w != p.Owner && !slices.Contains(p.Mirrors, w) && (choose == nil || choose(w)) {
			e.post(w, sh.key(comm.KindParams, e.wireStep(step)), comm.Bytes(sh.params), comm.Bulk+comm.Priority(sh.Layer))
		}
	}
}

// arrivals are the parameters of a layer on their way here. The loop expects
// them, the computing goroutine waits.
type arrivals struct {
	mu      sync.Mutex
	missing int
	full    chan struct{} // closed when nothing is missing; nil if nothing was
}

// expect lets the layer wait for a message.
func (a *arrivals) expect(e *Engine, k comm.Key, params []float32) {
	a.mu.Lock()
	if a.missing == 0 {
		a.full = make(chan struct{})
	}
	a.missing++
	a.mu.Unlock()
	r := e.c.Network.Expect(k, comm.Bytes(params))
	r.OnDone(func() {
		if _, _, err := r.Wait(e.ctx); err != nil {
			return // the network is closed, and so is the engine soon
		}
		a.mu.Lock()
		if a.missing--; a.missing == 0 {
			close(a.full)
		}
		a.mu.Unlock()
		e.mail.put(func() {})
	})
}

// there reports whether nothing is missing.
func (a *arrivals) there() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.missing == 0
}

// wait returns when nothing is missing.
func (a *arrivals) wait(ctx context.Context) error {
	a.mu.Lock()
	missing, full := a.missing, a.full
	a.mu.Unlock()
	if missing == 0 {
		return nil
	}
	select {
	case <-full:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
