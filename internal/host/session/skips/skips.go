// Package skips decides what follows when a worker cannot read a sample of the data, in a run that may skip such samples.
//
// A worker that cannot read a sample, also after it has tried again, says so and waits. All other workers are asked to read it. If one
// of them can, or has read it in this step, the sample is good, and the worker that waits fails: others do its work. If none can, the sample is
// skipped: that is agreed in the log and written to skips.jsonl before any worker hears of it. From then on the next sample of
// the data takes its place, for this one place in the run only.
//
// Each worker that has said that it cannot read a sample waits for the verdict before it tries again. So no two workers compute a step
// with another sample in the same place, but for one that is lost: what it has handed on is not what is computed in its place, which digests
// show, and all do the step again. So a step is a function of the job and of the ledger. A step that this run has committed before is computed
// again with the same samples: in it, none is skipped that was not before.
package skips

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
)

// Bounds of what is kept.
const (
	MaxSkipped = 1 << 16 // samples of a run
	maxOpen    = 1 << 12 // questions
	maxText    = 1 << 10 // bytes of a reason
)

// Spot is a place in the run, and how many samples were skipped there before.
type Spot struct {
	Sample uint64
	Skips  int
}

func (s Spot) compare(o Spot) int { return cmp.Or(cmp.Compare(s.Sample, o.Sample), s.Skips-o.Skips) }

// Question is a sample that no worker has read.
type Question struct {
	Spot
	Index int    // in the data
	Step  int    // that needs it
	Why   string // it cannot be read, as the first worker has said

	said     map[plan.Worker]bool
	asked    map[plan.Worker]bool
	proposed bool
}

// Send is a message to a worker.
type Send struct {
	To plan.Worker
	control.BadSample
}

// Register is what the leader of a run knows. The zero value is that of a run without skipped samples.
type Register struct {
	counts map[uint64]int
	ledger []uint64
	open   map[Spot]*Question
}

// New returns the register of a run in which these samples were skipped, each as often as it is there.
func New(ledger []uint64) Register {
	r := Register{counts: make(map[uint64]int), open: make(map[Spot]*Question)}
	for _, sample := range ledger {
		r.add(sample)
	}
	return r
}

func (r *Register) add(sample uint64) {
	r.counts[sample]++
	r.ledger = append(r.ledger, sample)
}

// Ledger returns the samples that are skipped, each as often as it was.
func (r *Register) Ledger() []uint64 { return r.ledger }

// Unread takes in what a worker says of a sample; committed is the newest step that was ever committed. fault is what is wrong with the
// message, "" if nothing is.
func (r *Register) Unread(from plan.Worker, m control.Unread, committed int) (send []Send, fault string) {
	at := Spot{m.Sample, m.Skips}
	q := r.open[at]
	switch have := r.counts[m.Sample]; {
	case m.Skips < 0 || m.Skips > have || m.Index < 0 || m.Step < 1:
		return nil, fmt.Sprintf("cannot read sample %d, of which %d were skipped,", m.Sample, m.Skips)
	case m.Skips < have:
		return []Send{verdict(from, at, control.SkipSample)}, "" // it has not heard yet
	case q == nil && m.Text == "":
		return nil, "" // the question is settled
	case q == nil && (m.Step <= committed || len(r.ledger) >= MaxSkipped || len(r.open) >= maxOpen):
		return []Send{verdict(from, at, control.FailSample)}, ""
	case q == nil:
		q = &Question{Spot: at, Index: m.Index, Step: m.Step, Why: m.Text[:min(len(m.Text), maxText)], said: make(map[plan.Worker]bool), asked: make(map[plan.Worker]bool)}
		r.open[at] = q
	}
	if m.Text != "" {
		q.said[from] = true
		return nil, ""
	}
	if q.proposed {
		return nil, "" // it joined since, and has read nothing of this step before
	}
	return r.fail(q), ""
}

// fail ends a question: the workers that cannot read the sample fail.
func (r *Register) fail(q *Question) (send []Send) {
	delete(r.open, q.Spot)
	for _, w := range slices.SortedFunc(maps.Keys(q.said), func(a, b plan.Worker) int { return cmp.Or(int(a.ID)-int(b.ID), a.Incarnation-b.Incarnation) }) {
		send = append(send, verdict(w, q.Spot, control.FailSample))
	}
	return send
}

func verdict(to plan.Worker, at Spot, do string) Send {
	return Send{to, control.BadSample{Sample: at.Sample, Skips: at.Skips, Do: do}}
}

// Weigh looks at the open questions, with the workers that live now: it asks those that have not been asked, and returns what is to be
// agreed since none of them can read it. In a step that was committed meanwhile, nothing is skipped.
func (r *Register) Weigh(live []plan.Worker, committed int) (send []Send, skip []Question) {
	for _, at := range slices.SortedFunc(maps.Keys(r.open), Spot.compare) {
		q := r.open[at]
		if q.proposed || len(live) == 0 {
			continue
		}
		if q.Step <= committed {
			send = append(send, r.fail(q)...)
			continue
		}
		all := true
		for _, w := range live {
			if q.said[w] {
				continue
			}
			all = false
			if !q.asked[w] {
				q.asked[w] = true
				send = append(send, verdict(w, at, control.TrySample))
			}
		}
		if all {
			q.proposed = true
			skip = append(skip, *q)
		}
	}
	return send, skip
}

// Agreed takes in that a sample is skipped, and returns what its workers are told. It reports false if that was known.
func (r *Register) Agreed(at Spot, live []plan.Worker) (send []Send, ok bool) {
	if at.Skips != r.counts[at.Sample] {
		return nil, false
	}
	delete(r.open, at)
	r.add(at.Sample)
	for _, w := range live {
		send = append(send, verdict(w, at, control.SkipSample))
	}
	return send, true
}

// Verdicts returns what a worker is told that may not have heard of all samples that are skipped.
func (r *Register) Verdicts(to plan.Worker) (send []Send) {
	for _, sample := range slices.Sorted(maps.Keys(r.counts)) {
		send = append(send, verdict(to, Spot{sample, r.counts[sample] - 1}, control.SkipSample))
	}
	return send
}

// Open reports whether there is a question.
func (r *Register) Open() bool { return len(r.open) > 0 }

// First returns the first open question; there has to be one.
func (r *Register) First() Question {
	return *r.open[slices.MinFunc(slices.Collect(maps.Keys(r.open)), Spot.compare)]
}
