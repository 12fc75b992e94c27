package session

import (
	"fmt"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/gossip"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// The evidence that a worker has failed: heartbeats that are missed, and what the gossip ring says. Broken links and exits are the
// controller's evidence. Gossip is read here only. It decides nothing by itself: the controller breaks ties by it.

// signs are the evidence of whether a worker lives.
type signs struct {
	heard  timing.History // not heard before its Hello
	silent time.Time      // since when it was silent, where that is why it was killed

	member   bool // of the ring, at any time
	standing gossip.State
	by       string // the member that cannot reach it, in words; "" while it is not suspected
	differs  bool   // it was noted that the ring and its host differ
}

// membership is what the user sees of a worker's state in the ring.
func (g *signs) membership() string {
	if !g.member {
		return ""
	}
	return g.standing.String()
}

// ring is what the session knows of the gossip ring as a whole.
type ring struct {
	formed bool      // all workers have been members
	due    time.Time // when missing members are noted; zero: not any more
}

// lateness is what the session knows of how late everything is.
type lateness struct {
	looks timing.Looks
	slack time.Duration // by which a controller's timer for evidence is longer than on an idle machine
	// stopped says that none of several workers has been heard for a while, so that none is to blame; noted, that it was noted.
	stopped, noted bool
}

// watched reports whether heartbeats of a worker are expected.
func (w *worker) watched() bool {
	return w.state != gone && w.exit == running && w.fault == nil && !w.heard.Heard.IsZero()
}

// watch looks for workers that are silent. due is when it was meant to look.
func (s *Session) watch(due time.Time) {
	if s.cfg.Detect == 0 {
		return
	}
	d, lateness := s.detector(), s.now.Sub(due)
	s.noteMissing()
	if d.Stopped(lateness) {
		s.dropSuspicions()
	}
	var peers []*timing.History
	hosts := make(map[string][]timing.Intervals)
	for place := range s.workers {
		if w := &s.workers[place]; w.watched() {
			peers = append(peers, &w.heard)
			hosts[w.who.Host] = append(hosts[w.who.Host], w.heard.Intervals)
		}
	}
	s.late.stopped = s.late.looks.Look(d, s.now, lateness, peers)
	s.noteStopped(peers)
	s.late.slack = 0
	around := make(map[string]timing.Intervals)
	for host, all := range hosts {
		around[host] = timing.Pool(all)
		s.late.slack = max(s.late.slack, d.Limit(around[host], s.late.looks.Intervals)-d.Least)
	}
	for place := range s.workers {
		w := &s.workers[place]
		if !w.watched() || s.phase == ending {
			continue
		}
		var failed bool
		if failed, w.heard = d.Suspect(w.heard, s.now, lateness, around[w.who.Host], s.late.looks.Intervals); failed {
			w.silent = w.heard.Heard
			w.fault = &SilentError{
				Worker: s.id(place), Workers: len(s.workers), By: w.by, Step: s.records.last.Step, Steps: s.job.Steps,
				For: d.Limit(w.heard.Intervals, around[w.who.Host], s.late.looks.Intervals).Truncate(10 * time.Millisecond),
			}
			if s.phase < training && !s.respawns(w.who.ID) {
				s.judge(w.fault)
				return
			}
			s.kill(place)
		}
	}
}

// detector is that of the session for its workers.
func (s *Session) detector() timing.Detector {
	return timing.Of(s.cfg.Detect).Worker(s.phase >= training)
}

// noteStopped notes, once, that no worker is heard.
func (s *Session) noteStopped(peers []*timing.History) {
	if !s.late.stopped {
		s.late.noted = false
		return
	}
	for _, h := range peers {
		if s.now.Sub(h.Heard) < s.cfg.Detect {
			return
		}
	}
	s.dropSuspicions()
	if !s.late.noted && s.phase == training {
		s.late.noted = true
		reason := fmt.Sprintf("no worker has been heard for %v: all of them are stopped, or the machine is; none is evicted", s.cfg.Detect)
		s.then(s.event(eventNote, reason), Show{view.Note(reason)})
	}
}

// gossip takes in what the ring says of a worker.
func (s *Session) gossip(e Gossip) {
	place := s.find(e.Worker)
	if place < 0 || s.phase == ending {
		return
	}
	w := &s.workers[place]
	if w.state == gone || w.hasExited() {
		return
	}
	by := w.by
	w.member, w.standing = true, e.State
	if e.By == "" || by == "" { // else the first member that cannot reach it stays
		w.by = e.By
	}
	if w.by != by {
		s.tell(controller.Suspected{Worker: w.who, By: w.by})
	}
	if s.ring.formed = s.ring.formed || len(s.outside()) == 0; s.ring.formed {
		s.then(s.processes())
	}
	if e.State == gossip.StateDead && w.state == working && w.fault == nil && !w.differs && s.now.Sub(w.heard.Heard) < 2*timing.Heartbeat {
		w.differs = true
		s.then(s.about(place, eventNote, fmt.Sprintf("the ring takes worker %d for dead, since %s cannot reach it; its agent hears it, and it stays", s.id(place), e.By)))
	}
}

// outside returns the workers of the run that have never been members of the ring.
func (s *Session) outside() (all []int) {
	for place := range s.workers {
		if w := &s.workers[place]; !w.member && w.state != gone && !w.hasExited() && !w.joins {
			all = append(all, s.id(place))
		}
	}
	return all
}

// dropSuspicions forgets suspicions: where the host or all workers were held up, they tell of that delay only.
func (s *Session) dropSuspicions() {
	for place := range s.workers {
		if w := &s.workers[place]; w.by != "" {
			w.by = ""
			s.tell(controller.Suspected{Worker: w.who})
		}
	}
}

// awaitRing sets when members that are missing are noted.
func (s *Session) awaitRing() {
	if len(s.cfg.Ring.Seeds) > 0 {
		s.ring.due = s.now.Add(timing.Of(s.cfg.Detect).RingForm)
	}
}

// noteMissing notes, once, which workers are not in the ring although it had time enough to form.
func (s *Session) noteMissing() {
	if s.ring.due.IsZero() || s.now.Before(s.ring.due) || s.phase != training {
		return
	}
	s.ring.due = time.Time{}
	if out := s.outside(); len(out) > 0 {
		s.note("not in the gossip ring: %v; what becomes of these workers their agents alone say", out)
	}
}

// ringOf is what a worker is told of the ring.
func (s *Session) ringOf(w *worker) control.Ring {
	r := s.cfg.Ring
	r.Host = w.who.Host
	return r
}

// stamp takes in when a fault was injected.
func (s *Session) stamp(e FaultStamped) {
	place := e.Worker
	if place < 0 {
		if place = s.newest(id.WorkerID(e.ID)); place < 0 {
			return
		}
	}
	w := &s.workers[place]
	w.hit = e.At
	s.tr.Stamped(w.who, e.At)
	if w.state == gone && !e.At.IsZero() { // the stamp was slower than the exit
		s.tell(controller.Stamp{Worker: w.who, At: e.At})
	}
}

// maxRepairs is how many times a worker's memory may alter: the next time may be one in which it is not found.
const maxRepairs = 1

// repairTarget is what a worker has repaired. Scripts depend on the words.
type repairTarget string

const (
	repairOwn    repairTarget = "own"
	repairMirror repairTarget = "mirror"
	repairCopy   repairTarget = "copy"
	repairMoment repairTarget = "moment"
	repairPassed repairTarget = "passed" // what a lost worker has passed on
	repairDiffer repairTarget = "differ" // a copy that is not what the owner has
)

// own reports whether the memory that was altered is the worker's own; false for a target that does not exist.
func (t repairTarget) own() bool {
	return t == repairOwn || t == repairMirror || t == repairCopy || t == repairMoment
}

// repairs are the times when a worker's memory was found altered.
type repairs struct {
	count     int
	step, try int // of the newest
}

// repaired writes down that memory of a worker was altered and is as it was again, and evicts a worker to which that happens once
// more while others can continue without it.
func (s *Session) repaired(place int, m control.Repaired) {
	w, id, target := &s.workers[place], s.id(place), repairTarget(m.Target)
	known := false
	for _, l := range w.ready.Layers {
		known = known || l.Name == m.Layer
	}
	if !known || m.Block < 0 || !target.own() && target != repairPassed && target != repairDiffer {
		s.judge(&ProtocolError{id, "tells of a repair that cannot be" + s.at()})
		return
	}
	reason := fmt.Sprintf("worker %d: block %d of layer %q (%s) was altered in memory before the commit of step %d, and is repaired", id, m.Block, m.Layer, m.Target, m.Step)
	switch target {
	case repairDiffer:
		reason = fmt.Sprintf("worker %d: its copy of a part of layer %q was not what the owner has: it is sent again, and step %d done again", id, m.Layer, m.Step)
	case repairPassed:
		reason = fmt.Sprintf("worker %d: what a lost worker had handed over for layer %q and micro-batch %d is not what was computed again, so memory was altered: step %d is done again", id, m.Layer, m.Block, m.Step)
	}
	e := s.about(place, eventRepaired, reason)
	e.Event.Repair = &rundir.Repair{Layer: m.Layer, Block: m.Block, Target: m.Target}
	s.then(e, Show{view.Note(reason)})
	if !target.own() {
		return // another worker's memory was altered
	}
	if r := &w.repairs; r.count == 0 || r.step != m.Step || r.try != m.Try {
		*r = repairs{r.count + 1, m.Step, m.Try}
	}
	others := false
	for _, p := range s.plan.Workers {
		x := s.find(p)
		others = others || x >= 0 && x != place && s.workers[x].state != gone
	}
	if w.repairs.count > maxRepairs && others && s.phase != ending {
		s.evict(place, fmt.Sprintf("memory of worker %d was altered %d times", id, w.repairs.count))
	}
}
