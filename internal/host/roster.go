package host

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/timing"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/reach"
	"github.com/soliton-train/soliton/internal/plan"
)

// roster is what a leader knows of hosts and of the workers on them: which host has a link, which one is lost, and which
// session is fenced. It turns what hosts say into events of the session, and has no goroutine, clock or socket.
type roster struct {
	addrs   []Addr
	self    int
	fresh   bool // no host has led before: its workers have yet to start
	hello   time.Duration
	times   timing.Policy
	hosts   []hostState
	looks   timing.Looks
	crowd   timing.Crowd // of this machine
	members []member     // every session; of the first ones, by WorkerID
}

// outbox takes messages to the other end of a link. It never waits.
type outbox interface {
	put(control.Message)
	empty() bool
}

// hostState is what a leader knows of a host.
type hostState struct {
	out    outbox         // of its link; nil while there is none
	heard  timing.History // or since when there is no link
	since  time.Time      // the same, as far as that was before this leadership
	crowd  timing.Crowd   // of its machine, as far as it has said
	probes reach.Pace
	server string // its part in the agreement, as it says
	leaves bool   // it has no vote any more, or is to have none
	starts int    // workers that are to be started on it when it links
	told   bool   // it has been linked once
	twice  bool   // and again, so this leadership starts over, and takes in nothing of the new link
	lost   bool

	awaited bool // it has entered under this leadership, and not linked yet
}

// member is a session of a worker.
type member struct {
	who    id.Session
	host   int
	closed bool // its connection
	exited bool
	fenced bool // the run continues without it, and it has to end
	last   string
}

// relayed is a message from or to a worker on its way between its host and the leader.
type relayed struct {
	control.Message
	worker id.Session
}

// closed says that the connection of a worker has ended. Between hosts it loses its reason.
type closed struct {
	control.Closed
	err error
}

func closedOf(who id.Session, err error) closed {
	return closed{control.Closed{Worker: int(who.Worker), Incarnation: who.Incarnation}, err}
}

// sayEnd says how a worker has ended, as far as it has; r.mu is held.
func (l *local) sayEnd(q outbox) {
	if l.closed {
		q.put(closedOf(l.who, l.err))
	}
	if l.exit != nil {
		q.put(*l.exit)
	}
}

// newRoster returns the roster of a leadership that begins now. broke returns since when a host has had no link. It has some time to
// connect, unless it led and was silent for too long already.
func newRoster(c *Config, now time.Time, broke func(host int) (since time.Time, missed bool)) *roster {
	addrs := slices.Clone(c.hosts())
	r := &roster{addrs: addrs, self: c.Self, hello: c.HelloTimeout, times: c.times(), hosts: make([]hostState, len(addrs)), members: make([]member, c.Workers)}
	least := now.Add(r.times.Welcome - r.times.Host)
	for i, h := range addrs {
		since, missed := broke(i)
		if r.hosts[i].since = since; !missed && since.Before(least) {
			since = least
		}
		r.hosts[i].heard.Restart(since)
		for _, worker := range h.Workers {
			r.members[worker] = member{who: id.Session{Worker: id.WorkerID(worker)}, host: i}
		}
	}
	return r
}

// inherit takes in which sessions have a part in a run that another host has led.
func (r *roster) inherit(c *Config, parts []plan.Worker) {
	for i := range r.members {
		m := &r.members[i]
		m.fenced = !session.HasPart(parts, plan.Worker{ID: m.who.Worker, Incarnation: m.who.Incarnation})
	}
	for _, w := range parts {
		if who := (id.Session{Worker: w.ID, Incarnation: w.Incarnation}); r.find(who) < 0 {
			r.members = append(r.members, member{who: who, host: max(c.host(w.Host), 0)})
		}
	}
	for i, h := range r.addrs { // it may have entered when the leader before failed
		if !slices.ContainsFunc(r.members, func(m member) bool { return m.host == i }) {
			r.hosts[i].starts = h.Starts
		}
	}
}

// workers returns all sessions as plans have them.
func (r *roster) workers() (all []plan.Worker) {
	for _, m := range r.members {
		all = append(all, plan.Worker{ID: m.who.Worker, Incarnation: m.who.Incarnation, Host: r.addrs[m.host].Name})
	}
	return all
}

// find returns the position of a session, -1 for none.
func (r *roster) find(who id.Session) int {
	for i := range r.members {
		if r.members[i].who == who {
			return i
		}
	}
	return -1
}

// place chooses a host for a worker that is to be started: its own, or the one with the fewest workers where that one is
// away or none is named. The worker's place is that of the session; begin has the host start it.
func (r *roster) place(w plan.Worker) (place int, e session.WorkerStarted) {
	load := make([]int, len(r.hosts))
	for _, m := range r.members {
		if !m.exited {
			load[m.host]++
		}
	}
	best := -1
	for i, h := range r.hosts {
		switch {
		case h.out == nil || h.lost:
		case r.addrs[i].Name == w.Host:
			load[i], best = -1, i
		case best < 0 || load[i] < load[best]:
			best = i
		}
	}
	if best < 0 {
		return -1, session.WorkerStarted{Worker: w, Err: errors.New("no host has a link")}
	}
	w.Host = r.addrs[best].Name
	r.members = append(r.members, member{who: id.Session{Worker: w.ID, Incarnation: w.Incarnation}, host: best})
	return len(r.members) - 1, session.WorkerStarted{Worker: w}
}

// linkedHosts returns the other hosts that have a link.
func (r *roster) linkedHosts() (all []linkedHost) {
	for i, h := range r.hosts {
		if i != r.self && h.out != nil && !h.lost {
			all = append(all, linkedHost{i, r.addrs[i].Name, h.out})
		}
	}
	return all
}

// begin has the host of a worker start it.
func (r *roster) begin(place int) {
	w := &r.members[place]
	r.hosts[w.host].out.put(control.Begin{Worker: int(w.who.Worker), Incarnation: w.who.Incarnation})
}

// send sends to a worker. Without a link the message is dropped: another link begins with what is to be known.
func (r *roster) send(place int, m control.Message) {
	if w := &r.members[place]; r.hosts[w.host].out != nil {
		r.hosts[w.host].out.put(relayed{m, w.who})
	}
}

// kill ends a worker, as far as its host has a link. With stacks, it writes them into its log before.
func (r *roster) kill(place int, stacks bool) {
	if w := &r.members[place]; r.hosts[w.host].out != nil {
		m := killOf(w.who)
		m.Stacks = stacks
		r.hosts[w.host].out.put(m)
	}
}

// fence ends a worker that the run does without, as soon as its host has a link.
func (r *roster) fence(place int) {
	r.members[place].fenced = true
	r.kill(place, false)
}

// rejoin ends the session of a worker and has its process continue as another one, whose place is that of the session.
func (r *roster) rejoin(place int, as plan.Worker) session.Fenced {
	w := &r.members[place]
	w.closed, w.exited = true, true // whatever it says counts for nothing
	who, host := w.who, w.host
	r.members = append(r.members, member{who: id.Session{Worker: as.ID, Incarnation: as.Incarnation}, host: host})
	if out := r.hosts[host].out; out != nil {
		out.put(control.Fence{Worker: int(who.Worker), Incarnation: who.Incarnation, Next: as.Incarnation})
	}
	return session.Fenced{Worker: place, As: as}
}

func killOf(who id.Session) control.Kill {
	return control.Kill{Worker: int(who.Worker), Incarnation: who.Incarnation}
}

// What hosts do, as the loop hears of it. All but probed is ordered for a host.
type (
	hostLinked struct {
		host   int
		server string
		out    outbox
	}
	hostUnlinked struct {
		host int
		out  outbox
	}
	hostSaid struct {
		host int
		at   time.Time
		m    control.Message
	}
	hostReleased struct{ host int } // it has no vote any more, and may go
	hostProbed   struct {
		host  int
		since time.Time // when it was heard last, as it was probed
		found reach.Finding
	}
)

// errLinkedTwice means that a host has a new link, and that what was on its way over the one before is lost.
var errLinkedTwice = errors.New("host: a host has linked twice")

// linked takes in that a host has a link.
func (r *roster) linked(now time.Time, e hostLinked) ([]session.Event, error) {
	h := &r.hosts[e.host]
	if h.told && !h.lost {
		h.twice = true
		return nil, errLinkedTwice
	}
	was := h.lost
	h.out, h.server, h.since, h.told, h.lost, h.awaited = e.out, e.server, time.Time{}, true, false, false
	h.heard.Restart(now)
	absent := true
	for i, m := range r.members {
		switch {
		case m.host != e.host:
		case m.fenced || was:
			r.kill(i, false)
		default:
			absent = false
		}
	}
	if absent {
		starts := h.starts
		h.starts = 0
		return []session.Event{session.HostBack{Host: r.addrs[e.host].Name, Workers: starts}}, nil
	}
	return nil, nil
}

// release lets a host go that leaves.
func (r *roster) release(host int) {
	if h := &r.hosts[host]; h.out != nil {
		h.out.put(control.Leave{})
	}
}

// unlinked takes in that a link has ended.
func (r *roster) unlinked(now time.Time, e hostUnlinked) {
	if h := &r.hosts[e.host]; h.out == e.out {
		h.out = nil
		h.heard.Restart(now)
	}
}

// said takes in what a host says.
func (r *roster) said(e hostSaid) []session.Event {
	h := &r.hosts[e.host]
	if e.at.After(h.heard.Heard) {
		h.heard.Hear(e.at, timing.HostHeartbeat)
	}
	var who id.Session
	switch m := e.m.(type) {
	case control.Beat:
		if h.crowd = 0; m.Crowd > 0 {
			h.crowd = m.Crowd
		}
		if m.Rejected != nil {
			return []session.Event{session.Rejected{Host: r.addrs[e.host].Name, Counts: m.Rejected}}
		}
		return nil
	case relayed:
		who = m.worker
	case closed:
		who = id.Session{Worker: id.WorkerID(m.Worker), Incarnation: m.Incarnation}
	case control.Exited:
		who = id.Session{Worker: id.WorkerID(m.Worker), Incarnation: m.Incarnation}
	case control.Halted:
		who = id.Session{Worker: id.WorkerID(m.Worker), Incarnation: m.Incarnation}
	case control.Runs:
		who = id.Session{Worker: id.WorkerID(m.Worker), Incarnation: m.Incarnation}
	default:
		return nil
	}
	if h.lost || h.twice {
		return nil // the run continues without it, or under the next leadership
	}
	place := r.find(who)
	if place < 0 || r.members[place].host != e.host {
		// It was to join under another leader, and has no part.
		if _, over := e.m.(control.Exited); !over && h.out != nil {
			h.out.put(killOf(who))
		}
		return nil
	}
	w := &r.members[place]
	switch m := e.m.(type) {
	case relayed:
		if !w.closed {
			return received(place, m.Message)
		}
	case closed:
		if !w.closed {
			w.closed = true
			return []session.Event{session.ConnClosed{Worker: place, Err: m.err}}
		}
	case control.Halted:
		if !w.exited {
			return []session.Event{session.WorkerHalted{Worker: place, Stopped: m.Stopped, Frozen: m.Frozen, For: time.Duration(max(0, m.For))}}
		}
	case control.Runs:
		if !w.exited {
			return []session.Event{session.WorkerRuns{Worker: place}}
		}
	case control.Exited:
		if !w.exited {
			w.exited, w.last = true, m.Last
			status := session.Status{Code: m.Code, Text: m.Text, Panicked: m.Panicked, Fault: m.Fault, Progress: m.Progress}
			return []session.Event{session.WorkerExited{Worker: place, Status: status}}
		}
	}
	return nil
}

// received returns what a message of a worker means to the session.
func received(place int, m control.Message) []session.Event {
	f, ok := m.(control.Fault)
	if !ok {
		return []session.Event{session.Received{Worker: place, Message: m}}
	}
	var events []session.Event
	if f.Text != "" {
		events = append(events, session.FaultInjected{Fault: f.Text})
	}
	if f.At != 0 || f.Kind == control.Thaw { // else no worker dies of it
		events = append(events, stampedFault(session.FaultStamped{Worker: place}, f))
	}
	return events
}

// tick loses the hosts that have been silent, or without a link, for too long. lateness is how late the tick comes. The last host whose
// workers can continue the run, if there is only one, has as long as a fenced worker: nothing is gained without it. tick returns the hosts
// that are suspected, or without a link, and worth a probe.
func (r *roster) tick(now time.Time, lateness time.Duration, last string) (events []session.Event, probe []hostProbed) {
	var intervals []timing.Intervals
	for i := range r.hosts {
		if h := &r.hosts[i]; h.out != nil && i != r.self {
			intervals = append(intervals, h.heard.Intervals)
		}
	}
	r.looks.Look(r.times.Follower(), now, lateness, nil)
	for i := range r.hosts {
		h := &r.hosts[i]
		if h.lost || i == r.self {
			continue
		}
		detector, every := r.times.Follower().In(max(r.crowd, h.crowd)), r.times.Answer
		suspected := h.out == nil
		if suspected {
			detector, every = r.times.Unlinked(r.fresh, r.hello), 0 // what exits, stops to listen soon
		} else {
			suspected, _ = r.times.Suspicion().Suspect(h.heard, now, lateness, timing.Pool(intervals), r.looks.Intervals)
		}
		var failed bool
		failed, h.heard = detector.Suspect(h.heard, now, lateness, timing.Pool(intervals), r.looks.Intervals)
		switch {
		case failed && (r.addrs[i].Name != last || h.heard.Silence(now) > r.times.Grace):
			events = append(events, r.lose(i, false)...)
		case suspected && !detector.Stopped(lateness) && h.probes.Begin(now, h.heard.Heard, every):
			probe = append(probe, hostProbed{host: i, since: h.heard.Heard})
		}
	}
	return events, probe
}

// probed takes in what was found of a host: it is lost where its agent has exited, or nothing reaches its machine. One that was heard or
// has linked meanwhile is not.
func (r *roster) probed(e hostProbed) []session.Event {
	h := &r.hosts[e.host]
	if h.probes.End(); !e.found.Gone() || !h.heard.Heard.Equal(e.since) || h.lost {
		return nil
	}
	return r.lose(e.host, e.found == reach.Refuses)
}

// lose gives up a host: all its workers are dead, and fenced should they come back. exited says that its agent has.
func (r *roster) lose(host int, exited bool) (events []session.Event) {
	h := &r.hosts[host]
	h.lost = true
	if h.out != nil {
		if end, ok := h.out.(interface{ close() }); ok {
			end.close()
		}
		h.out = nil
	}
	at := h.since
	if at.IsZero() {
		at = h.heard.Heard
	}
	for i := range r.members {
		w := &r.members[i]
		if w.host != host {
			continue
		}
		w.fenced = true
		if !w.closed {
			w.closed = true
			events = append(events, session.ConnClosed{Worker: i, Err: io.EOF})
		}
		if !w.exited {
			w.exited = true
			status := session.Status{Code: -1, Text: fmt.Sprintf("%s was lost", r.addrs[host].Name), Lost: at, Gone: exited}
			events = append(events, session.WorkerExited{Worker: i, Status: status})
		}
	}
	return events
}
