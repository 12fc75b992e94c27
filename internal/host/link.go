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

	"github.com/soliton-train/soliton/internal/timing"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/control"
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
			host, err := greet(ctx, conn, c)
			if !unproven.Leave(nc) || err != nil {
				return // peers try again
			}
			if l := s.admitted(); l != nil {
				defer l.links.Done()
				l.link(conn, host)
			}
		})
	}
}

// greet reads which host is at the other end, which shows that it knows the secret.
func greet(ctx context.Context, conn *control.Conn, c *Config) (host int, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.times().Greet)
	defer cancel()
	m, err := conn.Receive(ctx)
	if err != nil {
		return 0, err
	}
	hello, ok := m.(control.Host)
	if !ok || hello.Protocol != control.Protocol || hello.Host < 0 || hello.Host >= len(c.Hosts) || hello.Host == c.Self {
		return 0, fmt.Errorf("host: a link that begins with %T", m)
	}
	return hello.Host, nil
}

// link serves a host until its link ends.
func (l *lead) link(conn *control.Conn, host int) {
	if err := conn.Send(l.since); err != nil {
		return
	}
	q := newQueue[control.Message]()
	l.events.put(hostLinked{host, q})
	// A link ends with its host, or is dialled again: why does not matter here.
	_ = speak(l.ctx, conn, q, func(ctx context.Context) {
		tick := time.NewTicker(timing.Heartbeat)
		defer tick.Stop()
		for {
			if q.empty() {
				q.put(control.Beat{})
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	}, func(m control.Message) error {
		switch m.(type) {
		case control.Beat, control.Told, relayed, closed, control.Exited:
			l.events.put(hostSaid{host, time.Now(), m})
			return nil
		}
		return fmt.Errorf("host: host %d sent %T", host, m)
	})
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
	d := &net.Dialer{Timeout: c.times().Host}
	if a, ok := c.Link.Addr().(*net.TCPAddr); ok && !a.IP.IsUnspecified() {
		d.LocalAddr = &net.TCPAddr{IP: a.IP, Zone: a.Zone}
	}
	return d
}

// dial connects to another host.
func (c *Config) dial(ctx context.Context, host int, t *tls.Config) (*control.Conn, error) {
	nc, err := (&tls.Dialer{NetDialer: c.dialer(), Config: t}).DialContext(ctx, "tcp", c.Hosts[host].Link)
	if err != nil {
		return nil, err
	}
	return control.New(nc), nil
}

// refuses reports whether a machine answers that no process listens at a host's address: the host is gone.
func (c *Config) refuses(ctx context.Context, host int) bool {
	nc, err := c.dialer().DialContext(ctx, "tcp", c.Hosts[host].Link)
	if err == nil {
		_ = nc.Close()
	}
	return errors.Is(err, unix.ECONNREFUSED)
}
