package host

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// relay stands between the workers of a host and the agent that leads. It is the only
// partner of its workers, and remembers what a leader to come has to know of them.
type relay struct {
	c    *HostConfig
	tls  *tls.Config
	news chan struct{} // the leadership has changed

	elections elections
	gossip    *ringMember // nil where there is no ring
	noRing    error       // why there is none, where there should be

	stood time.Time // when this node stood for election last; of run

	mu      sync.Mutex
	ctx     context.Context // of run
	locals  []*local
	leader  agree.Leadership
	end     context.CancelFunc      // of the attempt to follow the leader of the moment
	term    uint64                  // of that leader
	out     *queue[control.Message] // to it; nil while there is no link
	heard   time.Time               // when it said something last
	broke   map[int]time.Time       // when the link to a host that led has ended
	working sync.WaitGroup
}

// local is a worker of this host.
type local struct {
	id     int
	life   int // incarnation
	worker Worker
	to     *queue[control.Message]

	// What a new leader is told, as bodies of messages.
	hello, ready, saved, done, failed, leave []byte
	steps                                    []reported
	closed                                   bool
	exit                                     *control.Exited

	// What a worker hears once.
	started, stopped, released bool

	unwanted bool // it is to be killed as soon as it is started
}

// reported is a step that a worker has reported. Plan and step grow together, as pairs.
type reported struct {
	plan uint64
	step int
	body []byte
}

// maxReported bounds the steps that are kept of each worker. Without a leader workers
// do not commit for longer than the budget of detection.
const maxReported = 1 << 14

func newRelay(c *HostConfig, t *tls.Config) *relay {
	return &relay{c: c, tls: t, news: make(chan struct{}, 1), broke: make(map[int]time.Time)}
}

// start starts a worker of this host.
func (r *relay) start(id, life int) (*local, error) {
	command := r.c.Command
	command.Incarnation = life
	w, err := startOne(command, id, func(id int) (*os.File, error) { return r.c.Log(id, life) })
	if err != nil {
		return nil, err
	}
	return &local{id: id, life: life, worker: w, to: newQueue[control.Message]()}, nil
}

// begin starts the first workers.
func (r *relay) begin() error {
	for _, id := range r.c.Hosts[r.c.Self].Workers {
		l, err := r.start(id, 0)
		if err != nil {
			return &StartError{err}
		}
		r.locals = append(r.locals, l)
	}
	return nil
}

// killAll ends all workers, after run.
func (r *relay) killAll() {
	for _, l := range r.locals {
		if l.worker != nil {
			l.worker.Kill()
		}
	}
	for _, l := range r.locals {
		if l.worker != nil {
			end(l.worker)
		}
	}
}

// join starts a worker that joins; r.mu is held. It runs in a goroutine of its own, as starting
// takes time; of one that cannot be started there is only its end.
func (r *relay) join(ctx context.Context, id, life int) {
	if r.find(id, life) != nil || len(r.locals) >= session.MaxWorkers {
		return // another leader wanted it, too
	}
	l := &local{id: id, life: life, to: newQueue[control.Message]()}
	r.locals = append(r.locals, l)
	r.working.Go(func() {
		begun, err := r.start(id, life)
		r.mu.Lock()
		defer r.mu.Unlock()
		if err != nil {
			l.closed, l.exit = true, &control.Exited{Worker: id, Incarnation: life, Code: 1, Text: "cannot be started: " + session.OneLine(err.Error())}
			r.tell(control.Closed{Worker: id, Incarnation: life})
			r.tell(*l.exit)
			return
		}
		if l.worker = begun.worker; l.unwanted {
			l.worker.Kill()
		}
		r.attend(ctx, l)
	})
}

func (r *relay) attend(ctx context.Context, l *local) {
	r.working.Go(func() { r.listen(ctx, l) })
	r.working.Go(func() { r.awaitExit(ctx, l) })
}

func (r *relay) find(id, life int) *local {
	i := slices.IndexFunc(r.locals, func(l *local) bool { return l.id == id && l.life == life })
	if i < 0 {
		return nil
	}
	return r.locals[i]
}

// follow takes in who leads.
func (r *relay) follow(l agree.Leadership) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.leader = l
	if r.end != nil && l.Leader != "" && l.Term != r.term {
		r.end()
	}
	select {
	case r.news <- struct{}{}:
	default:
	}
}

// run serves workers and leaders until ctx ends.
func (r *relay) run(ctx context.Context) {
	r.mu.Lock()
	r.ctx = ctx
	for _, l := range r.locals {
		r.attend(ctx, l)
	}
	r.mu.Unlock()
	r.working.Go(func() { r.beat(ctx) })
	defer r.working.Wait()
	retry := time.NewTimer(0)
	defer retry.Stop()
	for {
		select {
		case <-r.news:
		case <-retry.C:
		case <-ctx.Done():
			return
		}
		round, end := context.WithCancel(ctx)
		r.mu.Lock()
		l := r.leader
		r.end, r.term = end, l.Term
		r.mu.Unlock()
		if i := r.c.host(l.Leader); i >= 0 {
			_ = r.attach(round, i) // tried again
			r.succeed(round, i, l.Term)
			retry.Reset(retryEvery)
		}
		end()
	}
}

// succeed has this node stand for election where the process of the agent that led is gone. The
// nodes do so one after the other, so that the first finds all votes there.
func (r *relay) succeed(ctx context.Context, led int, term uint64) {
	if ctx.Err() != nil || led == r.c.Self || !r.c.refuses(ctx, led) {
		return
	}
	rank := 0
	for i, h := range r.c.Hosts {
		if i == r.c.Self {
			break
		}
		if h.Voter && i != led {
			rank++
		}
	}
	turn := time.NewTimer(time.Duration(rank) * standEvery)
	defer turn.Stop()
	select {
	case <-turn.C:
	case <-ctx.Done():
		return
	}
	// A newer term means that somebody stands already, or leads.
	if r.elections.Term() == term && r.c.Hosts[r.c.Self].Voter && time.Since(r.stood) > r.c.detect()/2 {
		r.stood = time.Now()
		r.elections.Stand()
	}
}

// elections is what the relay needs of the agreement.
type elections interface {
	Term() uint64
	Stand()
}

// standEvery is the time between two nodes that stand for election.
const standEvery = 60 * time.Millisecond

// retryEvery is the time between two attempts to reach the leader.
const retryEvery = 10 * time.Millisecond

// listen takes in what a worker says.
func (r *relay) listen(ctx context.Context, l *local) {
	nc, err := l.worker.Connect(ctx)
	if err == nil {
		conn := control.New(nc)
		sent := make(chan struct{})
		talk, cancel := context.WithCancel(ctx)
		go func() {
			defer close(sent)
			for {
				m, ok := l.to.take(talk)
				if !ok || conn.Send(m) != nil {
					return // the receiver sees the reason
				}
			}
		}()
		for {
			var m control.Message
			if m, err = conn.Receive(ctx); err != nil {
				break
			}
			r.said(l, m)
		}
		cancel()
		_ = conn.Close()
		<-sent
	}
	if ctx.Err() != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	l.closed = true
	r.tell(control.Closed{Worker: l.id, Incarnation: l.life})
}

func (r *relay) awaitExit(ctx context.Context, l *local) {
	select {
	case <-l.worker.Exited():
	case <-ctx.Done():
		return
	}
	defer waitReaped(l.worker) // and without the lock
	s := l.worker.Status()
	r.mu.Lock()
	defer r.mu.Unlock()
	l.exit = &control.Exited{Worker: l.id, Incarnation: l.life, Code: s.Code, Text: s.Text, Panicked: s.Panicked, Fault: s.Fault, Progress: s.Progress, Last: l.worker.LastOutput()}
	r.tell(*l.exit)
}

// said takes in a message of a worker.
func (r *relay) said(l *local, m control.Message) {
	if ready, ok := m.(control.Ready); ok {
		// Reading the program may take a while, in which the worker's beats have to go on.
		r.working.Go(func() {
			ready.Job.ProgramSHA256, _ = rundir.FileSHA256(l.worker.Program()) // only a record
			r.pass(l, ready)
		})
		return
	}
	r.pass(l, m)
}

// pass keeps what a new leader has to know of a message, and tells the one that there is.
func (r *relay) pass(l *local, m control.Message) {
	body, err := control.Marshal(m)
	if err != nil {
		return // it came as one
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch m := m.(type) {
	case control.Beat:
		if r.out == nil || !r.out.empty() {
			return
		}
	case control.Hello:
		l.hello = body
	case control.Ready:
		l.ready = body
	case control.Step:
		l.steps = append(l.steps, reported{m.Plan, m.Step, body})
		l.steps = l.steps[max(0, len(l.steps)-maxReported):]
	case control.Saved:
		l.saved = body
	case control.Done:
		l.done = body
	case control.Failed:
		l.failed = body
	case control.Leave:
		l.leave = body
	}
	r.tell(control.Relayed{Worker: l.id, Incarnation: l.life, Message: body})
}

// tell sends to the leader, if there is one; r.mu is held.
func (r *relay) tell(m control.Message) {
	if r.out != nil {
		r.out.put(m)
	}
}

// account is all that a new leader has to know; r.mu is held.
func (r *relay) account(q *queue[control.Message], since control.Lead) {
	for _, l := range r.locals {
		say := func(body []byte) {
			if body != nil {
				q.put(control.Relayed{Worker: l.id, Incarnation: l.life, Message: body})
			}
		}
		say(l.hello)
		say(l.ready)
		first := len(l.steps)
		for first > 0 {
			if s := l.steps[first-1]; s.plan < since.Plan || s.plan == since.Plan && s.step <= since.Step {
				break
			}
			first--
		}
		for _, s := range l.steps[max(0, min(first, len(l.steps)-1)):] { // the newest in any case
			say(s.body)
		}
		say(l.saved)
		say(l.done)
		say(l.leave)
		say(l.failed)
		if l.closed {
			q.put(control.Closed{Worker: l.id, Incarnation: l.life})
		}
		if l.exit != nil {
			q.put(*l.exit)
		}
	}
	q.put(control.Told{})
}

var errNotLeading = errors.New("agent: it does not lead")

// attach keeps a link to the agent that leads, until it ends.
func (r *relay) attach(ctx context.Context, host int) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn, err := r.c.dialAgent(ctx, host, r.tls)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.Send(control.Host{Protocol: control.Protocol, Host: r.c.Self}); err != nil {
		return err
	}
	hello, stop := context.WithTimeout(ctx, r.c.detect())
	m, err := conn.Receive(hello)
	stop()
	if err != nil {
		return err
	}
	since, ok := m.(control.Lead)
	if !ok {
		return errNotLeading
	}

	q := newQueue[control.Message]()
	r.mu.Lock()
	r.account(q, since)
	r.out, r.term, r.heard = q, since.Term, time.Now()
	delete(r.broke, host)
	r.mu.Unlock()
	var others sync.WaitGroup
	others.Go(func() {
		defer cancel()
		for {
			m, ok := q.take(ctx)
			if !ok || conn.Send(m) != nil {
				return
			}
		}
	})
	others.Go(func() {
		defer cancel()
		watchSilence(ctx, r.c.silence(), func() time.Time {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.heard
		})
	})
	silent := false                                                // until then, or no leader any more
	stopped := context.AfterFunc(ctx, func() { _ = conn.Close() }) // ends a Send that waits
	defer func() {
		cancel()
		stopped()
		_ = conn.Close()
		r.mu.Lock()
		r.out, r.broke[host] = nil, time.Now()
		if silent {
			r.broke[host] = r.heard
		}
		r.mu.Unlock()
		q.close()
		others.Wait()
	}()
	for {
		m, err := conn.Receive(ctx)
		if err != nil {
			silent = ctx.Err() != nil
			return err
		}
		if err := r.hear(m); err != nil {
			return err
		}
	}
}

// hear takes in what the leader says.
func (r *relay) hear(m control.Message) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.heard = time.Now()
	switch m := m.(type) {
	case control.Beat:
	case control.Kill:
		switch l := r.find(m.Worker, m.Incarnation); {
		case l == nil:
		case l.worker == nil:
			l.unwanted = true
		default:
			l.worker.Kill()
		}
	case control.Begin:
		r.join(r.ctx, m.Worker, m.Incarnation)
	case control.Relayed:
		l := r.find(m.Worker, m.Incarnation)
		if l == nil {
			return fmt.Errorf("agent: the leader speaks to worker %d, which is elsewhere", m.Worker)
		}
		said, err := control.Unmarshal(m.Message)
		if err != nil {
			return err
		}
		// What a worker is told once, another leader may tell it again.
		var told *bool
		switch said := said.(type) {
		case control.Start:
			r.gossip.join(said.Ring.Seeds)
			told = &l.started
		case control.Stop:
			told = &l.stopped
		case control.Release:
			told = &l.released
		case control.Order:
			if said.Restart {
				l.done = nil
			}
		}
		if told != nil {
			if *told {
				return nil
			}
			*told = true
		}
		l.to.put(said)
	default:
		return fmt.Errorf("agent: the leader sent %T", m)
	}
	return nil
}

// beat tells workers and leader that this agent lives, and the workers only as long as
// it hears of a leader: who has not heard its agent for the budget commits nothing.
func (r *relay) beat(ctx context.Context) {
	tick := time.NewTicker(control.BeatEvery)
	defer tick.Stop()
	alone, told := time.Now(), false
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		r.mu.Lock()
		if led := r.out != nil; led {
			alone, told = time.Now(), false
		} else if !told && r.c.Waits != nil && time.Since(alone) > r.c.detect() && slices.ContainsFunc(r.locals, func(l *local) bool { return l.started }) {
			told = true
			r.c.Waits(r.c.waits())
		}
		if r.out != nil && time.Since(r.heard) < r.c.detect() {
			if r.out.empty() {
				r.out.put(control.Beat{})
			}
			for _, l := range r.locals {
				if l.started && l.to.empty() {
					l.to.put(control.Beat{})
				}
			}
		}
		r.mu.Unlock()
	}
}

// brokeAt returns when the link to a host that led until now ended, or now.
func (r *relay) brokeAt(host int) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at := r.broke[host]; !at.IsZero() && time.Since(at) < patience*r.c.detect() {
		return at
	}
	return time.Now()
}

// dialer returns what connects to other agents: from the address at which they reach this one.
func (c *HostConfig) dialer() *net.Dialer {
	d := &net.Dialer{Timeout: c.detect()}
	if a, ok := c.Link.Addr().(*net.TCPAddr); ok && !a.IP.IsUnspecified() {
		d.LocalAddr = &net.TCPAddr{IP: a.IP, Zone: a.Zone}
	}
	return d
}

// dialAgent connects to another agent.
func (c *HostConfig) dialAgent(ctx context.Context, host int, t *tls.Config) (*control.Conn, error) {
	nc, err := (&tls.Dialer{NetDialer: c.dialer(), Config: t}).DialContext(ctx, "tcp", c.Hosts[host].Link)
	if err != nil {
		return nil, err
	}
	return control.New(nc), nil
}

// refuses reports whether nobody listens for other agents at a host that answers: its agent is gone.
func (c *HostConfig) refuses(ctx context.Context, host int) bool {
	nc, err := c.dialer().DialContext(ctx, "tcp", c.Hosts[host].Link)
	if err == nil {
		_ = nc.Close()
	}
	return isRefused(err)
}

// watchSilence returns when heard is longer ago than the budget, or ctx ends. Who looks late was
// deaf itself, and begins anew.
func watchSilence(ctx context.Context, budget time.Duration, heard func() time.Time) {
	period := budget / session.Watches
	tick := time.NewTimer(period)
	defer tick.Stop()
	due, deaf := time.Now().Add(period), time.Time{}
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		now := time.Now()
		if now.Sub(due) > budget/4 {
			deaf = now
		}
		last := heard()
		if last.Before(deaf) {
			last = deaf
		}
		if now.Sub(last) > budget {
			return
		}
		due = now.Add(period)
		tick.Reset(period)
	}
}
