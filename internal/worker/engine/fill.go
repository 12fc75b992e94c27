package engine

import (
	"encoding/binary"
	"math"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// A range comes to a new holder while training goes on: its source copies the
// range as it is after a commit, and from then on sends the gradient of every
// step, too, as soon as it is complete, and the numbers of the update after the
// commit. The destination applies the same updates to the same bits, so that it has
// what the source has; when a commit makes it the owner, the gradient, which takes
// long, is there already. Messages carry names of their own, which do not end with
// the step, and come from memory of their own, so a destination that is behind
// holds up nobody.

const (
	// baseHead is the numbers before the data of a base: the step it is of.
	baseHead = 1
	// updateWords is the numbers of an update: learning rate, scale, and which try
	// of the step it was, see [Engine.try]. Gradients of other tries do not count.
	updateWords = 3
)

// fillPriority comes after everything that training waits for.
const fillPriority comm.Priority = 1<<16 - 1

// outgoing is a range on its way to a new holder.
type outgoing struct {
	id   id.Fill
	r    id.Range
	to   id.Session
	base bool // the copy is made
}

// incoming is a range that this worker will hold.
type incoming struct {
	id     id.Fill
	r      id.Range
	state  *zero.Shard // nil before the base is here
	params []float32
	step   int  // of which params and state are
	next   bool // the update after it is here

	// Of that update:
	update   []float32 // its numbers, nil before they are here
	gradient []float32 // used again for each
	recv     *comm.Receiving
	try      key.Try // of the gradient that is expected
	came     bool    // it has
}

// Fill copies state in the background; see [controller.Fill].
func (e *Engine) Fill(f controller.Fill) {
	e.mail.put(func() {
		if e.err != nil || f.ID.Compare(e.fillID) <= 0 {
			return
		}
		e.fillID, e.levelSaid = f.ID, false
		e.stopFills()
		peers := make([]comm.Peer, len(f.Peers))
		sessions := make(map[id.WorkerID]id.Session)
		for i, p := range f.Peers {
			peers[i] = comm.Peer{Session: sessionOf(p.Worker), Addr: p.Addr}
			sessions[p.ID] = peers[i].Session
		}
		if e.order == nil { // whose own members count otherwise
			if err := e.c.Network.SetMembers(peers); err != nil {
				e.fail(err)
				return
			}
		}
		for _, t := range f.Transfers {
			r := t.Range
			switch e.c.Self.ID {
			case t.From:
				if to, ok := sessions[t.To]; ok {
					e.outgoing = append(e.outgoing, &outgoing{id: f.ID, r: r, to: to})
				}
			case t.To:
				e.receiveBase(f.ID, r)
			}
		}
	})
}

// stopFills withdraws what is under way.
func (e *Engine) stopFills() {
	e.endFills()
	for _, s := range e.fillSends {
		s.Cancel(errClosed)
	}
	e.fillSends = nil
}

// endFills ends what is under way but for what is being sent: others may wait
// for it before they apply the plan that this was for.
func (e *Engine) endFills() {
	e.outgoing, e.incoming = nil, nil
	for _, r := range e.fillRecvs {
		r.Cancel(errClosed)
	}
	e.fillRecvs = nil
}

// source returns the shard here that a range lies in.
func (e *Engine) source(r id.Range) *shard {
	for _, sh := range e.shards {
		if sh.state != nil && sh.Layer == r.Layer && sh.Lo <= r.Lo && r.Hi <= sh.Hi {
			return sh
		}
	}
	return nil
}

// copyFills is called by the computing goroutine after an update, and returns the
// bases that the loop is to send, nil for those that are to be made after another one: their
// source is not here, or was altered, which the next exchange puts right. sources are the shards of the ranges.
func (e *Engine) copyFills(out []*outgoing, sources []*shard, step int) (bases [][]float32) {
	for i, o := range out {
		sh := sources[i]
		if sh == nil {
			bases = append(bases, nil)
			continue
		}
		lo, hi := o.r.Lo-sh.Lo, o.r.Hi-sh.Lo
		m := make([]float32, 0, baseHead+(1+len(sh.state.Moments))*(hi-lo))
		m = append(m, math.Float32frombits(uint32(step)))
		m = append(m, sh.params[lo:hi]...)
		for _, x := range sh.state.Moments {
			m = append(m, x[lo:hi]...)
		}
		if !e.guard.fit(o.r, m[baseHead:]) {
			m = nil
		}
		bases = append(bases, m)
	}
	return bases
}

// postBases sends what copyFills has made.
func (e *Engine) postBases(out []*outgoing, bases [][]float32) {
	for i, o := range out {
		if bases[i] != nil && o.id == e.fillID {
			o.base = true
			e.postFill(o, key.Base(o.id, o.r), bases[i], fillPriority)
		}
	}
}

// feed sends the complete gradient of a shard to those who will hold parts of it.
func (e *Engine) feed(sh *shard) {
	for _, o := range e.outgoing {
		if !o.base || sh != e.source(o.r) {
			continue
		}
		g := e.free.get(o.r.Hi - o.r.Lo)
		copy(g, sh.total[o.r.Lo-sh.Lo:o.r.Hi-sh.Lo])
		s := e.postFill(o, key.Increment(o.id, o.r, e.step.number, e.try()), g, fillPriority)
		e.late = append(e.late, lateBuffer{g, []<-chan struct{}{s.Done()}})
	}
}

// tellUpdate sends the numbers of an update to who got the gradients. try is that of the
// step which was committed.
func (e *Engine) tellUpdate(u zero.Update, try key.Try) {
	numbers := []float32{u.LR, u.GradScale, math.Float32frombits(uint32(try.Word()))}
	for _, o := range e.outgoing {
		if o.base && e.source(o.r) != nil {
			e.postFill(o, key.Applied(o.id, o.r, u.Step), numbers, comm.Control)
		}
	}
}

func (e *Engine) postFill(o *outgoing, k comm.Key, data []float32, prio comm.Priority) *comm.Sending {
	s := e.c.Network.Post(o.to, k, comm.Bytes(data), prio)
	e.fillSends = append(slices.DeleteFunc(e.fillSends, func(s *comm.Sending) bool { return isClosed(s.Done()) }), s)
	return s
}

// receiveBase waits for the copy of a range.
func (e *Engine) receiveBase(fill id.Fill, r id.Range) {
	in := &incoming{id: fill, r: r}
	e.incoming = append(e.incoming, in)
	n := r.Hi - r.Lo
	buf := make([]float32, baseHead+(1+e.c.Rule.Moments())*n)
	e.receiveFill(in, key.Base(fill, r), buf, func() {
		state, err := zero.NewShard(e.c.Rule, r, e.c.Layers[r.Layer].Tensors)
		if err != nil {
			e.fail(err)
			return
		}
		in.step = int(math.Float32bits(buf[0]))
		in.params = buf[baseHead : baseHead+n]
		for i := range state.Moments {
			state.Moments[i] = buf[baseHead+(1+i)*n : baseHead+(2+i)*n]
		}
		in.state = state
		in.gradient = make([]float32, n)
		e.receiveUpdate(in)
	})
}

// receiveUpdate waits for the update of the step after the range's: the gradient and the
// numbers, which come in any order.
func (e *Engine) receiveUpdate(in *incoming) {
	e.sayLevel()
	in.update = nil
	e.receiveGradient(in, key.Try{Plan: max(in.try.Plan, e.plan.Version.N)}) // likely
	numbers := make([]float32, updateWords)
	e.receiveFill(in, key.Applied(in.id, in.r, in.step+1), numbers, func() {
		in.update = numbers
		if try := key.TryOf(int(math.Float32bits(numbers[2]))); try != in.try {
			in.recv.Cancel(errClosed)
			<-in.recv.Done() // the reader of a link leaves the memory at once
			e.receiveGradient(in, try)
		}
		e.updateCame(in)
	})
}

// receiveGradient waits for the gradient of a try of the step after the range's.
func (e *Engine) receiveGradient(in *incoming, try key.Try) {
	in.try, in.came = try, false
	in.recv = e.receiveFill(in, key.Increment(in.id, in.r, in.step+1, try), in.gradient, func() {
		if in.try == try {
			in.came = true
			e.updateCame(in)
		}
	})
}

// updateCame sees to it that an update is replayed once all of it is here.
func (e *Engine) updateCame(in *incoming) {
	if in.came && in.update != nil {
		in.next = true
		e.chores = append(e.chores, in)
	}
}

// receiveFill calls then when a message of a fill is here.
func (e *Engine) receiveFill(in *incoming, k comm.Key, buf []float32, then func()) *comm.Receiving {
	r := e.c.Network.Expect(k, comm.Bytes(buf))
	e.fillRecvs = append(slices.DeleteFunc(e.fillRecvs, func(r *comm.Receiving) bool { return isClosed(r.Done()) }), r)
	r.OnDone(func() {
		e.mail.put(func() {
			n, _, err := r.Wait(e.ctx)
			if err == nil && n == 4*len(buf) && slices.Contains(e.incoming, in) {
				then()
			}
		})
	})
	return r
}

// doChore replays an update, if one waits, and reports whether it did.
func (e *Engine) doChore() bool {
	for len(e.chores) > 0 {
		in := e.chores[0]
		e.chores = e.chores[1:]
		if !slices.Contains(e.incoming, in) {
			continue
		}
		u := zero.Update{Step: in.step + 1, LR: in.update[0], GradScale: in.update[1]}
		e.do(onJob, func() error {
			in.state.Update(e.c.Pool, in.params, in.gradient, u)
			return nil
		}, func(error) {
			in.step++
			in.next = false
			if slices.Contains(e.incoming, in) {
				e.receiveUpdate(in)
			}
		})
		return true
	}
	return false
}

// sayLevel says once that all that is to come has come.
func (e *Engine) sayLevel() {
	if e.levelSaid || e.c.Level == nil {
		return
	}
	step := 0
	for i, in := range e.incoming {
		if in.state == nil || in.id != e.fillID {
			return
		}
		if i == 0 || in.step < step {
			step = in.step
		}
	}
	if step+2 < e.passed.Step {
		return // much is still to be replayed
	}
	e.levelSaid = true
	e.c.Level(e.fillID, step)
}

// lacks reports whether a range that the order's plan gives this worker is not
// here as of the step passed, but on its way. In a recovery only what has come
// counts, as the report says: who is to send the rest may be gone.
func (e *Engine) lacks(o *controller.Order) bool {
	recovery := o.Ballot != id.Ballot{}
	return slices.ContainsFunc(e.incoming, func(in *incoming) bool {
		return (in.state == nil || in.step < e.passed.Step) && (!recovery || in.next) && e.isFor(in, o)
	})
}

// behind reports whether a range that the order's plan gives this worker is not here as of
// the step passed.
func (e *Engine) behind(o *controller.Order) bool {
	return slices.ContainsFunc(e.incoming, func(in *incoming) bool {
		return (in.state == nil || in.step < e.passed.Step) && e.isFor(in, o)
	})
}

// isFor reports whether the order's plan makes this worker a holder of a range that comes.
func (e *Engine) isFor(in *incoming, o *controller.Order) bool {
	return slices.ContainsFunc(o.Plan.Shards, func(sh plan.Shard) bool {
		return sh.Layer == in.r.Layer && sh.Lo < in.r.Hi && in.r.Lo < sh.Hi && sh.Holds(e.c.Self.ID)
	})
}

// filled says what has come.
func (e *Engine) filled() (all []controller.Filled) {
	for _, in := range e.incoming {
		if in.state == nil {
			continue
		}
		f := controller.Filled{Range: in.r, Step: in.step}
		if in.next {
			f.Step++
		}
		all = append(all, f)
	}
	return all
}

// assemble makes the state of a range out of what is here of it, nil if that
// is not all.
func (e *Engine) assemble(r id.Range) (*shard, error) {
	for _, in := range e.incoming {
		if in.r == r && in.state != nil && in.step == e.passed.Step {
			e.guard.take(r, in.params, in.state.Moments...)
			return &shard{Range: r, state: in.state, params: in.params, watched: true}, nil
		}
	}
	state, err := zero.NewShard(e.c.Rule, r, e.c.Layers[r.Layer].Tensors)
	if err != nil {
		return nil, err
	}
	// What was held here keeps its digests, which also tell of what alters on the way.
	sh := &shard{Range: r, state: state, params: make([]float32, r.Hi-r.Lo), watched: true}
	left := []id.Range{r} // what is not there yet; ranges may overlap
	take := func(from id.Range, params []float32, moments [][]float32) {
		lo, hi := max(from.Lo, r.Lo), min(from.Hi, r.Hi)
		if from.Layer != r.Layer || lo >= hi {
			return
		}
		copy(sh.params[lo-r.Lo:hi-r.Lo], params[lo-from.Lo:hi-from.Lo])
		for i, m := range moments {
			copy(state.Moments[i][lo-r.Lo:hi-r.Lo], m[lo-from.Lo:hi-from.Lo])
		}
		var rest []id.Range
		for _, x := range left {
			if x.Lo < min(lo, x.Hi) {
				rest = append(rest, id.Range{Layer: x.Layer, Lo: x.Lo, Hi: min(lo, x.Hi)})
			}
			if max(hi, x.Lo) < x.Hi {
				rest = append(rest, id.Range{Layer: x.Layer, Lo: max(hi, x.Lo), Hi: x.Hi})
			}
		}
		left = rest
	}
	for _, old := range e.former {
		take(old.Range, old.params, old.state.Moments)
	}
	for _, old := range e.shards {
		if old.state != nil {
			take(old.Range, old.params, old.state.Moments)
		}
	}
	for _, in := range e.incoming {
		if in.state != nil && in.step == e.passed.Step {
			take(in.r, in.params, in.state.Moments)
			e.guard.take(in.r, in.params, in.state.Moments...)
		}
	}
	if len(left) > 0 {
		return nil, nil
	}
	return sh, nil
}

// A worker that joins is in no exchange, so those who are tell it when its
// first plan is live, and where the run is.

// tellLive tells the workers that join with a plan that it is live.
func (e *Engine) tellLive(o *controller.Order) {
	for _, p := range o.Peers {
		if was, ok := e.plan.Worker(p.ID); ok && was.Incarnation == p.Incarnation {
			continue
		}
		words := binary.LittleEndian.AppendUint64(nil, uint64(e.passed.Step))
		words = append(words, e.result...)
		e.c.Network.Post(sessionOf(p.Worker), key.Live(o.Plan.Version), words, comm.Control)
	}
}

// maxResult bounds the result that a joining worker is told.
const maxResult = 1 << 20

// awaitLive lets a worker that joins wait for its first plan to be live. A
// query ends that, because who asked goes on without this plan, unless the
// answer says that it is live.
func (e *Engine) awaitLive(o controller.Order) {
	e.joins = o.Plan.Version
	buf := make([]byte, 8+maxResult)
	r := e.c.Network.Expect(key.Live(o.Plan.Version), buf)
	r.OnDone(func() {
		e.mail.put(func() {
			n, _, err := r.Wait(e.ctx)
			if err != nil || n < 8 || e.joins != o.Plan.Version {
				return
			}
			e.joins = id.Version{}
			e.passed = id.Point{Step: int(binary.LittleEndian.Uint64(buf))}
			e.result, e.live = slices.Clone(buf[8:n]), o.Plan.Version
			o.Passed = e.passed
			e.setOrder(o)
		})
	})
}
