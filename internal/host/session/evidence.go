package session

import (
	"fmt"
	"time"

	"github.com/soliton-train/soliton/internal/timing"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/gossip"
)

// The evidence that a worker has failed: heartbeats that are missed, and what the gossip ring says. Broken links and exits are the
// controller's evidence. Gossip is read here only. It decides nothing by itself: it shortens the time that a detector allows,
// and the controller breaks ties by it.

// signs are the evidence of whether a worker lives.
type signs struct {
	heard  time.Time // when it last said something; zero before its Hello
	silent time.Time // since when it was silent, where that is why it was killed

	member    bool // of the ring, at any time
	standing  gossip.State
	suspected time.Time // since when; zero: it is not, or that does not count
	by        string    // the member that cannot reach it, in words
	differs   bool      // it was noted that the ring and its host differ
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

// watch looks for workers that are silent. due is when it was meant to look.
func (s *Session) watch(due time.Time) {
	if s.cfg.Detect == 0 {
		return
	}
	d, lateness := timing.Of(s.cfg.Detect).Worker(s.phase >= training), s.now.Sub(due)
	s.noteMissing()
	if d.Stopped(lateness) {
		s.dropSuspicions()
	}
	for place := range s.workers {
		w := &s.workers[place]
		failed, history := d.Suspect(timing.History{Heard: w.heard, Suspected: w.suspected}, s.now, lateness)
		w.heard = history.Heard
		if failed && s.phase != ending && w.exit == running && w.fault == nil {
			w.silent = w.heard
			w.fault = &SilentError{Worker: s.id(place), Workers: len(s.workers), For: d.Limit(history, s.now), By: w.by, Step: s.records.last.Step, Steps: s.job.Steps}
			if s.phase < training {
				s.judge(w.fault)
				return
			}
			s.kill(place)
		}
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
	switch {
	case e.By == "":
		w.suspected, w.by = time.Time{}, ""
	case by == "":
		w.suspected, w.by = s.now, e.By
	}
	if w.by != by {
		s.tell(controller.Suspected{Worker: w.who, By: w.by})
	}
	if s.ring.formed = s.ring.formed || len(s.outside()) == 0; s.ring.formed {
		s.then(s.processes())
	}
	if e.State == gossip.StateDead && w.state == working && w.fault == nil && !w.differs && s.now.Sub(w.heard) < 2*timing.Heartbeat {
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

// dropSuspicions forgets suspicions: a host that was held up itself cannot tell them from its own delay.
func (s *Session) dropSuspicions() {
	for place := range s.workers {
		if w := &s.workers[place]; w.by != "" {
			w.suspected, w.by = time.Time{}, ""
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
	if w.state == gone && !e.At.IsZero() { // the stamp was slower than the exit
		s.tell(controller.Stamp{Worker: w.who, At: e.At})
	}
}
