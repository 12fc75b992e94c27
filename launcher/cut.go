package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/chaos"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/platform"
)

// cutPeriod is how often sockets that are new get to know of a cut. Those that dial need not wait
// for it, since the other end does not answer.
const cutPeriod = 20 * time.Millisecond

// place is where a host is.
type place struct {
	addr netip.Addr               // of its agent and its workers
	at   func(func() error) error // calls a function there: sockets that it opens and processes that it starts are the host's
}

// emulatedPlaces are all this machine. All of 127.0.0.0/8 is, and with an address for each host, a
// packet says which one it comes from.
func emulatedPlaces(hosts int) (places []place) {
	for h := range hosts {
		n := h + 1
		addr := netip.AddrFrom4([4]byte{127, 1, byte(n >> 8), byte(n)})
		if chaos.CanCut() != nil {
			addr = netip.AddrFrom4([4]byte{127, 0, 0, 1}) // other systems may have this one only
		}
		places = append(places, place{addr, func(f func() error) error { return f() }})
	}
	return places
}

// reach returns an error if a host cannot be reached at its address: sockets can listen on an interface that is down, and the agents
// would wait for each other for ever.
func reach(ctx context.Context, places []place) error {
	dialer := net.Dialer{Timeout: 5 * time.Second}
	for _, p := range places {
		l, err := net.Listen("tcp", netip.AddrPortFrom(p.addr, 0).String())
		if err != nil {
			return err
		}
		c, err := dialer.DialContext(ctx, "tcp", l.Addr().String())
		_ = l.Close()
		if err != nil {
			return fmt.Errorf("%v cannot be reached (%w): set the loopback interface up", p.addr, errors.Unwrap(err))
		}
		_ = c.Close()
	}
	return nil
}

// mayCut reports whether --chaos may want hosts to be cut off. Their processes are to use plain TCP
// then: the kernel filters no listeners of Multipath TCP.
func (s *supervisor) mayCut() bool {
	return slices.ContainsFunc(s.f.faults.Faults, func(h chaos.Fault) bool { return h.Kind == chaos.KindCut }) ||
		slices.ContainsFunc(s.f.faults.Random, func(r chaos.Random) bool { return slices.Contains(r.Kinds, chaos.KindCut) })
}

// startCutting makes sure that hosts can be cut off, where that may be wanted, and begins to.
func (s *supervisor) startCutting() error {
	if !s.mayCut() {
		return nil
	}
	agents := s.agents // they are all there
	var c chaos.Cuts
	for h, p := range agents {
		none := []netip.Addr{netip.AddrFrom4([4]byte{127, 255, 255, 254})}
		for _, from := range [][]netip.Addr{none, nil} {
			if err := c.Apply(p.cmd.Process.Pid, s.places[h].addr, from); err != nil {
				return err
			}
		}
	}
	s.tasks.Go(func() { s.cut(agents) })
	return nil
}

// cut keeps hosts from hearing each other while they are cut off. No agent and no worker is told.
func (s *supervisor) cut(agents []*agentProcess) {
	var c chaos.Cuts
	cuts := hostCuts{until: make([]time.Time, len(agents))}
	tick := time.NewTicker(cutPeriod)
	defer tick.Stop()
	for {
		select {
		case h := <-s.cuts:
			cuts.begin(h.Host, time.Now().Add(time.Duration(h.Seconds*float64(time.Second))))
			s.note(fmt.Sprintf("chaos: host-%d is cut off for %v s", h.Host, h.Seconds))
		case now := <-tick.C:
			for _, h := range cuts.end(now) {
				s.note(fmt.Sprintf("chaos: host-%d is not cut off any more", h))
			}
			if !cuts.pass() {
				c = chaos.Cuts{}
				continue
			}
		case <-s.ended:
			return
		}
		for h, p := range agents {
			for _, pid := range append(platform.Children(p.cmd.Process.Pid), p.cmd.Process.Pid) {
				var from []netip.Addr
				for _, other := range cuts.unheard(h) {
					from = append(from, s.places[other].addr)
				}
				if err := c.Apply(pid, s.places[h].addr, from); err != nil {
					// A run that went on would prove what it has not shown.
					s.finish(report{Kind: reportEnd, Status: session.ExitFailed, Errs: "launcher: " + err.Error() + "\n"})
				}
			}
		}
	}
}

// hostCuts says which hosts are cut off from which.
type hostCuts struct {
	until []time.Time // by host; zero for those that are not cut off
	left  int         // passes over all sockets that are to come after the last cut
}

// healing is the number of passes that end cuts: a connection that a listener took in during the
// first one may still have its filter.
const healing = 2

func (c *hostCuts) begin(host int, until time.Time) {
	if until.After(c.until[host]) {
		c.until[host] = until
	}
	c.left = healing
}

// end returns the hosts that are not cut off any more.
func (c *hostCuts) end(now time.Time) (healed []int) {
	for h, t := range c.until {
		if !t.IsZero() && !now.Before(t) {
			c.until[h] = time.Time{}
			healed = append(healed, h)
		}
	}
	return healed
}

// pass reports whether the sockets have to be gone over.
func (c *hostCuts) pass() bool {
	if slices.ContainsFunc(c.until, func(t time.Time) bool { return !t.IsZero() }) {
		return true
	}
	if c.left == 0 {
		return false
	}
	c.left--
	return true
}

// unheard returns the hosts that a host hears nothing from.
func (c *hostCuts) unheard(host int) (from []int) {
	for other := range c.until {
		if other != host && (!c.until[host].IsZero() || !c.until[other].IsZero()) {
			from = append(from, other)
		}
	}
	return from
}

// note shows a line, and tells no agent.
func (s *supervisor) note(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.v.Show(view.Note(text))
	}
}
