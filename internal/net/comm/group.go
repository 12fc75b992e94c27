package comm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
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
	names := [...]string{OpSend: "send", OpBarrier: "barrier", OpBroadcast: "broadcast", OpAllGather: "all-gather",
		OpReduceScatter: "reduce-scatter", OpAllReduce: "all-reduce", OpTreeReduce: "tree reduction", OpEdit: "edit"}
	if o == 0 || int(o) >= len(names) {
		return fmt.Sprintf("op%d", uint8(o))
	}
	return names[o]
}

// Call names one operation of a group. All members that take part give the
// same; (operation, Step, Tag) is used once under a version, so operations
// with different names may run side by side and nothing depends on the order
// in which they begin.
type Call struct {
	Version   id.Version // must be the group's present one
	Step      uint64     // step of the run
	Tag       uint16     // tells operations of one kind and step apart
	Priority  Priority   // of its messages; Control is 0
	Algorithm Algorithm  // Auto lets the cost model choose; the same on all members
}

// Group is an ordered list of members and a plan version over an endpoint's
// links. Operations run under the version they name, and fail with
// [ErrVersion] at once when it is not the group's, or is replaced while they
// run. A version also ends when one of its operations fails on any member or a
// link between two of its members is lost; from then on all its operations
// fail, until [Group.Edit].
type Group struct {
	e  *Endpoint
	id uint16

	// Under e.mu.
	now    *edition // nil before the first Edit
	closed bool
}

// edition is one version of a group.
type edition struct {
	g       *Group
	version id.Version
	members []id.Session
	rank    int // ours
	abort   *Receiving
	notice  []byte // that arrives through abort

	ended chan struct{}
	// Set before ended is closed.
	err     error
	culprit int
	remote  bool
}

// NewGroup returns the group with this number, which is the same on all
// members, without members yet.
func (e *Endpoint) NewGroup(id uint16) (*Group, error) {
	e.lock()
	defer e.unlock()
	switch {
	case e.closed:
		return nil, &Error{Op: "new group", Err: ErrClosed}
	case e.groups[id] != nil:
		return nil, &Error{Op: "new group", Err: fmt.Errorf("%w: group %d exists", ErrUsage, id)}
	}
	g := &Group{e: e, id: id}
	e.groups[id] = g
	return g, nil
}

// Version returns the present version, and whether there is one on which
// operations can run.
func (g *Group) Version() (v id.Version, ok bool) {
	g.e.lock()
	defer g.e.unlock()
	if g.now == nil {
		return id.Version{}, false
	}
	return g.now.version, !isClosed(g.now.ended)
}

// Members returns the members in rank order, and our rank; nothing before the
// first Edit.
func (g *Group) Members() (members []id.Session, rank int) {
	g.e.lock()
	defer g.e.unlock()
	if g.now == nil {
		return nil, -1
	}
	return slices.Clone(g.now.members), g.now.rank
}

// Ended returns a channel that is closed when the present version ends, or
// nil before the first Edit.
func (g *Group) Ended() <-chan struct{} {
	g.e.lock()
	defer g.e.unlock()
	if g.now == nil {
		return nil
	}
	return g.now.ended
}

// Edit begins the next version with these members, of whom we must be one; all
// must be admitted by the endpoint. Operations under earlier versions end with
// [ErrVersion], and what is still on its way for them is dropped. Links that
// exist are kept; those that do not are made, and when all are up, Edit returns
// how many are new, counted as [Endpoint.Connect] does. When it ends with ctx
// before, the version is in force all the same: its operations wait for the
// links.
//
// A link between two members that was lost before, but whose loss one of them
// notices only afterwards, ends the new version too, since something of it may
// have been sent into the void; it takes one more Edit. What happens to links
// with others is nothing to it.
func (g *Group) Edit(ctx context.Context, v id.Version, members []id.Session) (opened int, err error) {
	e := g.e
	e.lock()
	ed, err := g.edit(v, members)
	e.unlock()
	if err == nil {
		opened, err = e.connect(ctx, ed.ended, members)
		if errors.Is(err, ErrVersion) {
			e.lock()
			err = ed.err
			e.unlock()
		}
	}
	if err != nil {
		return opened, &GroupError{Group: uint32(g.id), Version: v, Op: OpEdit, Rank: -1, Err: err}
	}
	return opened, nil
}

func (g *Group) edit(v id.Version, members []id.Session) (*edition, error) {
	e := g.e
	rank := slices.Index(members, e.cfg.Self)
	switch {
	case g.closed || e.closed:
		return nil, ErrClosed
	case v == id.Version{} || g.now != nil && v.Compare(g.now.version) <= 0:
		return nil, fmt.Errorf("%w: %v does not follow the present one", ErrVersion, v)
	case rank < 0:
		return nil, fmt.Errorf("%w: worker %v is not among the members", ErrNotMember, e.cfg.Self)
	}
	for i, s := range members {
		if slices.Contains(members[:i], s) {
			return nil, fmt.Errorf("%w: worker %v is listed twice", ErrUsage, s)
		}
		if s == e.cfg.Self {
			continue
		}
		if _, err := e.member(s); err != nil {
			return nil, fmt.Errorf("%w: worker %v", err, s)
		}
	}
	if g.now != nil {
		g.now.end(ErrVersion, -1, false)
	}
	g.forget(v)
	ed := &edition{g: g, version: v, members: slices.Clone(members), rank: rank, ended: make(chan struct{}), notice: make([]byte, noticeSize)}
	g.now = ed
	r := &Receiving{e: e, key: abortKey(g.id, v), buf: ed.notice, done: make(chan struct{})}
	r.after = ed.noticed
	if err := e.in.post(r); err != nil {
		return nil, err
	}
	ed.abort = r
	return ed, nil
}

// forget drops all messages of versions before v.
func (g *Group) forget(v id.Version) {
	g.e.in.groups[g.id] = v
	over := func(k Key) bool { return k.ofGroup() && groupOf(k) == g.id && versionOf(k).Compare(v) < 0 }
	g.e.in.end(over)
	g.e.withdrawSends(over, ErrVersion)
}

// Close ends the group; its operations fail with [ErrClosed].
func (g *Group) Close() error {
	g.e.lock()
	defer g.e.unlock()
	g.end(ErrClosed, -1, false)
	if !g.closed {
		g.closed = true
		g.forget(id.Version{Generation: math.MaxInt, N: math.MaxInt})
		delete(g.e.groups, g.id)
	}
	return nil
}

// end ends the present version.
func (g *Group) end(err error, rank int, remote bool) {
	if g.now != nil {
		g.now.end(err, rank, remote)
	}
}

// linkLost ends the present version if the session is a member.
func (g *Group) linkLost(s id.Session, err error) {
	ed := g.now
	if ed == nil {
		return
	}
	if rank := slices.Index(ed.members, s); rank >= 0 {
		ed.fail(err, rank, true)
	}
}

// end ends the version for us.
func (ed *edition) end(err error, rank int, remote bool) {
	if isClosed(ed.ended) {
		return
	}
	ed.err, ed.culprit, ed.remote = err, rank, remote
	close(ed.ended)
	if ed.abort != nil {
		ed.g.e.in.withdraw(ed.abort, err)
	}
}

// noticeSize is the size of an abort: the rank of who is to blame, or -1.
const noticeSize = 8

// fail ends the version for us and tells the other members.
func (ed *edition) fail(err error, rank int, remote bool) {
	if isClosed(ed.ended) {
		return
	}
	ed.end(err, rank, remote)
	e := ed.g.e
	notice := binary.LittleEndian.AppendUint64(nil, uint64(int64(rank)))
	for _, s := range ed.members {
		if p, err := e.member(s); err == nil {
			e.order++
			p.push(&Sending{e: e, p: p, key: abortKey(ed.g.id, ed.version), data: notice, done: make(chan struct{}), order: e.order, queue: -1})
		}
	}
}

// noticed ends the version because another member says so.
func (ed *edition) noticed() {
	e := ed.g.e
	e.lock()
	defer e.unlock()
	if ed.abort != nil && ed.abort.err == nil && ed.abort.n == noticeSize {
		rank := int(int64(binary.LittleEndian.Uint64(ed.notice)))
		if rank >= len(ed.members) || rank < 0 {
			rank = -1
		}
		ed.end(ErrAborted, rank, true)
	}
}

// Keys of a group's messages: Layer is the group and the tag, Lo and Hi are
// the version, Dir is the operation, Micro is the sender's rank (of a tree
// reduction: the shard), Node is the round and the part (the tree's node).

func opKey(g uint16, v id.Version, op Op, step uint64, tag uint16, micro int, n tree.Node) Key {
	return Key{Kind: kindGroup, Dir: uint8(op), Layer: int32(uint32(g)<<16 | uint32(tag)), Micro: int32(micro), Step: step,
		Lo: int64(v.Generation), Hi: int64(v.N), Node: n}
}

func abortKey(g uint16, v id.Version) Key {
	return Key{Kind: kindAbort, Layer: int32(uint32(g) << 16), Lo: int64(v.Generation), Hi: int64(v.N)}
}

func versionOf(k Key) id.Version { return id.Version{Generation: int(k.Lo), N: int(k.Hi)} }
func groupOf(k Key) uint16       { return uint16(uint32(k.Layer) >> 16) }

// operation is one running call on a group.
type operation struct {
	g     *Group
	ed    *edition
	ctx   context.Context
	op    Op
	call  Call
	sends []*Sending
	recvs []*Receiving
	taken []*[]float32 // scratch memory
}

// begin checks the call against the group.
func (g *Group) begin(ctx context.Context, op Op, call Call) (*operation, error) {
	e := g.e
	e.lock()
	defer e.unlock()
	o := &operation{g: g, ed: g.now, ctx: ctx, op: op, call: call}
	var err error
	switch {
	case g.closed || e.closed:
		err = ErrClosed
	case g.now == nil:
		err = fmt.Errorf("%w: the group has none yet", ErrVersion)
	case g.now.version != call.Version:
		err = fmt.Errorf("%w, which is %v", ErrVersion, g.now.version)
	case isClosed(g.now.ended):
		return nil, o.error(nil)
	}
	if err != nil {
		return nil, &GroupError{Group: uint32(g.id), Version: call.Version, Op: op, Step: call.Step, Rank: -1, Err: err}
	}
	return o, nil
}

// error is what the operation returns: the end of its version if it has
// ended, else err.
func (o *operation) error(err error) error {
	ge := &GroupError{Group: uint32(o.g.id), Version: o.call.Version, Op: o.op, Step: o.call.Step, Rank: o.ed.rank, Err: err}
	if isClosed(o.ed.ended) {
		ge.Rank, ge.Remote, ge.Err = o.ed.culprit, o.ed.remote, o.ed.err
	}
	return ge
}

func (o *operation) n() int    { return len(o.ed.members) }
func (o *operation) rank() int { return o.ed.rank }

// peer returns the rank that is d further in the ring.
func (o *operation) peer(d int) int { return mod(o.ed.rank+d, len(o.ed.members)) }

func mod(a, n int) int { return (a%n + n) % n }

// send posts a message of a round to a rank.
func (o *operation) send(to, round, part int, data []byte) *Sending {
	return o.post(to, opKey(o.g.id, o.call.Version, o.op, o.call.Step, o.call.Tag, o.ed.rank, tree.Node{Lo: round, Hi: part}), data)
}

func (o *operation) post(to int, key Key, data []byte) *Sending {
	s := o.g.e.Post(o.ed.members[to], key, data, o.call.Priority)
	o.sends = append(o.sends, s)
	return s
}

// expect posts the receive of a message of a round from a rank.
func (o *operation) expect(from, round, part int, buf []byte) *Receiving {
	return o.receive(opKey(o.g.id, o.call.Version, o.op, o.call.Step, o.call.Tag, from, tree.Node{Lo: round, Hi: part}), buf)
}

func (o *operation) receive(key Key, buf []byte) *Receiving {
	r := o.g.e.Expect(key, buf)
	o.recvs = append(o.recvs, r)
	return r
}

// wait waits until done is closed, or the operation must end.
func (o *operation) wait(done <-chan struct{}) error {
	select {
	case <-done:
		return nil
	default:
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
func (o *operation) received(r *Receiving) error {
	if err := o.wait(r.done); err != nil {
		return err
	}
	if r.err == nil && r.n != len(r.buf) {
		return &Error{Op: "receive", Peer: r.from, Key: r.key, Remote: true, Err: fmt.Errorf("%w: %d bytes, want %d", ErrSize, r.n, len(r.buf))}
	}
	return r.err
}

// sent waits until the memory of all messages so far is ours again.
func (o *operation) sent() error {
	for _, s := range o.sends {
		if err := o.wait(s.done); err != nil {
			return err
		}
		if s.err != nil {
			return s.err
		}
	}
	o.sends = o.sends[:0]
	return nil
}

// scratch returns memory for a segment until the operation ends.
func (o *operation) scratch(n int) []float32 {
	x, _ := o.g.e.scratch.Get().(*[]float32)
	if x == nil {
		fresh := make([]float32, o.g.e.cfg.Segment/4)
		x = &fresh
	}
	o.taken = append(o.taken, x)
	return (*x)[:n]
}

// giveBack returns scratch memory, which nothing of the operation uses now.
func (o *operation) giveBack() {
	for _, x := range o.taken {
		o.g.e.scratch.Put(x)
	}
	o.taken = nil
}

// finish ends the operation: it returns when all memory is the caller's
// again. If err is not nil, or a send fails, the version ends.
func (o *operation) finish(err error) error {
	if err == nil {
		err = o.sent()
	}
	if err == nil {
		o.giveBack()
		return nil
	}
	defer o.giveBack()
	for _, r := range o.recvs {
		r.Cancel(err)
	}
	for _, s := range o.sends {
		s.Cancel(err)
	}
	o.g.e.lock()
	defer o.g.e.unlock()
	rank, remote := o.ed.rank, false
	var ce *Error
	if errors.As(err, &ce) && ce.Remote {
		rank, remote = slices.Index(o.ed.members, ce.Peer), true
	}
	o.ed.fail(err, rank, remote)
	return o.error(err)
}
