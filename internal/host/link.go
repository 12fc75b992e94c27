package host

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/host/archiving"
	"github.com/soliton-train/soliton/internal/host/logs"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/reach"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/timing"
)

// Links between hosts: each host has one to the leader, over which its workers and the leader speak. The relay of the
// leader's own host needs none.

// maxUnproven bounds the connections that have yet to show that they know the secret.
const maxUnproven = 64

// accept takes links from other hosts for the leadership of the moment.
func (s *seat) accept(ctx context.Context, secure *tls.Config) {
	c := &s.h.c
	stop := context.AfterFunc(ctx, func() { _ = c.Link.Close() })
	defer stop()
	var links sync.WaitGroup
	defer links.Wait()
	unproven := auth.NewLobby(maxUnproven)
	for {
		nc, err := auth.Accept(ctx, c.Link)
		if err != nil {
			return
		}
		unproven.Enter(nc)
		links.Go(func() {
			conn := control.New(tls.Server(nc, secure))
			defer conn.Close()
			m, err := greet(ctx, conn, c)
			if stays := unproven.Leave(nc); !stays || err != nil {
				if ctx.Err() == nil {
					c.reject(stays, err)
				}
				return // peers try again
			}
			switch m := m.(type) {
			case control.List:
				s.relay.supply.Serve(ctx, conn, m)
			case control.Fetch:
				if m.SHA256 != "" {
					s.relay.supply.Serve(ctx, conn, m)
				} else {
					s.relay.shards.Serve(ctx, conn, m)
				}
			case control.Upload:
				archiving.Serve(ctx, conn, m, c.RunDir.Path(), c.Target)
			case control.ReadLog:
				_ = conn.Send(logs.Read(c.RunDir.Path(), m)) // the same
			case control.Reach:
				_ = conn.Send(control.Reached{Found: c.probe(ctx, c.hosts()[c.host(m.Host)].Link)}) // its sender may have ended
			case control.Enter:
				s.answer(ctx, conn, m.Host)
			case control.Host:
				if l := s.admitted(); l != nil {
					defer l.links.Done()
					if m.Link != c.hosts()[m.Host].Link {
						c.Rejected.Add(auth.Outdated, 1) // its machine has entered again, with another agent
						return
					}
					l.link(conn, m)
				}
			}
		})
	}
}

// reject counts a connection whose first message did not come.
func (c *Config) reject(stays bool, err error) {
	switch {
	case !stays:
		c.Rejected.Add(auth.Crowded, 1)
	case malformed(err):
		c.Rejected.Add(auth.Malformed, 1)
	default:
		c.Rejected.AddError(err)
	}
}

// errMessage is a message of a host that knows the secret, but may not send this one.
var errMessage = errors.New("host: an unexpected message")

func malformed(err error) bool {
	return errors.Is(err, control.ErrFrameSize) || errors.Is(err, control.ErrFormat) || errors.Is(err, errMessage)
}

// greet reads the first message of a host, which shows that it knows the secret.
func greet(ctx context.Context, conn *control.Conn, c *Config) (control.Message, error) {
	ctx, cancel := context.WithTimeout(ctx, c.times().Greet)
	defer cancel()
	m, err := conn.Receive(ctx)
	if err != nil {
		return nil, err
	}
	ok := false
	switch m := m.(type) {
	case control.Host:
		ok = m.Protocol == control.Protocol && m.Host >= 0 && m.Host < len(c.hosts()) && m.Host != c.Self && len(m.Server) <= agree.MaxName && len(m.Records) <= maxMarks
	case control.ReadLog:
		ok = m.Protocol == control.Protocol && c.Apart
	case control.List:
		ok = m.Protocol == control.Protocol && c.Apart && len(m.Pattern) <= control.MaxPattern && m.From >= 0
	case control.Fetch:
		ok = m.Protocol == control.Protocol && c.Apart
	case control.Upload:
		ok = m.Protocol == control.Protocol && c.Apart
	case control.Reach:
		ok = m.Protocol == control.Protocol && c.host(m.Host) >= 0
	case control.Enter:
		ok = m.Protocol == control.Protocol && c.Apart && m.Host.Workers > 0 && m.Host.Workers <= session.MaxWorkers && len(m.Host.First) == 0
	}
	if !ok {
		return nil, fmt.Errorf("%w: a link begins with %T", errMessage, m)
	}
	return m, nil
}

// link serves a host until its link ends.
func (l *lead) link(conn *control.Conn, hello control.Host) {
	if err := conn.Send(l.since); err != nil {
		return
	}
	host, q := hello.Host, newQueue[control.Message]()
	l.events.put(hostLinked{host, hello.Server, q})
	// A link ends with its host, or is dialled again: why does not matter here, but that it may not be the host's.
	err := speak(l.ctx, conn, q, func(ctx context.Context) { l.attend(ctx, q, hello.Records) }, func(m control.Message) error {
		l.told.hear(q)
		switch m.(type) {
		case control.Beat, control.Told, relayed, closed, control.Exited, control.Halted, control.Runs, control.Leave, control.Surveyed, control.Kept, control.Asked, control.Answered, control.Watch, control.Clocks, control.ClockState:
			l.events.put(hostSaid{host, time.Now(), m})
			return nil
		}
		return fmt.Errorf("%w: host %d sent %T", errMessage, host, m)
	})
	if malformed(err) {
		l.c.Rejected.Add(auth.Malformed, 1)
	}
	l.events.put(hostUnlinked{host, q})
}

// speak sends what is in a queue and hands on what comes, with another function beside, until one of them ends.
// It closes the connection and the queue.
func speak(ctx context.Context, conn *control.Conn, q *queue[control.Message], beside func(context.Context), hear func(control.Message) error) error {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() }) // ends a Send that waits
	var others sync.WaitGroup
	defer others.Wait()
	defer func() {
		cancel()
		stop()
		_ = conn.Close()
		q.close()
	}()
	others.Go(func() {
		defer cancel()
		for {
			m, ok := q.take(ctx)
			if !ok {
				return
			}
			if m, err := toWire(m); err != nil || conn.Send(m) != nil {
				return
			}
		}
	})
	others.Go(func() {
		defer cancel()
		beside(ctx)
	})
	for {
		m, err := conn.Receive(ctx)
		if err == nil {
			m, err = fromWire(m)
		}
		if err == nil {
			err = hear(m)
		}
		if err != nil {
			if cause := ctx.Err(); cause != nil {
				return cause
			}
			return err
		}
	}
}

// toWire returns a message as it travels between hosts.
func toWire(m control.Message) (control.Message, error) {
	switch m := m.(type) {
	case closed:
		return m.Closed, nil
	case relayed:
		body, err := control.Marshal(m.Message)
		return control.Relayed{Worker: int(m.worker.Worker), Incarnation: m.worker.Incarnation, Message: body}, err
	}
	return m, nil
}

// fromWire undoes toWire.
func fromWire(m control.Message) (control.Message, error) {
	switch m := m.(type) {
	case control.Closed:
		return closed{m, io.EOF}, nil
	case control.Relayed:
		said, err := control.Unmarshal(m.Message)
		return relayed{said, id.Session{Worker: id.WorkerID(m.Worker), Incarnation: m.Incarnation}}, err
	}
	return m, nil
}

// dialer returns what connects to other hosts: from the address at which they reach this one.
func (c *Config) dialer() *net.Dialer {
	d := &net.Dialer{Timeout: c.times().Host, Control: platform.SmallSegments}
	if a, ok := c.Link.Addr().(*net.TCPAddr); ok && !a.IP.IsUnspecified() {
		d.LocalAddr = &net.TCPAddr{IP: a.IP, Zone: a.Zone}
	}
	return d
}

// dial connects to another host.
func (c *Config) dial(ctx context.Context, host int, t *tls.Config) (*control.Conn, error) {
	return c.dialLink(ctx, c.hosts()[host].Link, t)
}

func (c *Config) dialLink(ctx context.Context, link string, t *tls.Config) (*control.Conn, error) {
	nc, err := (&tls.Dialer{NetDialer: c.dialer(), Config: t}).DialContext(ctx, "tcp", link)
	if err != nil {
		return nil, err
	}
	return control.New(nc), nil
}

// inquire finds out whether a host is there: its machine may say that no process listens there, or answer neither this host nor others,
// together a majority of those that vote.
func (r *relay) inquire(ctx context.Context, host int) reach.Finding {
	voters, need := r.c.voters(), 1
	var others []func(context.Context) reach.Finding
	for _, name := range voters {
		switch i := r.c.host(name); i {
		case r.c.Self:
			need--
		case host, -1:
		default:
			others = append(others, func(ctx context.Context) reach.Finding { return r.second(ctx, i, host) })
		}
	}
	probe := func(ctx context.Context) reach.Finding { return r.c.probe(ctx, r.c.hosts()[host].Link) }
	return reach.Inquire(ctx, timing.Probe, need+len(voters)/2, probe, others)
}

// second asks a host whether it can reach the machine of another one.
func (r *relay) second(ctx context.Context, whom, host int) reach.Finding {
	times := r.c.times()
	ctx, cancel := context.WithTimeout(ctx, times.Host)
	defer cancel()
	conn, err := r.c.dial(ctx, whom, r.tls)
	if err != nil {
		return reach.Unsure
	}
	defer conn.Close()
	if err := conn.Send(control.Reach{Protocol: control.Protocol, Host: r.c.hosts()[host].Name}); err != nil {
		return reach.Unsure
	}
	m, err := conn.Receive(ctx)
	if reached, ok := m.(control.Reached); ok && err == nil {
		return reached.Found
	}
	return reach.Unsure
}

// probe finds out whether this host reaches the machine of another one, at an address.
func (c *Config) probe(ctx context.Context, addr string) reach.Finding {
	return reach.Probe(ctx, c.times().Answer, func(ctx context.Context) (net.Conn, error) {
		return c.dialer().DialContext(ctx, "tcp", addr)
	})
}

// queue hands values from goroutines that must not wait to one that may.
type queue[T any] struct {
	signal chan struct{}

	mu     sync.Mutex
	list   []T
	closed bool
}

func newQueue[T any]() *queue[T] { return &queue[T]{signal: make(chan struct{}, 1)} }

func (q *queue[T]) wake() {
	select {
	case q.signal <- struct{}{}:
	default:
	}
}

// put appends a value, unless the queue is closed.
func (q *queue[T]) put(v T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.closed {
		q.list = append(q.list, v)
		q.wake()
	}
}

// close ends the queue; what is in it can still be taken.
func (q *queue[T]) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.wake()
}

func (q *queue[T]) empty() bool { return q.len() == 0 }

func (q *queue[T]) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.list)
}

// next returns the next value; false if there is none now. The signal comes again while more are left.
func (q *queue[T]) next() (v T, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.list) == 0 {
		return v, false
	}
	v = q.list[0]
	if q.list = q.list[1:]; len(q.list) > 0 || q.closed {
		q.wake()
	}
	return v, true
}

// take waits for the next value; false when the queue is closed and empty, or ctx has ended.
func (q *queue[T]) take(ctx context.Context) (v T, ok bool) {
	for {
		if v, ok := q.next(); ok {
			return v, true
		}
		q.mu.Lock()
		ended := q.closed && len(q.list) == 0
		q.mu.Unlock()
		if ended {
			return v, false
		}
		select {
		case <-q.signal:
		case <-ctx.Done():
			return v, false
		}
	}
}
