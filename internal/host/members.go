package host

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/reach"
	"github.com/soliton-train/soliton/internal/timing"
)

// Hosts enter a run that has begun, and return after they were lost: the leader has their names and addresses agreed, so that every
// later one knows them, and then changes which of them vote.

// hosts returns the hosts of the run as far as this one knows, each at the position that it keeps.
func (c *Config) hosts() []Addr {
	if c.agreed == nil {
		return c.Hosts
	}
	all := slices.Clone(c.Hosts)
	for _, h := range c.agreed().Members {
		all, _ = entered(all, Addr{Name: h.Name, Agree: h.Agree, Link: h.Link, Starts: h.Workers})
	}
	return all
}

// entered returns hosts after one has entered, and its position: that of its name, if it has one.
func entered(all []Addr, a Addr) ([]Addr, int) {
	i := slices.IndexFunc(all, func(h Addr) bool { return h.Name == a.Name })
	if i < 0 {
		return append(all, a), len(all)
	}
	a.Voter, a.Workers = all[i].Voter, all[i].Workers
	all[i] = a
	return all, i
}

// self returns this host.
func (c *Config) self() Addr {
	if c.Enters != nil {
		return *c.Enters
	}
	return c.Hosts[c.Self]
}

// host returns the position of a host, -1 if there is none of this name.
func (c *Config) host(name string) int {
	return slices.IndexFunc(c.hosts(), func(h Addr) bool { return h.Name == name })
}

// hostNames returns the names of all hosts.
func (c *Config) hostNames() (names []string) {
	for _, h := range c.hosts() {
		names = append(names, h.Name)
	}
	return names
}

// voters returns the names of the hosts that vote.
func (c *Config) voters() (names []string) {
	for _, s := range c.servers() {
		if s.Voter {
			names = append(names, agree.HostOf(s.ID))
		}
	}
	return names
}

// servers returns all servers of the log.
func (c *Config) servers() (all []agree.Server) {
	if c.agreed != nil {
		all = c.agreed().Servers
	}
	if slices.ContainsFunc(all, func(s agree.Server) bool { return s.Voter }) {
		return all
	}
	all = nil
	for _, h := range c.Hosts { // the log is not there yet
		if h.Voter || c.Enters != nil && h.Name != c.self().Name {
			all = append(all, agree.Server{ID: h.Name, Addr: h.Agree, Voter: true})
		}
	}
	return all
}

// waits says what a host without a leader waits for.
func (c *Config) waits() string {
	voters := c.voters()
	others := slices.Compact(slices.Sorted(slices.Values(voters)))
	others = slices.DeleteFunc(others, func(name string) bool { return name == c.self().Name })
	return fmt.Sprintf("%s hears of no leader, and its workers hold: %d of %d hosts that vote have to be there; it waits for %s",
		c.self().Name, len(voters)/2+1, len(voters), strings.Join(others, ", "))
}

// StrandedError means that the run can never continue on this host: too many hosts that vote have ended.
type StrandedError struct{ Gone, Voters int }

func (e *StrandedError) Error() string {
	return fmt.Sprintf("%d of %d hosts that vote are gone, and the run needs %d to continue", e.Gone, e.Voters, e.Voters/2+1)
}

// strandedAfter is how long a host hears of no leader before it looks whether there can be one.
func (c *Config) strandedAfter() time.Duration { return min(c.times().Host, timing.Default) }

// isStranded asks the machines of all other hosts that vote whether their agents are there. One that does not answer may be.
func (c *Config) isStranded(ctx context.Context) error {
	voters, gone := 0, 0
	all := c.servers()
	for _, s := range all {
		if s.Voter {
			voters++
			if c.isGone(ctx, s, all) {
				gone++
			}
		}
	}
	if voters > 0 && voters-gone <= voters/2 {
		return &StrandedError{gone, voters}
	}
	return nil
}

// isGone reports whether a server of the log cannot come back. Another machine, or the same one with a new log, may have the name of its
// host by now.
func (c *Config) isGone(ctx context.Context, s agree.Server, all []agree.Server) bool {
	name := agree.HostOf(s.ID)
	i := c.host(name)
	if i < 0 {
		return false
	}
	switch h := c.hosts()[i]; {
	case s.Addr != "" && s.Addr != h.Agree:
		return c.refuses(ctx, s.Addr)
	case slices.ContainsFunc(all, func(o agree.Server) bool { return o.ID != s.ID && agree.HostOf(o.ID) == name && o.Addr == s.Addr }):
		return true
	default:
		return i != c.Self && c.refuses(ctx, h.Link)
	}
}

func (c *Config) refuses(ctx context.Context, addr string) bool {
	return c.probe(ctx, addr) == reach.Refuses
}

// watchStranded tells when this host has heard of no leader for a while and can never hear of one.
func (r *relay) watchStranded(ctx context.Context) {
	after := r.c.strandedAfter()
	tick := time.NewTicker(after / 2)
	defer tick.Stop()
	heard, found := time.Now(), 0
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		r.mu.Lock()
		if r.out != nil {
			heard, found = time.Now(), 0
		}
		r.mu.Unlock()
		if time.Since(heard) < after {
			continue
		}
		err := r.c.isStranded(ctx)
		if err == nil || ctx.Err() != nil {
			found = 0
			continue
		}
		// Agents that have just been started again would be there the second time.
		if found++; found == 2 {
			r.stranded <- err
			return
		}
	}
}

// memberOf and addrOf turn a host into what is sent of it, and back.
func memberOf(a Addr) control.Member {
	return control.Member{Name: a.Name, Agree: a.Agree, Link: a.Link, First: a.Workers, Workers: a.Starts}
}

func addrOf(m control.Member) Addr {
	return Addr{Name: m.Name, Agree: m.Agree, Link: m.Link, Workers: m.First, Starts: m.Workers}
}

// enter takes this host into the run, unless it is asked to leave before: it has no part yet that it could hand over.
func (h *Host) enter(ctx context.Context, t *tls.Config) error {
	ctx, cancel := context.WithCancel(ctx)
	left := make(chan bool, 1)
	go func() {
		select {
		case <-h.leave:
			left <- true
			cancel()
		case <-ctx.Done():
			left <- false
		}
	}()
	err := h.c.enter(ctx, t)
	cancel()
	if <-left {
		return ErrLeft
	}
	return err
}

// enter asks the hosts of a run, one after the other, until one that leads has taken this host in.
func (c *Config) enter(ctx context.Context, t *tls.Config) error {
	hosts, next := c.Hosts, 0
	pause := time.NewTimer(0)
	defer pause.Stop()
	for gone := 0; gone < len(hosts); {
		select {
		case <-pause.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		answer, err := c.askToEnter(ctx, hosts[next].Link, t)
		switch {
		case errors.Is(err, unix.ECONNREFUSED):
			gone++
			next = (next + 1) % len(hosts)
		case err != nil:
			gone = 0 // it may be cut off for a while
			next = (next + 1) % len(hosts)
		default:
			gone = 0
			hosts = nil
			for _, m := range answer.Hosts {
				hosts = append(hosts, addrOf(m))
			}
			if answer.Host >= 0 {
				c.Hosts, c.Self, c.led = hosts, answer.Host, answer.Leader
				c.Enters = &hosts[answer.Host]
				return nil
			}
			if next = (next + 1) % len(hosts); answer.Leader >= 0 {
				next = answer.Leader
			}
		}
		pause.Reset(timing.Probe)
	}
	return errors.New("the run has ended: none of its hosts is there")
}

func (c *Config) askToEnter(ctx context.Context, link string, t *tls.Config) (answer control.Entered, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.times().Greet)
	defer cancel()
	conn, err := c.dialLink(ctx, link, t)
	if err != nil {
		return answer, err
	}
	defer conn.Close()
	if err := conn.Send(control.Enter{Protocol: control.Protocol, Host: memberOf(*c.Enters)}); err != nil {
		return answer, err
	}
	m, err := conn.Receive(ctx)
	if err != nil {
		return answer, err
	}
	answer, ok := m.(control.Entered)
	if !ok || len(answer.Hosts) == 0 || answer.Host >= len(answer.Hosts) || answer.Leader >= len(answer.Hosts) {
		return answer, fmt.Errorf("host: a host answered with %T", m)
	}
	return answer, nil
}

// answer answers a host that wants to enter. Only a leader takes it in.
func (s *seat) answer(ctx context.Context, conn *control.Conn, m control.Member) {
	c := &s.h.c
	e := control.Entered{Host: -1, Leader: c.host(agree.HostOf(s.log.Leadership().Leader))}
	if l := s.admitted(); l != nil {
		e.Host = l.takeIn(ctx, addrOf(m))
		l.links.Done()
	}
	for _, h := range c.hosts() {
		e.Hosts = append(e.Hosts, memberOf(h))
	}
	_ = conn.Send(e) // it asks again
}

// hostEnters asks the roster for the name of a host that wants to enter, and hostEntered says that it is agreed.
type (
	hostEnters struct {
		host   Addr
		answer chan entering
	}
	hostEntered struct {
		host   Addr
		answer chan int
	}
	entering struct {
		host    Addr
		known   int  // its position, if nothing is to be agreed; else -1
		refused bool // for now
	}
)

// takeIn has a host agreed, and returns its position; -1 where it has to ask again.
func (l *lead) takeIn(ctx context.Context, a Addr) int {
	l.entering.Lock()
	defer l.entering.Unlock()
	name := make(chan entering, 1)
	l.events.put(hostEnters{a, name})
	var e entering
	select {
	case e = <-name:
	case <-l.ctx.Done():
		return -1
	case <-ctx.Done():
		return -1
	}
	if e.refused || e.known >= 0 {
		return e.known
	}
	if _, err := l.log.Propose(ctx, agree.Member{Name: e.host.Name, Agree: e.host.Agree, Link: e.host.Link, Workers: e.host.Starts}); err != nil {
		return -1
	}
	at := make(chan int, 1)
	l.events.put(hostEntered{e.host, at})
	select {
	case i := <-at:
		return i
	case <-l.ctx.Done():
	case <-ctx.Done():
	}
	return -1
}

// enters chooses the name of a host: the one that it wants, if no other host has it, or the one that had it is lost. One that has
// entered and not linked yet is on its way: machines that join in one moment may want the same name.
func (r *roster) enters(a Addr) entering {
	for i, h := range r.addrs {
		if h.Agree == a.Agree && h.Link == a.Link {
			return entering{known: i} // it asks a second time
		}
	}
	wanted := a.Name
	for n := 2; ; n++ {
		i := slices.IndexFunc(r.addrs, func(h Addr) bool { return h.Name == a.Name })
		switch {
		case i < 0 || r.hosts[i].lost && !r.hosts[i].awaited:
			return entering{host: a, known: -1}
		case r.hosts[i].out == nil && !r.hosts[i].awaited:
			return entering{known: -1, refused: true} // until that one links, or is lost
		}
		a.Name = fmt.Sprintf("%s-%d", wanted, n)
	}
}

// entered gives a host its position. It counts as lost until it has a link.
func (r *roster) entered(a Addr) (host int) {
	if r.addrs, host = entered(r.addrs, a); host == len(r.hosts) {
		r.hosts = append(r.hosts, hostState{})
	}
	r.hosts[host] = hostState{lost: true, awaited: true, starts: a.Starts}
	return host
}

// servers is the log of several hosts, as far as a leader changes which of them take part in it.
type servers interface {
	ID() string
	CaughtUp(id string) bool
	AddNonVoter(context.Context, agree.Server) error
	Promote(ctx context.Context, id string) error
	Demote(ctx context.Context, id string) error
	Remove(ctx context.Context, id string) error
	Transfer(ctx context.Context, id string) error
}

// server returns the ID of a host's part in the agreement.
func (r *roster) server(host int) string {
	return cmp.Or(r.hosts[host].server, r.addrs[host].Name) // the name from the beginning on
}

// view returns what the roster knows of the servers.
func (r *roster) view(leader, tieBreak string) *agree.View {
	v := &agree.View{Leader: leader, TieBreak: tieBreak}
	for i, h := range r.hosts {
		v.Hosts = append(v.Hosts, agree.HostView{
			Server: agree.Server{ID: r.server(i), Addr: r.addrs[i].Agree}, Linked: h.out != nil && !h.lost, Lost: h.lost, Leaves: h.leaves,
		})
	}
	return v
}

// changeServers changes, one after the other, which hosts vote and get the log, until ctx ends.
func changeServers(ctx context.Context, log agree.Log, s servers, newest *atomic.Pointer[agree.View], post func(session.Event) bool) {
	tick := time.NewTicker(timing.Heartbeat)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		for ctx.Err() == nil {
			v := newest.Load()
			if v == nil {
				break
			}
			view := *v
			view.Hosts = slices.Clone(v.Hosts)
			for i := range view.Hosts {
				view.Hosts[i].CaughtUp = s.CaughtUp(view.Hosts[i].Server.ID)
			}
			change, ok := agree.NextChange(log.State().Servers, view)
			if !ok || changeServer(ctx, s, change) != nil {
				break // tried again
			}
			post(session.Noted{Text: fmt.Sprintf("%s %s", agree.HostOf(change.Server.ID), changed[change.Kind])})
		}
	}
}

var changed = map[agree.ChangeKind]string{
	agree.AddNonVoter: "gets what the hosts agree on", agree.Promote: "votes", agree.Demote: "votes no longer", agree.Remove: "is no longer awaited by those that vote",
}

func changeServer(ctx context.Context, s servers, c agree.Change) error {
	switch c.Kind {
	case agree.AddNonVoter:
		return s.AddNonVoter(ctx, c.Server)
	case agree.Promote:
		return s.Promote(ctx, c.Server.ID)
	case agree.Demote:
		return s.Demote(ctx, c.Server.ID)
	}
	return s.Remove(ctx, c.Server.ID)
}
