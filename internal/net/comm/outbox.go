package comm

import (
	"container/heap"
	"context"
)

// Sending is a message on its way out.
type Sending struct {
	e    *Endpoint
	p    *peer
	key  Key
	data []byte
	prio Priority

	// Guarded by e.mu until done is closed, then constant.
	done   chan struct{}
	after  func()
	err    error
	id     uint64 // on the link; 0 before it is announced
	order  uint64
	off    int
	eager  bool
	state  outState
	busy   bool  // the writer is in data
	cancel error // set while the writer must leave data first
	queue  int   // place in its heap, -1 if in none
}

type outState uint8

const (
	outQueued  outState = iota // not announced: in peer.queue
	outOffered                 // announced: in link.out
	outReady                   // may be sent: in link.bulk
	outEnded
)

// outHeap orders messages by priority, then by age.
type outHeap []*Sending

func (h outHeap) Len() int { return len(h) }
func (h outHeap) Less(i, j int) bool {
	return h[i].prio < h[j].prio || h[i].prio == h[j].prio && h[i].order < h[j].order
}
func (h outHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].queue, h[j].queue = i, j
}
func (h *outHeap) Push(x any) {
	s := x.(*Sending)
	s.queue = len(*h)
	*h = append(*h, s)
}
func (h *outHeap) Pop() any {
	old := *h
	s := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	s.queue = -1
	return s
}

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
			s.eager, s.state = true, outReady
			heap.Pop(&p.queue)
			heap.Push(&l.bulk, s)
		case l.offers < maxOffers:
			l.offers++
			heap.Pop(&p.queue)
			l.nextID++
			s.id, s.state = l.nextID, outOffered
			l.out[s.id] = s
			l.ctl = Frame{Type: FrameOpen, ID: s.id, Key: s.key, Size: int64(len(s.data)), Priority: s.prio}.Append(l.ctl)
		default:
			return
		}
		p.wakeUp()
	}
}

// answered takes the peer's answer to an announced message: credit, or that it
// is not wanted. A message unknown here was cancelled meanwhile.
func (l *link) answered(id uint64, credit bool) error {
	if id > l.nextID {
		return protocolError("an answer to message %d, which was never announced", id)
	}
	s := l.out[id]
	if s == nil {
		return nil
	}
	delete(l.out, id)
	l.offers--
	if credit {
		s.state = outReady
		heap.Push(&l.bulk, s)
		l.p.wakeUp()
	} else {
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
	if s.queue >= 0 {
		switch s.state {
		case outQueued:
			heap.Remove(&p.queue, s.queue)
		case outReady:
			heap.Remove(&p.link.bulk, s.queue)
		}
	}
	s.state, s.err = outEnded, err
	close(s.done)
	if s.after != nil {
		p.e.later = append(p.e.later, s.after)
	}
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

// Done is closed when the message is sent or has failed.
func (s *Sending) Done() <-chan struct{} { return s.done }

// Wait returns when the message's memory is the caller's again: with nil when
// all of it was handed to the network, or the receiver did not want it because
// it has a copy or left its step; else with an error. It ends with ctx.
//
// Nil does not say that it arrived: a link that breaks loses what is under
// way, tells Config.OnLink, and the caller decides what to send again.
func (s *Sending) Wait(ctx context.Context) error {
	select {
	case <-s.done:
		return s.err
	default:
	}
	select {
	case <-s.done:
	case <-ctx.Done():
		s.Cancel(ctx.Err())
	}
	return s.err
}

// Cancel ends the message with an error, unless it has ended, and returns when
// its memory is the caller's again.
func (s *Sending) Cancel(err error) {
	s.e.lock()
	s.withdraw(&Error{Op: "send", Peer: s.p.Session, Key: s.key, Err: err})
	s.e.unlock()
	<-s.done
}

// OnDone calls f once, when the message has ended; Wait returns at once from
// then on. f must not block.
func (s *Sending) OnDone(f func()) {
	s.e.lock()
	defer s.e.unlock()
	if isClosed(s.done) {
		s.e.later = append(s.e.later, f)
		return
	}
	s.after = f
}
