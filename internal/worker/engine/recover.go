package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// Query seals the worker and hands what it knows to answer, which must not
// wait. A worker that has seen a higher ballot does not answer.
func (e *Engine) Query(b id.Ballot, answer func(controller.Report)) {
	e.mail.put(func() {
		if b.Compare(e.ballot) < 0 || e.err != nil && !errors.Is(e.err, ErrLeft) {
			return
		}
		e.ballot, e.sealed = b, true
		// An order that is being applied is withdrawn: the report is about what
		// was before, and must stay true.
		e.order, e.joins = nil, id.Version{}
		answer(e.report())
		if e.jobStop != nil {
			e.jobStop() // it begins anew under the plan that comes
		}
	})
}

// Order gives the worker a plan to apply; see [controller.Order]. One with a lower
// ballot than a query that was answered is dropped, and so is one whose plan is
// not newer than the live one.
func (e *Engine) Order(o controller.Order) {
	e.mail.put(func() {
		switch {
		case errors.Is(e.err, ErrLeft) && o.Ballot.Compare(e.ballot) >= 0 && o.Ballot != id.Ballot{}:
			// Who has left knows what was committed, and others may want that. The plan does without it.
			e.c.Applied(Applied{Ballot: o.Ballot, Version: o.Plan.Version})
		case e.err != nil || o.Plan.Version.Compare(e.plan.Version) < 0:
		case o.Plan.Version == e.plan.Version:
			// Sent again, by an agent that does not know that it is applied.
			if o.Ballot.Compare(e.ballot) >= 0 && e.order == nil {
				e.ballot, e.sealed = o.Ballot, false
				e.at, e.resuming = time.Now(), &Applied{Ballot: o.Ballot, Version: o.Plan.Version}
			}
		case o.Ballot == id.Ballot{}:
			e.pending = append(e.pending, o)
			if len(e.plan.Workers) == 0 && e.live == (id.Version{}) {
				e.c.First.Epoch = o.Epoch
				e.admit(&o) // who tells that it is live may be a stranger, if nothing was copied before
				e.awaitLive(o)
			}
		case o.Ballot.Compare(e.ballot) >= 0:
			e.ballot, e.sealed = o.Ballot, true
			e.setOrder(o)
		}
	})
}

// setOrder makes an order the one to be applied now.
func (e *Engine) setOrder(o controller.Order) {
	e.order, e.edited, e.admitted, e.came = &o, false, false, time.Now()
}

// LinkLost says that the link to a session broke, so that what was sent to it
// may be lost.
func (e *Engine) LinkLost(s id.Session) {
	e.mail.put(func() {
		if e.session(s.Worker) == s {
			e.lossy[s.Worker] = true
			return
		}
		// One that has left is gone.
		left := func(p comm.Peer) bool { return p.Session == s }
		if slices.ContainsFunc(e.peers, left) && e.order == nil {
			e.peers = slices.DeleteFunc(e.peers, left)
			if err := e.c.Network.SetMembers(e.peers); err != nil {
				e.fail(err)
			}
		}
	})
}

// report says what a sealed worker knows.
func (e *Engine) report() controller.Report {
	r := controller.Report{Plan: e.live, Passed: e.passed, Result: e.result, Holds: e.plan.Version, Filled: e.filled()}
	if e.step == nil || e.step.number <= e.passed.Step {
		return r
	}
	r.Works = e.step.queue.Statuses()
	if e.guard != nil {
		// Nobody has said yet that its memory is as it was, so what the lost have done is done again, and
		// held against what they have handed over.
		return r
	}
	for _, sh := range e.inOrder() {
		// The losses of the last stage are with who computed them, so its work is
		// done again.
		if sh.complete && sh.state != nil && e.plan.StageOf(sh.Layer) < len(e.plan.Stages)-1 {
			r.Complete = append(r.Complete, sh.Range)
		}
	}
	return r
}

// goLive makes a boundary plan that all workers have received the next to be
// applied.
func (e *Engine) goLive(v id.Version) {
	e.live = v
	if e.order != nil {
		return // of a recovery, which comes after it
	}
	for i := range e.pending {
		if e.pending[i].Plan.Version == v {
			o := e.pending[i]
			o.Passed = e.passed
			e.setOrder(o)
			e.admit(&o) // those who join may be strangers
			e.tellLive(&o)
		}
	}
	if e.order == nil {
		e.fail(fmt.Errorf("plan %v is to go live and never came", v))
	}
}

// obey applies the order, as far as that can be done now, and reports whether
// it is applied.
func (e *Engine) obey() bool {
	o := e.order
	if (o.Ballot != id.Ballot{}) && !e.admitted {
		// First of all: what goes on may wait for who is not there any more.
		e.admit(o)
		e.admitted = true
	}
	if e.passed.Compare(o.Passed) < 0 && !e.catchUp(o) {
		return false
	}
	if e.passed != o.Passed {
		e.fail(fmt.Errorf("plan %v goes on from %v, and this worker is at %v", o.Plan.Version, o.Passed, e.passed))
		return false
	}
	if e.jobStop != nil {
		e.jobStop()
	}
	if e.busy == onJob {
		return false
	}
	if _, ok := o.Plan.Worker(e.c.Self.ID); !ok {
		e.leave(o)
		return false
	}
	if (o.Ballot == id.Ballot{}) && e.awaits(o) {
		return false
	}
	if e.lacks(o) {
		// The last gradient is on its way here.
		if e.busy == idle {
			e.doChore()
		}
		return false
	}
	if !e.edited {
		if e.ops > 0 {
			e.opsCancel()
			return false
		}
		e.edit(o)
		return false
	}
	if e.ops > 0 {
		return false // links are being made
	}
	if e.passed == e.start && !e.prepare(&o.Plan) {
		return false
	}
	e.apply(o)
	return e.err == nil && !e.sealed
}

// awaits reports whether parameters have to come before a boundary plan can be applied. Most
// may come under the new plan, as under the next forward pass they always do. But who sends
// may not leave; and where this worker newly holds a part of a layer that it has served, it
// writes into the same memory.
func (e *Engine) awaits(o *controller.Order) bool {
	if slices.ContainsFunc(e.plan.Workers, func(w plan.Worker) bool { return !slices.Contains(o.Plan.Workers, w) }) {
		return !e.arrived()
	}
	return slices.ContainsFunc(o.Plan.Shards, func(p plan.Shard) bool {
		return p.Holds(e.c.Self.ID) && !e.computes(rangeOf(p)) && !e.arrivals[p.Layer].there()
	})
}

// catchUp passes the point that others have passed.
func (e *Engine) catchUp(o *controller.Order) bool {
	if e.busy != idle && e.req != nil && e.req.said == nil {
		return false // an evaluation that is being stopped
	}
	repaired := e.passed
	repaired.Repair++
	if e.req == nil || e.req.point != o.Passed && repaired != o.Passed || e.req.said == nil {
		e.fail(fmt.Errorf("others passed %v, and this worker had not come to it from %v", o.Passed, e.passed))
		return false
	}
	said, err := decodeSaid(o.Result)
	if err == nil && len(said) != len(e.plan.Workers) {
		err = fmt.Errorf("the result of %d workers", len(said))
	}
	if err != nil {
		e.fail(fmt.Errorf("%v was passed with %w under a plan of %d", o.Passed, err, len(e.plan.Workers)))
		return false
	}
	e.pass(said)
	return e.err == nil
}

// admit admits the workers of the plan and evicts all others, but for those
// who leave between two steps: they may not have passed the commit yet that
// this worker has, and end their links themselves.
func (e *Engine) admit(o *controller.Order) {
	var peers []comm.Peer
	for _, x := range o.Peers {
		peers = append(peers, comm.Peer{Session: sessionOf(x.Worker), Addr: x.Addr})
	}
	if (o.Ballot == id.Ballot{}) {
		for _, p := range e.peers {
			if !slices.ContainsFunc(peers, func(x comm.Peer) bool { return x.Worker == p.Worker }) {
				peers = append(peers, p)
			}
		}
	}
	e.peers = peers
	if err := e.c.Network.SetMembers(peers); err != nil {
		e.fail(err)
	}
}

// leave ends this worker's part: the plan goes on without it.
func (e *Engine) leave(o *controller.Order) {
	e.c.Applied(Applied{Ballot: o.Ballot, Version: o.Plan.Version, Edit: time.Since(e.came)})
	e.order = nil
	e.fail(ErrLeft)
}

// edit admits the workers of the plan, evicts all others, and edits the groups
// in place. That ends when all links are there.
func (e *Engine) edit(o *controller.Order) {
	e.edited, e.broken = true, false // all operations of the plan before have ended
	p := &o.Plan
	e.opsCtx, e.opsCancel = context.WithCancel(e.ctx)
	e.admit(o)
	type edit struct {
		group   *comm.Group
		members []id.Session
	}
	var edits []edit
	add := func(number uint16, members []id.WorkerID) *comm.Group {
		g := e.c.Groups[number]
		if g == nil {
			var err error
			if g, err = e.c.Network.NewGroup(number); err != nil {
				e.fail(err)
				return nil
			}
			e.c.Groups[number] = g
		}
		sessions := make([]id.Session, len(members))
		for i, m := range members {
			w, _ := p.Worker(m)
			sessions[i] = sessionOf(w)
		}
		edits = append(edits, edit{g, sessions})
		return g
	}
	all := make([]id.WorkerID, len(p.Workers))
	for i, w := range p.Workers {
		all[i] = w.ID
	}
	e.everyone = add(key.Everyone, all)
	clear(e.groups)
	for s, st := range p.Stages {
		if len(st.Workers) > 1 && slices.Contains(st.Workers, e.c.Self.ID) {
			e.groups[s] = add(key.OfStage(s), st.Workers)
		}
	}
	if e.err != nil {
		return
	}
	ctx, opened, version := e.opsCtx, 0, p.Version
	e.operate(func() error {
		for _, x := range edits {
			n, err := x.group.Edit(ctx, version, x.members)
			opened += n
			if err != nil {
				return err
			}
		}
		return nil
	}, func() { e.opened = opened })
}

// apply goes over to the plan of the order, whose groups are edited.
func (e *Engine) apply(o *controller.Order) {
	if e.broken {
		// The edit has failed, because of a link that breaks again. Another order
		// will come.
		e.order = nil
		return
	}
	old := e.plan
	e.plan, e.live = &o.Plan, o.Plan.Version
	e.rank = slices.IndexFunc(e.plan.Workers, func(w plan.Worker) bool { return w.ID == e.c.Self.ID })
	e.index = make(map[id.Range]int, len(e.plan.Shards))
	for i, sh := range e.plan.Shards {
		e.index[rangeOf(sh)] = i
	}
	e.pending = slices.DeleteFunc(e.pending, func(x controller.Order) bool {
		return o.Ballot != id.Ballot{} || x.Plan.Version.Compare(o.Plan.Version) <= 0
	})
	if e.begun != nil {
		close(e.begun)
		e.begun = nil
	}
	if (o.Ballot != id.Ballot{}) {
		for l := range e.arrivals {
			e.arrivals[l].stop(e.holds) // it is made of what is here
		}
	}
	fresh := e.serve(old)
	if err := e.hold(); err != nil {
		e.fail(err)
		return
	}
	e.refill(fresh)
	e.watch(fresh)
	e.share(old, o.Ballot != id.Ballot{})
	e.askShapes()
	for w := range e.lossy {
		for s := range e.shapes {
			delete(e.shapes[s].told, e.session(w))
		}
	}
	e.tellShapes(old)
	if e.req != nil {
		e.req.said, e.req.exchanging = nil, false
	}
	e.broken = false
	if e.step != nil {
		e.reroute(old)
	}
	e.remend()
	clear(e.lossy)
	e.endFills()
	e.putOff = 0
	if e.passed != e.start {
		clear(e.initial.shards)
		clear(e.initial.stages)
	}
	e.order = nil
	e.at = time.Now()
	e.resuming = &Applied{Ballot: o.Ballot, Version: o.Plan.Version, Opened: e.opened, Edit: e.at.Sub(e.came)}
	if o.Ballot.Compare(e.ballot) >= 0 || len(old.Workers) == 0 {
		e.sealed = false
	}
}

// serve makes the stages that this worker has not served before, also where one has other
// layers now, and returns the layers that are new here.
func (e *Engine) serve(old *plan.Plan) (fresh []int) {
	had := make(map[int]bool)
	for s := range e.stages {
		was := old.Stages[s]
		for l := was.Lo; l < was.Hi; l++ {
			had[l] = true
		}
		if s >= len(e.plan.Stages) || !slices.Contains(e.plan.Stages[s].Workers, e.c.Self.ID) ||
			e.plan.Stages[s].Lo != was.Lo || e.plan.Stages[s].Hi != was.Hi {
			delete(e.stages, s)
		}
	}
	var firsts []int
	for _, s := range e.plan.StagesOf(e.c.Self.ID) {
		firsts = append(firsts, e.plan.Stages[s].Lo)
		st := e.plan.Stages[s]
		if e.stages[s] == nil {
			if e.stages[s] = e.initial.stages[[2]int{st.Lo, st.Hi}]; e.stages[s] == nil {
				e.stages[s] = e.c.Stage(st.Lo, st.Hi)
			}
		}
		for l := st.Lo; l < st.Hi; l++ {
			if !had[l] {
				fresh = append(fresh, l)
				e.grads[l] = tree.NewSums(e.micros, e.mergeGrads)
			}
			delete(had, l)
		}
	}
	e.c.Meter.Keep(firsts...)
	for l := range had {
		// Its parameters stay until the next commit: what has come of them does not come again,
		// should another plan bring the layer back before that.
		e.arrivals[l].drop()
		e.grads[l] = nil
	}
	return fresh
}

// holds reports whether the plan makes this worker a holder of a part of the range.
func (e *Engine) holds(r id.Range) bool {
	return slices.ContainsFunc(e.plan.Shards, func(s plan.Shard) bool {
		return s.Layer == r.Layer && s.Lo < r.Hi && r.Lo < s.Hi && s.Holds(e.c.Self.ID)
	})
}

// hold brings the shards in line with the plan.
func (e *Engine) hold() error {
	mine, fresh := make(map[id.Range]bool), make(map[id.Range]*shard)
	me := e.c.Self.ID
	for _, p := range e.plan.Shards {
		owner, reduces, r := p.Owner == me, e.reducer(p) == me, rangeOf(p)
		sh := e.shards[r]
		if !owner && !slices.Contains(p.Mirrors, me) {
			if reduces || e.c.Zero == 1 && e.serves(p.Layer) {
				if mine[r] = true; sh == nil || sh.state != nil {
					sh = &shard{Range: r}
					e.shards[r] = sh
				}
				sh.assign(false, reduces)
			}
			continue
		}
		mine[r] = true
		if (sh == nil || sh.state == nil) && e.passed != e.start {
			made, err := e.assemble(r)
			if err == nil && made == nil && e.passed.Gate == id.Kept {
				continue // all is written: nobody needs it any more
			}
			if err == nil && made == nil {
				err = fmt.Errorf("plan %v makes this worker a holder of [%d,%d) of layer %d, which it does not have", e.plan.Version, r.Lo, r.Hi, r.Layer)
			}
			if err != nil {
				return err
			}
			sh, fresh[r] = made, made
		}
		if sh == nil || sh.state == nil {
			sh = e.initial.shards[r]
			fresh[r] = sh
		}
		sh.assign(owner, reduces)
	}
	for r, sh := range e.shards {
		if !mine[r] {
			delete(e.shards, r)
			if sh.state != nil {
				e.former = append(e.former, sh)
			}
		}
	}
	for r, sh := range fresh {
		e.shards[r] = sh
		if e.serves(sh.Layer) && e.c.Layers[sh.Layer].Params != nil {
			// Of a layer that was served before, the parameters are there.
			view := e.c.Layers[sh.Layer].Params[r.Lo:r.Hi]
			place(view, sh.params)
			sh.params = view
		}
	}
	return nil
}

// place writes parameters where a layer reads them. What lies there already is
// not touched, because it may be on its way to others.
func place(to, params []float32) {
	if !slices.Equal(to, params) {
		copy(to, params)
	}
}

// refill gets the parameters of layers that are new here, beyond those that
// the run began with.
func (e *Engine) refill(fresh []int) {
	for _, l := range fresh {
		params := e.c.Layers[l].Params
		for _, sh := range e.shards {
			if sh.Layer == l && sh.state != nil {
				place(params[sh.Lo:sh.Hi], sh.params)
				sh.params = params[sh.Lo:sh.Hi]
			}
		}
		if e.passed != e.start {
			e.expectParams(l, e.passed.Step)
		}
	}
}

// beginnings are stages and shards as they are where the run begins, made
// before the plan that needs them is applied.
type beginnings struct {
	shards map[id.Range]*shard
	stages map[[2]int]Stage // by layers
}

// prepare makes what a plan needs at the beginning, and reports whether all is
// there. It may take long, so the computing goroutine does it.
func (e *Engine) prepare(p *plan.Plan) bool {
	var stages [][2]int
	for _, s := range p.StagesOf(e.c.Self.ID) {
		if k := [2]int{p.Stages[s].Lo, p.Stages[s].Hi}; e.initial.stages[k] == nil {
			stages = append(stages, k)
		}
	}
	var ranges []id.Range
	for _, sh := range p.Shards {
		if sh.Holds(e.c.Self.ID) {
			if r := rangeOf(sh); e.initial.shards[r] == nil {
				ranges = append(ranges, r)
			}
		}
	}
	if len(stages)+len(ranges) == 0 {
		return true
	}
	if e.busy != idle {
		return false
	}
	made := beginnings{make(map[id.Range]*shard), make(map[[2]int]Stage)}
	e.do(onJob, func() error {
		serves := make(map[int]bool)
		for _, k := range stages {
			made.stages[k] = e.c.Stage(k[0], k[1])
			for l := k[0]; l < k[1]; l++ {
				serves[l] = true
			}
		}
		// All of a layer follows from the same values: layer by layer, they are
		// made once.
		for l := range e.c.Layers {
			if serves[l] {
				params := e.c.Layers[l].Params
				if err := e.c.Begin(id.Range{Layer: l, Lo: 0, Hi: len(params)}, params, nil); err != nil {
					return err
				}
			}
			for _, r := range ranges {
				if r.Layer != l {
					continue
				}
				state, err := zero.NewShard(e.c.Rule, r, e.c.Layers[l].Tensors)
				if err != nil {
					return err
				}
				sh := &shard{Range: r, state: state, params: make([]float32, r.Hi-r.Lo)}
				if err := e.c.Begin(r, sh.params, state.Moments); err != nil {
					return err
				}
				made.shards[r] = sh
			}
		}
		return nil
	}, func(err error) {
		if err != nil {
			e.fail(err)
			return
		}
		for k, s := range made.stages {
			e.initial.stages[k] = s
		}
		for r, sh := range made.shards {
			e.initial.shards[r] = sh
		}
	})
	return false
}

// share sends the parameters of owned shards to workers that are new in their
// stages. In a recovery, others may lack them, too, because their owner was
// lost; who has them drops them.
func (e *Engine) share(old *plan.Plan, recovery bool) {
	if e.passed == e.start {
		return
	}
	if recovery {
		for l := range e.arrivals {
			if !e.arrivals[l].there() {
				e.expectParams(l, e.passed.Step)
			}
		}
	}
	for _, sh := range e.inOrder() {
		if !sh.owner {
			continue
		}
		was := old.StageOf(sh.Layer)
		e.spread(sh, e.passed.Step, func(w id.WorkerID) bool {
			before, _ := old.Worker(w)
			now, _ := e.plan.Worker(w)
			return recovery || before != now || was < 0 || !slices.Contains(old.Stages[was].Workers, w)
		})
	}
}

// reroute brings the step that goes on in line with the plan. What is finished
// here stays so; what others may lack is sent again.
func (e *Engine) reroute(old *plan.Plan) {
	st := e.step
	for w := range e.lossy {
		for _, b := range st.tensors {
			delete(b.sentTo, w)
			delete(b.vouchedTo, w)
		}
	}
	for _, w := range old.Workers {
		if now, ok := e.plan.Worker(w.ID); !ok || now != w {
			for _, b := range st.tensors {
				delete(b.sentTo, w.ID)
				delete(b.vouchedTo, w.ID)
			}
		}
	}
	st.assigned(old, e.plan, e.c.Self.ID)
	e.assign()
	e.doubt(old)
	for s := range e.stages {
		// Either all gradients of a stage are where the plan wants them, or they
		// are reduced once more, from the sums that everybody has kept.
		settled := e.settled(s)
		for l := e.plan.Stages[s].Lo; l < e.plan.Stages[s].Hi; l++ {
			st.layers[l].reduced = settled
		}
		for _, sh := range e.shards {
			if e.plan.StageOf(sh.Layer) != s || !sh.owner {
				continue
			}
			if settled && !sh.complete {
				e.fail(fmt.Errorf("step %d: plan %v counts on a gradient of layer %d that this worker does not have", st.number, e.plan.Version, sh.Layer))
				return
			}
		}
	}
	for _, sh := range e.shards {
		sh.again(e, e.settled(e.plan.StageOf(sh.Layer)))
	}
}

// settled reports whether the plan counts on the gradients of a stage that
// their owners have.
func (e *Engine) settled(s int) bool {
	return slices.ContainsFunc(e.plan.Settled, func(p graph.Pair) bool {
		return p.Stage == s && !e.plan.Runs(p, e.step.number)
	})
}

// resumed tells that the plan is applied and that work goes on.
func (e *Engine) resumed() {
	if e.resuming == nil || e.step != nil && e.busy == idle && e.step.queue.Left() > 0 {
		return
	}
	a := *e.resuming
	e.resuming = nil
	a.Resume = time.Since(e.at)
	e.c.Applied(a)
}
