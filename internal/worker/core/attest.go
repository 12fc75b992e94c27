package core

import (
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// A worker whose memory was altered finds that out before the commit. A worker that is lost before that never does, and what others
// have computed from its boundary tensors stays. So a worker that recomputes one of these tells the digest of what it made, and a
// worker that has the lost worker's copy compares. Where they differ, all do the step again, as after an altered block. Therefore
// all that a lost worker has computed in the step is computed again, even where its gradients had come to their present owners.
//
// Where the worker that has told the digest is lost as well, the tensor is compared once more with what is made in its place: both may have
// read a sample that no worker can read any more, and that is skipped since.

// attest tells a worker that has a tensor from a lost worker what it should be. It was made here, in place of the lost worker.
func (w *Worker) attest(t key.Tensor, b *boundary, to id.WorkerID) {
	if w.c.NoDigests || !w.step.again[t.Producer()] || b.attestedTo[to] {
		return
	}
	if b.attestedTo == nil {
		b.attestedTo = make(map[id.WorkerID]bool)
	}
	b.attestedTo[to] = true
	w.emit(Attest{w.session(to), key.Attestation(w.step.attempt, t, w.session(w.me)), t})
}

// digestSize is the size of a digest in a message.
const digestSize = 8

// doubt expects the digests of tensors here whose makers are lost, of those that others make again.
func (w *Worker) doubt(old *plan.Plan) {
	if w.c.NoDigests {
		return
	}
	st := w.step
	for t, b := range st.tensors {
		maker, made := t.Producer(), old.Route[t.Producer().Stage][t.Producer().Micro]
		was, _ := old.Worker(made)
		if now, ok := w.plan.Worker(made); b.here && (!ok || now != was) {
			b.doubted = true
		}
		// Where it is made here, or goes to another worker, or is not made again, the digest is not waited for. But it stays expected: one
		// that has come does not come again, should another plan bring the tensor back.
		b.awaited = b.doubted && w.plan.Runs(maker, st.number) && w.runner(maker) != w.me && w.runner(t.Consumer()) == w.me
		if !b.awaited {
			continue
		}
		by := w.session(w.runner(maker))
		if b.attestation != 0 && b.attester != by { // it is lost, or has not begun
			w.cancel(b.attestation, false)
			b.attestation = 0
		}
		if b.attestation == 0 {
			b.attester = by
			b.attestation = w.expect(key.Attestation(st.attempt, t, by), Buffer{}, digestSize, expected{content: anAttestation, tensor: t})
		}
	}
}

// attested takes the digest of a tensor here.
func (w *Worker) attested(t key.Tensor, digest []byte) {
	b := w.step.tensors[t]
	b.attestation, b.doubted = 0, false
	if len(digest) != digestSize {
		w.taint(t)
		return
	}
	w.compare(t, digest)
}

// compare compares a tensor that is here with a digest, or, if that is nil, with the same one, made here.
func (w *Worker) compare(t key.Tensor, digest []byte) {
	w.step.comparing++
	w.emit(Compare{w.step.attempt, t, digest})
}

func (w *Worker) compared(ev Compared) {
	if w.step == nil || w.step.attempt != ev.Attempt {
		return
	}
	w.step.comparing--
	if !ev.Same && !w.c.NoDigests {
		w.taint(ev.Tensor)
	}
}

// taint has the step done again, since it was computed with a tensor that is wrong.
func (w *Worker) taint(t key.Tensor) {
	if w.step.tainted {
		return
	}
	w.step.tainted = true
	w.tellRepaired(w.step.number, w.plan.Stages[t.Boundary].Lo, t.Micro, Passed)
}

// doubts reports whether digests of tensors that may be wrong are on their way here.
func (st *step) doubts() bool {
	for _, b := range st.tensors {
		if b.attestation != 0 && b.awaited {
			return true
		}
	}
	return st.comparing > 0
}

// assigned marks the pairs that may have run on a lost worker: those that came here by the plan which the interrupted step goes on
// with, and those that have not begun here, since a plan that never came to this worker may have had them elsewhere.
func (st *step) assigned(old, now *plan.Plan, me id.WorkerID) {
	for s, route := range now.Route {
		for m, w := range route {
			p := graph.Pair{Stage: s, Micro: m}
			if w == me && now.Runs(p, st.number) && (old == nil || old.Route[s][m] != me || !old.Runs(p, st.number) || st.queue.Status(p).Phase <= graph.Waiting) {
				st.again[p] = true
			}
		}
	}
}
