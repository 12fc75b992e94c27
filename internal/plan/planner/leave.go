package planner

import (
	"errors"
	"fmt"

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
func (d *draft) leave() (string, error) {
	if len(d.leaves) == 0 {
		return "", errors.New("plan: no living worker of the current plan leaves")
	}
	promoted, moved, err := d.inherit()
	if err != nil {
		return "", err
	}
	staffStages(&d.Plan, d.current, d.stays)
	d.flow()
	d.Degraded = d.LacksMirrors()
	reason := fmt.Sprintf("%s: %s promoted, %d moved", workers(d.leaves, "leave"), plan.Count(promoted, "shard"), moved)
	if d.Degraded {
		reason += ", mirrors are missing"
	}
	return reason, nil
}
