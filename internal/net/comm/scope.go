package comm

import (
	"context"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/board"
	"github.com/soliton-train/soliton/internal/net/cma"
	"github.com/soliton-train/soliton/internal/net/line"
	"github.com/soliton-train/soliton/internal/timing"
)

// Scope is what a group uses of an endpoint beyond its messages: their keys ([GroupKey]) live as long as a version of the group, and
// not as long as a step. Between Lock and Unlock, no link comes or goes; all other methods but Connect are called in between.
type Scope struct {
	e    *Endpoint
	id   uint16
	lost func(peer id.Session, err error)
}

// NewScope returns the scope of the group with this number. lost is called with the lock held when the link to a peer is lost, when
// the peer is evicted, and, with [ErrClosed], when the endpoint closes.
func NewScope(e *Endpoint, number uint16, lost func(peer id.Session, err error)) (*Scope, error) {
	e.lock()
	defer e.unlock()
	switch {
	case e.closed:
		return nil, &Error{Op: "new group", Err: ErrClosed}
	case e.scopes[number] != nil:
		return nil, &Error{Op: "new group", Err: fmt.Errorf("%w: group %d exists", ErrUsage, number)}
	}
	s := &Scope{e: e, id: number, lost: lost}
	e.scopes[number] = s
	return s, nil
}

// Lock locks the endpoint.
func (s *Scope) Lock() { s.e.lock() }

// Unlock unlocks the endpoint and makes the calls that waited for it, such as those of [Receiving.OnDone].
func (s *Scope) Unlock() { s.e.unlock() }

// Config returns the endpoint's configuration, with its defaults. It needs no lock.
func (s *Scope) Config() *Config { return &s.e.cfg }

// Closed reports whether the endpoint is closed.
func (s *Scope) Closed() bool { return s.e.closed }

// Admitted returns nil if the session is admitted, else [ErrNotMember] or [ErrClosed].
func (s *Scope) Admitted(peer id.Session) error {
	_, err := s.e.member(peer)
	return err
}

// Near reports whether all these sessions are on our host. They all come to the same answer.
func (s *Scope) Near(members []id.Session) bool {
	return !slices.ContainsFunc(members, func(m id.Session) bool {
		p := s.e.peers[m.Worker]
		return m != s.e.cfg.Self && (p == nil || p.Session != m || !s.e.near(p.Addr))
	})
}

// Neighbour is what a session of our host and we share. The two always agree on it.
type Neighbour struct {
	Board   *board.Peer  // on which it shows us what it has for us, and it sees what we show on ours; nil: both send messages instead
	Process *cma.Process // to read what is shown in its memory
}

// Neighbours returns what we share with sessions that are near, in their order, which the caller closes, and our board. Where it is not known yet for one of
// them, it returns a channel that is closed when more is known.
func (s *Scope) Neighbours(members []id.Session) (all []Neighbour, ours *board.Board, later <-chan struct{}) {
	for _, m := range members {
		if m == s.e.cfg.Self {
			continue
		}
		if p := s.e.peers[m.Worker]; p == nil || p.Session != m || p.link == nil || !p.link.probed || !p.link.replied {
			return nil, nil, s.e.changed
		}
	}
	all = make([]Neighbour, len(members))
	for i, m := range members {
		if m == s.e.cfg.Self {
			continue
		}
		if l := s.e.peers[m.Worker].link; l.shared && l.board.Hold() {
			all[i].Board = l.board
			all[i].Process, _ = l.peer.Another() // nil fails where it is used
		}
	}
	return all, s.e.board, nil
}

// Crowd returns how many of these sessions share a processor, on the machine where these are most, and whether all are together on one. It is known once there are links to all; they all come to the same answer.
func (s *Scope) Crowd(members []id.Session) (crowd float64, together bool) {
	type sharing struct{ members, processors int }
	machines := make(map[uint64]sharing)
	for _, m := range members {
		on := thisMachine()
		if m != s.e.cfg.Self {
			p := s.e.peers[m.Worker]
			if p == nil || p.link == nil {
				continue
			}
			on = p.link.machine
		}
		if x := machines[on.Number]; on.Number != 0 && on.Processors != 0 {
			x.members++
			x.processors = max(x.processors, int(on.Processors))
			machines[on.Number] = x
		}
	}
	for _, x := range machines {
		crowd, together = max(crowd, float64(x.members)/float64(x.processors)), x.members == len(members)
	}
	return crowd, together
}

// Lines returns the lines to sessions, in their order, nil where two ends have none, and their hub, nil where there are no lines at all. The two ends agree on it. Where it is not
// known yet for one of them, it returns a channel that is closed when more is known.
func (s *Scope) Lines(members []id.Session) (all []*line.Line, hub *line.Hub, later <-chan struct{}) {
	all = make([]*line.Line, len(members))
	for i, m := range members {
		if m == s.e.cfg.Self {
			continue
		}
		p := s.e.peers[m.Worker]
		if p == nil || p.Session != m || p.link == nil {
			later = s.e.changed
			continue
		}
		switch l := p.link; {
		case l.line != nil:
			all[i], hub = l.line, s.e.hub
		case l.lines && !l.lineless:
			later = s.e.changed
			l.wantLine()
		}
	}
	return all, hub, later
}

// wantLine has the line dialled, by the side that has dialled the link.
func (l *link) wantLine() {
	if l.dialled {
		l.dialLine()
	} else if !l.asked {
		l.asked = true
		l.control(Frame{Type: FrameAskLine})
	}
}

// dialLine dials the line, once.
func (l *link) dialLine() {
	if l.dialling != nil || !l.dialled || !l.lines || l.dead {
		return
	}
	p := l.p
	ctx, cancel := context.WithTimeout(p.e.ctx, timing.Handshake)
	l.dialling = cancel
	connect := p.e.dialler(p.small)
	addr := p.Addr
	p.e.tasks.Go(func() {
		defer cancel()
		f := Frame{Type: FrameLine, From: p.e.cfg.Self, To: p.Session, Link: l.number}
		c, _, err := p.greet(ctx, connect, addr, func(net.Conn) Frame { return f })
		p.e.lock()
		defer p.e.unlock()
		if err == nil && l.addLine(c, nil) {
			return
		}
		if p.link == l {
			l.noLine()
			l.control(Frame{Type: FrameNoLine})
		}
	})
}

// takeLine makes a connection the line that its caller says it is, and welcomes it, if that can be.
func (p *peer) takeLine(c net.Conn, f Frame) bool {
	l := p.link
	if l == nil || l.number != f.Link || !l.lines || l.dialled || l.line != nil || l.lineless || !line.Capable(c) {
		return false
	}
	return l.addLine(c, Frame{Type: FrameWelcome, Link: l.number}.Append(nil))
}

// addLine makes a connection the line, which sends some bytes first. Without success, it closes a connection that has no such bytes.
func (l *link) addLine(c net.Conn, first []byte) bool {
	e := l.p.e
	var err error
	if e.hub == nil && !e.closed {
		if e.hub, err = line.New(); err == nil {
			for group, v := range e.in.versions {
				e.hub.Begin(group, v)
			}
		}
	}
	if err == nil && !e.closed && l.p.link == l && !l.dead && !l.lineless {
		// Where the line is lost, the link is, too, so that the groups of its ends learn of it.
		l.line, _ = e.hub.Add(c, first, func(err error) {
			l.lineLost.Store(err)
			l.conn.Close()
		})
	} else if first == nil {
		_ = c.Close()
	}
	e.notify()
	return l.line != nil
}

// noLine notes that there will be no line, or that one end has not got it.
func (l *link) noLine() {
	if l.lineless = true; l.line != nil {
		l.conn.Close()
	}
	l.p.e.notify()
}

// endLine ends the line of a link that is down.
func (l *link) endLine(err error) {
	if l.dialling != nil {
		l.dialling()
	}
	if l.line == nil {
		return
	}
	l.line.Close(err)
	sent, received := l.line.Bytes()
	l.p.e.lock()
	l.p.stats.WireSent += sent
	l.p.stats.WireReceived += received
	l.p.e.unlock()
}

// Shaped reports whether [Endpoint.Shape] limits anything.
func (s *Scope) Shaped() bool { return len(s.e.shaped) > 0 }

// Pace accounts for what is shown to a session, and returns how long a link that [Endpoint.Shape] limits is taken by it.
func (s *Scope) Pace(to id.Session, size int) time.Duration {
	p, err := s.e.member(to)
	if err != nil {
		return 0
	}
	now := time.Now()
	return p.pace(now, now, size)
}

// Traffic is messages, and their bytes.
type Traffic struct{ MessagesSent, MessagesReceived, BytesSent, BytesReceived int64 }

// Add adds other traffic.
func (t *Traffic) Add(u Traffic) {
	t.MessagesSent += u.MessagesSent
	t.MessagesReceived += u.MessagesReceived
	t.BytesSent += u.BytesSent
	t.BytesReceived += u.BytesReceived
}

// Count accounts for what passed on boards or a line between a session and us.
func (s *Scope) Count(peer id.Session, t Traffic) {
	if p, err := s.e.member(peer); err == nil {
		p.stats.Traffic.Add(t)
	}
}

// Begin ends all sends and receives of versions before v, and drops what has come for them, on boards too, and what comes from now on. What we show stays: others
// may have begun later than we ended.
func (s *Scope) Begin(v id.Version) {
	s.e.in.versions[s.id] = v
	over := func(k Key) bool { return k.ofGroup() && groupOf(k) == s.id && versionOf(k).Compare(v) < 0 }
	s.e.in.end(over)
	s.e.withdrawSends(over, ErrVersion)
	if s.e.hub != nil {
		s.e.hub.Begin(s.id, v)
	}
	for _, p := range s.e.peers {
		if p.link != nil && p.link.shared {
			p.link.board.Forgo(func(n board.Name) bool {
				group, old := boardNameOf(n)
				return group == s.id && old.Compare(v) < 0
			})
		}
	}
}

// Expect is [Endpoint.Expect] with a call of [Receiving.OnDone].
func (s *Scope) Expect(key Key, buf []byte, done func()) (*Receiving, error) {
	r := &Receiving{ending: newEnding(s.e), key: key, buf: buf}
	r.after = done
	return r, s.e.in.post(r)
}

// Withdraw ends a receive, unless it has ended, without waiting for its buffer.
func (s *Scope) Withdraw(r *Receiving, err error) { s.e.in.withdraw(r, err) }

// Notify sends a control message to a session if it is admitted.
func (s *Scope) Notify(to id.Session, key Key, data []byte) {
	_ = s.e.post(to, key, data, Control)
}

// Connect is [Endpoint.Connect], and ends with [ErrVersion] once done is closed.
func (s *Scope) Connect(ctx context.Context, done <-chan struct{}, to []id.Session) (opened int, err error) {
	return s.e.connect(ctx, done, to)
}

// Close frees the number of the group.
func (s *Scope) Close() { delete(s.e.scopes, s.id) }
