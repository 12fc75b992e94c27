package engine

import (
	"encoding/binary"
	"math"
	"slices"

	"github.com/soliton-train/soliton/comm"
	"github.com/soliton-train/soliton/elastic"
	"github.com/soliton-train/soliton/elastic/plan"
	"github.com/soliton-train/soliton/internal/tree"
	"github.com/soliton-train/soliton/zero"
)

// A range comes to a new holder while training goes on: its source copies the
// range as it is after a commit, and from then on sends the gradient of every
// step, too, with the numbers of the update. The destination applies the same
// updates to the same bits, so that it has what the source has. Messages carry
// names of their own, which do not end with the step, and come from memory of
// their own, so a destination that is behind holds up nobody.

// fillHead is the numbers before the data of a message: of the base, the step
// it is of; of a gradient, learning rate and scale. Both have two words.
const fillHead = 2

// fillPriority comes after everything that training waits for.
const fillPriority comm.Priority = 1<<16 - 1

// outgoing is a range on its way to a new holder.
type outgoing struct {
	id   int
	r    plan.Range
	to   comm.Session
	base bool // the copy is made
}

// incoming is a range that this worker will hold.
type incoming struct {
	id     int
	r      plan.Range
	state  *zero.Shard // nil before the base is here
	params []float32
	step   int  // of which params and state are
	next   bool // the gradient of the step after it is here
}

// fillKey names the base of a range (step 0) or its gradient of a step.
func (e *Engine) fillKey(id int, r plan.Range, step int) comm.Key {
	k := rangeKey(r, comm.KindState, 1<<64-1)
	k.Node = tree.Node{Lo: id, Hi: step}
	return k
}

// Fill copies state in the background; see [elastic.Fill].
func (e *Engine) Fill(f elastic.Fill) {
	e.mail.put(func() {
		if e.err != nil || f.ID <= e.fillID {
			return
		}
		e.fillID, e.levelSaid = f.ID, false
		e.stopFills()
		peers := make([]comm.Peer, len(f.Peers))
		sessions := make(map[plan.WorkerID]comm.Session)
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
			r := plan.Range(t.Range)
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
func (e *Engine) source(r plan.Range) *shard {
	for _, sh := range e.shards {
		if sh.state != nil && sh.Layer == r.Layer && sh.Lo <= r.Lo && r.Hi <= sh.Hi {
			return sh
		}
	}
	return nil
}

// sendFills is called by the computing goroutine after an update, and returns
// the messages that the loop is to send. sources are the shards of the ranges.
func (e *Engine) sendFills(out []*outgoing, sources []*shard, totals [][]float32, u zero.Update) (messages [][]float32) {
	for i, o := range out {
		sh := sources[i]
		if sh == nil {
			messages = append(messages, nil)
			continue
		}
		lo, hi := o.r.Lo-sh.Lo, o.r.Hi-sh.Lo
		var m []float32
		if o.base {
			m = append(m, u.LR, u.GradScale)
			m = append(m, totals[i][lo:hi]...)
		} else {
			m = append(m, math.Float32frombits(uint32(u.Step)), 0)
			m = append(m, sh.params[lo:hi]...)
			for _, x := range sh.state.Moments {
				m = append(m, x[lo:hi]...)
			}
		}
		messages = append(messages, m)
	}
	return messages
}

// postFills sends what sendFills has made.
func (e *Engine) postFills(out []*outgoing, messages [][]float32, step int) {
	for i, o := range out {
		if messages[i] == nil || o.id != e.fillID {
			continue
		}
		k := e.fillKey(o.id, o.r, 0)
		if o.base {
			k = e.fillKey(o.id, o.r, step)
		}
		o.base = true
		e.fillSends = append(slices.DeleteFunc(e.fillSends, func(s *comm.Sending) bool { return isClosed(s.Done()) }),
			e.c.Network.Post(o.to, k, comm.Bytes(messages[i]), fillPriority))
	}
}

// receiveBase waits for the copy of a range.
func (e *Engine) receiveBase(id int, r plan.Range) {
	in := &incoming{id: id, r: r}
	e.incoming = append(e.incoming, in)
	n := r.Hi - r.Lo
	buf := make([]float32, fillHead+(1+e.c.Rule.Moments())*n)
	e.receiveFill(in, e.fillKey(id, r, 0), buf, func() {
		state, err := zero.NewShard(e.c.Rule, zero.Range(r), e.c.Layers[r.Layer].Tensors)
		if err != nil {
			e.fail(err)
			return
		}
		in.step = int(math.Float32bits(buf[0]))
		in.params = buf[fillHead : fillHead+n]
		for i := range state.Moments {
			state.Moments[i] = buf[fillHead+(1+i)*n : fillHead+(2+i)*n]
		}
		in.state = state
		e.receiveGradient(in)
	})
}

// receiveGradient waits for the gradient of the step after the range's, and
// applies it.
func (e *Engine) receiveGradient(in *incoming) {
	e.sayLevel()
	buf := make([]float32, fillHead+in.r.Hi-in.r.Lo)
	e.receiveFill(in, e.fillKey(in.id, in.r, in.step+1), buf, func() {
		in.next = true
		e.chores = append(e.chores, chore{in, buf})
	})
}

// receiveFill calls then when a message of a fill is here.
func (e *Engine) receiveFill(in *incoming, k comm.Key, buf []float32, then func()) {
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
}

// chore is an update to be replayed.
type chore struct {
	in  *incoming
	buf []float32
}

// doChore replays an update, if one waits, and reports whether it did.
func (e *Engine) doChore() bool {
	for len(e.chores) > 0 {
		c := e.chores[0]
		e.chores = e.chores[1:]
		if !slices.Contains(e.incoming, c.in) {
			continue
		}
		u := zero.Update{Step: c.in.step + 1, LR: c.buf[0], GradScale: c.buf[1]}
		e.do(onJob, func() error {
			c.in.state.Update(e.c.Pool, c.in.params, c.buf[fillHead:], u)
			return nil
		}, func(error) {
			c.in.step++
			c.in.next = false
			e.receiveGradient(c.in)
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
func (e *Engine) lacks(o *elastic.Order) bool {
	recovery := o.Ballot != elastic.Ballot{}
	if !recovery && len(e.incoming) > 0 && !e.arrived() {
		return true // into the same memory
	}
	for _, in := range e.incoming {
		if in.state != nil && in.step >= e.passed.Step || recovery && !in.next {
			continue
		}
		for _, sh := range o.Plan.Shards {
			if sh.Layer == in.r.Layer && sh.Lo < in.r.Hi && in.r.Lo < sh.Hi && (sh.Owner == e.c.Self.ID || slices.Contains(sh.Mirrors, e.c.Self.ID)) {
				return true
			}
		}
	}
	return false
}

// filled says what has come.
func (e *Engine) filled() (all []elastic.Filled) {
	for _, in := range e.incoming {
		if in.state == nil {
			continue
		}
		f := elastic.Filled{Range: in.r, Step: in.step}
		if in.next {
			f.Step++
		}
		all = append(all, f)
	}
	return all
}

// assemble makes the state of a range out of what is here of it, nil if that
// is not all.
func (e *Engine) assemble(r plan.Range) (*shard, error) {
	state, err := zero.NewShard(e.c.Rule, zero.Range(r), e.c.Layers[r.Layer].Tensors)
	if err != nil {
		return nil, err
	}
	sh := &shard{Range: r, state: state, params: make([]float32, r.Hi-r.Lo)}
	left := r.Hi - r.Lo
	have := make([]bool, r.Hi-r.Lo) // by element; ranges may overlap
	take := func(from plan.Range, params []float32, moments [][]float32) {
		lo, hi := max(from.Lo, r.Lo), min(from.Hi, r.Hi)
		if from.Layer != r.Layer || lo >= hi {
			return
		}
		copy(sh.params[lo-r.Lo:hi-r.Lo], params[lo-from.Lo:hi-from.Lo])
		for i, m := range moments {
			copy(state.Moments[i][lo-r.Lo:hi-r.Lo], m[lo-from.Lo:hi-from.Lo])
		}
		for i := lo; i < hi; i++ {
			if !have[i-r.Lo] {
				have[i-r.Lo] = true
				left--
			}
		}
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
		}
	}
	if left > 0 {
		return nil, nil
	}
	return sh, nil
}

// A worker that joins is in no exchange, so those who are tell it when its
// first plan is live, and where the run is.

// liveKey names that message.
func (e *Engine) liveKey(v plan.Version) comm.Key {
	return comm.Key{Kind: comm.KindUser, Step: 1<<64 - 1, Layer: -1, Lo: int64(v.Generation), Hi: int64(v.N)}
}

// tellLive tells the workers that join with a plan that it is live.
func (e *Engine) tellLive(o *elastic.Order) {
	for _, p := range o.Peers {
		if was, ok := e.plan.Worker(p.ID); ok && was.Incarnation == p.Incarnation {
			continue
		}
		words := binary.LittleEndian.AppendUint64(nil, uint64(e.passed.Step))
		words = append(words, e.result...)
		e.c.Network.Post(sessionOf(p.Worker), e.liveKey(o.Plan.Version), words, comm.Control)
	}
}

// maxResult bounds the result that a joining worker is told.
const maxResult = 1 << 20

// awaitLive lets a worker that joins wait for its first plan to be live. A
// query ends that, because who asked goes on without this plan, unless the
// answer says that it is live.
func (e *Engine) awaitLive(o elastic.Order) {
	e.joins = o.Plan.Version
	buf := make([]byte, 8+maxResult)
	r := e.c.Network.Expect(e.liveKey(o.Plan.Version), buf)
	r.OnDone(func() {
		e.mail.put(func() {
			n, _, err := r.Wait(e.ctx)
			if err != nil || n < 8 || e.joins != o.Plan.Version {
				return
			}
			e.joins = plan.Version{}
			e.passed = elastic.Point{Step: int(binary.LittleEndian.Uint64(buf))}
			e.result, e.live = slices.Clone(buf[8:n]), o.Plan.Version
			o.Passed = e.passed
			e.setOrder(o)
		})
	})
}
