package engine

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// shard is the state of a range that this worker owns or mirrors. Both do the
// same with it: they apply the same updates to the same bits. Others have no
// state, but the gradient: in stage 1 of ZeRO the workers of the range's stage,
// and who reduces it for an owner that does not serve the stage.
type shard struct {
	id.Range
	owner   bool
	reduces bool // its gradient becomes complete here
	state   *zero.Shard
	// params is part of the layer's Params where this worker serves it, else
	// memory of its own.
	params []float32

	// total is the gradient of the step, once it is complete.
	total    []float32
	complete bool
	own      []float32       // memory for it
	recv     *comm.Receiving // of a mirror: it is expected
	told     map[id.WorkerID]bool

	watched bool // its digests were taken
}

func rangeOf(s plan.Shard) id.Range { return id.Range{Layer: s.Layer, Lo: s.Lo, Hi: s.Hi} }

// gradientKey names the complete gradient of the range under the plan.
func (e *Engine) gradientKey(r id.Range) comm.Key {
	return key.Gradient(e.step.attempt, e.plan.Version, r, e.micros)
}

// try names the gradients of the step up to the next repair, or plan.
func (e *Engine) try() key.Try { return key.Try{Plan: e.plan.Version.N, Repair: e.passed.Repair} }

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

// expect waits for the complete gradient, where it is not reduced here.
func (sh *shard) expect(e *Engine) {
	if sh.reduces || sh.complete || sh.recv != nil {
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

// completed says that the gradient is complete; who reduces it passes it on.
func (sh *shard) completed(e *Engine, total []float32) {
	sh.complete, sh.total = true, total
	sh.forward(e)
	e.feed(sh)
}

// forward sends the complete gradient to who is to have it, and was not sent it.
func (sh *shard) forward(e *Engine) {
	s := e.plan.StageOf(sh.Layer)
	if !sh.complete || !sh.reduces && !(sh.owner && e.settled(s)) {
		return
	}
	p := e.planned(sh.Range)
	readers := append([]id.WorkerID{p.Owner}, p.Mirrors...)
	if e.c.Zero == 1 {
		readers = append(readers, e.plan.Stages[s].Workers...)
	}
	for _, m := range readers {
		if sh.told[m] || m == e.c.Self.ID {
			continue
		}
		if sh.told == nil {
			sh.told = make(map[id.WorkerID]bool)
		}
		sh.told[m] = true
		e.post(m, e.gradientKey(sh.Range), comm.Bytes(sh.total), comm.Bulk)
	}
}

// assign gives the shard its parts under a plan.
func (sh *shard) assign(owner, reduces bool) {
	sh.owner, sh.reduces = owner, reduces
	if reduces {
		sh.stop()
	}
}

// stop ends the wait for the gradient.
func (sh *shard) stop() {
	if sh.recv != nil {
		sh.recv.Cancel(errClosed)
		<-sh.recv.Done() // the reader of a link leaves the memory at once
		sh.recv = nil
	}
}

// again begins with the gradient anew under a plan made in the step, whose names are others. settled says that
// the plan counts on those that are complete.
func (sh *shard) again(e *Engine, settled bool) {
	sh.stop()
	if sh.told = nil; !settled {
		sh.complete, sh.total = false, nil
	}
	if sh.complete {
		sh.forward(e)
		e.feed(sh)
	}
	sh.expect(e)
}

// post sends memory that the update changes. Everybody has all that is sent
// so when a commit is passed, since nobody enters it before.
func (e *Engine) post(to id.WorkerID, k comm.Key, data []byte, prio comm.Priority) {
	e.sent = append(slices.DeleteFunc(e.sent, func(s *comm.Sending) bool { return isClosed(s.Done()) }),
		e.c.Network.Post(e.session(to), k, data, prio))
}

// drain ends what is still being sent after a commit: copies that nobody
// waits for. It returns when the memory is ours.
func drain(ctx context.Context, sent []*comm.Sending) error {
	for _, s := range sent {
		s.Cancel(errClosed)
	}
	for _, s := range sent {
		select {
		case <-s.Done():
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// update applies a committed update to the shards, and begins to bring the
// new parameters to all workers of their stages, first layers first. try is that of the
// step which was committed. capture, if it is not nil, is called when all is updated.
func (e *Engine) update(step int, try key.Try, u zero.Update, capture, after func()) {
	e.former, e.c.Begin = nil, nil // nothing begins any more, and what it keeps is free
	for l := range e.c.Layers {
		if !e.serves(l) {
			e.c.Layers[l].Params = nil // what is held of it keeps its memory
		}
	}
	for l := range e.arrivals {
		e.expectParams(l, step)
	}
	order := e.inOrder()
	totals := make([][]float32, len(order))
	for i, sh := range order {
		totals[i] = sh.total
	}
	e.tellUpdate(u, try)
	var out []*outgoing
	var sources []*shard
	for _, o := range e.outgoing {
		if !o.base {
			out, sources = append(out, o), append(sources, e.source(o.r))
		}
	}
	digests := make([][][]zero.Digest, len(order))
	for i, sh := range order {
		digests[i] = e.guard.of(sh.Range)
	}
	sent := e.sent
	e.sent = nil
	e.do(onJob, func() error {
		if err := drain(e.ctx, sent); err != nil {
			return err
		}
		for i, sh := range order {
			if sh.state == nil {
				continue
			}
			sh.state.Update(e.c.Pool, sh.params, totals[i], u, digests[i]...)
			if sh.owner {
				e.mail.put(func() {
					e.phase(step, PhaseGather)
					e.spread(sh, step, nil)
				})
			}
		}
		if len(out) > 0 {
			bases := e.copyFills(out, sources, u.Step)
			e.mail.put(func() { e.postBases(out, bases) })
		}
		if capture != nil {
			capture()
		}
		return nil
	}, func(err error) {
		if err != nil {
			e.fail(err)
			return
		}
		e.computed(trace.Update, spanOf(-1, 0))
		e.phase(step, PhaseGather) // of who spreads nothing
		after()
	})
}

// reducer returns who reduces the gradient of a shard: its owner, if that
// serves the stage, else another worker of the stage.
func (e *Engine) reducer(p plan.Shard) id.WorkerID {
	workers := e.plan.Stages[e.plan.StageOf(p.Layer)].Workers
	if slices.Contains(workers, p.Owner) {
		return p.Owner
	}
	return workers[e.index[rangeOf(p)]%len(workers)]
}

// planned returns what the plan says of a range.
func (e *Engine) planned(r id.Range) plan.Shard { return e.plan.Shards[e.index[r]] }

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
	var keys []comm.Key
	var params [][]float32
	for _, p := range e.plan.Shards {
		if p.Layer == layer && !e.computes(rangeOf(p)) {
			keys = append(keys, key.Params(e.after(step), rangeOf(p)))
			params = append(params, e.c.Layers[layer].Params[p.Lo:p.Hi])
		}
	}
	e.arrivals[layer].expect(e, keys, params)
}

// computes reports whether this worker updates a range itself.
func (e *Engine) computes(r id.Range) bool {
	sh := e.shards[r]
	return sh != nil && sh.state != nil
}

// spread sends the parameters of an owned shard to the workers of its stage
// that do not compute them; only to some, if there is a choice.
func (e *Engine) spread(sh *shard, step int, choose func(id.WorkerID) bool) {
	p := e.planned(sh.Range)
	for _, w := range e.plan.Stages[e.plan.StageOf(sh.Layer)].Workers {
		if w != p.Owner && !slices.Contains(p.Mirrors, w) && (choose == nil || choose(w)) {
			e.post(w, key.Params(e.after(step), sh.Range), comm.Bytes(sh.params), comm.Bulk+comm.Priority(sh.Layer))
		}
	}
}

// arrivals are the parameters of a layer on their way here. The loop expects
// them, the computing goroutine waits.
type arrivals struct {
	mu      sync.Mutex
	missing map[*comm.Receiving]arrival
	stopped bool          // more is missing, which is not expected any more
	full    chan struct{} // closed when nothing is missing; nil if nothing was
}

// arrival is a message that is expected and where it goes.
type arrival struct {
	key comm.Key
	to  *float32
}

// expect lets the layer wait for messages. What it waited for before, and is
// missing, it does not any more.
func (a *arrivals) expect(e *Engine, keys []comm.Key, params [][]float32) {
	a.mu.Lock()
	was := a.missing
	a.missing, a.stopped = make(map[*comm.Receiving]arrival), false
	a.mu.Unlock()
	kept := make(map[arrival]*comm.Receiving)
	for i, k := range keys {
		kept[arrival{k, &params[i][0]}] = nil
	}
	for r, was := range was {
		if _, ok := kept[was]; ok {
			kept[was] = r // its copy may be under way, and no other
			continue
		}
		r.Cancel(errClosed)
		<-r.Done() // the reader of a link leaves the memory at once
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.full == nil || isClosed(a.full) {
		a.full = make(chan struct{})
	}
	for i, k := range keys {
		to := arrival{k, &params[i][0]}
		if r := kept[to]; r != nil {
			a.missing[r] = to
			continue
		}
		r := e.c.Network.Expect(k, comm.Bytes(params[i]))
		a.missing[r] = to
		r.OnDone(func() {
			if _, _, err := r.Wait(e.ctx); err == nil || errors.Is(err, comm.ErrDuplicate) {
				e.guard.take(key.RangeOf(k), params[i])
			}
			e.mail.put(func() { a.came(e, r) })
		})
	}
	if len(a.missing) == 0 {
		close(a.full)
	}
}

// stop keeps what is missing of some ranges from coming. Until all that is still missing is expected
// anew, nothing counts as there.
func (a *arrivals) stop(choose func(id.Range) bool) {
	a.mu.Lock()
	var stopped []*comm.Receiving
	for r, was := range a.missing {
		if choose(key.RangeOf(was.key)) {
			delete(a.missing, r)
			stopped = append(stopped, r)
		}
	}
	a.stopped = a.stopped || len(stopped) > 0
	a.mu.Unlock()
	for _, r := range stopped {
		r.Cancel(errClosed)
		<-r.Done() // the reader of a link leaves the memory at once
	}
}

// drop stops all, of a layer that nobody here waits for any more.
func (a *arrivals) drop() {
	a.stop(func(id.Range) bool { return true })
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stopped, a.full = false, nil
}

// came takes note of a message, or of one that had come before.
func (a *arrivals) came(e *Engine, r *comm.Receiving) {
	if _, _, err := r.Wait(e.ctx); err != nil && !errors.Is(err, comm.ErrDuplicate) {
		return // it is not wanted any more
	}
	a.mu.Lock()
	if _, ok := a.missing[r]; ok {
		delete(a.missing, r)
		if len(a.missing) == 0 && !a.stopped {
			close(a.full)
		}
	}
	a.mu.Unlock()
}

// there reports whether nothing is missing.
func (a *arrivals) there() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.full == nil || isClosed(a.full)
}

// wait returns when nothing is missing.
func (a *arrivals) wait(ctx context.Context) error {
	a.mu.Lock()
	full := a.full
	a.mu.Unlock()
	if full == nil {
		return nil
	}
	select {
	case <-full:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
