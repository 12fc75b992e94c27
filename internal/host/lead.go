package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
)

// lead is one leadership of an agent: the run, with all workers behind links to the agents of
// their hosts, its own included. The next leadership, here or elsewhere, begins anew from
// what is agreed, what is in the run directory, and what the agents tell.
type lead struct {
	c       *HostConfig
	node    agree.Log
	term    uint64
	fresh   bool         // nobody has led before
	attempt uint64       // newest ballot of this term, of an earlier leadership or of this one after serve
	fills   int          // newest fill, the same
	since   control.Lead // what hosts are told
	again   func()       // called when the leadership has to begin anew

	back  func(host string) // called when a host is linked of which no worker is heard
	tasks sync.WaitGroup

	mu      sync.Mutex
	hosts   []leadHost
	workers []*remote // every session; of the first ones, by WorkerID
}

// leadHost is what a leader knows of a host.
type leadHost struct {
	conn    *control.Conn           // nil while there is no link
	out     *queue[control.Message] // of the link
	heard   time.Time               // or since when there is no link
	since   time.Time               // the same, as far as that was before this leadership
	probing bool
	told    bool // it has been linked once
	lost    bool
}

// remote is a worker behind a link.
type remote struct {
	lead *lead
	id   int
	life int // incarnation
	host int
	in   *queue[control.Message]

	exited chan struct{}
	once   sync.Once
	status session.Status
	last   string

	// Of lead.mu:
	out    *queue[control.Message] // of the host's link; nil without one
	fenced bool                    // the run goes on without it, and it has to end
}

func newLead(c *HostConfig, node agree.Log, term uint64, r *relay) *lead {
	l := &lead{c: c, node: node, term: term, hosts: make([]leadHost, len(c.Hosts))}
	for i, h := range c.Hosts {
		since := r.brokeAt(i)
		l.hosts[i].heard, l.hosts[i].since = since, since
		for _, id := range h.Workers {
			for len(l.workers) <= id {
				l.workers = append(l.workers, nil)
			}
			l.workers[id] = l.session(id, 0, i)
		}
	}
	return l
}

func (l *lead) session(id, life, host int) *remote {
	return &remote{lead: l, id: id, life: life, host: host, in: newQueue[control.Message](), exited: make(chan struct{})}
}

// find returns a session, nil for none. l.mu is held.
func (l *lead) find(id, life int) *remote {
	for _, w := range l.workers {
		if w.id == id && w.life == life {
			return w
		}
	}
	return nil
}

// start has a worker started on its host, or on the host with the fewest workers where that one is
// away or none is named.
func (l *lead) start(who plan.Worker) (Worker, plan.Worker, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	load := make([]int, len(l.hosts))
	for _, w := range l.workers {
		select {
		case <-w.exited:
		default:
			load[w.host]++
		}
	}
	best := -1
	for i := range l.hosts {
		switch {
		case l.hosts[i].out == nil || l.hosts[i].lost:
		case l.c.Hosts[i].Name == who.Host:
			load[i], best = -1, i
		case best < 0 || load[i] < load[best]:
			best = i
		}
	}
	if best < 0 {
		return nil, who, errors.New("no host is there")
	}
	who.Host = l.c.Hosts[best].Name
	w := l.session(int(who.ID), who.Incarnation, best)
	w.out = l.hosts[best].out
	l.workers = append(l.workers, w)
	w.out.put(control.Begin{Worker: w.id, Incarnation: w.life})
	return w, who, nil
}

// Connect implements [Worker]; there are no bytes to read here.
func (w *remote) Connect(context.Context) (net.Conn, error) {
	return nil, errors.New("agent: the worker is on another host")
}
func (w *remote) Exited() <-chan struct{} { return w.exited }
func (w *remote) Status() session.Status  { return w.status }
func (w *remote) Program() string         { return "" }
func (w *remote) LastOutput() string      { return w.last }

func (w *remote) Kill() { w.put(w.kill()) }

func (w *remote) kill() control.Kill { return control.Kill{Worker: w.id, Incarnation: w.life} }

// put sends to the worker's agent. Without a link there is nobody to hear it; another link
// begins with what is to be known.
func (w *remote) put(m control.Message) {
	w.lead.mu.Lock()
	defer w.lead.mu.Unlock()
	if w.out != nil {
		w.out.put(m)
	}
}

// conversation is what the agent's loop needs of a connection.
type conversation interface {
	Send(control.Message) error
	Receive(context.Context) (control.Message, error)
	Close() error
}

func (w *remote) Send(m control.Message) error {
	body, err := control.Marshal(m)
	if err == nil {
		w.put(control.Relayed{Worker: w.id, Incarnation: w.life, Message: body})
	}
	return err
}

func (w *remote) Receive(ctx context.Context) (control.Message, error) {
	m, ok := w.in.take(ctx)
	if !ok {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		return nil, io.EOF
	}
	return m, nil
}

func (w *remote) Close() error { return nil }

func (w *remote) end(s session.Status, last string) {
	w.once.Do(func() {
		w.status, w.last = s, last
		close(w.exited)
	})
}

// fence ends a worker that the run does without, as soon as its host is there.
func (w *remote) fence() {
	w.lead.mu.Lock()
	defer w.lead.mu.Unlock()
	w.fenced = true
	if w.out != nil {
		w.out.put(w.kill())
	}
}

// link serves the agent of a host until its link ends.
func (l *lead) link(ctx context.Context, conn *control.Conn, host int) {
	if err := conn.Send(l.since); err != nil {
		return
	}
	q := newQueue[control.Message]()
	l.mu.Lock()
	h := &l.hosts[host]
	if h.told && !h.lost {
		// It was here before, and what was on its way then is lost.
		l.mu.Unlock()
		l.again()
		return
	}
	was := h.lost
	h.conn, h.out, h.heard, h.told, h.lost = conn, q, time.Now(), true, false
	h.since = time.Time{}
	absent := true
	for _, w := range l.workers {
		if w.host == host {
			w.out = q
			if w.fenced || was {
				q.put(w.kill())
			} else {
				absent = false
			}
		}
	}
	l.mu.Unlock()
	if absent {
		l.tasks.Go(func() { l.back(l.c.Hosts[host].Name) })
	}

	ctx, cancel := context.WithCancel(ctx)
	var others sync.WaitGroup
	others.Go(func() {
		for {
			m, ok := q.take(ctx)
			if !ok || conn.Send(m) != nil {
				return
			}
		}
	})
	others.Go(func() {
		tick := time.NewTicker(control.BeatEvery)
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
	})
	for {
		m, err := conn.Receive(ctx)
		if err != nil || l.hear(host, m) != nil {
			break
		}
	}
	cancel()
	_ = conn.Close()
	l.mu.Lock()
	if h.conn == conn {
		h.conn, h.out, h.heard = nil, nil, time.Now()
	}
	for _, w := range l.workers {
		if w.out == q {
			w.out = nil
		}
	}
	l.mu.Unlock()
	others.Wait()
}

// hear takes in what the agent of a host says.
func (l *lead) hear(host int, m control.Message) error {
	l.mu.Lock()
	l.hosts[host].heard = time.Now()
	lost := l.hosts[host].lost
	l.mu.Unlock()
	id, life := -1, 0
	switch m := m.(type) {
	case control.Beat, control.Told:
		return nil
	case control.Relayed:
		id, life = m.Worker, m.Incarnation
	case control.Closed:
		id, life = m.Worker, m.Incarnation
	case control.Exited:
		id, life = m.Worker, m.Incarnation
	}
	if id < 0 {
		return fmt.Errorf("agent: host %d sent %T", host, m)
	}
	if lost {
		return nil // the run goes on without
	}
	l.mu.Lock()
	w := l.find(id, life)
	if w == nil || w.host != host {
		// It was to join under another leader, and has no part.
		if _, over := m.(control.Exited); !over && l.hosts[host].out != nil {
			l.hosts[host].out.put(control.Kill{Worker: id, Incarnation: life})
		}
		l.mu.Unlock()
		return nil
	}
	l.mu.Unlock()
	switch m := m.(type) {
	case control.Relayed:
		said, err := control.Unmarshal(m.Message)
		if err != nil {
			return err
		}
		w.in.put(said)
	case control.Closed:
		w.in.close()
	case control.Exited:
		w.end(session.Status{Code: m.Code, Text: m.Text, Panicked: m.Panicked, Fault: m.Fault, Progress: m.Progress}, m.Last)
	}
	return nil
}

// leastWelcome is the least time that hosts have to come to another leader: on a machine that is
// busy, a quarter of a short budget is not enough to hear of it and to prove who they are.
const leastWelcome = 500 * time.Millisecond

// welcome begins the time in which hosts have to find out who leads, and to come here.
func (l *lead) welcome(now time.Time) {
	least := now.Add(max(l.c.detect()/4, leastWelcome) - l.c.detect())
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.hosts {
		if h := &l.hosts[i]; h.heard.Before(least) {
			h.heard = least
		}
	}
}

// probeEvery is the time between two looks at hosts without a link.
const probeEvery = 20 * time.Millisecond

// watch finds out which hosts are gone: at once where their machine says that nobody listens any
// more, else when they were silent, or without a link, for the budget. This host is there, however
// long it takes its own link to be made.
func (l *lead) watch(ctx context.Context) {
	tick := time.NewTimer(0)
	defer tick.Stop()
	due := time.Now()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		now := time.Now()
		deaf := now.Sub(due) > l.c.detect()/4
		l.mu.Lock()
		for i := range l.hosts {
			h := &l.hosts[i]
			switch {
			case h.lost:
			case deaf:
				h.heard = now
			case h.conn != nil && now.Sub(h.heard) > l.c.silence(), h.conn == nil && i != l.c.Self && now.Sub(h.heard) > l.patience():
				l.lose(i)
			case h.conn == nil && !h.probing:
				h.probing = true
				l.tasks.Go(func() {
					gone := l.c.refuses(ctx, i)
					l.mu.Lock()
					defer l.mu.Unlock()
					if h.probing = false; gone && h.conn == nil && !h.lost {
						l.lose(i)
					}
				})
			}
		}
		l.mu.Unlock()
		due = now.Add(probeEvery)
		tick.Reset(probeEvery)
	}
}

// patience is how long a host may be without a link. Before training a machine has much to do,
// and nobody waits for it.
func (l *lead) patience() time.Duration {
	if l.fresh {
		return l.c.Run.withDefaults(1).HelloTimeout
	}
	return l.c.detect()
}

// lose gives up a host: all its workers are dead, and fenced should they come back. l.mu is held.
func (l *lead) lose(host int) {
	h := &l.hosts[host]
	h.lost = true
	if h.conn != nil {
		_ = h.conn.Close()
	}
	at := h.since
	if at.IsZero() {
		at = h.heard
	}
	for _, w := range l.workers {
		if w.host == host {
			w.fenced = true
			w.in.close()
			w.end(session.Status{Code: -1, Text: l.c.Hosts[host].Name + " was lost", Lost: at}, "")
		}
	}
}

func isRefused(err error) bool { return errors.Is(err, unix.ECONNREFUSED) }
