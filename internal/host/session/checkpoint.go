package session

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
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
func (r *Resume) Newest() id.Version {
	if r == nil || r.Plan == nil {
		return id.Version{}
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
	parts  map[saveID]map[id.WorkerID]part
	ready  []checkpoint.Manifest // to be committed, one after the other
	under  bool                  // the first of them is being
	newest int                   // step of the newest, 0 for none
}

// maxSaves bounds the checkpoints that are not whole: one at a time is asked for, and a run
// that is stopped makes one more.
const maxSaves = 8

type saveID struct {
	step    int
	version id.Version // of a plan whose owners write the parts
}

type part struct {
	file checkpoint.File
	rule string
}

type (
	CommitCheckpoint    struct{ Manifest checkpoint.Manifest } // committed comes, and then pruned
	CheckpointCommitted struct {
		Step int
		Err  error // it is none
	}
	CheckpointsPruned struct{ Err error } // those that are not needed any more are removed, or not all
)

type (
	// verify lets a checkpoint be read before the run goes back to it; verified comes.
	VerifyCheckpoint struct {
		Propose Propose
		Job     string // whose checkpoint
	}
	CheckpointVerified struct {
		Propose Propose
		Step    int // of the newest that is whole; 0 for none
		Refused []string
		Err     error // of the file system
	}
)

// verifiedSave proposes the plan that begins from a checkpoint, or has another one made if that
// cannot be used.
func (s *Session) verifiedSave(now time.Time, e CheckpointVerified) []Effect {
	if e.Err != nil {
		return s.judge(now, &FileError{Err: e.Err})
	}
	var effects []Effect
	for _, text := range e.Refused {
		effects = append(effects, s.event(now, "note", text))
	}
	if e.Propose.Order.Plan.Version != s.restarting {
		return nil // another plan has come to take its place
	}
	if e.Step >= e.Propose.Order.Passed.Step {
		return append(effects, e.Propose)
	}
	older := controller.Saved{Step: e.Step}
	if s.saves.newest = e.Step; e.Step > 0 {
		older.Dir = e.Propose.Order.From
	}
	return append(effects, s.tell(now, older)...)
}

// nextSave sets when the next checkpoint is due.
func (s *Session) nextSave(now time.Time) {
	if s.saves.every > 0 {
		s.saves.due = now.Add(s.saves.every)
	}
}

// askForSave asks for a checkpoint that is due.
func (s *Session) askForSave(now time.Time) []Effect {
	if s.saves.due.IsZero() || now.Before(s.saves.due) {
		return nil
	}
	s.nextSave(now)
	if s.state != training || s.judged || s.stop != "" || s.saves.asked || s.saves.under || len(s.saves.parts)+len(s.saves.ready) > 0 {
		return nil
	}
	s.saves.asked, s.saves.since = true, now
	var effects []Effect
	for id := range s.workers {
		if w := &s.workers[id]; !w.gone && w.state == training {
			effects = append(effects, Send{id, control.Save{}})
		}
	}
	return effects
}

// saved takes in a part of a checkpoint.
func (s *Session) saved(now time.Time, place int, m control.Saved) []Effect {
	w := s.workers[place].who.ID
	bad := func(format string, args ...any) []Effect {
		return s.judge(now, &ProtocolError{int(w), fmt.Sprintf(format, args...) + s.place()})
	}
	v := id.Version{Generation: m.Generation, N: m.N}
	p, ok := s.known[uint64(m.N)]
	if s.tookOver && !ok {
		return nil // of a plan so long ago that it was not inherited, with what was told to the leader before
	}
	if !ok || p.Version != v {
		return bad("saved a part of a checkpoint under plan %v, which is not known,", v)
	}
	if in, _ := p.Worker(w); in.Incarnation != s.workers[place].who.Incarnation {
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
	case m.Step < 1 || m.Step > s.job.Steps || s.saves.parts[key][w].rule != "":
		return bad("saved a part of a checkpoint of step %d", m.Step)
	case !slices.Contains(owners, w):
		return bad("saved a part of a checkpoint and owns nothing under plan %v,", v)
	}
	s.saves.asked = false
	if m.Err != "" {
		delete(s.saves.parts, key)
		return []Effect{s.event(now, "note", fmt.Sprintf("no checkpoint of step %d: worker %d: %s", m.Step, w, OneLine(m.Err)))}
	}
	var file checkpoint.File
	if err := json.Unmarshal(m.File, &file); err != nil || m.Rule == "" {
		return bad("saved a part of a checkpoint that is none")
	}
	parts := s.saves.parts[key]
	if parts == nil {
		if s.saves.parts == nil {
			s.saves.parts = make(map[saveID]map[id.WorkerID]part)
		}
		parts = make(map[id.WorkerID]part)
		s.saves.parts[key] = parts
	}
	parts[w] = part{file, m.Rule}
	return s.gather(now)
}

// ownersOf returns who owns shards under a plan, by ID.
func ownersOf(p *plan.Plan) []id.WorkerID {
	var owners []id.WorkerID
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
func (s *Session) gather(now time.Time) []Effect {
	var effects []Effect
	keys := slices.SortedFunc(maps.Keys(s.saves.parts), func(a, b saveID) int { return cmp.Or(a.step-b.step, a.version.Compare(b.version)) })
	for _, key := range keys {
		parts := s.saves.parts[key]
		p := s.known[uint64(key.version.N)]
		owners := ownersOf(&p)
		lost := slices.IndexFunc(owners, func(w id.WorkerID) bool {
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
			m := checkpoint.Manifest{Job: s.job.ID(), Step: key.step, Plan: key.version, Rule: parts[owners[0]].rule}
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
func (s *Session) lostSave(now time.Time) []Effect {
	s.saves.asked = false // perhaps it was lost, too
	return s.gather(now)
}

func (s *Session) commitNext() []Effect {
	if s.saves.under || len(s.saves.ready) == 0 {
		return nil
	}
	s.saves.under = true
	return []Effect{CommitCheckpoint{s.saves.ready[0]}}
}

// committedSave takes in that a checkpoint is whole, or will not be.
func (s *Session) committedSave(now time.Time, e CheckpointCommitted) []Effect {
	if e.Err != nil {
		return []Effect{s.event(now, "note", fmt.Sprintf("no checkpoint of step %d: %s", e.Step, OneLine(e.Err.Error())))}
	}
	s.saves.newest = max(s.saves.newest, e.Step)
	effects := []Effect{s.event(now, "checkpoint", fmt.Sprintf("the state after step %d is saved", e.Step))}
	effects = append(effects, s.traceCheckpoint(now, e.Step, s.saves.since)...)
	s.saves.since = time.Time{}
	return append(effects, s.tell(now, controller.Saved{Step: e.Step, Dir: s.cfg.RunDir})...)
}

// prunedSaves goes on after all work on a checkpoint.
func (s *Session) prunedSaves(now time.Time, e CheckpointsPruned) []Effect {
	s.saves.under, s.saves.ready = false, s.saves.ready[1:]
	var effects []Effect
	if e.Err != nil {
		effects = append(effects, s.event(now, "note", "old checkpoints: "+OneLine(e.Err.Error())))
	}
	effects = append(effects, s.commitNext()...)
	return append(effects, s.conclude(now)...)
}

// savesLeft reports whether a checkpoint is being made whole.
func (s *Session) savesLeft() bool { return len(s.saves.ready) > 0 }

// resumable returns the run directory from which the run can go on, "" if it cannot or need not.
func (s *Session) resumable() string {
	if s.saves.newest == 0 || s.cfg.RunDir == "" || s.last.Step == s.job.Steps && s.state == finished {
		return ""
	}
	var failed *FailedError
	for _, is := range []bool{
		errors.As(s.err, new(*StoppedError)), errors.As(s.err, &failed) && (failed.Kind == control.Faulty || failed.Kind == control.Corrupt), errors.As(s.err, new(*LostError)), errors.As(s.err, new(*SilentError)), errors.As(s.err, new(*RecoveryError)),
	} {
		if is {
			return s.cfg.Shown
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
