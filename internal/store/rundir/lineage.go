package rundir

import (
	"encoding/json"
	"fmt"
	"math"
	"path/filepath"
	"slices"
)

// Ancestor is what a run was before it was resumed with something changed. job.json lists them, the oldest first, so every step of the
// run can be computed again: the steps up to Until, and after those of the ancestor before, are steps of Job.
type Ancestor struct {
	ID      string          `json:"id"`    // of Job, which checkpoints up to Until have
	Until   int             `json:"until"` // newest step that counts
	Changed []Change        `json:"changed"`
	Job     json.RawMessage `json:"job"` // as job.json had it, without a lineage
}

// Change is one thing that is not as it was.
type Change struct {
	Name string `json:"name"` // such as lr: what --allow calls it
	Was  string `json:"was"`
	Is   string `json:"is"`
}

func (c Change) String() string { return c.Name + ": " + c.Is + ", not " + c.Was }

// Description returns the job of an ancestor.
func (a Ancestor) Description() (j Job, err error) {
	err = json.Unmarshal(a.Job, &j)
	return j, err
}

// Era is a stretch of the steps of a run that one job describes: those after After, up to Until. A checkpoint of one of these steps has
// the ID of the job.
type Era struct {
	Job   string // ID
	After int
	Until int
}

// Eras are those of a run, the oldest first.
type Eras []Era

// Own returns [ErrInUse] if a run directory has the job of another run by now than the one of the eras.
func (e Eras) Own(dir string) error {
	var job Job
	found, err := readJSON(filepath.Join(dir, "job.json"), &job)
	if err != nil || !found {
		return nil // removed or damaged, which is not said here
	}
	if !slices.ContainsFunc(e, func(x Era) bool { return job.Plain().Descends(x.Job) }) {
		return fmt.Errorf("%s %w", dir, ErrInUse)
	}
	return nil
}

// Only returns the eras of a run that has always been the same job.
func Only(job string) Eras { return Eras{{Job: job, Until: math.MaxInt}} }

// Has reports whether a checkpoint of a job and a step is of the run.
func (e Eras) Has(job string, step int) bool {
	return slices.ContainsFunc(e, func(x Era) bool { return x.Job == job && step > x.After && step <= x.Until })
}

// Now returns the ID of the job that the run is now, "" for no eras.
func (e Eras) Now() string {
	if len(e) == 0 {
		return ""
	}
	return e[len(e)-1].Job
}

// Eras returns the eras of the run.
func (j Job) Eras() (all Eras) {
	after := 0
	for _, a := range j.Lineage {
		all = append(all, Era{a.ID, after, a.Until})
		after = a.Until
	}
	return append(all, Era{j.ID(), after, math.MaxInt})
}

// Floor returns the step after which the run became what it is now: it cannot go back behind it, because the steps before are those of
// another job.
func (j Job) Floor() int {
	if n := len(j.Lineage); n > 0 {
		return j.Lineage[n-1].Until
	}
	return 0
}

// Rollback returns the eras of the checkpoints to which the run may go back.
func (j Job) Rollback() Eras {
	all := j.Eras()
	if n := len(all); n > 1 {
		all = all[n-2:]
		all[0].After = all[0].Until - 1
	}
	return all
}

// Shift returns how many samples lie between the first one of the step after the floor and where it would be if all steps before had had
// the global batch of now. It wraps around below 0, as the numbers of samples do that it is added to.
func (j Job) Shift() (samples uint64) {
	after := 0
	for _, a := range j.Lineage {
		was, _ := a.Description() // checked when it was made
		samples += uint64(a.Until-after) * uint64(was.GlobalBatch)
		after = a.Until
	}
	return samples - uint64(after)*uint64(j.GlobalBatch)
}

// Descends reports whether the run is, or was before it was changed, the job with an ID.
func (j Job) Descends(id string) bool {
	return slices.ContainsFunc(j.Eras(), func(e Era) bool { return e.Job == id })
}

// Resumed returns the lineage of a job as which the run j is resumed after a step. changes says how two descriptions differ. Where the
// job is what the run was at that step, the lineage is that of then.
func (j Job) Resumed(step int, now Job, changes func(was, now Job) []Change) ([]Ancestor, error) {
	if step == 0 {
		return nil, nil // from the seed
	}
	chain := slices.Clone(j.Lineage)
	i := slices.IndexFunc(chain, func(a Ancestor) bool { return a.Until >= step })
	var last Job
	if i < 0 {
		last = j
		last.Lineage = nil
		text, err := json.Marshal(last.Plain())
		if err != nil {
			return nil, err
		}
		i, chain = len(chain), append(chain, Ancestor{ID: j.ID(), Job: text})
	} else {
		var err error
		if last, err = chain[i].Description(); err != nil {
			return nil, err
		}
	}
	chain = chain[:i+1]
	chain[i].Until, chain[i].Changed = step, changes(last, now)
	if len(chain[i].Changed) == 0 {
		chain = chain[:i]
	}
	return chain, nil
}
