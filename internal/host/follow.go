package host

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/timing"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/host/devices"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/reach"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// How a relay follows the leader: by a call where that is on its own host, over a link elsewhere.

// elections is what the relay needs of the agreement.
type elections interface {
	Term() uint64
	Stand()
	Miss()
}

var (
	errNotLeading = errors.New("host: it does not lead")
	errCopies     = errors.New("host: the copies of records begin again")
)

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
	r.here = l
	r.speakTo(toLeader{l.events, r.c.Self})
	l.events.put(hostLinked{r.c.Self, r.server, toRelay{r}})
	r.account(r.out, l.since)
}

// unlead undoes lead.
func (r *relay) unlead(l *lead) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.here == l {
		r.here = nil
		r.speakTo(nil)
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
	if r.supply != nil {
		defer r.supply.Close()
	}
	r.working.Go(func() { r.feel(ctx) })
	if r.c.alone() {
		<-ctx.Done()
		return
	}
	r.working.Go(func() { r.beat(ctx) })
	r.working.Go(func() { r.watchStranded(ctx) })
	if r.setClocks != nil {
		r.working.Go(func() { r.setClocks.Run(ctx) })
	}
	asked, heard := r.c.led, time.Time{}
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
		i := r.c.host(agree.HostOf(l.Leader))
		pause := timing.Retry
		if i >= 0 {
			heard = time.Now()
		} else if pause = timing.Probe; time.Since(heard) > r.c.times().Host {
			// The log does not reach a host that has just entered, or has been taken out of it while it was away: not before the leader hears it.
			i = asked % len(r.c.hosts())
			asked++
		}
		if i >= 0 && i != r.c.Self {
			found, missed, _ := r.attach(round, i) // tried again
			r.succeed(round, i, l.Term, found, missed)
		}
		retry.Reset(pause)
		end()
	}
}

// succeed has this node stand for election where the host that led is gone, or missed: silent for so long that it counts as failed. The
// nodes do so one after the other, so that the first finds all votes there. Of those that miss the leader the first have no leader any more, and so
// a later one wins.
func (r *relay) succeed(ctx context.Context, led int, term uint64, found reach.Finding, missed bool) {
	if ctx.Err() == nil && !found.Gone() {
		found = r.inquire(ctx, led)
	}
	if ctx.Err() != nil || !found.Gone() && !missed {
		return
	}
	stand := r.elections.Miss
	if found.Gone() {
		stand = r.elections.Stand
		r.mu.Lock()
		r.gone[led] = goneHost{time.Now(), found}
		r.mu.Unlock()
	}
	voters := slices.DeleteFunc(r.c.voters(), func(name string) bool { return r.c.host(name) == led })
	rank := slices.Index(voters, r.c.self().Name)
	if rank < 0 {
		return
	}
	turn := time.NewTimer(time.Duration(rank) * timing.Stagger)
	defer turn.Stop()
	select {
	case <-turn.C:
	case <-ctx.Done():
		return
	}
	// A newer term means that another node stands already, or leads.
	if r.elections.Term() == term && time.Since(r.stood) > r.c.times().Candidacy {
		r.stood = time.Now()
		stand()
	}
}

// attach keeps a link to the host that leads, until it ends. It returns what was found of the host, or that it was missed, if that was why.
func (r *relay) attach(ctx context.Context, host int) (found reach.Finding, missed bool, err error) {
	times := r.c.times()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn, err := r.c.dial(ctx, host, r.tls)
	if err != nil {
		return reach.Unsure, false, err
	}
	defer conn.Close()
	self := control.Host{Protocol: control.Protocol, Host: r.c.Self, Server: r.server, Link: r.c.self().Link}
	if r.c.Apart {
		self.Records = r.copies.marks()
	}
	if err := conn.Send(self); err != nil {
		return reach.Unsure, false, err
	}
	answer, stop := context.WithTimeout(ctx, times.Host)
	m, err := conn.Receive(answer)
	stop()
	if err != nil {
		return reach.Unsure, false, err
	}
	since, ok := m.(control.Lead)
	if !ok {
		return reach.Unsure, false, errNotLeading
	}

	q := newQueue[control.Message]()
	r.mu.Lock()
	if r.here != nil {
		r.mu.Unlock()
		return reach.Unsure, false, errNotLeading
	}
	r.account(q, since)
	r.speakTo(q)
	r.term, r.heard = since.Term, time.Now()
	delete(r.broke, host)
	delete(r.missed, host)
	delete(r.gone, host)
	r.mu.Unlock()
	silent := false // the leader was, until the link ended
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.out == q {
			r.speakTo(nil)
		}
		if r.broke[host] = time.Now(); silent {
			r.broke[host] = r.heard
		}
		r.missed[host] = missed
	}()
	err = speak(ctx, conn, q, func(ctx context.Context) {
		found, missed = r.watchLeader(ctx, host)
	}, func(m control.Message) error {
		if r.copies != nil {
			switch m := m.(type) {
			case control.Copy:
				if !r.copies.keep(since.Term, rundir.Part(m)) {
					return errCopies
				}
			case control.Shown:
				r.c.Shown(m.Data)
			case control.Alive:
				r.copies.alive(since.Term, r.alive(m.Workers))
			}
		}
		return r.hear(m)
	})
	silent = errors.Is(err, context.Canceled)
	return found, missed, err
}

// brokeAt returns when the link to a host that led until now ended, or now, and whether the host was missed then.
func (r *relay) brokeAt(host int) (at time.Time, missed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at := r.broke[host]; !at.IsZero() && time.Since(at) < r.c.times().Log {
		return at, r.missed[host]
	}
	return time.Now(), false
}

// crowded returns the crowd of this machine.
func (r *relay) crowded() timing.Crowd {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.crowd
}

// goneHosts returns the hosts that led until a short time ago, and are gone.
func (r *relay) goneHosts() (all []hostProbed) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for host, g := range r.gone {
		if time.Since(g.at) < r.c.times().Host {
			all = append(all, hostProbed{host: host, found: g.found})
		}
	}
	return all
}

// watchLeader returns when the leader counts as failed, or ctx ends. It returns what was found of its host, or that it was silent for too
// long, if that is why.
func (r *relay) watchLeader(ctx context.Context, host int) (found reach.Finding, missed bool) {
	times := r.c.times()
	ctx, cancel := context.WithCancel(ctx)
	var inquiry sync.WaitGroup
	defer inquiry.Wait()
	defer cancel()
	answers := make(chan hostProbed, 1)
	var probes reach.Pace
	tick := time.NewTimer(times.LinkWatch)
	defer tick.Stop()
	due := time.Now().Add(times.LinkWatch)
	var h timing.History
	var looks timing.Looks
	for {
		var p hostProbed
		select {
		case p = <-answers:
			probes.End()
		case <-tick.C:
		case <-ctx.Done():
			return reach.Unsure, false
		}
		now := time.Now()
		r.mu.Lock()
		heard, crowd := r.heard, max(r.crowd, r.crowdThere)
		r.mu.Unlock()
		if p.found.Gone() && p.since.Equal(heard) {
			return p.found, false
		}
		if heard.After(h.Heard) {
			h.Hear(heard, timing.HostHeartbeat)
		}
		lateness := now.Sub(due)
		looks.Look(times.Leader(), now, lateness, nil)
		suspected, _ := times.Suspicion().Suspect(h, now, lateness, looks.Intervals)
		if suspected && probes.Begin(now, heard, times.Answer) {
			inquiry.Go(func() { answers <- hostProbed{host, heard, r.inquire(ctx, host)} })
		}
		var failed bool
		if failed, h = times.Leader().In(crowd).Suspect(h, now, lateness, looks.Intervals); failed {
			return reach.Unsure, true
		}
		due = now.Add(times.LinkWatch)
		tick.Reset(times.LinkWatch)
	}
}

// How a relay has the clocks of its machine set, by the leader on this host or another one.

// openClocks has this host's clocks held for whoever leads.
func (r *relay) openClocks() {
	if r.c.alone() {
		r.clocks = devices.NewHolder(r.c.Clocks, nil)
		return
	}
	r.clocks = devices.NewHolder(r.c.Clocks, r.resetWorkers)
	r.setClocks = devices.NewServer(r.clocks, r.pids, func(err error) {
		if r.c.Waits != nil {
			r.c.Waits(r.c.self().Name + ": clocks may not be as they were found: " + session.OneLine(err.Error()))
		}
	})
}

// hearClocks takes in what a leader on another host says of clocks; r.mu is held.
func (r *relay) hearClocks(m control.Message) error {
	open, opens := m.(control.OpenClocks)
	switch {
	case r.here != nil || r.out == nil: // that one leads no more
	case r.setClocks != nil:
		if !r.setClocks.Hear(r.out, r.out.put, m) {
			return errors.New("host: the leader sets clocks faster than they can be set")
		}
	case opens:
		r.tell(control.Clocks{ID: open.ID, Err: "it sets no clocks"})
	}
	return nil
}

// pids returns the processes of those workers that are on this host.
func (r *relay) pids(workers []int) map[int]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make(map[int]int)
	for _, l := range r.locals {
		if hello, ok := l.hello.(control.Hello); ok && l.exit == nil {
			all[int(l.who.Worker)] = hello.PID
		}
	}
	maps.DeleteFunc(all, func(w, _ int) bool { return !slices.Contains(workers, w) })
	return all
}

// resetWorkers lets the workers of this host compute at full speed again: their emulated devices do.
func (r *relay) resetWorkers() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.locals {
		if l.started && l.next == nil && l.exit == nil {
			l.to.put(control.Clock{Share: 1})
		}
	}
}

// beat tells workers and leader that this host lives, and the workers only as long as
// it hears of a leader: a worker that has not heard its host for the timeout commits nothing.
func (r *relay) beat(ctx context.Context) {
	tick := time.NewTicker(timing.HostHeartbeat)
	defer tick.Stop()
	times, alone, told := r.c.times(), time.Now(), false
	for n := 0; ; n++ {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		threads, _ := platform.Runnable() // none where that is unknown
		r.mu.Lock()
		r.crowd = r.crowd.Next(threads, runtime.NumCPU())
		if r.out != nil {
			alone, told = time.Now(), false
		} else if !told && r.c.Waits != nil && time.Since(alone) > times.Host && !r.heard.IsZero() {
			told = true
			r.c.Waits(r.c.waits())
		}
		if r.here != nil || r.out != nil && time.Since(r.heard) < times.Host {
			if rejected := r.c.Rejected.Counts(); r.out.empty() && (r.here == nil || rejected != nil) {
				r.out.put(control.Beat{Crowd: r.crowd, Rejected: rejected})
			}
			for _, l := range r.locals {
				if n%int(timing.Heartbeat/timing.HostHeartbeat) == 0 && l.started && l.next == nil && l.to.empty() {
					l.to.put(control.Beat{})
				}
			}
		}
		r.mu.Unlock()
	}
}
