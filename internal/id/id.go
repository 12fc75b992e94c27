// Package id has the identities that the parts of a run share: workers and their sessions, versions of the plan, ranges of
// parameters, ballots, and the points of a run. It imports no other package of this module.
//
// The JSON forms are those of the files of a run directory and of a checkpoint.
package id

import (
	"cmp"
	"fmt"
)

// WorkerID names a worker for the life of a job.
type WorkerID int

// Session is one life of a worker. A worker that is restarted is a new session, with a higher incarnation.
type Session struct {
	Worker      WorkerID `json:"worker"`
	Incarnation int      `json:"incarnation"`
}

// Compare orders sessions by worker, then by incarnation.
func (s Session) Compare(o Session) int {
	return cmp.Or(cmp.Compare(s.Worker, o.Worker), cmp.Compare(s.Incarnation, o.Incarnation))
}

// String renders the session as "3.1": worker 3, incarnation 1.
func (s Session) String() string { return fmt.Sprintf("%d.%d", s.Worker, s.Incarnation) }

// Version orders the plans of a job. Generation counts the starts of the job, N its plans; both count from 1, and N goes on
// growing when an ended job is resumed.
type Version struct {
	Generation int `json:"generation"`
	N          int `json:"n"`
}

// Compare orders versions by generation, then by N.
func (v Version) Compare(o Version) int {
	return cmp.Or(cmp.Compare(v.Generation, o.Generation), cmp.Compare(v.N, o.N))
}

// String renders the version as "2.17".
func (v Version) String() string { return fmt.Sprintf("%d.%d", v.Generation, v.N) }

// Range is the elements [Lo, Hi) of one layer's parameters, flattened tensor after tensor.
type Range struct {
	Layer int `json:"layer"`
	Lo    int `json:"lo"`
	Hi    int `json:"hi"`
}

// Compare orders ranges by layer, then by Lo, then by Hi.
func (r Range) Compare(o Range) int {
	return cmp.Or(cmp.Compare(r.Layer, o.Layer), cmp.Compare(r.Lo, o.Lo), cmp.Compare(r.Hi, o.Hi))
}

// Ballot orders the attempts to make a plan after a failure. Term is the agents' term, Attempt counts within it.
type Ballot struct {
	Term    uint64 `json:"term"`
	Attempt uint64 `json:"attempt"`
}

// Compare orders ballots by term, then by attempt.
func (b Ballot) Compare(o Ballot) int {
	return cmp.Or(cmp.Compare(b.Term, o.Term), cmp.Compare(b.Attempt, o.Attempt))
}

// String renders the ballot as "2.5".
func (b Ballot) String() string { return fmt.Sprintf("%d.%d", b.Term, b.Attempt) }

// Fill names a request to copy state in the background. A later request has a greater Fill, whichever agent leads.
type Fill struct {
	Term uint64 `json:"term"` // the agents' term
	N    int    `json:"n"`    // counts within the term, from 1
}

// Compare orders fills by term, then by N.
func (f Fill) Compare(o Fill) int {
	return cmp.Or(cmp.Compare(f.Term, o.Term), cmp.Compare(f.N, o.N))
}

// String renders the fill as "2.5".
func (f Fill) String() string { return fmt.Sprintf("%d.%d", f.Term, f.N) }

// Gate is a kind of [Point].
type Gate uint8

// The gates of a step, in their order.
const (
	Committed Gate = iota // the step's update is decided
	Evaluated             // the evaluation after it has a result
	Kept                  // the model of the ended run is written and hashed
)

// String returns the gate's name.
func (g Gate) String() string {
	return NameOf("gate", uint8(g), "committed", "evaluated", "kept")
}

// NameOf returns the name of a value: names has those of the values from 0 on, "" where there is none. Another value is named by its
// kind and number.
func NameOf(kind string, value uint8, names ...string) string {
	if int(value) < len(names) && names[value] != "" {
		return names[value]
	}
	return fmt.Sprintf("%s%d", kind, value)
}

// Point is a place in the run that the workers pass together, by one exchange of reports: no worker passes it before all have
// reached it, so two workers are never more than one point apart. The run begins at Point{FromStep-1, Committed} of its first
// plan.
type Point struct {
	Step int  `json:"step"`
	Gate Gate `json:"gate"`
	// Repair counts the exchanges after the point that found corrupted memory. Such an exchange passes nothing: the memory is
	// repaired, and all workers come to the next point again.
	Repair int `json:"repair,omitempty"`
}

// Compare orders points by step, gate and repair.
func (p Point) Compare(o Point) int {
	return cmp.Or(cmp.Compare(p.Step, o.Step), cmp.Compare(p.Gate, o.Gate), cmp.Compare(p.Repair, o.Repair))
}

// String renders the point as "step 7 committed", or "step 7 committed, repair 2".
func (p Point) String() string {
	s := fmt.Sprintf("step %d %v", p.Step, p.Gate)
	if p.Repair > 0 {
		s += fmt.Sprintf(", repair %d", p.Repair)
	}
	return s
}
