package main

import (
	"net/netip"
	"slices"
	"time"

	"github.com/soliton-train/soliton/elastic/agent"
	"github.com/soliton-train/soliton/internal/chaos"
)

// addrOf returns the address of an emulated host. All of 127.0.0.0/8 is this machine; with an
// address for each host, a packet says which one it comes from.
func addrOf(host int) netip.Addr {
	n := host + 1
	return netip.AddrFrom4([4]byte{127, 1, byte(n >> 8), byte(n)})
}

// cutPeriod is how often sockets that are new get to know of a cut. Those that dial need not wait
// for it, since the other end does not answer.
const cutPeriod = 20 * time.Millisecond

// mayCut reports whether --chaos may want hosts to be cut off. Their processes are to use plain TCP
// then: the kernel filters no listeners of Multipath TCP.
func (s *supervisor) mayCut() bool {
	return slices.ContainsFunc(s.f.harms.Harms, func(h chaos.Harm) bool { return h.Kind == chaos.KindCut }) ||
		slices.ContainsFunc(s.f.harms.Random, func(r chaos.Random) bool { return slices.Contains(r.Kinds, chaos.KindCut) })
}

// startCutting makes sure that hosts can be cut off, where that may be wanted, and begins to.
func (s *supervisor) startCutting() error {
	if !s.mayCut() {
		return nil
	}
	agents := s.agents // they are all there
	var c chaos.Cuts
	for h, p := range agents {
		if err := c.Apply(p.cmd.Process.Pid, addrOf(h), nil); err != nil {
			return err
		}
	}
	s.tasks.Go(func() { s.cut(agents) })
	return nil
}

// cut keeps hosts from hearing each other while they are cut off. No agent and no worker is told.
func (s *supervisor) cut(agents []*agentProcess) {
	var c chaos.Cuts
	until := make([]time.Time, len(agents)) // zero for those that are not cut off
	tick := time.NewTicker(cutPeriod)
	defer tick.Stop()
	for {
		select {
		case h := <-s.cuts:
			if end := time.Now().Add(time.Duration(h.Seconds * float64(time.Second))); end.After(until[h.Host]) {
				until[h.Host] = end
			}
		case now := <-tick.C:
			if !slices.ContainsFunc(until, func(t time.Time) bool { return !t.IsZero() }) {
				c = chaos.Cuts{}
				continue
			}
			for h, t := range until {
				if !now.Before(t) {
					until[h] = time.Time{}
				}
			}
		case <-s.ended:
			return
		}
		for h, p := range agents {
			var from []netip.Addr
			for other := range agents {
				if other != h && (!until[h].IsZero() || !until[other].IsZero()) {
					from = append(from, addrOf(other))
				}
			}
			for _, pid := range append(p.workers(), p.cmd.Process.Pid) {
				if err := c.Apply(pid, addrOf(h), from); err != nil {
					// A run that went on would prove what it has not shown.
					s.finish(report{Kind: reportEnd, Status: agent.ExitFailed, Errs: "launcher: " + err.Error() + "\n"})
				}
			}
		}
	}
}
