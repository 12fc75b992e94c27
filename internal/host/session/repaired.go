package session

import (
	"fmt"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// maxOffences is how many times a worker's memory may alter: the next time may be one in which
// it is not found.
const maxOffences = 1

// Targets of repairs that are not the offence of who tells of them: what a lost worker has passed on, and
// copies that are not what the owner has.
const (
	passed = "passed"
	differ = "differ"
)

// offences are the times when a worker's memory was found altered.
type offences struct {
	count     int
	step, try int // of the newest
}

// repaired writes down that memory of a worker was altered and is as it was again, and evicts
// a worker to which that happens once more while others can go on without it.
func (s *Session) repaired(now time.Time, id int, m control.Repaired) []Effect {
	w := &s.workers[id]
	known := slices.ContainsFunc(w.ready.Layers, func(l control.Layer) bool { return l.Name == m.Layer })
	if !known || m.Block < 0 || !slices.Contains([]string{"own", "mirror", "copy", "moment", passed, differ}, m.Target) {
		return s.judge(now, &ProtocolError{id, "tells of a repair that cannot be" + s.place()})
	}
	reason := fmt.Sprintf("worker %d: block %d of layer %q (%s) was altered in memory before the commit of step %d, and is repaired", id, m.Block, m.Layer, m.Target, m.Step)
	switch m.Target {
	case differ:
		reason = fmt.Sprintf("worker %d: its copy of a part of layer %q was not what the owner has: it is sent again, and step %d done again", id, m.Layer, m.Step)
	case passed:
		reason = fmt.Sprintf("worker %d: what a lost worker had handed over for layer %q and micro-batch %d is not what was computed again, so memory was altered: step %d is done again", id, m.Layer, m.Block, m.Step)
	}
	e := s.about(now, id, "repaired", reason)
	e.Event.Repair = &rundir.Repair{Layer: m.Layer, Block: m.Block, Target: m.Target}
	effects := []Effect{e, Show{view.Note(reason)}}
	if m.Target == passed || m.Target == differ {
		return effects // it is not this one's offence
	}
	if o := &w.offences; o.count == 0 || o.step != m.Step || o.try != m.Try {
		*o = offences{o.count + 1, m.Step, m.Try}
	}
	others := slices.ContainsFunc(s.plan.Workers, func(p plan.Worker) bool {
		x := s.find(p)
		return x >= 0 && x != id && !s.workers[x].gone
	})
	if w.offences.count > maxOffences && others && !s.judged {
		effects = append(effects, s.evict(now, id, fmt.Sprintf("memory of worker %d was altered %d times", id, w.offences.count))...)
	}
	return effects
}

// evict ends a worker, whose end is the event that follows.
func (s *Session) evict(now time.Time, id int, reason string) []Effect {
	w := &s.workers[id]
	if w.doom != nil || w.exited {
		return nil
	}
	w.doom, w.killed = &evictedError{reason}, true
	return []Effect{s.about(now, id, "evict", reason), Kill{id}}
}
