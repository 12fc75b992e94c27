package host

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Resume says where a run goes on that has ended before.
type Resume struct {
	Job  rundir.Job        // as job.json has it: the program must still make the same
	Data []rundir.DataFile // as data.json has it
	Step int               // of the checkpoint in the run directory
	Plan *rundir.Plan      // the newest, nil for none
	// Number is that of the plan of the newest step. It may be greater than Plan's, which is written down later.
	Number uint64
	Note   []string // what is to be known of it, in a sentence each
}

// ResumeError means that the program, its data or its flags are not what they were.
type ResumeError struct {
	Field  string // of job.json, or "data"
	Values string // "7, not 1"; "" where they say nothing to people
}

func (e *ResumeError) Error() string {
	text := "the run cannot go on: " + e.Field + " is another one than before"
	if e.Values != "" {
		text += " (" + e.Values + ")"
	}
	return text + "; go on with the same PROGRAM on the same data"
}

// newest is the newest version that the run has given, as far as its files tell.
func (r *Resume) newest() plan.Version {
	if r == nil || r.Plan == nil {
		return plan.Version{}
	}
	v := written(r.Plan)
	v.N = max(v.N, int(min(r.Number, maxNumber)))
	return v
}

// maxNumber bounds the number of a plan that a file may claim.
const maxNumber = 1 << 40

// saving is what a session knows of checkpoints. The workers are asked for one when it is
// due; from then on nothing is asked until that one is written or given up.
type saving struct {
	every  time.Duration // 0 for none but that of a stopped run
	due    time.Time
	asked  bool
	since  time.Time // it was
	parts  map[saveID]map[plan.WorkerID]part
	ready  []checkpoint.Manifest // to be committed, one after the other
	under  bool                  // the first of them is being
	newest int                   // step of the newest, 0 for none
}

// maxSaves bounds the checkpoints that are not whole: one at a time is asked for, and a run
// that is stopped makes one more.
const maxSaves = 8

type saveID struct {
	step    int
	version plan.Version // of a plan whose owners write the parts
}

type part struct {
	file checkpoint.File
	rule string
}

type (
	commitCheckpoint struct{ manifest checkpoint.Manifest } // committed comes, and then pruned
	committed        struct {
		step int
		err  error // it is none
	}
	pruned struct{ err error } // those that are not needed any more are removed, or not all
)

type (
	// verify lets a checkpoint be read before the run goes back to it; verified comes.
	verify   struct{ p propose }
	verified struct {
		p       propose
		step    int // of the newest that is whole; 0 for none
		refused []string
		err     error // of the file system
	}
)

// verifiedSave proposes the plan that begins from a checkpoint, or has another one made if that
// cannot be used.
func (s *session) verifiedSave(now time.Time, e verified) []effect {
	if e.err != nil {
		return s.judge(now, &FileError{Err: e.err})
	}
	var effects []effect
	for _, text := range e.refused {
		effects = append(effects, s.event(now, "note", text))
	}
	if e.p.order.Plan.Version != s.restarting {
		return nil // another plan has come to take its place
	}
	if e.step >= e.p.order.Passed.Step {
		return append(effects, e.p)
	}
	older := controller.Saved{Step: e.step}
	if s.saves.newest = e.step; e.step > 0 {
		older.Dir = e.p.order.From
	}
	return append(effects, s.tell(now, older)...)
}

// nextSave sets when the next checkpoint is due.
func (s *session) nextSave(now time.Time) {
	if s.saves.every > 0 {
		s.saves.due = now.Add(s.saves.every)
	}
}

// askForSave asks for a checkpoint that is due.
func (s *session) askForSave(now time.Time) []effect {
	if s.saves.due.IsZero() || now.Before(s.saves.due) {
		return nil
	}
	s.nextSave(now)
	if s.state != training || s.judged || s.stop != "" || s.saves.asked || s.saves.under || len(s.saves.parts)+len(s.saves.ready) > 0 {
		return nil
	}
	s.saves.asked, s.saves.since = true, now
	var effects []effect
	for id := range s.workers {
		if w := &s.workers[id]; !w.gone && w.state == training {
			effects = append(effects, sendMessage{id, control.Save{}})
		}
	}
	return effects
}

// saved takes in a part of a checkpoint.
func (s *session) saved(now time.Time, place int, m control.Saved) []effect {
	id := s.workers[place].who.ID
	bad := func(format string, args ...any) []effect {
		return s.judge(now, &ProtocolError{int(id), fmt.Sprintf(format, args...) + s.place()})
	}
	v := plan.Version{Generation: m.Generation, N: m.N}
	p, ok := s.known[uint64(m.N)]
	if s.tookOver && !ok {
		return nil // of a plan so long ago that it was not inherited, with what was told to the leader before
	}
	if !ok || p.Version != v {
		return bad("saved a part of a checkpoint under plan %v, which is not known,", v)
	}
	if in, _ := p.Worker(id); in.Incarnation != s.workers[place].who.Incarnation {
		return bad("saved a part of a checkpoint under plan %v, which another one of its lives was in,", v)
	}
	owners := ownersOf(&p)
	key := saveID{m.Step, v}
	if s.tookOver && m.Step <= s.saves.newest {
		return nil // told to the leader before, which made it whole
	}
	switch {
	case len(s.saves.parts) > maxSaves:
		return bad("saved parts of %d checkpoints", len(s.saves.parts))
	case m.Step < 1 || m.Step > s.job.Steps || s.saves.parts[key][id].rule != "":
		return bad("saved a part of a checkpoint of step %d", m.Step)
	case !slices.Contains(owners, id):
		return bad("saved a part of a checkpoint and owns nothing under plan %v,", v)
	}
	s.saves.asked = false
	if m.Err != "" {
		delete(s.saves.parts, key)
		return []effect{s.event(now, "note", fmt.Sprintf("no checkpoint of step %d: worker %d: %s", m.Step, id, oneLine(m.Err)))}
	}
	var file checkpoint.File
	if err := json.Unmarshal(m.File, &file); err != nil || m.Rule == "" {
		return bad("saved a part of a checkpoint that is none")
	}
	parts := s.saves.parts[key]
	if parts == nil {
		if s.saves.parts == nil {
			s.saves.parts = make(map[saveID]map[plan.WorkerID]part)
		}
		parts = make(map[plan.WorkerID]part)
		s.saves.parts[key] = parts
	}
	parts[id] = part{file, m.Rule}
	return s.gather(now)
}

// ownersOf returns who owns shards under a plan, by ID.
func ownersOf(p *plan.Plan) []plan.WorkerID {
	var owners []plan.WorkerID
	for _, sh := range p.Shards {
		if !slices.Contains(owners, sh.Owner) {
			owners = append(owners, sh.Owner)
		}
	}
	slices.Sort(owners)
	return owners
}

// gather commits the checkpoints of which all parts are there, and gives up those of which
// parts never will be, as their owners have gone. A checkpoint waits for its step's line in
// metrics.jsonl.
func (s *session) gather(now time.Time) []effect {
	var effects []effect
	keys := slices.SortedFunc(maps.Keys(s.saves.parts), func(a, b saveID) int { return cmp.Or(a.step-b.step, a.version.Compare(b.version)) })
	for _, key := range keys {
		parts := s.saves.parts[key]
		p := s.known[uint64(key.version.N)]
		owners := ownersOf(&p)
		lost := slices.IndexFunc(owners, func(w plan.WorkerID) bool {
			in, _ := p.Worker(w)
			place := s.find(in)
			_, ok := parts[w]
			return !ok && (place < 0 || s.workers[place].gone || s.workers[place].state == finished)
		})
		switch {
		case lost >= 0:
			delete(s.saves.parts, key)
			effects = append(effects, s.event(now, "note", fmt.Sprintf("no checkpoint of step %d: worker %d has gone", key.step, owners[lost])))
		case len(parts) == len(owners) && key.step <= s.last.Step:
			delete(s.saves.parts, key)
			m := checkpoint.Manifest{Job: s.job.ID(), Step: key.step, Plan: checkpoint.PlanVersion(key.version), Rule: parts[owners[0]].rule}
			for _, l := range profile(s.first).Layers {
				size := 0
				for _, n := range l.Tensors {
					size += n
				}
				m.Layers = append(m.Layers, size)
			}
			for _, w := range owners {
				m.Files = append(m.Files, parts[w].file)
			}
			s.saves.ready = append(s.saves.ready, m)
		}
	}
	return append(effects, s.commitNext()...)
}

// lostSave gives up what a lost worker was to bring.
func (s *session) lostSave(now time.Time) []effect {
	s.saves.asked = false // perhaps it was lost, too
	return s.gather(now)
}

func (s *session) commitNext() []effect {
	if s.saves.under || len(s.saves.ready) == 0 {
		return nil
	}
	s.saves.under = true
	return []effect{commitCheckpoint{s.saves.ready[0]}}
}

// committedSave takes in that a checkpoint is whole, or will not be.
func (s *session) committedSave(now time.Time, e committed) []effect {
	if e.err != nil {
		return []effect{s.event(now, "note", fmt.Sprintf("no checkpoint of step %d: %s", e.step, oneLine(e.err.Error())))}
	}
	s.saves.newest = max(s.saves.newest, e.step)
	effects := []effect{s.event(now, "checkpoint", fmt.Sprintf("the state after step %d is saved", e.step))}
	effects = append(effects, s.traceCheckpoint(now, e.step, s.saves.since)...)
	s.saves.since = time.Time{}
	return append(effects, s.tell(now, controller.Saved{Step: e.step, Dir: s.cfg.RunDir.Path()})...)
}

// prunedSaves goes on after all work on a checkpoint.
func (s *session) prunedSaves(now time.Time, e pruned) []effect {
	s.saves.under, s.saves.ready = false, s.saves.ready[1:]
	var effects []effect
	if e.err != nil {
		effects = append(effects, s.event(now, "note", "old checkpoints: "+oneLine(e.err.Error())))
	}
	effects = append(effects, s.commitNext()...)
	return append(effects, s.conclude(now)...)
}

// savesLeft reports whether a checkpoint is being made whole.
func (s *session) savesLeft() bool { return len(s.saves.ready) > 0 }

// resumable returns the run directory from which the run can go on, "" if it cannot or need not.
func (s *session) resumable() string {
	if s.saves.newest == 0 || s.cfg.RunDir == nil || s.last.Step == s.job.Steps && s.state == finished {
		return ""
	}
	var failed *FailedError
	for _, is := range []bool{
		errors.As(s.err, new(*StoppedError)), errors.As(s.err, &failed) && (failed.Kind == control.Faulty || failed.Kind == control.Corrupt), errors.As(s.err, new(*LostError)), errors.As(s.err, new(*SilentError)), errors.As(s.err, new(*RecoveryError)),
	} {
		if is {
			return s.cfg.RunDir.String()
		}
	}
	return ""
}

// changed returns why the run cannot go on with what the workers have.
func (r *Resume) changed(now control.Ready) error {
	was := control.Ready{Job: r.Job.Plain(), Data: r.Data, Layers: now.Layers}
	is := now
	is.Job = is.Job.Plain()
	if field, values := difference(was, is); field != "" {
		return &ResumeError{field, values}
	}
	return nil
}

// commitFiles makes a checkpoint whole, and removes those that are not needed any more.
func commitFiles(ctx context.Context, dir string, m checkpoint.Manifest, post func(event) bool) {
	err := checkpoint.Commit(dir, m)
	if !post(committed{m.Step, err}) {
		return
	}
	e := pruned{}
	if err == nil {
		e.err = checkpoint.Prune(ctx, dir, 0, m.Step+1)
	}
	post(e)
}

// verifyFiles finds the newest whole checkpoint before a plan that goes on from one is proposed.
func verifyFiles(ctx context.Context, dir, job string, p propose) verified {
	v := verified{p: p}
	r, refused, err := checkpoint.Newest(ctx, dir, job)
	for _, fault := range refused {
		if !errors.Is(fault, checkpoint.ErrUnfinished) {
			v.refused = append(v.refused, oneLine(fault.Error())+"; the checkpoint is not used")
		}
	}
	switch {
	case err == nil:
		v.step = r.Manifest().Step
		_ = r.Close()
	case !errors.Is(err, checkpoint.ErrNone):
		v.err = err
	}
	return v
}
