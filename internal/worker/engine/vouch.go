package engine

import (
	"encoding/binary"

	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// A worker whose memory was altered finds that out before the commit. One that is lost before
// that never does, and what others have computed from its boundary tensors stays. So who
// computes one of these again tells the digest of what it made, and who has the lost
// worker's holds it against that. Where they differ, all do the step again, as after an
// altered block. Therefore all that a lost worker has computed in the step is computed again, even where its
// gradients had come to those who own them now.

// vouch tells who has a tensor from a worker that was lost what it should be. id was made here, in place of
// that worker.
func (e *Engine) vouch(what tensorID, b *boundary, to id.WorkerID) {
	if e.guard == nil || !e.step.anew[what.producer()] || b.vouchedTo[to] {
		return
	}
	if b.vouchedTo == nil {
		b.vouchedTo = make(map[id.WorkerID]bool)
		b.digest = binary.LittleEndian.AppendUint64(nil, uint64(zero.DigestOf(b.t.F)))
	}
	b.vouchedTo[to] = true
	e.c.Network.Post(e.session(to), key.Attestation(e.step.attempt, what.named()), b.digest, comm.Control)
}

// doubt expects the digests of tensors here whose makers are lost, of those that are made
// again by others.
func (e *Engine) doubt(old *plan.Plan) {
	if e.guard == nil {
		return
	}
	st, me := e.step, e.c.Self.ID
	for id, b := range st.tensors {
		maker, made := id.producer(), old.Route[id.producer().Stage][id.producer().Micro]
		was, _ := old.Worker(made)
		if now, ok := e.plan.Worker(made); b.here && !b.sure && (!ok || now != was) && st.works[maker] == nil {
			b.doubted = true
		}
		again := b.doubted && e.plan.Runs(maker, st.number) && e.runner(maker) != me && e.runner(id.consumer()) == me
		switch {
		case again && b.vow == nil:
			e.awaitVow(id, b)
		case !again && b.vow != nil: // it is made here, or goes to another worker, or is not made again
			b.vow.Cancel(errClosed)
			b.vow = nil
		}
	}
}

func (e *Engine) awaitVow(id tensorID, b *boundary) {
	st, digest := e.step, make([]byte, 8)
	r := e.c.Network.Expect(key.Attestation(st.attempt, id.named()), digest)
	b.vow = r
	r.OnDone(func() {
		e.mail.put(func() {
			n, _, err := r.Wait(e.ctx) // it has ended
			if e.step != st || b.vow != r || err != nil {
				return
			}
			b.vow, b.doubted, b.sure = nil, false, true
			if n != len(digest) || binary.LittleEndian.Uint64(digest) != uint64(zero.DigestOf(b.t.F)) {
				e.taint(id)
			}
		})
	})
}

// compare holds a tensor that is here against the same one, made here.
func (e *Engine) compare(id tensorID, b *boundary, made tensor.Tensor) {
	if e.guard != nil && zero.DigestOf(b.t.F) != zero.DigestOf(made.F) {
		e.taint(id)
	}
}

// taint has the step done again, since it was computed with a tensor that is wrong.
func (e *Engine) taint(id tensorID) {
	if e.step.tainted {
		return
	}
	e.step.tainted = true
	if e.c.Repaired != nil {
		e.c.Repaired(Repair{Step: e.step.number, Try: e.passed.Repair, Layer: e.plan.Stages[id.b].Lo, Block: id.m, Target: Passed})
	}
}

// doubts reports whether digests of tensors that may be wrong are on their way here.
func (st *stepState) doubts() bool {
	for _, b := range st.tensors {
		if b.vow != nil {
			return true
		}
	}
	return false
}

// assigned marks the pairs that came here by the plan which the struck step goes on with.
func (st *stepState) assigned(old, now *plan.Plan, me id.WorkerID) {
	for s, route := range now.Route {
		for m, w := range route {
			p := graph.Pair{Stage: s, Micro: m}
			if w == me && now.Runs(p, st.number) && (old == nil || old.Route[s][m] != me || !old.Runs(p, st.number)) {
				st.anew[p] = true
			}
		}
	}
}
