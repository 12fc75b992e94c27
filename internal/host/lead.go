package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/session/skips"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// seat is where a host's leadership is, if it has any.
type seat struct {
	h     *Host
	log   agree.Log
	relay *relay
	again chan *lead
	asked []session.Event      // StopAsked and WatchAsked that every leadership is told
	ends  chan session.Outcome // of leaderships that ended in doubt
	lead  *lead                // nil while this host does not lead

	mu   sync.Mutex
	open *lead // the same, while it takes links
}

// lead is one leadership of a host. The next one, here or elsewhere, starts from
// what is agreed, what is in the run directory, and what the hosts tell.
type lead struct {
	c       *Config
	log     agree.Log
	relay   *relay
	term    uint64
	attempt uint64       // newest ballot of this term, of an earlier leadership or of this one after serve
	fills   int          // newest fill, the same
	since   control.Lead // what hosts are told
	skipped []uint64     // samples, before this leader
	again   func()       // called when the leadership has to start over
	linked  []string     // other hosts that took part when the run ended, after serve

	ctx    context.Context // ends when another host leads
	depose context.CancelFunc
	ended  chan struct{}
	links  sync.WaitGroup
	events *queue[any] // of the loop
	told   *audience

	entering sync.Mutex // of hosts, one after the other
}

// take begins to lead.
func (s *seat) take(ctx context.Context, term, attempt uint64, fills int) {
	l := &lead{
		c: &s.h.c, log: s.log, relay: s.relay, term: term, attempt: attempt, fills: fills,
		ended: make(chan struct{}), events: newQueue[any](), told: newAudience(),
	}
	l.ctx, l.depose = context.WithCancel(ctx)
	l.again = func() {
		select {
		case s.again <- l:
		default:
		}
	}
	s.lead = l
	for _, e := range s.asked {
		l.events.put(e)
	}
	go func() {
		defer close(l.ended)
		out, err := l.serve(s)
		switch {
		case errors.Is(err, errDeposed):
			l.depose()
			l.links.Wait()
			return
		case err != nil:
			out = session.Outcome{Err: err}
		}
		doubt := false
		if l.c.Apart {
			l.relay.gatherLogs(l.ctx, l.linked)
			doubt = l.conclude(out)
		}
		l.depose()
		l.links.Wait()
		if doubt {
			s.doubt(out)
			return
		}
		l.c.Done(term, out)
	}()
}

// conclude tells the other hosts how the run has ended. It reports whether they may not have heard it: another host has been elected
// meanwhile, perhaps with the vote of this one, which it needs until it has concluded the run itself.
func (l *lead) conclude(out session.Outcome) (doubt bool) {
	l.told.end(l.c.Last(l.term, out), max(timing.Reap, l.c.times().Host))
	return out.Summary != nil && l.log.Term() != l.term
}

// doubt keeps how the run has ended, which counts if no other host says so.
func (s *seat) doubt(out session.Outcome) {
	select {
	case s.ends <- out:
	default: // it has led twice since
	}
}

// leave ends the leadership, if there is one.
func (s *seat) leave() {
	if s.lead == nil {
		return
	}
	s.lead.depose()
	<-s.lead.ended
	s.lead = nil
}

// ask tells this leadership and later ones what the user asks for.
func (s *seat) ask(e session.Event) {
	// Only the newest WatchAsked counts, and the first two StopAsked.
	stops := 0
	s.asked = slices.DeleteFunc(s.asked, func(old session.Event) bool {
		_, watch := old.(session.WatchAsked)
		if !watch {
			stops++
		}
		_, again := e.(session.WatchAsked)
		return watch && again
	})
	if _, stop := e.(session.StopAsked); stop && stops == 2 {
		return
	}
	s.asked = append(s.asked, e)
	if s.lead != nil {
		s.lead.events.put(e)
	}
}

// admit sets the leadership that takes links; nil is none.
func (s *seat) admit(l *lead) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open = l
}

// admitted returns it, and counts a link of it that the caller ends.
func (s *seat) admitted() *lead {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open != nil {
		s.open.links.Add(1)
	}
	return s.open
}

// errDeposed ends the work of a leader when another host leads.
var errDeposed = errors.New("host: another one leads")

// serve leads: it starts, resumes or takes over the run, and keeps it until it has ended or another host leads.
func (l *lead) serve(s *seat) (session.Outcome, error) {
	c := l.c
	if l.log.State().Generation == 0 {
		if _, err := l.log.Propose(l.ctx, agree.Generation{N: c.Resume.Newest().Generation + 1}); err != nil {
			return session.Outcome{}, errDeposed // or nothing works, and another host tries
		}
	}
	dir := c.RunDir
	if !c.alone() {
		dir = rundir.Attach(dir.Path(), dir.String(), c.Resume != nil)
	}
	state := l.log.State()
	in, err := l.inherit(state, dir)
	if err != nil {
		return session.Outcome{}, err
	}
	if l.skipped, err = readSkips(dir, state); err != nil {
		return session.Outcome{}, err
	}
	l.since = control.Lead{Term: l.term}
	if in != nil && in.History.Last != nil {
		l.since.Plan, l.since.Step = in.History.Last.Plan, in.History.Last.Step
	}
	console := c.Console
	if c.Lead != nil {
		tell := func(string, []byte) {}
		if c.Apart {
			tell = func(keep string, data []byte) { l.told.tell(keep, control.Shown{Data: data}) }
		}
		if console, err = c.Lead(l.term, tell); err != nil {
			return session.Outcome{}, err
		}
	}
	hosts := newRoster(c, time.Now(), l.relay.brokeAt)
	if hosts.fresh = in == nil; in != nil {
		hosts.inherit(c, in.Members())
	}
	sc := l.session(console, dir, in)
	if in == nil {
		// Of a run that is resumed, the first plan is greater than any that a worker has seen.
		sc.First = id.Version{Generation: state.Generation, N: max(state.Newest.N, c.Resume.Newest().N) + 1}
	}
	sess := session.New(sc, hosts.workers())
	r := newRun(l, console, dir, hosts, sess)
	s.admit(l)
	defer s.admit(nil)
	for _, gone := range l.relay.goneHosts() {
		gone.since = hosts.hosts[gone.host].heard.Heard
		l.events.put(gone)
	}
	l.relay.lead(l)
	defer l.relay.unlead(l)
	out := r.loop()
	for _, h := range hosts.linkedHosts() {
		l.linked = append(l.linked, h.name)
	}
	l.attempt, l.fills = sess.Last()
	if l.ctx.Err() != nil && !sess.Over() {
		return session.Outcome{}, errDeposed
	}
	return out, nil
}

// session returns what the session has to know of the run.
func (l *lead) session(console Console, dir *rundir.Dir, in *session.Inherited) session.Config {
	c := l.c
	sc := session.Config{
		Settings: c.Settings, Workers: c.Workers, Telemetry: console.Telemetry != nil, CanStart: !c.Fixed,
		Apart: c.Apart, Term: l.term, Attempt: l.attempt, Fills: l.fills, Leader: c.self().Name, Inherited: in,
	}
	sc.Skipped = l.skipped
	if !c.alone() {
		sc.Lease, sc.Home = c.Detect, c.hosts()[0].Name
	}
	if g := l.relay.gossip; g != nil {
		sc.Ring = g.Ring()
	}
	if err := l.relay.noRing; err != nil {
		sc.NoRing = fmt.Sprintf("there is no gossip ring: %s", session.OneLine(err.Error()))
	}
	if dir != nil {
		sc.RunDir, sc.Shown = dir.Path(), dir.String()
	}
	switch {
	case c.Clocks == nil:
	case c.Clocks.Emulated():
		sc.Clocks = session.EmulatedClocks
	default:
		sc.Clocks = session.RealClocks
	}
	return sc
}

// inherit reads what there is of a run; nil if it has not begun in this generation. Where the disk is full or takes no writes, it
// waits, and workers continue meanwhile until the end of their step.
func (l *lead) inherit(state agree.State, dir *rundir.Dir) (*session.Inherited, error) {
	in, err := parseAgreed(state)
	if in == nil {
		return nil, err
	}
	ForgetSocket(dir.Path())
	by := rundir.Leader{Generation: state.Generation, Term: l.term}
	var saved []checkpoint.Entry
	read := func() (err error) {
		if l.relay.copies != nil {
			err = l.relay.copies.takeOver(l.term, state.Job.Data)
		}
		if err == nil {
			err = dir.Resume(by)
		}
		if err == nil {
			in.History, err = rundir.ReadHistory(dir.Path())
		}
		if err == nil {
			saved, err = checkpoint.List(dir.Path())
		}
		return err
	}
	say := func(text string, err error) {
		if l.c.Waits != nil {
			l.c.Waits(fmt.Sprintf("%s leads, %s: %s", l.c.self().Name, text, session.OneLine(err.Error())))
		}
	}
	err = untilDisk(l.ctx, read, func(err error) { say("and waits until the run directory can be written", err) })
	if was := err; was != nil && l.ctx.Err() == nil && !errors.Is(was, rundir.ErrReplaced) && rundir.Remake(dir.Path(), state.Job.Data) == nil {
		if err = read(); err == nil {
			say("and has made records again that were lost", was)
		}
	}
	switch {
	case err == nil:
	case l.ctx.Err() != nil:
		return nil, errDeposed
	case errors.Is(err, rundir.ErrReplaced): // this host slept, and hears of the other one soon
		<-l.ctx.Done()
		return nil, errDeposed
	default:
		return nil, &session.FileError{Err: err}
	}
	// Whether one can be used is found out before the run goes back to it.
	if i := slices.IndexFunc(saved, func(e checkpoint.Entry) bool { return e.Err == nil }); i >= 0 {
		in.Saved = saved[i].Step
	}
	return in, nil
}

// parseAgreed reads the orders of the newest generation, nil if there are none.
func parseAgreed(state agree.State) (*session.Inherited, error) {
	var in *session.Inherited
	for _, p := range state.Plans {
		if p.Version.Generation != state.Generation {
			continue
		}
		o, err := control.ParseOrder(p.Data)
		if err != nil {
			return nil, err
		}
		if in == nil {
			in = new(session.Inherited)
		}
		in.Add(o, p.Reason)
	}
	return in, nil
}

// proposer commits what a leader proposes, one entry after the other, so that its loop does not wait.
type proposer struct {
	log     agree.Log
	term    uint64        // in which the entries are made
	entries chan proposal // in the order of their versions
}

type proposal struct {
	entry    agree.Entry
	began    time.Time
	question skips.Question // of a Skip
}

// run commits entries and tells of them until ctx ends.
func (p *proposer) run(ctx context.Context, post func(session.Event) bool) {
	for {
		select {
		case next := <-p.entries:
			if _, err := p.log.Propose(ctx, next.entry); err != nil {
				l := p.log.Leadership()
				leads := l.Ready && l.Term == p.term
				_, job := next.entry.(agree.Job)
				switch {
				case ctx.Err() != nil:
					return
				case leads && (errors.Is(err, agree.ErrInvalid) || p.log.Broken() != nil && !errors.Is(err, agree.ErrStale)):
					post(session.FileFailed{Err: err})
					return
				case job, leads && errors.Is(err, agree.ErrStale):
					continue // an earlier leader had the job agreed, or a newer plan has taken the place of this one
				}
				return // another host leads, which ends this
			}
			posted := true
			switch e := next.entry.(type) {
			case agree.Plan:
				posted = post(session.Agreed{Version: e.Version, Proposed: next.began})
			case agree.Skip:
				posted = post(session.SkipAgreed{Question: next.question})
			}
			if !posted {
				return
			}
		case <-p.log.Broken():
			post(session.FileFailed{Err: p.log.Sync()})
			return
		case <-ctx.Done():
			return
		}
	}
}

// job proposes the job of the run. It does not wait, as long as the log follows.
func (p *proposer) job(j rundir.Job) error {
	text, err := json.Marshal(j)
	if err == nil {
		p.entries <- proposal{entry: agree.Job{Generation: p.log.State().Generation, Data: text}, began: time.Now()}
	}
	return err
}

// plan proposes an order, as job does.
func (p *proposer) plan(o control.Order, reason string) error {
	text, err := o.Encode()
	if err == nil {
		e := agree.Plan{Term: p.term, Version: o.Plan.Version, Reason: reason[:min(len(reason), agree.MaxReason)], Data: text}
		p.entries <- proposal{entry: e, began: time.Now()}
	}
	return err
}

// skip proposes that a sample is skipped, as job does.
func (p *proposer) skip(q skips.Question) {
	p.entries <- proposal{entry: agree.Skip{Term: p.term, Sample: q.Sample, Skips: q.Skips}, began: time.Now(), question: q}
}

// readSkips returns the samples that were skipped so far, and writes those down that the leader before has only had agreed.
func readSkips(dir *rundir.Dir, state agree.State) ([]uint64, error) {
	if dir == nil {
		return state.Skipped(), nil
	}
	all, err := rundir.ReadSkips(dir.Path())
	if err != nil {
		return nil, &session.FileError{Err: err}
	}
	had := make(map[uint64]int)
	for _, sample := range all {
		had[sample]++
	}
	for _, sample := range state.Skipped() {
		if had[sample]--; had[sample] < 0 {
			s := rundir.Skip{Sample: sample, Index: -1, Time: rundir.Time{Time: time.Now()}, Reason: "agreed under another leader"}
			if err := dir.AddSkip(s); err != nil && !platform.MayPass(err) {
				return nil, &session.FileError{Err: err}
			}
			all = append(all, sample)
		}
	}
	return all, nil
}
