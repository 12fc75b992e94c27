package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/soliton-train/soliton/internal/timing"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/net/control"
)

// How a relay follows the leader: by a call where that is on its own host, over a link elsewhere.

// elections is what the relay needs of the agreement.
type elections interface {
	Term() uint64
	Stand()
}

var errNotLeading = errors.New("host: it does not lead")

func errUnexpected(m control.Message) error {
	if r, ok := m.(relayed); ok {
		return fmt.Errorf("host: the leader speaks to worker %v, which is elsewhere", r.worker)
	}
	return fmt.Errorf("host: the leader sent %T", m)
}

// lead makes the leadership of this host the leader of its relay.
func (r *relay) lead(l *lead) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.end != nil {
		r.end()
	}
	r.here, r.out = l, toLeader{l.events, r.c.Self}
	l.events.put(hostLinked{r.c.Self, toRelay{r}})
	r.account(r.out, l.since)
}

// unlead undoes lead.
func (r *relay) unlead(l *lead) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.here == l {
		r.here, r.out = nil, nil
		r.broke[r.c.Self] = time.Now()
	}
}

// toLeader and toRelay are the link between the relay and the leader of one host.
type (
	toLeader struct {
		events *queue[any]
		self   int
	}
	toRelay struct{ r *relay }
)

func (t toLeader) put(m control.Message) { t.events.put(hostSaid{t.self, time.Now(), m}) }
func (t toLeader) empty() bool           { return true }
func (t toRelay) put(m control.Message)  { _ = t.r.hear(m) } // a leader knows its own workers
func (t toRelay) empty() bool            { return true }

// follow takes in which host leads.
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
		r.attend(l)
	}
	r.mu.Unlock()
	defer r.working.Wait()
	if r.c.alone() {
		<-ctx.Done()
		return
	}
	r.working.Go(func() { r.beat(ctx) })
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
		if i := r.c.host(l.Leader); i >= 0 && i != r.c.Self {
			_ = r.attach(round, i) // tried again
			r.succeed(round, i, l.Term)
			retry.Reset(timing.Retry)
		}
		end()
	}
}

// succeed has this node stand for election where the process of the host that led is gone. The
// nodes do so one after the other, so that the first finds all votes there.
func (r *relay) succeed(ctx context.Context, led int, term uint64) {
	if ctx.Err() != nil || !r.c.refuses(ctx, led) {
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
	turn := time.NewTimer(time.Duration(rank) * timing.Stagger)
	defer turn.Stop()
	select {
	case <-turn.C:
	case <-ctx.Done():
		return
	}
	// A newer term means that another node stands already, or leads.
	if r.elections.Term() == term && r.c.Hosts[r.c.Self].Voter && time.Since(r.stood) > r.c.times().Candidacy {
		r.stood = time.Now()
		r.elections.Stand()
	}
}

// attach keeps a link to the host that leads, until it ends.
func (r *relay) attach(ctx context.Context, host int) error {
	times := r.c.times()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn, err := r.c.dial(ctx, host, r.tls)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.Send(control.Host{Protocol: control.Protocol, Host: r.c.Self}); err != nil {
		return err
	}
	hello, stop := context.WithTimeout(ctx, times.Host)
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
	if r.here != nil {
		r.mu.Unlock()
		return errNotLeading
	}
	r.account(q, since)
	r.out, r.term, r.heard = q, since.Term, time.Now()
	delete(r.broke, host)
	r.mu.Unlock()
	silent := false // the leader was, until the link ended
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.out == q {
			r.out = nil
		}
		if r.broke[host] = time.Now(); silent {
			r.broke[host] = r.heard
		}
	}()
	err = speak(ctx, conn, q, func(ctx context.Context) {
		watchSilence(ctx, times.Leader(), times.LinkWatch, func() time.Time {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.heard
		})
	}, r.hear)
	silent = errors.Is(err, context.Canceled)
	return err
}

// brokeAt returns when the link to a host that led until now ended, or now.
func (r *relay) brokeAt(host int) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at := r.broke[host]; !at.IsZero() && time.Since(at) < r.c.times().Log {
		return at
	}
	return time.Now()
}

// watchSilence returns when the detector takes the other end as failed, or ctx ends.
func watchSilence(ctx context.Context, d timing.Detector, period time.Duration, heard func() time.Time) {
	tick := time.NewTimer(period)
	defer tick.Stop()
	due := time.Now().Add(period)
	var h timing.History
	var looks timing.Looks
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		now := time.Now()
		if at := heard(); at.After(h.Heard) {
			h.Hear(at)
		}
		looks.Look(d, now, now.Sub(due), nil)
		var failed bool
		if failed, h = d.Suspect(h, now, now.Sub(due), looks.Intervals); failed {
			return
		}
		due = now.Add(period)
		tick.Reset(period)
	}
}
