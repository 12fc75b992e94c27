package group

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/board"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/line"
)

// Op is an operation of a group.
type Op uint8

// The operations.
const (
	OpSend Op = 1 + iota // send and receive
	OpBarrier
	OpBroadcast
	OpAllGather
	OpReduceScatter
	OpAllReduce
	OpTreeReduce
	OpEdit
)

// String returns the operation's name.
func (o Op) String() string {
	return id.NameOf("op", uint8(o), "", "send", "barrier", "broadcast", "all-gather", "reduce-scatter", "all-reduce", "tree reduction", "edit")
}

// Call names one operation of a group. All members that take part give the
// same; (operation, Step, Tag) is used once under a version, so operations
// with different names may run side by side and nothing depends on the order
// in which they begin.
type Call struct {
	Version   id.Version    // must be the group's present one
	Step      uint64        // step of the run
	Tag       uint16        // tells operations of one kind and step apart
	Priority  comm.Priority // of its messages; Control is 0
	Algorithm Algorithm     // Auto lets the cost model choose; the same on all members
}

// Error is the failure of an operation of a group. What the operation's
// buffers hold then is not defined, except that memory it only reads is
// unchanged. The failure ends the group's version, on all members as far as
// they can be reached; the process goes on, and [Group.Edit] begins the next
// version.
type Error struct {
	Group   uint32
	Version id.Version // of the operation
	Op      Op
	Step    uint64
	Rank    int  // where it failed first, as far as known; -1 if it is no member's failure
	Remote  bool // the fault is another member's or a link's
	Err     error
}

func (e *Error) Error() string {
	s := fmt.Sprintf("comm: %v of group %d, version %v, step %d", e.Op, e.Group, e.Version, e.Step)
	if e.Rank >= 0 {
		s += fmt.Sprintf(", rank %d", e.Rank)
	}
	return s + ": " + e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

// operation is one running call on a group.
type operation struct {
	g     *Group
	ed    *edition
	ctx   context.Context
	op    Op
	call  Call
	sends []*comm.Sending
	recvs []*comm.Receiving
	hub   *line.Hub // of the lines; nil: it uses none
	place Place     // of the members, if the operation can use lines
	lines []*line.Line
	lined []*line.Message // on lines
	taken []*[]float32    // scratch memory
	lent  []lent          // scratch memory that the operation need not have back

	host    *neighbours // nil: it goes by messages, or on lines
	shown   []board.Slot
	kept    [][]byte // what is shown in our memory
	readers []*board.Peer
	traffic []comm.Traffic // on boards and lines, by rank
	in      arrivals

	// Memory of its algorithms.
	borders []int
	segs    []span
	own     [][]float32
	parts   []coming // by rank
}

// reset keeps nothing of an operation but its memory.
func (o *operation) reset() {
	for _, m := range o.lined {
		*m = line.Message{}
	}
	clear(o.sends)
	clear(o.recvs)
	clear(o.taken)
	clear(o.lent)
	clear(o.shown)
	clear(o.kept)
	clear(o.readers)
	clear(o.traffic)
	clear(o.own)
	clear(o.parts)
	*o = operation{
		lined: o.lined[:0], sends: o.sends[:0], recvs: o.recvs[:0], taken: o.taken[:0], lent: o.lent[:0], shown: o.shown[:0], readers: o.readers[:0], kept: o.kept[:0], traffic: o.traffic[:0],
		borders: o.borders[:0], segs: o.segs[:0], own: o.own[:0], parts: o.parts[:0], in: o.in.reset(),
	}
}

// lent is scratch memory that goes back when all messages from it have ended, perhaps after the operation.
type lent struct {
	memory *[]float32
	sends  []*comm.Sending
}

// begin checks the call against the group.
func (g *Group) begin(ctx context.Context, op Op, call Call) (*operation, error) {
	g.scope.Lock()
	defer g.scope.Unlock()
	o, _ := g.operations.Get().(*operation)
	if o == nil {
		o = new(operation)
	}
	o.g, o.ed, o.ctx, o.op, o.call = g, g.now, ctx, op, call
	var err error
	switch {
	case g.closed || g.scope.Closed():
		err = comm.ErrClosed
	case g.now == nil:
		err = fmt.Errorf("%w: the group has none yet", comm.ErrVersion)
	case g.now.version != call.Version:
		err = fmt.Errorf("%w, which is %v", comm.ErrVersion, g.now.version)
	case comm.Closed(g.now.ended):
		return nil, o.error(nil)
	}
	if err != nil {
		return nil, &Error{Group: uint32(g.number), Version: call.Version, Op: op, Step: call.Step, Rank: -1, Err: err}
	}
	return o, nil
}

// error is what the operation returns: the end of its version if it has
// ended, else err.
func (o *operation) error(err error) error {
	ge := &Error{Group: uint32(o.g.number), Version: o.call.Version, Op: o.op, Step: o.call.Step, Rank: o.ed.rank, Err: err}
	if comm.Closed(o.ed.ended) {
		ge.Rank, ge.Remote, ge.Err = o.ed.culprit, o.ed.remote, o.ed.err
	}
	return ge
}

func (o *operation) n() int    { return len(o.ed.members) }
func (o *operation) rank() int { return o.ed.rank }

// peer returns the rank that is d further in the ring.
func (o *operation) peer(d int) int { return mod(o.ed.rank+d, len(o.ed.members)) }

func mod(a, n int) int { return (a%n + n) % n }

// key names a message: micro is the rank of its sender and node are its round and its part, or of a tree reduction the piece and
// the tree's node.
func (o *operation) key(micro int, node tree.Node) comm.Key {
	return comm.GroupKey(o.g.number, o.call.Version, uint8(o.op), o.call.Step, o.call.Tag, micro, node)
}

// send posts a message of a round to a rank.
func (o *operation) send(to, round, part int, data []byte) {
	if l := o.line(to); l != nil {
		o.sendOn(l, to, round, part, data)
		return
	}
	o.post(to, o.key(o.ed.rank, tree.Node{Lo: round, Hi: part}), data)
}

func (o *operation) post(to int, key comm.Key, data []byte) *comm.Sending {
	s := o.g.e.Post(o.ed.members[to], key, data, o.call.Priority)
	o.sends = append(o.sends, s)
	return s
}

// coming is a message that is expected, over a link or on a line.
type coming struct {
	r *comm.Receiving
	m *line.Message
}

// expect posts the receive of a message of a round from a rank.
func (o *operation) expect(from, round, part int, buf []byte) coming {
	if l := o.line(from); l != nil {
		return coming{m: o.expectOn(l, from, round, part, buf)}
	}
	return coming{r: o.receive(o.key(from, tree.Node{Lo: round, Hi: part}), buf)}
}

func (o *operation) receive(key comm.Key, buf []byte) *comm.Receiving {
	r := o.g.e.Expect(key, buf)
	o.recvs = append(o.recvs, r)
	return r
}

// wait waits until done is closed, or the operation must end.
func (o *operation) wait(done <-chan struct{}) error {
	if comm.Closed(done) {
		return nil
	}
	if o.hub != nil {
		return o.carry(done)
	}
	select {
	case <-done:
		return nil
	case <-o.ed.ended:
		return o.ed.err
	case <-o.ctx.Done():
		return o.ctx.Err()
	}
}

// received waits for a message, which must fill its buffer.
func (o *operation) received(a coming) error {
	if a.m != nil {
		return o.carried(a.m)
	}
	return o.filled(a.r)
}

func (o *operation) filled(r *comm.Receiving) error {
	o.ringOn(r)
	if err := o.wait(r.Done()); err != nil {
		return err
	}
	return r.Filled()
}

// sent waits until the memory of all messages so far is ours again.
func (o *operation) sent() error {
	if err := o.sentOnLinks(); err != nil {
		return err
	}
	return o.sentOn()
}

// sentOnLinks waits until the memory of all messages on links is. Where those who have received them answer, that is certain of lines, which the goroutine of the operation writes itself; the writer of a link may not
// have returned by then from the call that sent them.
func (o *operation) sentOnLinks() error {
	for _, s := range o.sends {
		o.ringOn(s)
		if err := o.wait(s.Done()); err != nil {
			return err
		}
		if err := s.Wait(o.ctx); err != nil {
			return err
		}
	}
	o.sends = o.sends[:0]
	return nil
}

// scratch returns memory for a segment until the operation ends.
func (o *operation) scratch(n int) []float32 {
	x := o.g.segment()
	o.taken = append(o.taken, x)
	return (*x)[:n]
}

// segment returns scratch memory of the group.
func (g *Group) segment() *[]float32 {
	x, _ := g.scratch.Get().(*[]float32)
	if x == nil {
		fresh := make([]float32, g.scope.Config().Segment/4)
		x = &fresh
	}
	return x
}

// lend copies numbers into scratch memory and sends them from there to all others that do not see our board, as a part of a round. The operation does not wait until
// they are sent, unless it is on a line.
func (o *operation) lend(round, part int, x []float32) (copied []float32) {
	m := o.g.segment()
	copied = (*m)[:len(x)]
	copy(copied, x)
	l := lent{memory: m}
	for d := 1; d < o.n(); d++ {
		if o.shares(o.peer(d)) {
			continue
		}
		if to := o.line(o.peer(d)); to != nil {
			o.sendOn(to, o.peer(d), round, part, comm.Bytes(copied))
			continue
		}
		l.sends = append(l.sends, o.g.e.Post(o.ed.members[o.peer(d)], o.key(o.rank(), tree.Node{Lo: round, Hi: part}), comm.Bytes(copied), o.call.Priority))
	}
	o.lent = append(o.lent, l)
	return copied
}

// giveBackLent has scratch memory go back when it is sent.
func (o *operation) giveBackLent() {
	for i := range o.lent {
		o.lent[i].giveBack(o.g)
	}
	clear(o.lent)
	o.lent = o.lent[:0]
}

func (l lent) giveBack(g *Group) {
	if len(l.sends) == 0 {
		g.scratch.Put(l.memory)
		return
	}
	left := new(atomic.Int32) // what is called later keeps nothing else of the operation
	left.Store(int32(len(l.sends)))
	memory := l.memory
	for _, s := range l.sends {
		s.OnDone(func() {
			if left.Add(-1) == 0 {
				g.scratch.Put(memory)
			}
		})
	}
}

// giveBack returns scratch memory, which nothing of the operation uses now.
func (o *operation) giveBack() {
	for _, x := range o.taken {
		o.g.scratch.Put(x)
	}
	clear(o.taken)
	o.taken = o.taken[:0]
}

// finish ends the operation: it returns when all memory is the caller's
// again. If err is not nil, or a send fails, the version ends.
func (o *operation) finish(err error) error {
	if err == nil {
		err = o.sent()
	}
	if o.hub != nil {
		o.leaveLines(err)
	}
	if o.host != nil {
		err = o.leaveHost(err)
	}
	if err == nil {
		o.giveBack()
		o.giveBackLent()
		g := o.g
		o.reset()
		g.operations.Put(o)
		return nil
	}
	defer o.giveBack()
	for _, r := range o.recvs {
		r.Cancel(err)
	}
	for _, s := range o.sends {
		s.Cancel(err)
	}
	for _, l := range o.lent {
		for _, s := range l.sends {
			s.Cancel(err)
		}
	}
	o.giveBackLent()
	o.g.scope.Lock()
	defer o.g.scope.Unlock()
	rank, remote := o.ed.rank, false
	var ce *comm.Error
	if errors.As(err, &ce) && ce.Remote {
		rank, remote = slices.Index(o.ed.members, ce.Peer), true
	}
	if remote && o.hub != nil && errors.Is(err, comm.ErrLink) {
		o.ed.lost(err, rank) // with its line, a member has lost the link
	} else {
		o.ed.fail(err, rank, remote)
	}
	return o.error(err)
}
