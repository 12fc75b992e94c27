// Package delivery decides which worker calls OnStep for which step, so that every committed step is delivered once and in order.
//
// One worker at a time makes the calls: it is appointed, keeps the appointment as long as it lives and has a part in the run, and gets
// the next step when it has confirmed the one before. What it confirmed is a [rundir.Delivery], which is written before the next
// step is sent. So at most one call is in doubt: that of a worker whose process ended before it confirmed. The next worker makes
// that call again, and is told that it does.
//
// A [Queue] has no goroutine, file or clock.
package delivery

import (
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Bounds of what a worker says of its files.
const (
	MaxFiles = 1 << 8
	MaxPath  = 1 << 12
)

// Queue holds the committed steps that are to be delivered. The zero Queue is that of a program without OnStep, to which nothing
// is delivered.
type Queue struct {
	on      bool
	record  rundir.Delivery
	caller  plan.Worker // makes the calls, if appointed
	appoint bool        // no worker is appointed
	steps   []control.Step
	sent    bool                 // the first of them is with the caller
	doubt   bool                 // the first of them may have been delivered
	earlier bool                 // what the leader before has sent to the caller is not known
	left    map[plan.Worker]bool // workers that make no calls any more
}

// New returns the queue of a run that continues from a record, with the steps that were committed after it. The worker of the record
// is gone, and may have delivered the first of them.
func New(record rundir.Delivery, steps []control.Step) Queue {
	return Queue{on: true, record: record, appoint: true, steps: steps, doubt: record.Again || len(steps) > 0, left: make(map[plan.Worker]bool)}
}

// Inherit is [New] for a leader that takes over from another one, so that the worker of the record may be at its call.
func Inherit(record rundir.Delivery, steps []control.Step) Queue {
	q := New(record, steps)
	q.appoint, q.doubt, q.earlier = false, record.Again, true
	q.caller = plan.Worker{ID: id.WorkerID(record.Worker), Incarnation: record.Incarnation}
	return q
}

// Done reports whether every committed step has been delivered.
func (q *Queue) Done() bool { return len(q.steps) == 0 }

// Record is what was delivered.
func (q *Queue) Record() rundir.Delivery { return q.record }

// Commit adds a committed step. After a rollback a step is committed again, and not delivered again.
func (q *Queue) Commit(m control.Step) {
	newest := q.record.Step
	if n := len(q.steps); n > 0 {
		newest = q.steps[n-1].Step
	}
	if q.on && m.Step > newest {
		q.steps = append(q.steps, m)
	}
}

// Confirm takes in what a worker says of its calls, and reports whether the record has changed.
func (q *Queue) Confirm(from plan.Worker, m control.Delivered) (changed bool, err error) {
	switch {
	case !q.on:
		return false, fmt.Errorf("delivered step %d of a program without OnStep", m.Step)
	case len(m.Files) > MaxFiles:
		return false, fmt.Errorf("writes %d files of lines, more than %d", len(m.Files), MaxFiles)
	case slices.ContainsFunc(m.Files, func(f rundir.LineFile) bool { return len(f.Path) > MaxPath || f.Size < 0 }):
		return false, fmt.Errorf("delivered step %d with a file that cannot be", m.Step)
	}
	caller := !q.appoint && q.is(from)
	// The leader before may have had it called for more than one step since its record was read.
	if caller && m.Step > q.record.Step && (q.earlier || q.sent && m.Step == q.record.Step+1) {
		q.record.Step, q.record.Files, q.record.Again = m.Step, m.Files, false
		q.steps = slices.DeleteFunc(q.steps, func(s control.Step) bool { return s.Step <= m.Step })
		q.sent, q.doubt, q.earlier, changed = false, false, false, true
	}
	if m.Left {
		q.left[from] = true
		if caller { // it has made no call since
			q.appoint, q.sent, q.earlier = true, false, false
		}
	}
	return changed, nil
}

// is reports whether a worker is the caller; its host is no part of that.
func (q *Queue) is(w plan.Worker) bool {
	return w.ID == q.caller.ID && w.Incarnation == q.caller.Incarnation
}

// Lost takes the appointment from a worker whose process has ended.
func (q *Queue) Lost(w plan.Worker) {
	if q.on && !q.appoint && q.is(w) {
		q.doubt = q.doubt || q.sent || q.earlier
		q.appoint, q.sent, q.earlier = true, false, false
	}
}

// Caller returns the worker that makes the calls; ok is false if there is none.
func (q *Queue) Caller() (w plan.Worker, ok bool) { return q.caller, q.on && !q.appoint }

// Calling reports whether a worker may be in a call.
func (q *Queue) Calling(w plan.Worker) bool {
	return q.on && !q.appoint && q.is(w) && (q.sent || q.earlier)
}

// Next returns what to tell which worker; ok is false if there is nothing to tell. The candidates can make calls, the first one
// preferably. appointed says that the record has a new caller, and is to be written before.
func (q *Queue) Next(candidates []plan.Worker) (to plan.Worker, m control.Deliver, appointed, ok bool) {
	if !q.on || q.sent {
		return to, m, false, false
	}
	if q.appoint {
		i := slices.IndexFunc(candidates, func(w plan.Worker) bool { return !q.left[w] })
		if i < 0 {
			return to, m, false, false
		}
		q.caller, q.appoint, appointed = candidates[i], false, true
		q.record.Worker, q.record.Incarnation, q.record.Again = int(q.caller.ID), q.caller.Incarnation, q.doubt
	}
	if !appointed && len(q.steps) == 0 {
		return to, m, false, false
	}
	m = control.Deliver{After: q.record.Step, Files: q.record.Files, Again: q.doubt && len(q.steps) > 0}
	if len(q.steps) > 0 {
		step := q.steps[0]
		m.Step, q.sent = &step, true
	}
	return q.caller, m, appointed, true
}
