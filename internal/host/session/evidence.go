package session

import (
	"fmt"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/gossip"
	"github.com/soliton-train/soliton/internal/plan"
)

// gossiped is what the ring believes of a worker.
type Gossip struct {
	Worker plan.Worker
	State  gossip.State
	By     string // who cannot reach it, in words, where it is suspected or called dead
}

// standing is a worker's in the ring.
type standing struct {
	known     bool // it was a member once
	state     gossip.State
	suspected time.Time // since when; zero: it is not, or that does not count
	by        string    // who cannot reach it
	told      bool      // that the ring and its agent differ
}

// String is what people are told of it.
func (s standing) String() string {
	if !s.known {
		return ""
	}
	return s.state.String()
}

// gossiped takes in what the ring believes of a worker. That decides nothing by itself: watch
// and the controller weigh it.
func (s *Session) gossiped(now time.Time, e Gossip) []Effect {
	id := s.find(e.Worker)
	if id < 0 || s.judged {
		return nil
	}
	w := &s.workers[id]
	if w.gone || w.exited {
		return nil
	}
	by := w.ring.by
	w.ring.known, w.ring.state = true, e.State
	switch {
	case e.By == "":
		w.ring.suspected, w.ring.by = time.Time{}, ""
	case by == "":
		w.ring.suspected, w.ring.by = now, e.By
	}
	var effects []Effect
	if w.ring.by != by {
		effects = s.tell(now, controller.Suspected{Worker: w.who, By: w.ring.by})
	}
	if s.formed() {
		effects = append(effects, s.processes())
	}
	if e.State == gossip.StateDead && w.state == training && w.doom == nil && !w.ring.told && now.Sub(w.heard) < 2*control.BeatEvery {
		w.ring.told = true
		effects = append(effects, s.about(now, id, "note", fmt.Sprintf("the ring takes worker %d for dead, since %s cannot reach it; its agent hears it, and it stays", s.id(id), e.By)))
	}
	return effects
}

// formed reports whether all workers of the run have been members at once.
func (s *Session) formed() bool {
	s.ringFormed = s.ringFormed || len(s.outside()) == 0
	return s.ringFormed
}

// outside returns the workers of the run that have never been members.
func (s *Session) outside() (all []int) {
	for id := range s.workers {
		if w := &s.workers[id]; !w.ring.known && !w.gone && !w.exited && !w.joins {
			all = append(all, s.id(id))
		}
	}
	return all
}

// deaf forgets suspicions: an agent that was held up itself cannot tell them from its own pause.
func (s *Session) deaf(now time.Time) (effects []Effect) {
	for id := range s.workers {
		if w := &s.workers[id]; w.ring.by != "" {
			w.ring.suspected, w.ring.by = time.Time{}, ""
			effects = append(effects, s.tell(now, controller.Suspected{Worker: w.who})...)
		}
	}
	return effects
}

// bears returns how long a worker may be silent. One that the others of the ring have tried to
// reach in vain for a quarter of the budget, all of it since it was heard last, has
// used up the doubt that is in the rest: two ways lead to it, and it answers on neither. Below
// some beats, nothing is made of that: a process that waits for a processor is slow on both ways.
func (s *Session) bears(w *worker, now time.Time) time.Duration {
	limit := s.cfg.Silence()
	if s.state < training {
		// Reading data and starting processes may take a machine's whole attention,
		// and nothing is lost yet by patience.
		return limit * startPatience
	}
	if at := w.ring.suspected; !at.IsZero() && at.After(w.heard) && now.Sub(at) > s.cfg.Detect/4 {
		limit = min(limit, max(s.cfg.Detect/2, suspectBeats*control.BeatEvery))
	}
	return limit
}

// suspectBeats is how many beats a suspected worker may leave out at least.
const suspectBeats = 5

// ringPatience is how long the ring may take to form, in budgets, before that is told.
const ringPatience = 10

// formBy returns until when the ring is to have formed, zero where there is none.
func (s *Session) formBy(now time.Time) (by time.Time) {
	if len(s.gossip.Seeds) > 0 {
		by = now.Add(ringPatience * s.cfg.Detect)
	}
	return by
}

// missing notes, once, who is not in the ring although it had time enough to form.
func (s *Session) missing(now time.Time) []Effect {
	if s.ringDue.IsZero() || now.Before(s.ringDue) || s.judged || s.state != training {
		return nil
	}
	s.ringDue = time.Time{}
	out := s.outside()
	if len(out) == 0 {
		return nil
	}
	return []Effect{s.event(now, "note", fmt.Sprintf("not in the gossip ring: %v; what becomes of these workers their agents alone say", out))}
}

// ringOf is what a worker is told of the ring.
func (s *Session) ringOf(w *worker) control.Ring {
	r := s.gossip
	r.Host = w.who.Host
	return r
}
