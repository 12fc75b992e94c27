package host

import (
	"cmp"
	"context"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/internal/timing"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/host/archiving"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/shards"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// run is the loop around the session of one leadership, and the goroutines beside it.
type run struct {
	Console
	c      *Config
	lead   *lead
	dir    *rundir.Dir // nil for a run without files
	hosts  *roster
	s      *session.Session
	events *queue[any]     // from the goroutines to the loop
	placed []session.Event // answers of the roster that the session has yet to hear, see apply

	others  sync.WaitGroup  // goroutines beside the loop
	talking context.Context // theirs

	log        *proposer
	newest     atomic.Pointer[agree.View] // of the hosts, for changeServers
	commands   *commands                  // nil for a run without files, and where each host has its own
	asks       map[int]*asks              // of hosts
	watched    map[int]bool               // hosts on which timelines are wanted, where each asks for itself
	governing  *governing                 // nil where no clocks are to be set
	answer     session.AnswerAdd          // to the newest AddWorkers
	save       *shards.Save               // the checkpoint that hosts are making whole, where they are apart; nil for none
	gather     *shards.Gather             // the checkpoint that hosts get, the same
	gathers    session.VerifyCheckpoint
	protect    *shards.Protect   // the checkpoint that is copied again, the same
	guarded    map[int]outbox    // links of the hosts when that began last
	asked      uint64            // of hosts, for save, gather and protect
	archiving  *archiving.Copier // nil where checkpoints have no target
	late       []session.Effect  // what is to be written to the run directory, in order, after a recovery
	lateDue    *time.Timer       // when it is to be written at the latest
	viewClosed bool
	early      []byte // output that came before the view was closed
}

func newRun(l *lead, c Console, dir *rundir.Dir, hosts *roster, s *session.Session) *run {
	r := &run{Console: c, c: l.c, lead: l, dir: dir, hosts: hosts, s: s, events: l.events}
	r.asks, r.watched = make(map[int]*asks), make(map[int]bool)
	r.log = &proposer{log: l.log, term: l.term, entries: make(chan proposal, 64)}
	r.lateDue = newTimer()
	return r
}

// newTimer returns a timer that is not set.
func newTimer() *time.Timer {
	t := time.NewTimer(0)
	t.Stop()
	return t
}

// begin starts what works beside the loop.
func (r *run) begin() {
	if g := r.lead.relay.gossip; g != nil {
		r.others.Go(func() { g.Tell(r.talking, r.post) })
	}
	r.others.Go(func() { r.log.run(r.talking, r.post) })
	if s, ok := r.lead.log.(servers); ok {
		r.others.Go(func() { changeServers(r.talking, r.lead.log, s, &r.newest, r.post) })
	}
	if h := r.lead.relay.clocks; h != nil {
		self := ""
		if !r.c.alone() {
			self = r.c.self().Name
		}
		// Emulated hosts are one machine, whose real devices the leader's process sets.
		own := func(host string) bool { return host == self || !r.c.Apart && !h.Emulated() }
		g, err := newGoverning(h, self, own, governorConfig, r.post)
		if err != nil {
			panic(err) // it has the defaults
		}
		r.governing = g
		r.others.Go(func() { g.run(r.talking) })
	}
	if r.dir != nil && r.c.Target != nil {
		r.archiving = r.openArchive()
	}
	if r.dir == nil || r.c.Apart {
		return // each host takes commands
	}
	c, err := listenForCommands()
	if err != nil {
		r.step(session.FileFailed{Err: err})
		return
	}
	r.commands = c
	r.others.Go(func() { c.serve(r.talking, func(c command) { r.events.put(c) }) })
}

// loop keeps the run until it has ended or another host leads.
func (r *run) loop() session.Outcome {
	talking, hangUp := context.WithCancel(context.Background())
	r.talking = talking
	defer hangUp()
	r.begin()
	alarm := newTimer()
	defer alarm.Stop()
	watch, watchDue := newTimer(), time.Time{}
	defer watch.Stop()
	rewatch := func() {
		if period := r.c.times().Watch; period > 0 {
			watchDue = time.Now().Add(period)
			watch.Reset(period)
		}
	}
	rewatch()
	look, due := newTimer(), time.Now()
	defer look.Stop()
	if !r.c.alone() {
		look.Reset(0)
	}
	r.apply(r.s.Begin(time.Now()))
	alarmed := false // AlarmDue is in the queue
	for !r.s.Over() {
		if at := r.s.Alarm(); at.IsZero() || alarmed {
			alarm.Stop()
		} else {
			alarm.Reset(time.Until(at))
		}
		// Times come behind what was heard before them, so that a worker is not blamed for the length of the queue.
		select {
		case <-r.events.signal:
			e, ok := r.events.next()
			if !ok {
				continue
			}
			r.take(e)
			switch e.(type) {
			case session.AlarmDue:
				alarmed = false
			case session.WatchTick:
				rewatch()
			case lookDue:
				due = time.Now().Add(timing.Probe)
				look.Reset(timing.Probe)
			}
		case <-alarm.C:
			alarmed = true
			r.events.put(session.AlarmDue{})
		case <-watch.C:
			threads, _ := platform.Runnable() // none where that is unknown
			r.hosts.crowd = r.hosts.crowd.Next(threads, runtime.NumCPU())
			r.events.put(session.WatchTick{Due: watchDue, Crowd: r.hosts.crowd})
		case <-look.C:
			r.events.put(lookDue{due})
		case <-r.lateDue.C:
			r.writeLate()
		case <-r.lead.ctx.Done():
			return r.end(hangUp)
		}
	}
	return r.end(hangUp)
}

// end stops and joins the goroutines beside the loop, closes the files, and returns how the run has ended.
func (r *run) end(hangUp func()) session.Outcome {
	r.lateDue.Stop()
	r.writeLate()
	var unarchived error
	if r.archiving != nil {
		unarchived = r.archiving.End(r.s.Over()) // else another host does it
	}
	hangUp()
	r.events.close()
	if r.commands != nil {
		_ = r.commands.close() // a socket that is left behind is removed by the next process
	}
	r.others.Wait()
	if r.s.Over() { // else another host continues the run
		r.closeView()
	}
	out := r.s.Outcome()
	warn := func(text string) {
		if out.Warning == "" {
			out.Warning = session.OneLine(text)
		}
	}
	if unarchived != nil && r.s.Over() {
		warn("the newest checkpoint is in the run directory only: " + unarchived.Error())
	}
	if g := r.governing; g != nil {
		if e, ok := r.s.ClocksRestored(time.Now(), g.last); ok && r.dir != nil {
			_ = r.dir.AddEvent(e) // the clocks are what matters
		}
		if g.err != nil {
			warn("clocks may not be as they were found: " + g.err.Error())
		}
	}
	if r.Telemetry != nil {
		if err := r.Telemetry.Close(); err != nil {
			warn(err.Error())
		}
	}
	if out.Lost >= 0 {
		out.Detail = r.hosts.members[out.Lost].last
	}
	if r.dir != nil {
		if err := r.dir.Close(); err != nil && out.Err == nil {
			out.Err = &session.FileError{Err: err}
		} else if err != nil {
			out.Warning = strings.TrimPrefix(out.Warning+"; "+session.OneLine(err.Error()), "; ")
		}
	}
	return out
}

// post hands an event to the loop, and reports whether there still is one.
func (r *run) post(e session.Event) bool {
	if r.talking.Err() != nil {
		return false
	}
	r.events.put(e)
	return true
}

// lookDue says that hosts are to be looked at, and when that was meant to be.
type lookDue struct{ at time.Time }

// take takes in what comes from the goroutines beside the loop.
func (r *run) take(e any) {
	switch e := e.(type) {
	case command:
		r.command(e)
	case hostSaid:
		r.heardOfShards(e)
		if _, leaves := e.m.(control.Leave); leaves {
			r.hosts.hosts[e.host].leaves = true
			r.see()
			server := r.hosts.server(e.host)
			r.others.Go(func() { r.release(e.host, server) })
		}
		r.steps(r.hosts.said(e))
		r.heardAsk(e)
		if r.governing != nil {
			r.governing.heard(e)
		}
	case hostReleased:
		r.hosts.release(e.host)
	case hostLinked:
		events, err := r.hosts.linked(time.Now(), e)
		if err != nil {
			r.lead.again()
		}
		r.steps(events)
		if g := r.gather; g != nil {
			r.tellHosts(g.Linked(e.host))
		}
	case hostUnlinked:
		r.hosts.unlinked(time.Now(), e)
		r.unanswered(e.host)
	case hostProbed:
		r.steps(r.hosts.probed(e))
	case lookDue:
		r.look(e.at)
	case hostEnters:
		e.answer <- r.hosts.enters(e.host)
	case hostEntered:
		e.answer <- r.hosts.entered(e.host)
	default:
		r.step(e)
	}
}

// release lets a host go whose workers have left, once the hosts agree on all without it (changeServers). This host has another one lead
// first, which is then asked: one that stays, as soon as it votes.
func (r *run) release(host int, server string) {
	ctx, cancel := context.WithTimeout(r.talking, timing.Drain)
	defer cancel()
	log, change := r.lead.log.(servers)
	for change {
		if host != r.c.Self {
			if _, there := r.lead.log.State().Server(server); !there {
				break
			}
		} else if next, there := agree.Successor(r.lead.log.State().Servers, *r.newest.Load()); there && log.Transfer(ctx, next) == nil {
			break
		}
		select {
		case <-time.After(timing.Retry): // a host that stays may be yet to vote, or a silent one to be found lost
		case <-ctx.Done():
			return // another leader is asked
		}
	}
	if host != r.c.Self {
		r.events.put(hostReleased{host})
	}
}

// see tells changeServers which hosts are there.
func (r *run) see() {
	r.newest.Store(r.hosts.view(r.lead.relay.server, cmp.Or(r.c.TieBreak, r.c.Hosts[0].Name)))
}

// look finds out which hosts are lost: at once where their machine says that no process listens there any
// more, soon where several hosts find that it does not answer, else when they were silent, or without a link, for too long.
func (r *run) look(due time.Time) {
	now := time.Now()
	events, probe := r.hosts.tick(now, now.Sub(due), r.s.LastHost())
	r.steps(events)
	r.lookAtShards()
	r.see()
	for _, p := range probe {
		r.others.Go(func() {
			p.found = r.lead.relay.inquire(r.talking, p.host)
			r.post(p)
		})
	}
}
