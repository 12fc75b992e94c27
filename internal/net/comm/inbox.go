package comm

import (
	"container/heap"
	"context"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/soliton-train/soliton/internal/id"
)

// Receiving is a receive that waits for its message.
type Receiving struct {
	ending
	key Key
	buf []byte

	// Guarded by e.mu until done is closed, then constant.
	n       int
	from    id.Session
	filling *incoming // the message that is on its way into buf
	cancel  error     // set while the reader must leave buf first
}

// incoming is one message of one peer, from its announcement until it is
// consumed or dropped.
type incoming struct {
	link   *link
	peer   *peer
	id     uint64
	key    Key
	size   int
	turn   // order is that of arrival, over all peers; index is the place in link.ready
	state  inState
	got    int
	recv   *Receiving  // the receive that it fills
	pool   []byte      // or the place where it waits
	credit bool        // it holds credit
	busy   bool        // recv.buf is being written
	addr   uint64      // of the data, where they are to be read from the peer's memory
	fence  uint64      // its value while they are there
	gone   bool        // the sender cancelled it while it was being read from there
	stop   atomic.Bool // the read is to end
}

type inState uint8

const (
	inOffered inState = iota // it waits for credit
	inFilling                // it goes into recv.buf
	inPooling                // it goes into the pool
	inPooled                 // it is in the pool, whole
	inDiscard                // what comes is thrown away
)

// entry is all that is known of a key.
type entry struct {
	done   bool        // received; further copies are dropped
	posted *Receiving  // the receive that waits
	early  []*incoming // messages that it could take, in order of arrival
}

// inbox matches messages with receives. It is plain data under the endpoint's
// lock; it sends nothing but the small frames it appends to links.
type inbox struct {
	e        *Endpoint
	keys     map[Key]*entry
	step     uint64                // keys of earlier steps are over
	versions map[uint16]id.Version // and keys of earlier versions of a group
	order    uint64
	active   int // links that hold credit
}

// stale reports whether the key's life is over.
func (b *inbox) stale(k Key) bool {
	if k.ofGroup() {
		return versionOf(k).Compare(b.versions[groupOf(k)]) < 0
	}
	return k.Step < b.step
}

func (b *inbox) entry(k Key) *entry {
	en := b.keys[k]
	if en == nil {
		en = &entry{}
		b.keys[k] = en
	}
	return en
}

// tidy forgets an entry that says nothing.
func (b *inbox) tidy(k Key, en *entry) {
	if !en.done && en.posted == nil && len(en.early) == 0 {
		delete(b.keys, k)
	}
}

func charge(size int) int { return size + PoolOverhead }

// open takes the announcement of a message. An error is the peer's breach of
// the protocol.
func (b *inbox) open(l *link, f Frame) error {
	if f.ID <= l.lastID {
		return protocolError("message %d announced after %d", f.ID, l.lastID)
	}
	l.lastID = f.ID
	b.order++
	in := &incoming{
		link: l, peer: l.p, id: f.ID, key: f.Key, turn: turn{f.Priority, b.order, -1}, size: int(f.Size),
		addr: f.Addr, fence: f.Fence,
	}
	if f.Type == FrameOffer && l.fence == 0 {
		return protocolError("%v: its memory is not in reach", f)
	}
	en := b.keys[f.Key]
	unwanted := b.stale(f.Key) || en != nil && en.done
	if f.Eager {
		if f.Size > int64(b.e.cfg.Pool) || l.pooled+charge(in.size) > b.e.cfg.Pool {
			return protocolError("an early message of %d bytes passes the pool's %d", f.Size, b.e.cfg.Pool)
		}
		l.in[f.ID] = in
		l.pooled += charge(in.size)
		if unwanted {
			in.state = inDiscard
			l.release(in.size)
			return nil
		}
		en = b.entry(f.Key)
		if r := en.posted; r != nil && r.filling == nil && len(en.early) == 0 {
			if in.size <= len(r.buf) {
				in.state, in.recv, r.filling = inFilling, r, in
			} else {
				in.state = inDiscard
				b.fail(r, &Error{Op: "receive", Peer: l.p.Session, Key: r.key, Remote: true, Err: ErrSize})
			}
			l.release(in.size)
			return nil
		}
		in.state, in.pool = inPooling, make([]byte, in.size)
		en.early = append(en.early, in)
		return nil
	}
	if unwanted {
		l.control(Frame{Type: FrameDrop, ID: f.ID})
		return nil
	}
	if l.offered >= maxOffers {
		return protocolError("more than %d messages wait for credit", maxOffers)
	}
	l.offered++
	l.in[f.ID] = in
	en = b.entry(f.Key)
	en.early = append(en.early, in)
	b.match(en)
	return nil
}

// post lets r wait for its message.
func (b *inbox) post(r *Receiving) error {
	if b.stale(r.key) {
		return ErrStale
	}
	en := b.entry(r.key)
	if en.done || en.posted != nil {
		return ErrDuplicate
	}
	en.posted = r
	b.match(en)
	return nil
}

// match brings the waiting receive and the messages that are there together.
func (b *inbox) match(en *entry) {
	r := en.posted
	if r == nil || r.filling != nil {
		return
	}
	offered := false
	for _, in := range en.early {
		if in.size > len(r.buf) {
			b.fail(r, &Error{Op: "receive", Peer: in.peer.Session, Key: r.key, Remote: true, Err: ErrSize})
			return
		}
		switch in.state {
		case inPooled:
			copy(r.buf, in.pool)
			b.complete(r, in)
			return
		case inOffered:
			if in.index < 0 {
				heap.Push(&in.link.ready, in)
				offered = true
			}
		}
	}
	if offered {
		b.schedule()
	}
}

// schedule gives credit to what is most urgent, then to what came first. A
// peer that holds none gets some while fewer than Incast hold any, one that
// does while it holds less than Ahead for messages at least as urgent. A peer
// that waits for its turn holds back what comes after its message, so that a
// busy peer cannot starve it. Control messages pass all of this.
func (b *inbox) schedule() {
	for {
		var best, turn *incoming
		for _, p := range b.e.peers {
			l := p.link
			if l == nil || l.dead {
				continue
			}
			for len(l.ready) > 0 && !b.grantable(l.ready[0]) {
				heap.Pop(&l.ready)
			}
			if len(l.ready) == 0 {
				continue
			}
			in := l.ready[0]
			switch {
			case in.prio == Control || len(l.credit) > 0 && l.ahead(in.prio) < b.e.cfg.Ahead || len(l.credit) == 0 && b.active < b.e.cfg.Incast:
				if best == nil || in.before(&best.turn) {
					best = in
				}
			case len(l.credit) == 0:
				if turn == nil || in.before(&turn.turn) {
					turn = in
				}
			}
		}
		if best == nil || turn != nil && best.prio != Control && turn.before(&best.turn) {
			return
		}
		l := best.link
		heap.Pop(&l.ready)
		en := b.keys[best.key]
		best.state, best.recv, en.posted.filling = inFilling, en.posted, best
		en.drop(best)
		l.offered--
		if len(l.credit) == 0 {
			b.active++
		}
		best.credit = true
		l.credit = append(l.credit, best)
		if best.addr != 0 {
			l.grant(best)
		} else {
			l.control(Frame{Type: FrameCredit, ID: best.id})
		}
	}
}

// ahead returns the bytes still to come by credit for messages at least as
// urgent as prio.
func (l *link) ahead(prio Priority) int {
	n := 0
	for _, in := range l.credit {
		if in.prio <= prio {
			n += in.size - in.got
		}
	}
	return n
}

// grantable reports whether an offered message still has a receive to go to.
func (b *inbox) grantable(in *incoming) bool {
	en := b.keys[in.key]
	return in.state == inOffered && en != nil && en.posted != nil && en.posted.filling == nil
}

// used takes back the credit of a message that ended.
func (b *inbox) used(in *incoming) {
	l := in.link
	i := slices.Index(l.credit, in)
	l.credit = slices.Delete(l.credit, i, i+1)
	in.credit = false
	if len(l.credit) == 0 {
		b.active--
	}
	b.schedule()
}

// arrived notes that all bytes of a message have come.
func (b *inbox) arrived(in *incoming) {
	l := in.link
	delete(l.in, in.id)
	switch in.state {
	case inFilling:
		in.recv.filling = nil
		b.complete(in.recv, in)
	case inPooling:
		in.state = inPooled
		b.match(b.keys[in.key])
	}
	if in.credit {
		b.used(in)
	}
}

// complete ends a receive with its message.
func (b *inbox) complete(r *Receiving, in *incoming) {
	r.n, r.from = in.size, in.peer.Session
	in.peer.stats.MessagesReceived++
	in.peer.stats.BytesReceived += int64(in.size)
	en := b.keys[r.key]
	en.posted = nil
	if in.state == inPooled && r.key.ofGroup() {
		en.drop(in)
		b.forget(in)
	}
	if !r.key.ofGroup() {
		en.done = true
		b.dropEarly(en)
	}
	b.tidy(r.key, en)
	b.finish(r, nil)
}

// fail ends a receive without a message. Its buffer must not be in use.
func (b *inbox) fail(r *Receiving, err error) {
	if en := b.keys[r.key]; en != nil && en.posted == r {
		en.posted = nil
		b.tidy(r.key, en)
	}
	b.finish(r, err)
}

func (b *inbox) finish(r *Receiving, err error) {
	r.filling = nil
	r.ending.finish(err)
}

// withdraw ends a receive from its own side: at once, or when the reader,
// told to hurry, has left the buffer, or a read of the peer's memory is over.
func (b *inbox) withdraw(r *Receiving, err error) {
	if r.cancel != nil || Closed(r.done) {
		return
	}
	if in := r.filling; in != nil {
		if in.busy {
			r.cancel = err
			if in.stop.Store(true); in.addr == 0 {
				in.link.kickReader()
			}
			return
		}
		in.state, in.recv = inDiscard, nil
	}
	b.fail(r, err)
}

// dropEarly drops all copies of a key.
func (b *inbox) dropEarly(en *entry) {
	early := en.early
	en.early = nil
	for _, in := range early {
		b.forget(in)
	}
}

// forget drops a message that waits. The caller takes it out of its entry.
func (b *inbox) forget(in *incoming) {
	l := in.link
	switch in.state {
	case inOffered:
		if in.index >= 0 {
			heap.Remove(&l.ready, in.index)
		}
		l.offered--
		delete(l.in, in.id)
		l.control(Frame{Type: FrameDrop, ID: in.id})
	case inPooling, inPooled:
		l.release(in.size)
		in.pool = nil
	}
	in.state = inDiscard
}

// cancelled takes the sender's word that the rest will not come.
func (b *inbox) cancelled(in *incoming) {
	delete(in.link.in, in.id)
	if in.busy { // by fetch, since we are the reader
		in.gone = true
		in.stop.Store(true)
		return
	}
	b.lost(in)
}

// lost takes a message apart whose rest will not come. Nothing writes to its
// receive.
func (b *inbox) lost(in *incoming) {
	en := b.keys[in.key]
	switch in.state {
	case inFilling:
		r := in.recv
		r.filling, in.recv, in.state = nil, nil, inDiscard
		if r.cancel != nil {
			b.fail(r, r.cancel)
		} else {
			b.match(b.keys[in.key]) // from the next copy
		}
	case inOffered, inPooling:
		en.drop(in)
		b.forget(in)
		b.tidy(in.key, en)
	}
	if in.credit {
		b.used(in)
	}
}

// drop takes a message out of the entry.
func (en *entry) drop(in *incoming) {
	if i := slices.Index(en.early, in); i >= 0 {
		en.early = slices.Delete(en.early, i, i+1)
	}
}

// end ends the life of all keys for which over is true.
func (b *inbox) end(over func(Key) bool) {
	for k, en := range b.keys {
		if !over(k) {
			continue
		}
		b.dropEarly(en)
		if r := en.posted; r != nil {
			b.withdraw(r, &Error{Op: "receive", Key: k, Err: ErrStale})
		}
		en.done = false
		b.tidy(k, en)
	}
}

// evict drops what came from a session that is no member any more and still
// waits here.
func (b *inbox) evict(p *peer) {
	for k, en := range b.keys {
		for _, in := range slices.Clone(en.early) {
			if in.peer == p && in.state == inPooled {
				en.drop(in)
				b.forget(in)
			}
		}
		b.tidy(k, en)
	}
}

// Wait returns the number of bytes received and whose they are. It ends on
// the message, on ctx, on [Endpoint.Advance] beyond the key's step, on close,
// or on a message that does not fit. When it returns, the buffer is the
// caller's again. A receive given up in mid-message loses that message; its
// sender may not notice.
func (r *Receiving) Wait(ctx context.Context) (n int, from id.Session, err error) {
	err = r.wait(ctx, r.Cancel)
	return r.n, r.from, err
}

// Filled returns nil if the receive has ended with a message as long as its buffer.
func (r *Receiving) Filled() error {
	if r.err == nil && r.n != len(r.buf) {
		return &Error{Op: "receive", Peer: r.from, Key: r.key, Remote: true, Err: fmt.Errorf("%w: %d bytes, want %d", ErrSize, r.n, len(r.buf))}
	}
	return r.err
}

// Cancel ends the receive with an error, unless it has ended, and returns
// when the buffer is the caller's again.
func (r *Receiving) Cancel(err error) {
	r.e.lock()
	r.e.in.withdraw(r, &Error{Op: "receive", Key: r.key, Err: err})
	r.e.unlock()
	<-r.done
}
