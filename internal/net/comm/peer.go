package comm

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/line"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/timing"
)

// peer is an admitted session. Its loop, run, is the only goroutine that
// makes, serves and closes its connections; others leave word under the
// endpoint's lock and wake it.
type peer struct {
	e    *Endpoint
	wake chan struct{} // capacity 1
	gone chan struct{} // closed by evict
	done chan struct{} // closed last by run

	// Under e.mu.
	Peer
	wanted  bool
	evicted error
	known   uint64             // number of the newest link
	link    *link              // while one is up
	ends    uint64             // links that have gone down
	next    *handover          // accepted, not served yet
	taken   net.Conn           // the loop has it in hand, between obtain and serve
	abort   context.CancelFunc // while the loop dials
	queue   turns[*Sending]    // not announced yet
	lastErr error              // of the last attempt to dial
	small   bool               // large packets may vanish on the way: TCP has ended the last link since no answer came
	stats   PeerStats
	free    time.Time // when a shaped link has sent all
}

// handover is a connection whose handshake is over but for the welcome.
type handover struct {
	conn    net.Conn
	number  uint64
	pool    uint32  // of the other side
	lines   bool    // the other side can have a line
	machine Machine // of the other side
	welcome bool    // we owe it
}

func newPeer(e *Endpoint, p Peer) *peer {
	return &peer{e: e, Peer: p, wake: make(chan struct{}, 1), gone: make(chan struct{}), done: make(chan struct{})}
}

func (p *peer) wakeUp() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// want asks the loop for a link.
func (p *peer) want() {
	p.wanted = true
	p.wakeUp()
}

// push takes a message for sending.
func (p *peer) push(s *Sending) {
	heap.Push(&p.queue, s)
	p.want()
	p.dispatch()
}

// sendings returns all messages that have not ended, but for those whose last
// chunk is being written.
func (p *peer) sendings() []*Sending {
	all := append([]*Sending(nil), p.queue...)
	if l := p.link; l != nil {
		all = append(all, l.bulk...)
		for _, s := range l.out {
			all = append(all, s)
		}
	}
	return all
}

// evict ends the peer: nothing of it counts from now on, and the loop ends.
func (p *peer) evict(err error) {
	if p.evicted != nil {
		return
	}
	p.evicted = err
	close(p.gone)
	if p.abort != nil {
		p.abort()
	}
	if p.next != nil {
		p.next.conn.Close()
		p.next = nil
	}
	if p.taken != nil {
		p.taken.Close()
	}
	if p.link != nil {
		p.link.dead = true
		p.link.conn.Close()
	} else {
		p.failAll(err)
	}
}

// called decides on a caller that says it is our peer, and takes the
// connection or says why not.
func (p *peer) called(c net.Conn, hello Frame) Refusal {
	up := p.link != nil || p.next != nil || p.taken != nil
	switch {
	case p.abort != nil && !up && p.e.cfg.Self.Worker < p.Worker:
		return RefusedCrossed // of two calls that cross, the lower worker's wins
	case up && hello.Link < p.known:
		return RefusedLinked // it called before it knew of this link, or has yet to learn that the link is lost
	}
	if p.abort != nil {
		p.abort()
	}
	if p.next != nil {
		p.next.conn.Close()
	}
	if p.link != nil {
		p.link.dead = true
		p.link.conn.Close()
	}
	p.known = max(p.known, hello.Link) + 1
	p.next = &handover{conn: c, number: p.known, pool: hello.Pool, lines: hello.Lines, machine: hello.Machine, welcome: true}
	p.wakeUp()
	return 0
}

// run is the peer's loop: a link, then the next, until evicted.
func (p *peer) run() {
	defer close(p.done)
	pause := time.Duration(0)
	for {
		h := p.obtain(&pause)
		if h == nil {
			return
		}
		began := time.Now()
		p.serve(h)
		if time.Since(began) > timing.MaxRedials*timing.Redial {
			// The link was good, so its peer has more likely failed than the network, and the survivors need their time
			// for the recovery. A link that breaks at once is made again after growing pauses.
			pause = timing.Redial
		}
	}
}

// obtain waits until a link is wanted, and dials, or until the peer called. It
// returns nil when the peer is evicted. pause is how long to wait before the
// next attempt.
func (p *peer) obtain(pause *time.Duration) *handover {
	e := p.e
	type result struct {
		h   *handover
		err error
	}
	var dialled chan result // while dialling
	var timer *time.Timer
	var retry <-chan time.Time
	defer func() {
		if timer != nil {
			timer.Stop()
		}
	}()
	failed := 0
	for {
		e.lock()
		if p.evicted != nil || p.next != nil {
			h := p.next
			if p.next = nil; h != nil {
				p.taken = h.conn
			}
			if dialled != nil {
				p.abort()
				e.unlock()
				if r := <-dialled; r.h != nil {
					r.h.conn.Close()
				}
				e.lock()
				p.abort = nil
			}
			if p.evicted != nil {
				if h != nil {
					h.conn.Close()
				}
				h = nil
			}
			e.unlock()
			return h
		}
		if p.wanted && dialled == nil && retry == nil {
			if *pause > 0 && failed == 0 {
				timer = time.NewTimer(*pause)
				retry = timer.C
				failed++
			} else {
				ctx, cancel := context.WithTimeout(e.ctx, timing.Handshake)
				p.abort = cancel
				dialled = make(chan result, 1)
				addr, known, connect := p.Addr, p.known, e.dialler(p.small)
				out := dialled
				e.tasks.Go(func() {
					defer cancel()
					h, err := p.dial(ctx, connect, addr, known)
					out <- result{h, err}
				})
			}
		}
		e.unlock()
		select {
		case <-p.wake:
		case <-p.gone:
		case <-retry:
			retry = nil
		case r := <-dialled:
			e.lock()
			dialled, p.abort = nil, nil
			switch {
			case p.evicted != nil || p.next != nil:
				if r.h != nil {
					r.h.conn.Close()
				}
			case r.h != nil:
				p.known = max(p.known, r.h.number)
				*pause = min(max(2**pause, timing.Redial), timing.MaxRedials*timing.Redial)
				p.taken = r.h.conn
				e.unlock()
				return r.h
			default:
				p.lastErr = r.err
				var refused *refusedError
				if errors.As(r.err, &refused) && refused.link > p.known {
					p.known = refused.link // we lost a link that the peer still sees: the next call says so
					e.unlock()
					continue
				}
				*pause = min(max(2**pause, timing.Redial), timing.MaxRedials*timing.Redial)
				failed++
				timer = time.NewTimer(*pause)
				retry = timer.C
				number := p.known
				e.unlock()
				p.tell(LinkEvent{Peer: p.Session, Link: number, Err: r.err})
				continue
			}
			e.unlock()
		}
	}
}

// refusedError is a refusal and the newest link the peer knows of.
type refusedError struct {
	reason Refusal
	link   uint64
}

func (e *refusedError) Error() string { return ErrRefused.Error() + ": " + e.reason.String() }
func (e *refusedError) Unwrap() error { return ErrRefused }

// dial calls the peer for a link.
func (p *peer) dial(ctx context.Context, connect dialler, addr string, known uint64) (*handover, error) {
	c, f, err := p.greet(ctx, connect, addr, func(c net.Conn) Frame {
		return Frame{Type: FrameHello, From: p.e.cfg.Self, To: p.Session, Link: known, Pool: uint32(p.e.cfg.Pool), Lines: line.Capable(c), Machine: thisMachine()}
	})
	if err != nil {
		return nil, err
	}
	return &handover{conn: c, number: f.Link, pool: f.Pool, lines: f.Lines, machine: f.Machine}, nil
}

// dialler connects to an address.
type dialler func(ctx context.Context, addr string) (net.Conn, error)

// dialler returns how to connect, by small packets or not.
func (e *Endpoint) dialler(small bool) dialler {
	if !small {
		return e.cfg.Transport.Dial
	}
	return func(ctx context.Context, addr string) (net.Conn, error) {
		return transport.DialSmall(ctx, e.cfg.Transport, addr)
	}
}

// greet calls the peer, shakes hands, sends the first frame, and returns the welcome.
func (p *peer) greet(ctx context.Context, connect dialler, addr string, first func(net.Conn) Frame) (net.Conn, Frame, error) {
	fail := func(err error) (net.Conn, Frame, error) {
		return nil, Frame{}, &Error{Op: "dial", Peer: p.Session, Remote: true, Err: err}
	}
	c, err := connect(ctx, addr)
	if err != nil {
		return fail(err)
	}
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(past) })
	f, err := func() (Frame, error) {
		hello := first(c)
		if err := auth.Call(c, p.e.cfg.Key, auth.Ends{From: hello.From, To: hello.To}, hello.Append(nil)); err != nil {
			return Frame{}, err
		}
		return NewFrameReader(c).Next()
	}()
	switch {
	case !stop():
		err = ctx.Err()
	case err != nil:
	case f.Type == FrameWelcome:
		return c, f, nil
	case f.Type == FrameRefuse:
		err = &refusedError{f.Reason, f.Link}
	default:
		err = protocolError("%v for an answer", f)
	}
	c.Close()
	return fail(err)
}

// serve runs a link from its welcome to its end.
func (p *peer) serve(h *handover) {
	e := p.e
	l := &link{
		p: p, conn: h.conn, number: h.number, pool: int(h.pool), window: int(h.pool),
		out: make(map[uint64]*Sending), in: make(map[uint64]*incoming), lines: h.lines && line.Capable(h.conn), dialled: !h.welcome, machine: h.machine,
	}
	l.ours.Store(rand.Uint64())
	near, copies := transport.Neighbour(h.conn)
	l.conn.SetDeadline(time.Time{})
	if h.welcome {
		l.ctl = Frame{Type: FrameWelcome, Link: h.number, Pool: uint32(e.cfg.Pool), Lines: line.Capable(h.conn), Machine: thisMachine()}.Append(nil) // goes with the first frames
	}
	e.lock()
	p.taken = nil
	if p.evicted != nil || p.next != nil {
		e.unlock()
		l.conn.Close()
		if near != nil {
			_ = near.Close()
		}
		return
	}
	l.start(near)
	p.link, p.lastErr = l, nil
	p.dispatch()
	e.notify()
	e.unlock()
	up := LinkEvent{Peer: p.Session, Up: true, Link: l.number, Copies: copies}
	if l.near {
		up.Board = e.boardless
	}
	p.tell(up)

	readEnd := make(chan error, 1)
	e.tasks.Go(func() {
		err := l.read()
		l.conn.Close() // so that the writer ends too
		readEnd <- err
		p.wakeUp()
	})
	err, reading := p.write(l, readEnd)
	l.conn.Close()
	if reading {
		if rerr := <-readEnd; errors.Is(rerr, ErrProtocol) || errors.Is(rerr, syscall.ETIMEDOUT) {
			err = rerr // says more than that a write failed
		}
	}
	l.reach.end()
	if lost, ok := l.lineLost.Load().(error); ok {
		err = lost
	}

	e.lock()
	p.small = errors.Is(err, syscall.ETIMEDOUT)
	if p.evicted != nil {
		err = p.evicted
	} else if l.dead {
		err = fmt.Errorf("%w: the peer made a new one", ErrLink)
	}
	p.wanted = p.wanted && p.evicted == nil
	l.down(err)
	p.link = nil
	for _, s := range e.scopes {
		s.lost(p.Session, lostErr(err))
	}
	e.notify()
	e.unlock()
	if l.board != nil {
		_ = l.board.Close()
	}
	l.endLine(lostErr(err))
	p.tell(LinkEvent{Peer: p.Session, Link: l.number, Err: lostErr(err)})
}

// write writes what there is until the link ends. reading says whether the
// reader's result is still to come.
func (p *peer) write(l *link, readEnd <-chan error) (err error, reading bool) {
	e := p.e
	b := &batch{l: l, heads: make([]byte, 0, maxPieces*(2*headerSize+keySize+12))}
	for {
		e.lock()
		more := b.fill()
		e.unlock()
		if more {
			began := time.Now()
			n, err := b.write()
			if err != nil {
				return err, true
			}
			e.lock()
			rest := p.pace(began, time.Now(), n)
			e.unlock()
			if rest <= 0 {
				continue
			}
			t := time.NewTimer(rest)
			select {
			case <-t.C:
				continue
			case <-p.gone:
				err = net.ErrClosed
			case err = <-readEnd:
				t.Stop()
				return err, false
			}
			t.Stop()
			return err, true
		}
		select {
		case <-p.wake:
		case <-p.gone:
			return net.ErrClosed, true
		case err := <-readEnd:
			return err, false
		}
	}
}

// lostErr puts the end of a connection into a class callers match.
func lostErr(err error) error {
	switch {
	case errors.Is(err, ErrLink), errors.Is(err, ErrNotMember), errors.Is(err, ErrClosed):
		return err
	case errors.Is(err, io.EOF):
		return fmt.Errorf("%w: closed by the peer", ErrLink)
	}
	return fmt.Errorf("%w: %w", ErrLink, err)
}

func (p *peer) tell(ev LinkEvent) {
	if p.e.cfg.OnLink != nil {
		p.e.cfg.OnLink(ev)
	}
}

// FullSpeed is the speed in bytes per second that parts of a link's speed are
// parts of, where they are asked for: that of a network of 8 Gbit/s.
const FullSpeed = 1e9

// shapeAhead is the most time without anything to send that counts as a timer
// that came late, which is made up for.
const shapeAhead = 5 * time.Millisecond

// Shape limits what this side sends to a worker, in whichever incarnation, to
// so many bytes per second; 0 lifts the limit. It is there to see what a slow
// link does. The limit holds from the next chunk on, and chunks still go by
// priority.
func (e *Endpoint) Shape(to id.WorkerID, rate float64) {
	e.lock()
	defer e.unlock()
	if e.shaped == nil {
		e.shaped = make(map[id.WorkerID]float64)
	}
	if rate > 0 {
		e.shaped[to] = rate
	} else {
		delete(e.shaped, to)
	}
}

// pace accounts for n bytes whose write began at a time, and returns how long
// the link is still taken by them. The caller holds the lock.
func (p *peer) pace(began, now time.Time, n int) (rest time.Duration) {
	p.stats.Busy += now.Sub(began)
	rate := p.e.shaped[p.Worker]
	if rate <= 0 {
		return 0
	}
	if began.Sub(p.free) > shapeAhead {
		p.free = began
	}
	p.free = p.free.Add(time.Duration(float64(n) / rate * float64(time.Second)))
	if rest = p.free.Sub(now); rest > 0 {
		p.stats.Busy += rest
	}
	return rest
}
