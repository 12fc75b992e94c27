package planner

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/search"
)

// boundary makes a plan between two steps: arrange fills it in.
func boundary(current plan.Plan, v plan.View, prof plan.Profile, e Event, arrange func(*draft) (string, error)) (plan.Plan, Reason, error) {
	if len(prof.Layers) != current.Layers() {
		return plan.Plan{}, "", fmt.Errorf("plan: a profile of %s for a plan of %d", plan.Count(len(prof.Layers), "layer"), current.Layers())
	}
	d, err := newDraft(&current, &v, prof, e)
	if err != nil {
		return plan.Plan{}, "", err
	}
	reason, err := arrange(d)
	if err != nil {
		return plan.Plan{}, "", err
	}
	return d.Plan, Reason(reason), nil
}

// draft is a boundary plan in the making. Workers are known by their index in
// it; workers outside it have none.
type draft struct {
	plan.Plan
	current *plan.Plan
	prof    plan.Profile // measured
	stays   map[id.WorkerID]bool
	leaves  []id.WorkerID        // live and leave
	lives   map[id.WorkerID]bool // of the current plan
	origin  []int                // of each shard: the one of the current plan that it is a part of

	index           map[id.WorkerID]int
	host            []int // by worker
	perHost         []int // workers
	owned, mirrored []int // parameters, by worker
}

// newDraft returns a draft with the workers that the plan will have.
func newDraft(current *plan.Plan, v *plan.View, prof plan.Profile, e Event) (*draft, error) {
	d := &draft{
		Plan: plan.Plan{
			Version:  following(current, e),
			FromStep: max(current.FromStep, v.Step+1),
			Mirrors:  current.Mirrors,
		},
		current: current, prof: prof.WithDefaults(),
		stays: make(map[id.WorkerID]bool), lives: make(map[id.WorkerID]bool), index: make(map[id.WorkerID]int),
	}
	if current.InStep {
		d.FromStep = max(d.FromStep, current.FromStep+1)
	}
	for _, w := range v.Workers {
		was, ok := current.Worker(w.ID)
		ok = ok && was == w
		d.lives[w.ID] = ok
		switch leaves := slices.Contains(v.Leaving, w.ID); {
		case leaves && ok:
			d.leaves = append(d.leaves, w.ID)
		case leaves || !ok && e.Kind != Join:
		default:
			d.stays[w.ID] = ok
			d.Workers = append(d.Workers, w)
		}
	}
	if len(d.Workers) == 0 {
		return nil, fmt.Errorf("plan: that stays, %w", ErrNoWorkers)
	}
	d.Workers = sorted(d.Workers)
	slices.Sort(d.leaves)
	hosts := make(map[string]int)
	for i, w := range d.Workers {
		d.index[w.ID] = i
		h, ok := hosts[w.Host]
		if !ok {
			h = len(hosts)
			hosts[w.Host] = h
			d.perHost = append(d.perHost, 0)
		}
		d.host = append(d.host, h)
		d.perHost[h]++
	}
	d.owned, d.mirrored = make([]int, len(d.Workers)), make([]int, len(d.Workers))
	return d, nil
}

// following returns the version of the plan that an event calls for.
func following(current *plan.Plan, e Event) id.Version {
	v := current.Version
	if e.After.Compare(v) > 0 {
		v = e.After
	}
	v.N++
	return v
}

// inherit takes the shards over from the current plan, without mirrors that do
// not stay. A shard whose owner does not stay goes to a mirror; without any, to
// a worker of its stage, or any worker if none of the stage stays: it has to be
// moved. Of several it is the one that owns least.
func (d *draft) inherit() (promoted, moved int, err error) {
	var dead LostError
	d.Shards = slices.Clone(d.current.Shards)
	d.origin = make([]int, len(d.Shards))
	var orphans []int
	for i := range d.Shards {
		s := &d.Shards[i]
		d.origin[i] = i
		if !d.lives[s.Owner] && !slices.ContainsFunc(s.Mirrors, func(m id.WorkerID) bool { return d.lives[m] }) {
			if dead.Count == 0 {
				dead.Shard = *s
			}
			dead.Count++
			continue
		}
		s.Mirrors = keep(s.Mirrors, func(m id.WorkerID) bool { return d.stays[m] })
		for _, m := range s.Mirrors {
			d.mirrored[d.index[m]] += s.Hi - s.Lo
		}
		if d.stays[s.Owner] {
			d.owned[d.index[s.Owner]] += s.Hi - s.Lo
		} else {
			orphans = append(orphans, i)
		}
	}
	if dead.Count > 0 {
		return 0, 0, fmt.Errorf("plan: %w", &dead)
	}
	members := make([][]id.WorkerID, len(d.current.Stages))
	everyone := make([]id.WorkerID, len(d.Workers))
	for i, w := range d.Workers {
		everyone[i] = w.ID
	}
	for i, st := range d.current.Stages {
		if members[i] = keep(st.Workers, func(w id.WorkerID) bool { return d.stays[w] }); len(members[i]) == 0 {
			members[i] = everyone
		}
	}
	for _, i := range orphans {
		s := &d.Shards[i]
		candidates := s.Mirrors
		if len(candidates) > 0 {
			promoted++
		} else {
			candidates = members[d.current.StageOf(s.Layer)]
			moved++
		}
		s.Owner = slices.MinFunc(candidates, func(a, b id.WorkerID) int { return cmp.Compare(d.owned[d.index[a]], d.owned[d.index[b]]) })
		d.owned[d.index[s.Owner]] += s.Hi - s.Lo
		d.dropMirror(s, s.Owner)
	}
	return promoted, moved, nil
}

// keep returns those of a list for which a condition holds; the list stays as
// it is.
func keep[T any](list []T, holds func(T) bool) []T {
	for i, x := range list {
		if holds(x) {
			continue
		}
		kept := slices.Clone(list[:i])
		for _, x := range list[i+1:] {
			if holds(x) {
				kept = append(kept, x)
			}
		}
		return kept
	}
	return list
}

func (d *draft) dropMirror(s *plan.Shard, w id.WorkerID) {
	if slices.Contains(s.Mirrors, w) {
		s.Mirrors = keep(s.Mirrors, func(m id.WorkerID) bool { return m != w })
		d.mirrored[d.index[w]] -= s.Hi - s.Lo
	}
}

// flow routes the micro-batches over the stages' workers.
func (d *draft) flow() {
	search.Route(&d.Plan, d.prof, d.current.Micros())
	d.prune()
}

// serves returns the number of stages of each worker.
func (d *draft) serves() []int {
	serves := make([]int, len(d.Workers))
	for _, st := range d.Stages {
		for _, w := range st.Workers {
			serves[d.index[w]]++
		}
	}
	return serves
}

// prune removes workers that serve several stages from those in which they have nothing to
// do.
func (d *draft) prune() {
	serves := d.serves()
	idle := make(map[place]bool)
	for s := range d.Stages {
		runs := make([]bool, len(d.Workers))
		for _, w := range d.Route[s] {
			runs[d.index[w]] = true
		}
		d.Stages[s].Workers = keep(d.Stages[s].Workers, func(w id.WorkerID) bool {
			i := d.index[w]
			if runs[i] || serves[i] == 1 {
				return true
			}
			serves[i]--
			idle[place{s, w}] = true
			return false
		})
	}
	d.Limits = keep(d.Limits, func(l plan.Limit) bool { return !idle[place{l.Stage, l.Worker}] })
}

// place is a worker in a stage.
type place struct {
	stage  int
	worker id.WorkerID
}

// staff gives every stage living workers.
func staffStages(p *plan.Plan, current *plan.Plan, alive map[id.WorkerID]bool) {
	for _, s := range current.Stages {
		st := plan.Stage{Lo: s.Lo, Hi: s.Hi}
		for _, w := range s.Workers {
			if alive[w] {
				st.Workers = append(st.Workers, w)
			}
		}
		if len(st.Workers) == 0 {
			for _, sh := range p.Shards {
				if s.Lo <= sh.Layer && sh.Layer < s.Hi && !slices.Contains(st.Workers, sh.Owner) {
					st.Workers = append(st.Workers, sh.Owner)
				}
			}
		}
		if len(st.Workers) == 0 { // a stage without parameters
			for _, w := range p.Workers {
				st.Workers = append(st.Workers, w.ID)
			}
		}
		p.Stages = append(p.Stages, st)
	}
}
