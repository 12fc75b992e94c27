package core

import (
	"cmp"
	"encoding/binary"
	"math"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// A range comes to a new holder while training goes on: its source copies the range as it is after a commit, at once, and from then
// on sends the gradient of every step, too, as soon as it is complete, and the numbers of the update after the commit. The
// destination applies the same updates to the same bits, so that it has what the source has; when a commit makes it the owner, the
// gradient, which takes long, is there already. Messages carry names of their own, which do not end with the step, and come from
// memory that the next step leaves alone, so a destination that is behind holds up no other worker. That of the copies is bounded: further ones are made once
// others are sent, as of whatever step that is in.

// BaseHead is the numbers before the data of a base: the step it is of.
const BaseHead = 1

// numbersSize is the size of the numbers of an update: learning rate, scale, and which try of the step it was, as float32.
// Gradients of other tries do not count.
const numbersSize = 12

// fills is state on its way to and from holders that are to come.
type fills struct {
	fillID    id.Fill       // of the newest Fill
	deferred  *control.Fill // it begins once the order is applied
	outgoing  []*outgoing
	incoming  []*incoming
	due       []*incoming // with an update to be replayed
	replaying *incoming
	updates   []CatchUp // to be made of shards that are late
	levelSaid bool

	lack    int // updates that the incoming state lacked at the last commit
	stalled int // commits since they became fewer, or were none
	lacked  int // commits at which it lacked some
}

// outgoing is a range on its way to a new holder.
type outgoing struct {
	Transfer
	tried bool // a copy was made at once; where the source was altered it is made after the next update
	based bool // the copy is made
	sent  bool // and sent
}

// incoming is a range that this worker will hold.
type incoming struct {
	id    id.Fill
	r     id.Range
	based bool // the base is here
	step  int  // of which the state is
	next  bool // the update after it is here

	// Of that update:
	update zero.Update
	buffer int // of the gradient: one is read while the next gradient comes

	// Of the update after all that is here:
	numbers   *zero.Update // nil before they are here
	increment Ticket       // the gradient is expected
	into      int          // its buffer
	try       key.Try      // of the gradient that is expected
	came      bool         // it has
	tickets   []Ticket
}

// here returns the newest step whose update is here, replayed or not. One more may have come: it counts once that one is replayed.
func (in *incoming) here() int {
	if in.next {
		return in.step + 1
	}
	return in.step
}

// fill takes transfers of state. Those that come while a plan is being applied are made for that plan.
func (w *Worker) fill(f control.Fill) {
	if w.over() || f.ID.Compare(w.fillID) <= 0 {
		return
	}
	w.fillID, w.levelSaid = f.ID, false
	w.lack, w.stalled, w.lacked = math.MaxInt, 0, 0
	w.endFills(true)
	if w.order != nil {
		w.deferred = &f
		return
	}
	w.transfer(f)
}

// transfer begins transfers of state in the background.
func (w *Worker) transfer(f control.Fill) {
	peers := make([]comm.Peer, len(f.Peers))
	sessions := make(map[id.WorkerID]id.Session)
	for i, p := range f.Peers {
		peers[i] = comm.Peer{Session: SessionOf(p.Worker), Addr: p.Addr}
		sessions[p.ID] = peers[i].Session
	}
	w.emit(Admit{peers})
	for _, t := range f.Transfers {
		r := t.Range
		switch w.me {
		case t.From:
			if to, ok := sessions[t.To]; ok {
				w.outgoing = append(w.outgoing, &outgoing{Transfer: Transfer{f.ID, r, to}})
			}
		case t.To:
			in := &incoming{id: f.ID, r: r}
			w.incoming = append(w.incoming, in)
			size := 4 * (BaseHead + (1+w.c.Moments)*(r.Hi-r.Lo))
			w.receiveFill(in, key.Base(f.ID, r), Buffer{Content: BaseState, Range: r}, size, aBase)
		}
	}
}

// endFills ends what is under way. When a plan is applied that is all but what is being sent: others may wait for it before they
// apply the plan, too.
func (w *Worker) endFills(sends bool) {
	for _, in := range w.incoming {
		for _, t := range in.tickets {
			w.cancel(t, false)
		}
	}
	w.outgoing, w.incoming, w.deferred = nil, nil, nil
	w.emit(Forget{Sends: sends})
}

// source returns the shard here that a range lies in.
func (w *Worker) source(r id.Range) *shard {
	for _, sh := range w.all {
		if sh.holds && sh.Layer == r.Layer && sh.Lo <= r.Lo && r.Hi <= sh.Hi {
			return sh
		}
	}
	return nil
}

// base has the bases of new transfers copied, and reports whether there are any.
func (w *Worker) base() bool {
	if w.state != Working || w.repairing() || w.begins() || w.isLate() || !w.startBeside(onFill) {
		return false
	}
	d := CopyBases{Step: w.passed.Step, Copies: w.dueBases(nil)}
	if len(d.Copies) == 0 {
		w.beside = idle
		return false
	}
	w.emit(d)
	return true
}

// dueBases appends the bases to be copied now that have not been tried: as many as may fly at a time, and one at least.
func (w *Worker) dueBases(copies []Copy) []Copy {
	flying := 0
	size := func(r id.Range) int { return (1 + w.c.Moments) * (r.Hi - r.Lo) }
	for _, o := range w.outgoing {
		if o.based && !o.sent {
			flying += size(o.Range)
		}
	}
	for _, c := range copies {
		flying += size(c.Range)
	}
	for _, o := range w.outgoing {
		sh := w.source(o.Range)
		if sh == nil || o.tried || o.based {
			continue
		}
		if flying > 0 && flying+size(o.Range) > cmp.Or(w.c.Flying, 16<<20) {
			break
		}
		flying += size(o.Range)
		o.tried = true
		copies = append(copies, Copy{o.Transfer, sh.Range})
	}
	return copies
}

// stopCopies ends the copying of bases. A plan that is applied now withdraws their transfers; if none is, they are copied after the next update.
func (w *Worker) stopCopies() {
	if slices.ContainsFunc(w.outgoing, func(o *outgoing) bool { return o.tried && !o.based }) {
		w.emit(StopCopies{})
	}
}

// baseSent makes room for further bases.
func (w *Worker) baseSent(t Transfer) {
	for _, o := range w.outgoing {
		if o.Transfer == t {
			o.sent = true
		}
	}
}

// copied sends the bases that were copied. Others are made after another update: their source was altered, which the next exchange
// repairs. Gradients of the step that are complete already follow a base that was copied in it.
func (w *Worker) copied(all []Transfer) {
	for _, o := range w.outgoing {
		if slices.Contains(all, o.Transfer) {
			o.based = true
			w.emit(SendFill{Transfer: o.Transfer, Key: key.Base(o.Fill, o.Range), Content: BaseState})
			if sh := w.source(o.Range); sh != nil && sh.complete && w.step != nil && w.step.number > w.passed.Step {
				w.feedOne(o, sh)
			}
		}
	}
}

// feed sends the complete gradient of a shard to the workers that will hold parts of it.
func (w *Worker) feed(sh *shard) {
	for _, o := range w.outgoing {
		if o.based && sh == w.source(o.Range) {
			w.feedOne(o, sh)
		}
	}
}

func (w *Worker) feedOne(o *outgoing, sh *shard) {
	k := key.Increment(o.Fill, o.Range, w.step.number, w.try())
	w.emit(SendFill{Transfer: o.Transfer, Key: k, Content: Increment, Source: sh.Range})
}

// tellUpdate sends the numbers of an update to the workers that got the gradients. try is that of the step which was committed.
func (w *Worker) tellUpdate(u zero.Update, try key.Try) {
	var words []byte
	for _, x := range []uint32{math.Float32bits(u.LR), math.Float32bits(u.GradScale), uint32(try.Word())} {
		words = binary.NativeEndian.AppendUint32(words, x)
	}
	for _, o := range w.outgoing {
		if o.based && w.source(o.Range) != nil {
			w.emit(SendFill{Transfer: o.Transfer, Key: key.Applied(o.Fill, o.Range, u.Step), Data: words})
		}
	}
}

// receiveFill expects a message of a transfer.
func (w *Worker) receiveFill(in *incoming, k comm.Key, into Buffer, size int, what content) Ticket {
	t := w.expect(k, into, size, expected{content: what, in: in})
	in.tickets = append(slices.DeleteFunc(in.tickets, func(t Ticket) bool { _, ok := w.tickets[t]; return !ok }), t)
	return t
}

// baseCame takes the copy of a range.
func (w *Worker) baseCame(in *incoming, ev Received) {
	if len(ev.Data) < 4 || ev.Bytes != 4*(BaseHead+(1+w.c.Moments)*(in.r.Hi-in.r.Lo)) {
		return
	}
	in.based, in.step = true, int(binary.NativeEndian.Uint32(ev.Data))
	w.emit(Found{in.r})
	w.receiveUpdate(in)
}

// receiveUpdate waits for the update of the step after that which is here: the gradient and the numbers, which come in any order.
func (w *Worker) receiveUpdate(in *incoming) {
	w.sayLevel()
	in.numbers = nil
	if in.next {
		in.into = 1 - in.buffer
	}
	w.receiveIncrement(in, key.Try{Plan: max(in.try.Plan, w.plan.Version.N)}) // likely
	w.receiveFill(in, key.Applied(in.id, in.r, in.here()+1), Buffer{}, numbersSize, anUpdate)
}

// numbersCame takes the numbers of the next update.
func (w *Worker) numbersCame(in *incoming, words []byte) {
	if len(words) != numbersSize {
		return
	}
	word := func(i int) uint32 { return binary.NativeEndian.Uint32(words[4*i:]) }
	in.numbers = &zero.Update{Step: in.here() + 1, LR: math.Float32frombits(word(0)), GradScale: math.Float32frombits(word(1))}
	if try := key.TryOf(int(word(2))); try != in.try {
		w.cancel(in.increment, true)
		w.receiveIncrement(in, try)
	}
	w.updateCame(in)
}

// receiveIncrement waits for the gradient of a try of that step.
func (w *Worker) receiveIncrement(in *incoming, try key.Try) {
	in.try, in.came = try, false
	in.increment = w.receiveFill(in, key.Increment(in.id, in.r, in.here()+1, try), Buffer{Content: Increment, Range: in.r, Array: in.into}, 0, anIncrement)
}

func (w *Worker) incrementCame(in *incoming, bytes int) {
	if bytes == 4*(in.r.Hi-in.r.Lo) {
		in.came = true
		w.updateCame(in)
	}
}

// updateCame has an update replayed once all of it is here, and waits for the one after it. That takes as long as the link needs, not as long as
// replays have to wait for what the step needs first.
func (w *Worker) updateCame(in *incoming) {
	if in.came && in.numbers != nil && !in.next {
		in.next, in.update, in.buffer = true, *in.numbers, in.into
		w.due = append(w.due, in)
		w.receiveUpdate(in)
	}
}

// replay replays an update, if one waits, and reports whether it did.
func (w *Worker) replay() bool {
	w.due = slices.DeleteFunc(w.due, func(in *incoming) bool { return !slices.Contains(w.incoming, in) })
	if len(w.due) == 0 || !w.startBeside(onFill) {
		return false
	}
	in := w.due[0]
	w.due, w.replaying = w.due[1:], in
	w.emit(Replay{in.r, in.update, in.buffer})
	return true
}

func (w *Worker) replayed() {
	in := w.replaying
	in.step++
	in.next = false
	if slices.Contains(w.incoming, in) {
		w.sayLevel()
		w.updateCame(in)
	}
}

// A link may be slower than training. State that comes over it is waited for while it comes nearer to the step: until it has come no nearer for
// maxStalled commits, or for maxLacked in all at which it lacks something. Then a plan that waits for it goes live all the same, and training waits for what is on its way.
const (
	maxStalled = 4
	maxLacked  = 32
)

// watchFills is called in each commit.
func (w *Worker) watchFills() {
	lack := 0
	for _, in := range w.incoming {
		if !in.based || in.id != w.fillID {
			return
		}
		lack = max(lack, w.passed.Step-in.step)
	}
	if lack > 0 {
		w.lacked++
	}
	if lack == 0 || lack < w.lack {
		w.stalled = 0
	} else { // it may be more than before: other state is sent first
		w.stalled++
	}
	w.lack = lack
	if len(w.incoming) > 0 {
		w.sayLevel()
	}
}

// tooSlow reports whether state that comes is not waited for any longer.
func (w *Worker) tooSlow() bool { return w.stalled >= maxStalled || w.lacked >= maxLacked }

// sayLevel says once that all that is to come has come, or comes no nearer.
func (w *Worker) sayLevel() {
	if w.levelSaid {
		return
	}
	step := 0
	for i, in := range w.incoming {
		if !in.based || in.id != w.fillID {
			return
		}
		if i == 0 || in.step < step {
			step = in.step
		}
	}
	if step+2 < w.passed.Step && !w.tooSlow() {
		return // much is still to be replayed
	}
	w.levelSaid = true
	w.emit(control.Level{ID: w.fillID, Step: step})
}

// late reports whether a range is not here as of the step passed.
func (w *Worker) late(in *incoming) bool { return !in.based || in.step < w.passed.Step }

// lacks reports whether a range that the order's plan gives this worker is not here as of the step passed, but on its way. In a
// recovery only what has come counts, as the report says: the worker that is to send the rest may be lost. What can be replayed beside the passes that
// follow is not waited for.
func (w *Worker) lacks(o *control.Order) bool {
	recovers := o.Ballot != noBallot
	return slices.ContainsFunc(w.incoming, func(in *incoming) bool {
		if !w.late(in) || recovers && !in.next || !w.willHold(&o.Plan, in.r) {
			return false
		}
		asItIs := slices.ContainsFunc(o.Plan.Shards, func(p plan.Shard) bool { return RangeOf(p) == in.r && p.Holds(w.me) })
		return !asItIs || !w.oneBehind(in)
	})
}

// oneBehind reports whether a range is of the step before the one passed, and the update that it lacks is here. Where blocks are being repaired, nothing is
// left for later.
func (w *Worker) oneBehind(in *incoming) bool {
	return in.based && in.next && in.step == w.passed.Step-1 && !w.repairing() && w.passed.Repair == 0
}

// behindAs returns the transfer whose range a shard can be made of before its last update is replayed, nil if there is none.
func (w *Worker) behindAs(r id.Range) *incoming {
	for _, in := range w.incoming {
		if in.r == r && w.oneBehind(in) {
			return in
		}
	}
	return nil
}

// putOffUpdate has the update of a shard that is held from now on replayed beside the passes that follow. A layer whose parameters are not here waits for it.
func (w *Worker) putOffUpdate(sh *shard, in *incoming) {
	sh.late = true
	w.arrivals[sh.Layer].late++
	w.updates = append(w.updates, CatchUp{in.r, in.update, in.buffer})
}

// catchUpShard begins with the next of these updates, and reports whether it did.
func (w *Worker) catchUpShard() bool {
	if len(w.updates) == 0 || !w.startBeside(onFill) {
		return false
	}
	w.emit(w.updates[0])
	w.updates = w.updates[1:]
	return true
}

// caughtUp takes the end of one.
func (w *Worker) caughtUp(r id.Range) {
	sh := w.all[r]
	sh.late = false
	w.arrivals[r.Layer].late--
	w.checkArrivals(r.Layer)
	if sh.owner {
		w.spread(sh, w.passed.Step, sh.lackedBy)
	}
	sh.lackedBy = nil
}

// isLate reports whether a shard is not as of the step passed.
func (w *Worker) isLate() bool {
	return slices.ContainsFunc(w.arrivals, func(a arrivals) bool { return a.late > 0 })
}

// behind reports whether a range that the order's plan gives this worker is not here as of the step passed.
func (w *Worker) behind(o *control.Order) bool {
	return slices.ContainsFunc(w.incoming, func(in *incoming) bool { return w.late(in) && w.willHold(&o.Plan, in.r) })
}

// filled says what has come.
func (w *Worker) filled() (all []control.Filled) {
	for _, in := range w.incoming {
		if in.based {
			all = append(all, control.Filled{Range: in.r, Step: in.here()})
		}
	}
	for _, r := range w.former { // a recovery may have this worker hold it again
		all = append(all, control.Filled{Range: r, Step: w.passed.Step})
	}
	return all
}
