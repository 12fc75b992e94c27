package planner

import (
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

// protect makes the plan in which every shard has its mirrors again, as many
// as there are workers for. Owners stay, and so do mirrors, unless they are on
// the owner's host and could be elsewhere. Micro-batches are rerouted over
// all workers.
func (d *draft) protect() (string, error) {
	if _, _, err := d.inherit(); err != nil {
		return "", err
	}
	staffStages(&d.Plan, d.current, d.stays)
	d.flow()
	added := d.mirror()
	return fmt.Sprintf("mirrors restored: %s added, %s", plan.Count(added, "mirror"), d.coverage()), nil
}

// coverage says how many mirrors each shard has.
func (d *draft) coverage() string {
	if most := len(d.Workers) - 1; most < d.Mirrors {
		return fmt.Sprintf("only %d of %s per shard possible with %s", most, plan.Count(d.Mirrors, "mirror"), plan.Count(len(d.Workers), "worker"))
	}
	return fmt.Sprintf("every shard has %s", plan.Count(d.Mirrors, "mirror"))
}

// mirror gives every shard its mirrors and returns how many are new holders.
// Mirrors that a shard has stay, those on other hosts than its owner first.
// New ones are on other hosts if there are any; of these it is first one of the
// shard's stage, then one that owns and mirrors least.
func (d *draft) mirror() (added int) {
	need := min(d.Mirrors, len(d.Workers)-1)
	members := make([][]int, len(d.Stages))
	for i, st := range d.Stages {
		for _, w := range st.Workers {
			members[i] = append(members[i], d.index[w])
		}
	}
	all := make([]int, len(d.Workers))
	for i := range all {
		all[i] = i
	}
	for i := range d.Shards {
		s := &d.Shards[i]
		owner := d.index[s.Owner]
		isHome := func(w id.WorkerID) bool { return d.host[d.index[w]] == d.host[owner] }
		away := min(need, len(d.Workers)-d.perHost[d.host[owner]])
		home := need - away
		atHome := 0
		for _, m := range s.Mirrors {
			if isHome(m) {
				atHome++
			}
		}
		if len(s.Mirrors) == need && atHome == home {
			continue
		}
		was := s.Mirrors
		for _, m := range was {
			d.mirrored[d.index[m]] -= s.Hi - s.Lo
		}
		// Kept are the first ones of each kind.
		s.Mirrors = make([]id.WorkerID, 0, need)
		for _, m := range was {
			left := &away
			if isHome(m) {
				left = &home
			}
			if *left > 0 {
				*left--
				s.Mirrors = append(s.Mirrors, m)
			}
		}
		stage := members[d.StageOf(s.Layer)]
		for range away {
			added += d.addMirror(i, stage, all, false)
		}
		for range home {
			added += d.addMirror(i, stage, all, true)
		}
		for _, m := range s.Mirrors {
			d.mirrored[d.index[m]] += s.Hi - s.Lo
		}
	}
	return added
}

// addMirror adds a mirror on the owner's host or on another one. There is a
// worker for it. It returns 1 if that is a new holder.
func (d *draft) addMirror(i int, stage, all []int, home bool) int {
	s := &d.Shards[i]
	owner := d.index[s.Owner]
	fits := func(w int) bool {
		return w != owner && (d.host[w] == d.host[owner]) == home && !slices.Contains(s.Mirrors, d.Workers[w].ID)
	}
	was := &d.current.Shards[d.origin[i]]
	for _, id := range append([]id.WorkerID{was.Owner}, was.Mirrors...) {
		if w, ok := d.index[id]; ok && d.stays[id] && fits(w) {
			s.Mirrors = append(s.Mirrors, id)
			return 0
		}
	}
	for _, list := range [2][]int{stage, all} {
		best := -1
		// From the owner on, so that not all owners come to the same one.
		from := max(0, slices.Index(list, owner))
		for k := range list {
			w := list[(from+k)%len(list)]
			if (best < 0 || d.owned[w]+d.mirrored[w] < d.owned[best]+d.mirrored[best]) && fits(w) {
				best = w
			}
		}
		if best >= 0 {
			s.Mirrors = append(s.Mirrors, d.Workers[best].ID)
			return 1
		}
	}
	panic("plan: a mirror was counted that is not there")
}
