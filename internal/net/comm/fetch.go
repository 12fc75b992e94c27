package comm

import (
	"errors"
	"os"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/soliton-train/soliton/internal/net/board"
	"github.com/soliton-train/soliton/internal/net/cma"
)

// Where both ends of a link are processes of one host, a large message does not pass through it. Its sender announces where the data are, the
// receiver reads them from there into its receive, and says so.
//
// A receiver cannot know whether the data still are the message's when it has read them: the sender may have cancelled the message, or lost
// the link, and may have used the memory for something else. So each end has a fence, a number that it changes before it lets go of the data of an
// offer without an answer. The receiver reads the fence after the data, and asks for the data through the link where the fence has changed.

// reach is what a link has where its peer's memory may be read.
type reach struct {
	peer *cma.Process // constant; nil where there is none
	wake chan struct{}
	over chan struct{} // closed when the link ends
	done chan struct{} // closed last by fetch

	told atomic.Bool // that the peer's memory cannot be read

	// Under e.mu.
	near     bool        // the peer is on our host: it sends a probe, and answers ours
	probed   bool        // the peer has told where its fence is, and we have answered
	replied  bool        // the peer has answered our probe
	readable bool        // the peer can read our memory
	board    *board.Peer // the peer's, if we have opened it
	shared   bool        // the peer has opened ours, too
	fence    uint64      // its address; 0 while we cannot read the peer's memory
	granted  []*incoming // what is to be read, in order
}

// start begins to read from a peer, and lets it try whether it can read from us.
func (l *link) start(peer *cma.Process) {
	l.peer, l.wake, l.over, l.done = peer, make(chan struct{}, 1), make(chan struct{}), make(chan struct{})
	e := l.p.e
	l.near = e.near(l.p.Addr)
	probe := Frame{Type: FrameProbe}
	if peer != nil {
		probe.Addr, probe.Fence = addressOf(&l.ours), l.ours.Load()
		if e.board != nil {
			probe.Board = e.board.Ticket()
		}
	}
	if l.near || peer != nil {
		l.ctl = probe.Append(l.ctl)
	}
	if peer == nil {
		close(l.done)
		return
	}
	e.tasks.Go(func() {
		defer close(l.done)
		l.fetch()
	})
}

// end returns when nothing is read any more. The board stays until the link is its peer's no more.
func (r *reach) end() {
	close(r.over)
	<-r.done
	if r.peer != nil {
		_ = r.peer.Close()
	}
}

// addressOf is where a value is, for a process that reads it while we keep it.
func addressOf[T any](x *T) uint64 { return uint64(uintptr(unsafe.Pointer(x))) }

// probe opens the peer's board and tries to read its fence, and says what works.
func (l *link) probe(f Frame) error {
	e := l.p.e
	if l.probed {
		return protocolError("%v: not the first", f)
	}
	reply := Frame{Type: FrameReach}
	var theirs *board.Peer
	if l.peer != nil && f.Addr != 0 {
		var fault error
		if f.Board.Nonce != 0 && e.board != nil {
			theirs, fault = e.board.Open(l.peer.Number(), f.Board)
		}
		// Up to now the number was that of the process.
		if err := l.peer.Read(nil, 0, f.Addr, f.Fence, nil); err != nil {
			l.unread(err)
			if theirs != nil {
				_ = theirs.Close()
			}
			theirs = nil
		} else if reply.Read = true; fault != nil {
			l.p.tell(LinkEvent{Peer: l.p.Session, Up: true, Link: l.number, Board: fault})
		}
		if theirs != nil {
			reply.Open, reply.Place = true, theirs.Place()
		}
	}
	e.lock()
	defer e.unlock()
	l.probed, l.board = true, theirs
	if reply.Read {
		l.fence = f.Addr
	}
	l.control(reply)
	e.notify()
	return nil
}

// reached takes the peer's answer to our probe.
func (l *link) reached(f Frame) error {
	if l.replied || !l.near && l.peer == nil || f.Read && l.peer == nil || f.Open && l.p.e.board == nil {
		return protocolError("%v: not the answer to a probe", f)
	}
	l.replied, l.readable = true, f.Read
	// Its probe came before.
	if f.Open && l.board != nil {
		if l.shared = l.board.Sees(f.Place); !l.shared {
			return protocolError("%v: our board has no such place there", f)
		}
	}
	l.p.e.notify()
	return nil
}

// unread tells that a read has failed, unless that says nothing of the next one.
func (l *link) unread(err error) {
	if errors.Is(err, cma.ErrChanged) || errors.Is(err, cma.ErrStopped) || errors.Is(err, os.ErrProcessDone) || l.told.Swap(true) {
		return
	}
	l.p.tell(LinkEvent{Peer: l.p.Session, Up: true, Link: l.number, Copies: err})
}

// grant has a message read whose turn it is.
func (l *link) grant(in *incoming) {
	l.granted = append(l.granted, in)
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// fetch reads what is granted, until the link ends.
func (l *link) fetch() {
	e := l.p.e
	for !Closed(l.over) {
		e.lock()
		in := l.next()
		e.unlock()
		if in == nil {
			select {
			case <-l.wake:
				continue
			case <-l.over:
				return
			}
		}
		began := time.Now()
		// What is read here stays as it is while the message is busy.
		err := l.peer.Read(in.recv.buf[:in.size], in.addr, l.fence, in.fence, func() bool { return in.stop.Load() || Closed(l.over) })
		took := time.Since(began)
		if err != nil {
			l.unread(err)
		}
		e.lock()
		l.fetched(in, took, err)
		e.unlock()
	}
}

// next returns the message to read next, and drops those that are not wanted any more.
func (l *link) next() *incoming {
	for len(l.granted) > 0 && !l.dead {
		in := l.granted[0]
		l.granted = slices.Delete(l.granted, 0, 1)
		if in.state == inFilling {
			in.busy = true
			return in
		}
		l.refuse(in)
	}
	return nil
}

// refuse tells the peer that a granted message will not be read.
func (l *link) refuse(in *incoming) {
	delete(l.in, in.id)
	l.control(Frame{Type: FrameDrop, ID: in.id})
	if in.credit {
		l.p.e.in.used(in)
	}
}

// fetched takes the result of a read.
func (l *link) fetched(in *incoming, took time.Duration, err error) {
	b, r := &l.p.e.in, in.recv
	in.busy = false
	switch {
	case in.gone:
		b.lost(in)
	case l.dead: // down takes it apart
	case r.cancel != nil:
		in.state, in.recv = inDiscard, nil
		r.filling = nil
		b.fail(r, r.cancel)
		l.refuse(in)
	case err != nil:
		in.addr = 0
		l.control(Frame{Type: FrameCredit, ID: in.id})
	default:
		in.got = in.size
		l.p.stats.WireReceived += int64(in.size)
		l.control(Frame{Type: FrameTaken, ID: in.id, Took: min(took, maxTook)})
		b.arrived(in)
	}
}

// offer announces a message with the place of its data.
func (l *link) offer(s *Sending) {
	s.offered = true
	l.ctl = Frame{
		Type: FrameOffer, ID: s.id, Key: s.key, Size: int64(len(s.data)), Priority: s.prio,
		Addr: addressOf(unsafe.SliceData(s.data)), Fence: l.ours.Load(),
	}.Append(l.ctl)
}

// taken takes the peer's word that it has read a message.
func (l *link) taken(s *Sending, took time.Duration) {
	s.offered = false
	st := &l.p.stats
	st.passed(s)
	st.WireSent += int64(len(s.data))
	st.Busy += took
	l.p.endSending(s, nil)
}

// passed counts a message that the peer reads from our memory.
func (st *PeerStats) passed(s *Sending) {
	st.MessagesSent++
	st.BytesSent += int64(len(s.data))
}

// takenBack changes the fence: the data of an offer are about to be the caller's again.
func (s *Sending) takenBack() {
	s.offered = false
	s.p.link.ours.Add(1)
}

// A read takes no longer than maxTook, as far as we count.
const maxTook = time.Minute
