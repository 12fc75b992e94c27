package planner

import (
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

// protect makes the plan in which every shard has its mirrors again, as many
// as there are workers for. Owners stay, and so do mirrors, unless they share
// a host with another holder and need not. Micro-batches are rerouted over
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
// Mirrors are on hosts of their own, as far as there are hosts, then on other
// hosts than the owner's. Those that a shard has stay where that allows it.
// A new one is first of the shard's stage, then one that owns and mirrors least.
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
		var most, has [3]int // by where
		most[away] = min(need, len(d.Workers)-d.perHost[d.host[owner]])
		most[home] = need - most[away]
		most[apart] = min(need, len(d.perHost)-1)
		most[away] -= most[apart]
		// Kept are the first ones of each kind.
		was, kept := s.Mirrors, make([]id.WorkerID, 0, need)
		for _, kind := range [...]where{apart, away, home} {
			for _, m := range was {
				if has[kind] < most[kind] && !slices.Contains(kept, m) && d.where(s.Owner, kept, d.index[m]) == kind {
					has[kind]++
					kept = append(kept, m)
				}
			}
		}
		if len(was) == need && len(kept) == need {
			continue
		}
		for _, m := range was {
			d.mirrored[d.index[m]] -= s.Hi - s.Lo
		}
		s.Mirrors = slices.DeleteFunc(slices.Clone(was), func(m id.WorkerID) bool { return !slices.Contains(kept, m) }) // others may share was
		stage := members[d.StageOf(s.Layer)]
		for kind := range most {
			for range most[kind] - has[kind] {
				added += d.addMirror(i, stage, all, where(kind))
			}
		}
		for _, m := range s.Mirrors {
			d.mirrored[d.index[m]] += s.Hi - s.Lo
		}
	}
	return added
}

// where says on which host a mirror is.
type where int

const (
	apart where = iota // on one of its own
	away               // on one with a mirror, but not the owner's
	home               // on the owner's
)

// where returns where worker w is to a shard with these holders.
func (d *draft) where(owner id.WorkerID, mirrors []id.WorkerID, w int) where {
	switch {
	case d.host[w] == d.host[d.index[owner]]:
		return home
	case slices.ContainsFunc(mirrors, func(m id.WorkerID) bool { return d.host[d.index[m]] == d.host[w] }):
		return away
	}
	return apart
}

// addMirror adds a mirror of a kind, for which there is a worker. It returns 1 if that is a new holder.
func (d *draft) addMirror(i int, stage, all []int, kind where) int {
	s := &d.Shards[i]
	owner := d.index[s.Owner]
	fits := func(w int) bool {
		return w != owner && !slices.Contains(s.Mirrors, d.Workers[w].ID) && d.where(s.Owner, s.Mirrors, w) == kind
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
