package comm

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"sync"
	"time"
	"unsafe"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/board"
	"github.com/soliton-train/soliton/internal/net/line"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/timing"
)

// Endpoint is a worker's side of all its links. All methods may be called
// from several goroutines.
type Endpoint struct {
	cfg      Config
	listener transport.Listener
	ctx      context.Context // ends with Close
	stop     context.CancelFunc
	tasks    sync.WaitGroup // every goroutine of the endpoint

	mu      sync.Mutex
	later   []func() // to be called when mu is free
	closed  bool
	changed chan struct{} // closed and replaced when a link or the membership changes
	peers   map[id.WorkerID]*peer
	scopes  map[uint16]*Scope // of groups
	in      inbox
	order   uint64                  // of sendings
	callers *auth.Lobby             // accepted, hello not read
	shaped  map[id.WorkerID]float64 // bytes per second

	hub *line.Hub // of all lines; nil before the first

	board     *board.Board // what we show to others of our host; nil where there is none
	boardless error        // why there is none
}

// Listen opens an endpoint that admits no session yet.
func Listen(cfg Config) (*Endpoint, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	l, err := cfg.Transport.Listen(cfg.Listen)
	if err != nil {
		return nil, &Error{Op: "listen", Err: err}
	}
	e := &Endpoint{
		cfg: cfg, listener: l, changed: make(chan struct{}),
		peers: make(map[id.WorkerID]*peer), scopes: make(map[uint16]*Scope), callers: auth.NewLobby(transport.MaxCallers),
	}
	e.in = inbox{e: e, keys: make(map[Key]*entry), versions: make(map[uint16]id.Version)}
	e.ctx, e.stop = context.WithCancel(context.Background())
	if _, ok := cfg.Transport.(transport.Neighbourhood); ok {
		if e.board, e.boardless = board.New(); errors.Is(e.boardless, errors.ErrUnsupported) {
			e.boardless = nil // there is nothing that would help
		}
	}
	e.tasks.Go(e.accept)
	return e, nil
}

// Addr returns the address that others dial.
func (e *Endpoint) Addr() string { return e.listener.Addr() }

// Self returns our own session.
func (e *Endpoint) Self() id.Session { return e.cfg.Self }

func (e *Endpoint) lock() { e.mu.Lock() }

// unlock frees the lock and then makes the calls that waited for it.
func (e *Endpoint) unlock() {
	later := e.later
	e.later = nil
	e.mu.Unlock()
	for _, f := range later {
		f()
	}
}

// notify wakes the calls that wait for a change of links or members.
func (e *Endpoint) notify() {
	close(e.changed)
	e.changed = make(chan struct{})
}

// Close ends all links, calls and groups with [ErrClosed], and returns when
// every goroutine of the endpoint has ended.
func (e *Endpoint) Close() error {
	e.lock()
	first := !e.closed
	if first {
		e.closed = true
		e.stop()
		e.listener.Close()
		e.callers.Close()
		for _, s := range e.scopes {
			s.lost(e.cfg.Self, ErrClosed)
		}
		for _, p := range e.peers {
			p.evict(ErrClosed)
		}
		e.notify()
	}
	e.unlock()
	e.tasks.Wait()
	if first {
		e.lock()
		for k, en := range e.in.keys {
			if en.posted != nil {
				e.in.withdraw(en.posted, &Error{Op: "receive", Key: k, Err: ErrClosed})
			}
		}
		clear(e.in.keys)
		if e.board != nil {
			_ = e.board.Close()
		}
		if e.hub != nil {
			e.hub.Close()
		}
		e.unlock()
	}
	return nil
}

// SetMembers admits exactly these peers; our own session is left out if it is
// listed. A session that is not listed any more is evicted: its link is
// closed, sends to it fail with [ErrNotMember], and what it sent and no
// receive has taken is dropped. Sessions that stay keep their links. A worker's
// new incarnation is a new session.
func (e *Endpoint) SetMembers(members []Peer) error {
	want := make(map[id.WorkerID]Peer, len(members))
	for _, m := range members {
		if m.Session == e.cfg.Self {
			continue
		}
		if !fits(m.Session) {
			return &Error{Op: "set members", Peer: m.Session, Err: fmt.Errorf("%w: worker and incarnation must be 0 to %d", ErrUsage, uint32(math.MaxUint32))}
		}
		if _, twice := want[m.Worker]; twice || m.Worker == e.cfg.Self.Worker {
			return &Error{Op: "set members", Peer: m.Session, Err: fmt.Errorf("%w: worker %d is listed in two incarnations", ErrUsage, m.Worker)}
		}
		want[m.Worker] = m
	}
	e.lock()
	if e.closed {
		e.unlock()
		return &Error{Op: "set members", Err: ErrClosed}
	}
	var gone []*peer
	for w, p := range e.peers {
		if m, stays := want[w]; stays && m.Session == p.Session {
			p.Addr = m.Addr
			continue
		}
		p.evict(ErrNotMember)
		delete(e.peers, w)
		e.in.evict(p)
		for _, s := range e.scopes {
			s.lost(p.Session, ErrNotMember)
		}
		gone = append(gone, p)
	}
	for w, m := range want {
		if e.peers[w] == nil {
			p := newPeer(e, m)
			e.peers[w] = p
			e.tasks.Go(p.run)
		}
	}
	e.notify()
	e.unlock()
	for _, p := range gone {
		<-p.done
	}
	return nil
}

// near reports whether an address is one of our host.
func (e *Endpoint) near(addr string) bool {
	t, ok := e.cfg.Transport.(transport.Neighbourhood)
	return ok && t.Near(addr)
}

// member returns the admitted peer of a session.
func (e *Endpoint) member(s id.Session) (*peer, error) {
	if e.closed {
		return nil, ErrClosed
	}
	p := e.peers[s.Worker]
	if p == nil || p.Session != s {
		return nil, ErrNotMember
	}
	return p, nil
}

// Connect makes sure that there are links to all these members and waits for
// them. It returns how many are new: made, by either side, since a Connect or
// [Group.Edit] last counted. Links that exist are not touched. It ends with
// ctx, on close, and when one of the sessions is not a member or is evicted.
func (e *Endpoint) Connect(ctx context.Context, to ...id.Session) (opened int, err error) {
	return e.connect(ctx, nil, to)
}

func (e *Endpoint) connect(ctx context.Context, done <-chan struct{}, to []id.Session) (opened int, err error) {
	for {
		e.lock()
		up := 0
		var waiting *peer
		for _, s := range to {
			if s == e.cfg.Self {
				up++
				continue
			}
			p, err := e.member(s)
			if err != nil {
				e.unlock()
				return opened, &Error{Op: "connect", Peer: s, Err: err}
			}
			if p.link != nil {
				up++
				if !p.link.counted {
					p.link.counted = true
					opened++
				}
				continue
			}
			waiting = p
			p.want()
		}
		changed := e.changed
		e.unlock()
		if up == len(to) {
			return opened, nil
		}
		select {
		case <-changed:
		case <-done:
			return opened, ErrVersion
		case <-ctx.Done():
			e.lock()
			last := waiting.lastErr
			e.unlock()
			return opened, &Error{Op: "connect", Peer: waiting.Session, Remote: last != nil, Err: errors.Join(ctx.Err(), last)}
		}
	}
}

// Bytes returns the memory of x as bytes, in the machine's byte order; peers
// of another order are refused when they call.
func Bytes(x []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 4*len(x))
}

// Post hands a message to the peer's link, which is made if there is none. The
// data must not change until the returned Sending has ended. Data travel from
// there to the network without a copy.
func (e *Endpoint) Post(to id.Session, key Key, data []byte, prio Priority) *Sending {
	e.lock()
	defer e.unlock()
	return e.post(to, key, data, prio)
}

// post is Post for a caller that holds the lock.
func (e *Endpoint) post(to id.Session, key Key, data []byte, prio Priority) *Sending {
	e.order++
	s := &Sending{ending: newEnding(e), key: key, data: data, turn: turn{prio, e.order, -1}}
	p, err := e.member(to)
	switch {
	case err != nil:
	case !key.valid() || len(data) > MaxMessage:
		err = fmt.Errorf("%w: a message needs a key of a known kind", ErrUsage)
	case e.in.stale(key):
		err = ErrStale
	}
	if err != nil {
		s.p, s.state = &peer{e: e, Peer: Peer{Session: to}}, outEnded
		s.finish(&Error{Op: "send", Peer: to, Key: key, Err: err})
		return s
	}
	s.p = p
	p.push(s)
	return s
}

// Send is Post and Wait.
func (e *Endpoint) Send(ctx context.Context, to id.Session, key Key, data []byte, prio Priority) error {
	return e.Post(to, key, data, prio).Wait(ctx)
}

// Expect posts a receive: the first whole message of any member with this key
// goes into buf, from the network directly where it was not there before. A
// message may be shorter than buf. The buffer must not be touched until the
// returned Receiving has ended.
func (e *Endpoint) Expect(key Key, buf []byte) *Receiving {
	r := &Receiving{ending: newEnding(e), key: key, buf: buf}
	e.lock()
	defer e.unlock()
	var err error
	switch {
	case e.closed:
		err = ErrClosed
	case !key.valid():
		err = fmt.Errorf("%w: a message needs a key of a known kind", ErrUsage)
	default:
		err = e.in.post(r)
	}
	if err != nil {
		r.finish(&Error{Op: "receive", Key: key, Err: err})
	}
	return r
}

// Receive is Expect and Wait.
func (e *Endpoint) Receive(ctx context.Context, key Key, buf []byte) (n int, from id.Session, err error) {
	return e.Expect(key, buf).Wait(ctx)
}

// Advance leaves all steps before the given one behind: early messages of
// theirs are dropped, as is what still comes; sends and receives end with
// [ErrStale]; and their keys are forgotten. A step does not go back.
func (e *Endpoint) Advance(step uint64) {
	if e.board != nil {
		_ = e.board.Sweep()
	}
	e.lock()
	defer e.unlock()
	if step <= e.in.step {
		return
	}
	e.in.step = step
	over := func(k Key) bool { return !k.ofGroup() && k.Step < step }
	e.in.end(over)
	e.withdrawSends(over, ErrStale)
}

// withdrawSends ends the sends of keys whose life is over.
func (e *Endpoint) withdrawSends(over func(Key) bool, err error) {
	for _, p := range e.peers {
		for _, s := range p.sendings() {
			if over(s.key) {
				s.withdraw(&Error{Op: "send", Peer: p.Session, Key: s.key, Err: err})
			}
		}
	}
}

// PeerStats counts what passed between us and one session. Payload is the
// bytes of messages, wire is all bytes. A message that is taken back while
// the peer may read it from our memory counts as sent: its word that it has it
// may be under way.
type PeerStats struct {
	Peer   id.Session
	Linked bool
	Links  uint64 // links of the pair so far
	Traffic
	WireSent, WireReceived int64 // bytes on the link, or read from memory; what passes on boards is none of them
	// Busy is how long the link was taken by what was sent: by the system's calls, which wait
	// while the network takes no more, and by what [Endpoint.Shape] adds.
	Busy time.Duration
}

// Stats returns the counts of all present members, in no order.
func (e *Endpoint) Stats() []PeerStats {
	e.lock()
	defer e.unlock()
	var all []PeerStats
	for _, p := range e.peers {
		s := p.stats
		s.Peer, s.Linked, s.Links = p.Session, p.link != nil, p.known
		if p.link != nil && p.link.line != nil {
			sent, received := p.link.line.Bytes()
			s.WireSent, s.WireReceived = s.WireSent+sent, s.WireReceived+received
		}
		all = append(all, s)
	}
	return all
}

// accept takes callers until the listener closes.
func (e *Endpoint) accept() {
	for {
		c, err := auth.Accept(e.ctx, e.listener)
		if err != nil || !e.callers.Enter(c) {
			return
		}
		e.tasks.Go(func() { e.answer(c) })
	}
}

// answer has a caller prove that it holds the key, reads its hello, and hands
// the connection to the loop of its peer, or refuses it.
func (e *Endpoint) answer(c net.Conn) {
	c.SetDeadline(time.Now().Add(timing.Handshake))
	ends, err := auth.Answer(c, e.cfg.Key)
	var f Frame
	if err == nil {
		f, err = NewFrameReader(c).Next()
	}
	stays := e.callers.Leave(c)
	e.lock()
	var reply Frame
	switch forged := err == nil && (f.Type != FrameHello && f.Type != FrameLine || auth.Ends{From: f.From, To: f.To} != ends); {
	case e.closed || !stays || err != nil && !errors.Is(err, errVersion) || forged:
		switch {
		case e.closed:
		case !stays:
			e.cfg.Rejected.Add(auth.Crowded, 1)
		case forged || errors.Is(err, ErrProtocol):
			e.cfg.Rejected.Add(auth.Malformed, 1)
		default:
			e.cfg.Rejected.AddError(err)
		}
		e.unlock()
		c.Close()
		return
	case err != nil:
		reply = Frame{Type: FrameRefuse, Reason: RefusedVersion}
	case f.To != e.cfg.Self:
		reply = Frame{Type: FrameRefuse, Reason: RefusedWrongPeer}
	default:
		p, err := e.member(f.From)
		if err != nil {
			if now := e.peers[f.From.Worker]; now != nil && now.Incarnation > f.From.Incarnation {
				e.cfg.Rejected.Add(auth.Outdated, 1)
			}
			reply = Frame{Type: FrameRefuse, Reason: RefusedNotMember}
			break
		}
		if f.Type == FrameLine {
			if p.takeLine(c, f) {
				e.unlock()
				return
			}
			reply = Frame{Type: FrameRefuse, Reason: RefusedLine}
			break
		}
		if reason := p.called(c, f); reason != 0 {
			reply = Frame{Type: FrameRefuse, Reason: reason, Link: p.known}
			break
		}
		e.unlock()
		return // the connection is the peer's
	}
	e.unlock()
	_, _ = c.Write(reply.Append(nil)) // the deadline still holds; a caller that misses the reason sees the end
	c.Close()
}
