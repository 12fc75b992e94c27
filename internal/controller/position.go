package controller

import (
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
)

// position is what all reports together say of the run's progress.
type position struct {
	point  id.Point
	result []byte
	plan   id.Version // under which the run continues from point
	behind bool       // a member has not carried out the last rollback
	missed []*member  // have left with the plan and do not know it: a link broke as the others told them
}

// position finds the furthest point that a living member has passed. All workers had come to that point, so it
// holds. The run comes again to a point that only failed workers have passed, with the same result.
func (r *run) position(all []*member) (at position, err error) {
	at.plan, at.point = r.plan.Version, id.Point{Step: r.cfg.Plan.FromStep - 1}
	if r.live != nil {
		at.point, at.result = r.live.Passed, r.live.Result
		at.behind = r.live.Rollback && slices.ContainsFunc(all, func(m *member) bool { return m.report.Plan.Compare(r.live.Plan.Version) < 0 })
	}
	if at.behind {
		// No step commits before all have rolled back, so nothing is lost by a second rollback.
		return at, nil
	}
	further := func(p id.Point, result []byte) {
		if n := p.Compare(at.point); n > 0 || n == 0 && at.result == nil {
			at.point, at.result = p, result
		}
	}
	for _, m := range all {
		further(m.report.Passed, m.report.Result)
	}
	if r.finished != nil {
		further(id.Point{Step: r.finished.Step, Gate: id.Kept}, r.finished.Result)
	}
	p := &r.plan
	for _, m := range all {
		rep := m.report
		if rep.Plan.Compare(at.plan) <= 0 { // whatever it has passed: a plan that is live at one worker is live
			continue
		}
		if r.boundary == nil || rep.Plan != r.boundary.order.Plan.Version {
			return at, &ReportError{m.ID, fmt.Sprintf("works under plan %v, which is not known", rep.Plan)}
		}
		at.plan, p = rep.Plan, &r.boundary.order.Plan
	}
	for _, m := range all {
		switch _, stays := p.Worker(m.ID); {
		case follows(m.report.Passed, at.point):
		case stays:
			return at, &ReportError{m.ID, fmt.Sprintf("has passed %v, and another one %v", m.report.Passed, at.point)}
		default:
			at.missed = append(at.missed, m)
		}
	}
	return at, nil
}

// follows reports whether a worker can have passed p last when another one has passed latest: latest is the same
// point or the next.
func follows(p, latest id.Point) bool {
	switch {
	case p == latest:
		return true
	case latest.Repair > 0:
		return p == id.Point{Step: latest.Step, Gate: latest.Gate, Repair: latest.Repair - 1}
	case latest.Gate == id.Committed:
		return p.Step == latest.Step-1
	}
	return p.Step == latest.Step && p.Gate < latest.Gate
}
