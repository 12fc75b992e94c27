package core

import (
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// recovery is what the core knows of queries, orders and plans that are to come.
type recovery struct {
	ballot   id.Ballot
	order    *control.Order   // to be applied now
	opened   int              // links for it
	resuming *control.Applied // applied, but no task began yet
	pending  []control.Order
	joining  id.Version           // of a worker that joins: the plan that is to go live
	lossy    map[id.WorkerID]bool // links that broke since the plan was applied
	peers    []comm.Peer          // admitted for a plan

	// What was made of the beginning of the run: stages, by layers, and ranges.
	madeStages [][2]int
	madeRanges []id.Range
	firsts     []int // layers whose first values are to be made, in order
}

var noBallot id.Ballot

// query seals the worker and answers. A worker that has seen a higher ballot does not answer.
func (w *Worker) query(q control.Query) {
	if q.Ballot.Compare(w.ballot) < 0 || w.state == Dead {
		return
	}
	w.ballot = q.Ballot
	// An order that is being applied is withdrawn: the report is about what was before, and must stay true.
	w.order, w.deferred, w.joining = nil, nil, id.Version{}
	if w.state != Left {
		w.to(Sealed)
	}
	w.emit(control.Answer{Ballot: q.Ballot, Report: w.report()})
	w.stopJob()
	w.stopCopies()
}

// report says what a sealed worker knows.
func (w *Worker) report() control.Report {
	r := control.Report{Plan: w.live, Passed: w.passed, Result: w.result, Holds: w.plan.Version, Filled: w.filled()}
	if w.state == Left {
		r.Holds = w.live // which assigns it nothing
	}
	if w.step == nil || w.step.number <= w.passed.Step {
		return r
	}
	r.Works = w.step.queue.Statuses()
	if !w.c.NoDigests {
		// No worker has said yet that its memory is as it was. So what the lost workers did is done again, and compared with
		// what they have handed over.
		return r
	}
	for _, sh := range w.inOrder() {
		// The losses of the last stage are with the workers that computed them, so its work is done again.
		if sh.complete && sh.holds && w.plan.StageOf(sh.Layer) < len(w.plan.Stages)-1 {
			r.Complete = append(r.Complete, sh.Range)
		}
	}
	return r
}

// receiveOrder takes a plan. One with a lower ballot than a query that was answered is dropped, and so is one whose plan is not
// newer than the live one.
func (w *Worker) receiveOrder(o control.Order) {
	recovers := o.Ballot != noBallot
	switch {
	case w.state == Left && recovers && o.Ballot.Compare(w.ballot) >= 0:
		// This worker knows what was committed, and others may need that. The plan does without it.
		w.emit(Mark{})
		w.emit(Mark{Live: true})
		w.emit(control.Applied{Ballot: o.Ballot, Version: o.Plan.Version})
	case w.over() || o.Plan.Version.Compare(w.plan.Version) < 0:
	case o.Plan.Version == w.plan.Version:
		// Sent again, by an agent that does not know that it is applied.
		if o.Ballot.Compare(w.ballot) >= 0 && w.order == nil {
			w.ballot = o.Ballot
			if w.state == Sealed {
				w.to(Working)
			}
			w.emit(Mark{})
			w.emit(Mark{Live: true})
			w.resuming = &control.Applied{Ballot: o.Ballot, Version: o.Plan.Version}
		}
	case !recovers:
		w.pending = append(w.pending, o)
		if len(w.plan.Workers) == 0 && w.live == (id.Version{}) {
			if w.state == Sealed {
				w.to(Joining) // the recovery that asked is over, and went on without this worker
			}
			w.c.First.Epoch = o.Epoch
			w.admit(&o) // the worker that tells that it is live may be a stranger, if nothing was copied before
			w.awaitLive(o)
		}
	case o.Ballot.Compare(w.ballot) >= 0:
		w.ballot = o.Ballot
		w.setOrder(o)
		w.stopCopies()
		// First of all: what goes on may wait for a worker that is lost.
		w.admit(&o)
	}
}

// setOrder makes an order the one to be applied now.
func (w *Worker) setOrder(o control.Order) {
	w.order, w.deferred = &o, nil
	if w.has(onRepeat) {
		w.emit(StopRepeat{}) // what the plan has this worker compute comes first
	}
	if w.passed.Compare(o.Passed) < 0 {
		w.to(CatchingUp)
	} else {
		w.to(Draining)
	}
	w.emit(Mark{})
}

// linkLost takes note of a link that broke.
func (w *Worker) linkLost(s id.Session) {
	if w.over() {
		return
	}
	if w.session(s.Worker) == s {
		w.lossy[s.Worker] = true
		return
	}
	// One that has left is gone.
	left := func(p comm.Peer) bool { return p.Session == s }
	if slices.ContainsFunc(w.peers, left) && w.order == nil {
		w.peers = slices.DeleteFunc(slices.Clone(w.peers), left)
		w.emit(Admit{w.peers})
	}
}

// goLive makes a boundary plan that all workers have received the next to be applied.
func (w *Worker) goLive(v id.Version) {
	w.live = v
	if w.order != nil {
		return // of a recovery, which comes after it
	}
	for _, o := range w.pending {
		if o.Plan.Version == v {
			o.Passed = w.passed
			w.setOrder(o)
			w.admit(&o) // workers that join may be strangers
			w.tellLive(&o)
			return
		}
	}
	w.fail(fmt.Errorf("plan %v is to go live and never came", v))
}

// newest returns the newest plan that has come, and could go live here without a wait for more than the gradient of this step, or whose state
// comes too slowly to wait until then.
func (w *Worker) newest() id.Version {
	v := w.plan.Version
	for i := range w.pending {
		if o := &w.pending[i]; v.Compare(o.Plan.Version) < 0 && (w.tooSlow() || !w.behind(o)) {
			v = o.Plan.Version
		}
	}
	return v
}

// obey applies the order, as far as that can be done now, and reports whether it is applied and work goes on.
func (w *Worker) obey() bool {
	o := w.order
	if w.state == CatchingUp {
		if w.passed.Compare(o.Passed) < 0 && !w.catchUp(o) {
			return false
		}
		w.to(Draining)
	}
	if w.passed != o.Passed {
		w.fail(fmt.Errorf("plan %v goes on from %v, and this worker is at %v", o.Plan.Version, o.Passed, w.passed))
		return false
	}
	w.stopJob()
	if w.has(onFill) || w.has(onJob) && !w.leavesJob() || w.has(onFirst) && w.moves(&o.Plan) || w.has(onUpdate, onJob) && w.alters(o) {
		return false
	}
	if _, ok := o.Plan.Worker(w.me); !ok {
		w.emit(Mark{Live: true})
		w.emit(control.Applied{Ballot: o.Ballot, Version: o.Plan.Version})
		w.order = nil
		w.fail(ErrLeft)
		return false
	}
	if w.isLate() {
		w.catchUpShard()
		return false
	}
	if o.Ballot == noBallot && w.awaits(o) {
		return false
	}
	if w.lacks(o) {
		// The last gradient is on its way here.
		w.replay()
		return false
	}
	if len(w.ops) > 0 {
		if w.state == Draining {
			w.cancelOps()
		}
		return false
	}
	switch w.state {
	case Draining:
		w.to(Editing)
		w.edit(o)
		return false
	case Editing:
		if w.broken {
			// The edit has failed, because of a link that breaks again. Another order will come.
			w.giveUp()
			return false
		}
		if w.passed == w.start {
			w.to(Preparing)
		}
	}
	if w.state == Preparing && !w.prepare(&o.Plan) {
		return false
	}
	w.apply(o)
	return w.state == Working
}

// giveUp drops the order. One that a query has sealed this worker for leaves it sealed, and so does a boundary plan: it is live, so nothing
// may begin under the plan before it, which may route passes to others and cut stages elsewhere.
func (w *Worker) giveUp() {
	if first := w.order.Ballot == noBallot && len(w.plan.Workers) == 0; first {
		w.to(Joining)
	} else {
		w.to(Sealed)
	}
	w.order = nil
}

// catchUp passes the point that others have passed.
func (w *Worker) catchUp(o *control.Order) bool {
	if !w.idle() && w.req != nil && w.req.said == nil {
		return false // an evaluation that is being stopped
	}
	repaired := w.passed
	repaired.Repair++
	if w.req == nil || w.req.Point != o.Passed && repaired != o.Passed || w.req.said == nil {
		w.fail(fmt.Errorf("others passed %v, and this worker had not come to it from %v", o.Passed, w.passed))
		return false
	}
	said, err := decodeSaid(o.Result)
	if err == nil && len(said) != len(w.plan.Workers) {
		err = fmt.Errorf("the result of %d workers", len(said))
	}
	if err != nil {
		w.fail(fmt.Errorf("%v was passed with %w under a plan of %d", o.Passed, err, len(w.plan.Workers)))
		return false
	}
	w.pass(said)
	return !w.over()
}

// awaits reports whether parameters have to come before a boundary plan can be applied. Most may come under the new plan, as
// under the next forward pass they always do. But a worker that sends may not leave; and where this worker newly holds a part
// of a layer that it has served, it writes into the same memory.
func (w *Worker) awaits(o *control.Order) bool {
	if slices.ContainsFunc(w.plan.Workers, func(x plan.Worker) bool { return !slices.Contains(o.Plan.Workers, x) }) {
		return !w.arrived()
	}
	return slices.ContainsFunc(o.Plan.Shards, func(p plan.Shard) bool {
		return p.Holds(w.me) && !w.computes(RangeOf(p)) && w.arrivals[p.Layer].waiting
	})
}

// admit admits the workers of the plan and evicts all others, but for those that leave between two steps: they may not have
// passed the commit yet that this worker has, and end their links themselves.
func (w *Worker) admit(o *control.Order) {
	var peers []comm.Peer
	for _, x := range o.Peers {
		peers = append(peers, comm.Peer{Session: SessionOf(x.Worker), Addr: x.Addr})
	}
	if o.Ballot == noBallot {
		for _, p := range w.peers {
			if !slices.ContainsFunc(peers, func(x comm.Peer) bool { return x.Worker == p.Worker }) {
				peers = append(peers, p)
			}
		}
	}
	w.peers = peers
	w.emit(Admit{peers})
}

// edit admits the workers of the plan, evicts all others, and edits the groups in place. That ends when all links are there.
func (w *Worker) edit(o *control.Order) {
	w.broken, w.opened = false, 0 // all operations of the plan before have ended
	p := &o.Plan
	w.admit(o)
	group := func(number uint16, members []id.WorkerID) GroupEdit {
		g := GroupEdit{ID: number}
		for _, m := range members {
			x, _ := p.Worker(m)
			g.Members = append(g.Members, SessionOf(x))
		}
		return g
	}
	all := make([]id.WorkerID, len(p.Workers))
	for i, x := range p.Workers {
		all[i] = x.ID
	}
	edits := []GroupEdit{group(key.Everyone, all)}
	for s, st := range p.Stages {
		if len(st.Workers) > 1 && slices.Contains(st.Workers, w.me) {
			edits = append(edits, group(key.OfStage(s), st.Workers))
		}
	}
	w.emit(Edit{w.begin(operation{kind: opEdit}), p.Version, edits})
}

// prepare makes what a plan needs at the beginning, and reports whether all is there. It may take long, so the computing
// goroutine does it.
func (w *Worker) prepare(p *plan.Plan) bool {
	var d Prepare
	for _, s := range p.StagesOf(w.me) {
		if k := [2]int{p.Stages[s].Lo, p.Stages[s].Hi}; !slices.Contains(w.madeStages, k) {
			d.Stages = append(d.Stages, k)
		}
	}
	for _, sh := range p.Shards {
		if r := RangeOf(sh); sh.Holds(w.me) && !slices.Contains(w.madeRanges, r) && !w.derives(p, sh.Layer) {
			d.Ranges = append(d.Ranges, r)
		}
	}
	if len(d.Stages)+len(d.Ranges) == 0 {
		return true
	}
	if w.idle() {
		w.occupy(onJob)
		w.emit(d)
	}
	return false
}

// derives reports whether shards of a layer are derived from it as the run begins.
func (w *Worker) derives(p *plan.Plan, layer int) bool {
	return w.c.Derive && slices.Contains(p.Stages[p.StageOf(layer)].Workers, w.me)
}

// The first values of layers that are served, which take long, are made beside the passes, which wait for them at the gates of layers: a plan is applied
// meanwhile.

// queueFirst has the first values made of layers that are served from now on, and shuts their gates.
func (w *Worker) queueFirst(layers []int) {
	for _, l := range layers {
		if a := &w.arrivals[l]; !a.first {
			a.first, a.making = true, true
			w.waitFor(l)
			w.firsts = append(w.firsts, l)
		}
	}
	slices.Sort(w.firsts)
}

// makeFirst begins with the first values of the next layer, but not where an order waits for those that are being made.
func (w *Worker) makeFirst() {
	if len(w.firsts) > 0 && (w.order == nil || !w.moves(&w.order.Plan)) && w.startBeside(onFirst) {
		w.emit(First{w.firsts[0]})
		w.firsts = w.firsts[1:]
	}
}

// firstMade takes the end of it.
func (w *Worker) firstMade(layer int) {
	w.arrivals[layer].making = false
	w.checkArrivals(layer)
}

// begins reports whether first values are still to be made here.
func (w *Worker) begins() bool { return len(w.firsts) > 0 || w.has(onFirst) }

// moves reports whether under a plan this worker serves other layers than now.
func (w *Worker) moves(p *plan.Plan) bool {
	for l := range w.arrivals {
		if slices.Contains(p.Stages[p.StageOf(l)].Workers, w.me) != w.serves(l) {
			return true
		}
	}
	return false
}

// leavesJob reports whether the job that runs is one of an operation other than a step that was stopped: it reads what is here until it ends, and nothing
// of it counts.
func (w *Worker) leavesJob() bool {
	return w.stopping && w.req != nil && w.req.Point.Gate != id.Committed
}

// alters reports whether under the plan of an order this worker serves other layers than now, or holds other ranges. So does every boundary plan: others
// wait for what is updated here under the plan before.
func (w *Worker) alters(o *control.Order) bool {
	p, held := &o.Plan, 0
	for _, sh := range w.all {
		if sh.holds {
			held++
		}
	}
	for _, s := range p.Shards {
		if s.Holds(w.me) {
			if !w.computes(RangeOf(s)) {
				return true
			}
			held--
		}
	}
	sameCuts := slices.EqualFunc(p.Stages, w.plan.Stages, func(a, b plan.Stage) bool { return a.Lo == b.Lo && a.Hi == b.Hi })
	return held > 0 || !sameCuts || w.moves(p) || o.Ballot == noBallot
}

// apply goes over to the plan of the order, whose groups are edited.
func (w *Worker) apply(o *control.Order) {
	recovers := o.Ballot != noBallot
	old := w.plan
	w.plan, w.live = &o.Plan, o.Plan.Version
	w.index = make(map[id.Range]int, len(w.plan.Shards))
	for i, sh := range w.plan.Shards {
		w.index[RangeOf(sh)] = i
	}
	w.pending = slices.DeleteFunc(w.pending, func(x control.Order) bool {
		return recovers || x.Plan.Version.Compare(o.Plan.Version) <= 0
	})
	if recovers {
		for l := range w.arrivals {
			w.stopArrivals(l, func(r id.Range) bool { return w.willHold(w.plan, r) }) // it is made of what is here
		}
	}
	d := Apply{Plan: w.plan, Initial: w.passed == w.start}
	w.serve(old, &d)
	if err := w.hold(&d); err != nil {
		w.fail(err)
		return
	}
	if w.passed == w.start && w.c.Beside {
		w.queueFirst(d.Fresh)
	}
	w.emit(d)
	if w.passed != w.start {
		for _, l := range d.Fresh {
			if w.arrivals[l].late > 0 {
				w.waitFor(l)
			}
			w.expectParams(l, w.passed.Step)
		}
		w.share(old, recovers)
	}
	w.askShapes()
	for x := range w.lossy {
		for s := range w.shapes {
			delete(w.shapes[s].told, w.session(x))
		}
	}
	w.tellShapes(old)
	if w.req != nil && !w.has(onUpdate) {
		w.req.said, w.req.exchanging = nil, false
	}
	w.broken = false
	if w.step != nil {
		w.reroute(old)
	}
	w.resumeRepairs(old)
	clear(w.lossy)
	deferred := w.deferred
	w.endFills(false)
	if w.passed != w.start {
		w.madeStages, w.madeRanges = nil, nil
	}
	w.order = nil
	w.emit(Mark{Live: true})
	w.resuming = &control.Applied{Ballot: o.Ballot, Version: o.Plan.Version, Opened: w.opened}
	if !w.over() {
		w.to(Working)
		if deferred != nil {
			w.transfer(*deferred)
		}
	}
}

// reroute brings the step that goes on in line with the plan. What is finished here stays so; what others may lack is sent again.
func (w *Worker) reroute(old *plan.Plan) {
	st := w.step
	forget := func(x id.WorkerID) {
		for _, b := range st.tensors {
			delete(b.sentTo, x)
			delete(b.attestedTo, x)
		}
	}
	for x := range w.lossy {
		forget(x)
	}
	for _, x := range old.Workers {
		if now, ok := w.plan.Worker(x.ID); !ok || now != x {
			forget(x.ID)
		}
	}
	st.assigned(old, w.plan, w.me)
	st.spot = w.drawSpot(st.number)
	w.assign()
	w.doubt(old)
	for _, s := range w.served {
		// Either all gradients of a stage are where the plan wants them, or they are reduced once more, from the sums that every
		// worker has kept.
		settled := w.settled(s)
		for l := w.plan.Stages[s].Lo; l < w.plan.Stages[s].Hi; l++ {
			st.layers[l].reduced = settled
		}
		for _, sh := range w.all {
			if w.plan.StageOf(sh.Layer) == s && sh.owner && settled && !sh.complete {
				w.fail(fmt.Errorf("step %d: plan %v counts on a gradient of layer %d that this worker does not have", st.number, w.plan.Version, sh.Layer))
				return
			}
		}
	}
	for _, sh := range w.inOrder() {
		w.restart(sh, w.settled(w.plan.StageOf(sh.Layer)))
	}
}

// settled reports whether the plan counts on the gradients of a stage that their owners have.
func (w *Worker) settled(s int) bool {
	return slices.ContainsFunc(w.plan.Settled, func(p graph.Pair) bool {
		return p.Stage == s && !w.plan.Runs(p, w.step.number)
	})
}

// resumed tells that the plan is applied and that work goes on.
func (w *Worker) resumed() {
	if w.resuming == nil || w.step != nil && !w.has(onPass, onKept, onRepeat, onUpdate, onJob) && w.step.queue.Left() > 0 && !w.begins() {
		return
	}
	w.emit(*w.resuming)
	w.resuming = nil
}

// A worker that joins is in no exchange, so the others tell it when its first plan is live, and where the run is.

// tellLive tells the workers that join with a plan that it is live.
func (w *Worker) tellLive(o *control.Order) {
	for _, p := range o.Peers {
		if was, ok := w.plan.Worker(p.ID); ok && was.Incarnation == p.Incarnation {
			continue
		}
		w.emit(Send{To: SessionOf(p.Worker), Key: key.Live(o.Plan.Version), Data: append(w.committed.append(nil), w.result...), Priority: comm.Control})
	}
}

// maxResult bounds what all said in the commit, which follows its result.
const maxResult = 1 << 20

// awaitLive lets a worker that joins wait for its first plan to be live. A query ends that, because the leader goes on without
// this plan, unless the answer says that it is live.
func (w *Worker) awaitLive(o control.Order) {
	w.joining = o.Plan.Version
	w.expect(key.Live(o.Plan.Version), Buffer{}, resultSize(w.c.Metrics)+maxResult, expected{content: aLive, order: o})
}

// liveCame takes the message that the first plan is live.
func (w *Worker) liveCame(o control.Order, words []byte) {
	size := resultSize(w.c.Metrics)
	if len(words) < size || w.joining != o.Plan.Version {
		return
	}
	w.joining = id.Version{}
	w.committed = parseResult(words, w.c.Metrics)
	w.passed = id.Point{Step: w.committed.Step}
	w.result, w.live = slices.Clone(words[size:]), o.Plan.Version
	o.Passed = w.passed
	w.setOrder(o)
}
