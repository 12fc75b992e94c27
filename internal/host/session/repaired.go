package session

import (
	"fmt"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

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
