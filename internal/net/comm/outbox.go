package comm

import (
	"container/heap"
	"context"
)

// Sending is a message on its way out.
type Sending struct {
	ending
	p    *peer
	key  Key
	data []byte

	// Guarded by e.mu until done is closed, then constant.
	turn
	id     uint64 // on the link; 0 before it is announced
	off    int
	state  outState
	busy   bool  // the writer is in data
	cancel error // set while the writer must leave data first

	offered bool // the peer may read data from our memory
}

type outState uint8

const (
	outQueued  outState = iota // not announced: in peer.queue
	outOffered                 // announced: in link.out
	outReady                   // may be sent: in link.bulk
	outEnded
)

// dispatch announces what waits at p, as far as its link allows.
func (p *peer) dispatch() {
	l := p.link
	if l == nil {
		return
	}
	for len(p.queue) > 0 {
		s := p.queue[0]
		cost := charge(len(s.data))
		switch {
		case len(s.data) <= p.e.cfg.Eager && cost <= l.window:
			l.window -= cost
			s.state = outReady
			heap.Pop(&p.queue)
			heap.Push(&l.bulk, s)
		case l.offers < maxOffers:
			l.offers++
			heap.Pop(&p.queue)
			l.nextID++
			s.id, s.state = l.nextID, outOffered
			l.out[s.id] = s
			if l.readable && len(s.data) > 0 && p.e.shaped[p.Worker] == 0 {
				l.offer(s)
				break
			}
			l.ctl = Frame{Type: FrameOpen, ID: s.id, Key: s.key, Size: int64(len(s.data)), Priority: s.prio}.Append(l.ctl)
		default:
			return
		}
		p.wakeUp()
	}
}

// answered takes the peer's answer to an announced message: credit, that it has read it, or that it
// is not wanted. A message unknown here was cancelled meanwhile.
func (l *link) answered(f Frame) error {
	if f.ID > l.nextID {
		return protocolError("an answer to message %d, which was never announced", f.ID)
	}
	s := l.out[f.ID]
	switch {
	case s == nil:
		return nil
	case f.Type == FrameTaken && !s.offered:
		return protocolError("message %d was read, which was never offered", f.ID)
	}
	delete(l.out, f.ID)
	l.offers--
	switch f.Type {
	case FrameTaken:
		l.taken(s, f.Took)
	case FrameCredit:
		s.state, s.offered = outReady, false
		heap.Push(&l.bulk, s)
		l.p.wakeUp()
	default:
		s.offered = false
		l.p.endSending(s, nil) // the receiver has it from elsewhere, or needs it no more
	}
	l.p.dispatch()
	return nil
}

// endSending ends a message. The writer must not be in its data.
func (p *peer) endSending(s *Sending, err error) {
	if s.state == outEnded {
		return
	}
	if s.index >= 0 {
		switch s.state {
		case outQueued:
			heap.Remove(&p.queue, s.index)
		case outReady:
			heap.Remove(&p.link.bulk, s.index)
		}
	}
	s.state = outEnded
	if s.offered {
		s.takenBack()
	}
	s.finish(err)
}

// withdraw ends a message from its own side: at once, or when the writer,
// told to hurry, has left its data.
func (s *Sending) withdraw(err error) {
	if s.state == outEnded || s.cancel != nil {
		return
	}
	if s.busy {
		s.cancel = err
		s.p.link.kickWriter()
		return
	}
	s.p.retract(s, err)
}

// retract ends a message that the receiver may have heard of.
func (p *peer) retract(s *Sending, err error) {
	if l := p.link; l != nil && s.id != 0 {
		if s.state == outOffered {
			delete(l.out, s.id)
			l.offers--
		}
		if s.offered {
			p.stats.passed(s)
		}
		l.control(Frame{Type: FrameCancel, ID: s.id})
	}
	p.endSending(s, err)
	p.dispatch()
}

// failAll ends all messages to the peer. The writer has ended.
func (p *peer) failAll(err error) {
	fail := func(s *Sending) {
		p.endSending(s, &Error{Op: "send", Peer: p.Session, Key: s.key, Remote: true, Err: err})
	}
	for len(p.queue) > 0 {
		fail(p.queue[0])
	}
	if l := p.link; l != nil {
		for len(l.bulk) > 0 {
			fail(l.bulk[0])
		}
		for _, s := range l.out {
			fail(s)
		}
		clear(l.out)
	}
}

// Wait returns when the message's memory is the caller's again: with nil when
// all of it was handed to the network, or the receiver did not want it because
// it has a copy or left its step; else with an error. It ends with ctx.
//
// Nil does not say that it arrived: a link that breaks loses what is under
// way, tells Config.OnLink, and the caller decides what to send again.
func (s *Sending) Wait(ctx context.Context) error {
	return s.wait(ctx, s.Cancel)
}

// Cancel ends the message with an error, unless it has ended, and returns when
// its memory is the caller's again.
func (s *Sending) Cancel(err error) {
	s.e.lock()
	s.withdraw(&Error{Op: "send", Peer: s.p.Session, Key: s.key, Err: err})
	s.e.unlock()
	<-s.done
}
