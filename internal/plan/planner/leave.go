package planner

import (
	"errors"
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/plan"
)

// leave makes the plan without the workers that leave. It goes live at a
// boundary, so nothing is computed again.
//
//   - A shard that a leaving worker owns goes to a mirror that stays, else to
//     a worker of its stage, which has to get it first, see [Needs].
//   - A stage that has no worker left is taken over by the new owners of its
//     shards; their parameters of the others have to come first.
//   - Micro-batches are rerouted over the remaining workers.
//
// No mirrors are made, as leaving must not wait for that: the plan may be
// Degraded, and Protect follows.
func (d *draft) leave(e Event) (string, error) {
	if len(d.leaves) == 0 {
		return "", errors.New("plan: no living worker of the current plan leaves")
	}
	promoted, moved, err := d.inherit()
	if err != nil {
		return "", err
	}
	for i := range d.Shards {
		d.adopt(&d.Shards[i])
	}
	staffStages(&d.Plan, d.current, d.stays)
	d.flow()
	d.Degraded = d.LacksMirrors()
	cause := e.Cause
	if cause == "" {
		cause = fmt.Sprintf("%s leaves", names(d.leaves))
		if len(d.leaves) > 1 {
			cause = fmt.Sprintf("%s leave", names(d.leaves))
		}
	}
	reason := fmt.Sprintf("%s: %s promoted, %d moved", cause, plan.Count(promoted, "shard"), moved)
	if d.Degraded {
		reason += ", mirrors are missing"
	}
	return reason, nil
}

// adopt makes workers mirrors that have a shard already.
func (d *draft) adopt(s *plan.Shard) {
	for _, w := range d.filled {
		if w != s.Owner && len(s.Mirrors) < d.Mirrors && !slices.Contains(s.Mirrors, w) && d.hasFilled(w, s) {
			s.Mirrors = append(slices.Clone(s.Mirrors), w)
			d.mirrored[d.index[w]] += s.Hi - s.Lo
		}
	}
}
