package comm

import (
	"context"
	"errors"
	"fmt"
)

// Flush returns when every message posted before is in its peer's process: in
// a receive or in the pool of early ones, from where no end of the link takes
// it back; or when its peer did not want it, or was evicted. It is what to
// call before [Endpoint.Close], which throws away what is on its way.
//
// A message waits for its link and for its receiver as ever, so give ctx a
// deadline. Flush ends with it, and on close. A link that is lost meanwhile
// is an error of class [ErrLink]: some of what went over it may not have
// arrived. Flush waits for the others all the same, and returns the errors of
// all peers.
func (e *Endpoint) Flush(ctx context.Context) error {
	type lost struct {
		p    *peer
		ends uint64
	}
	var before []lost
	var pending []*Sending
	e.lock()
	if e.closed {
		e.unlock()
		return &Error{Op: "flush", Err: ErrClosed}
	}
	for _, p := range e.peers {
		before = append(before, lost{p, p.ends})
		pending = append(pending, p.sendings()...)
	}
	e.unlock()

	for _, s := range pending {
		if Closed(s.done) {
			continue
		}
		select {
		case <-s.done:
		case <-ctx.Done():
			return &Error{Op: "flush", Peer: s.p.Session, Key: s.key, Err: ctx.Err()}
		}
	}

	// All of it is written. A peer's answer to a sync says that it has read
	// what came before.
	asked := make(map[*peer]uint64)
	for {
		var faults []error
		var waiting *peer
		e.lock()
		if e.closed {
			e.unlock()
			return &Error{Op: "flush", Err: ErrClosed}
		}
		for _, b := range before {
			p, l := b.p, b.p.link
			switch {
			case p.evicted != nil:
			case p.ends != b.ends || l != nil && l.dead:
				faults = append(faults, &Error{Op: "flush", Peer: p.Session, Remote: true, Err: fmt.Errorf("%w before its end was reached", ErrLink)})
			case l == nil: // nothing was ever written
			case asked[p] == 0:
				l.syncs++
				asked[p] = l.syncs
				l.control(Frame{Type: FrameSync, ID: l.syncs})
				waiting = p
			case l.synced < asked[p]:
				waiting = p
			}
		}
		changed := e.changed
		e.unlock()
		if waiting == nil {
			return errors.Join(faults...)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return errors.Join(append(faults, &Error{Op: "flush", Peer: waiting.Session, Err: ctx.Err()})...)
		}
	}
}

// syncAnswered takes the peer's answer that it has read all before a sync.
func (l *link) syncAnswered(number uint64) error {
	if number <= l.synced || number > l.syncs {
		return protocolError("an answer to sync %d, of %d with %d answered", number, l.syncs, l.synced)
	}
	l.synced = number
	l.p.e.notify()
	return nil
}
