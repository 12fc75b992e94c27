package session

import (
	"fmt"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/timing"
)

// A full disk: what the run must write waits in the shell, the workers commit no step meanwhile, and the session asks the shell now
// and then whether there is room. A run that is to stop does not hold: it has one step left to commit.

// disk is what the session knows of the disk of the run directory.
type disk struct {
	full time.Time // since when what must be written has had no room; zero: it has
	due  time.Time // when the next attempt is due
}

// diskFull takes in that there is no room for what must be written.
func (s *Session) diskFull(err error) {
	if s.phase == ending {
		return
	}
	d := &s.disk
	d.due = s.now.Add(timing.Disk)
	if d.full.IsZero() {
		d.full = s.now
		reason := fmt.Sprintf("training holds until there is room: %s", OneLine(err.Error()))
		s.then(s.event(eventHold, reason), Show{view.Note(reason)})
	}
	s.hold()
}

// diskRoom takes in that all that must be written is written.
func (s *Session) diskRoom() {
	d := &s.disk
	if d.full.IsZero() {
		return
	}
	reason := fmt.Sprintf("the disk has room again after %v: training continues", s.now.Sub(d.full).Round(time.Second))
	*d = disk{}
	s.then(s.event(eventNote, reason), Show{view.Note(reason)})
	s.hold()
}

// hold tells the workers whether they may commit steps.
func (s *Session) hold() {
	on := !s.disk.full.IsZero() && s.end.stop == ""
	for place := range s.workers {
		if w := &s.workers[place]; w.state == working && !w.closed() {
			s.send(place, control.Hold{On: on})
		}
	}
}
