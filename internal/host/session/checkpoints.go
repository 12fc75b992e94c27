package session

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/host/session/change"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Resume says where a run goes on that has ended before.
type Resume struct {
	Job  rundir.Job        // as job.json has it
	Data []rundir.DataFile // as data.json has it
	Step int               // of the checkpoint in the run directory
	// Gather says that the hosts have run directories of their own: the checkpoint is the newest one of which all files are there when the
	// workers are, and Step is that of the newest record.
	Gather bool
	// OrBegin has the run begin once more after step 0 where it has no checkpoint: Step is 0, or no host has one.
	OrBegin bool
	Plan    *rundir.Plan // the newest, nil for none
	// Number is that of the plan of the newest step. It may be greater than Plan's, which is written down later.
	Number uint64
	Calls  rundir.Calls
	// Committed is the newest step that was ever committed; see [rundir.Committed].
	Committed int
	Note      []string // what the user should know about it, in a sentence each

	Finished bool                // all steps are done: it can be resumed with more
	Allow    []string            // what may have changed, by its names in package change
	Tensors  []checkpoint.Tensor // of the checkpoint, as far as it names them
	Loss     float64             // of its step, 0 where that is not known
	ValLoss  *float64            // of the evaluation after it, if there was one
}

// Newest returns the newest version that the run has given, as far as its files tell.
func (r *Resume) Newest() id.Version {
	if r == nil || r.Plan == nil {
		return id.Version{}
	}
	v := written(r.Plan)
	v.N = max(v.N, int(min(r.Number, maxNumber)))
	return v
}

// allows returns why the run cannot be resumed with what the workers have.
func (r *Resume) allows(now control.Ready) error {
	is := now.Job.Plain()
	if r.Finished && is.Steps <= r.Job.Steps {
		return &ResumeError{fmt.Errorf("nothing to resume: all %d steps are done; give --steps with more", r.Job.Steps)}
	}
	if err := change.Allowed(r.Job.Plain(), is, r.Allow); err != nil {
		if file := change.OtherFile(r.Data, now.Data); file != "" {
			err = fmt.Errorf("%w (data: file %s)", err, file)
		}
		return &ResumeError{err}
	}
	if r.Tensors == nil || len(now.Layers) == 0 {
		return nil
	}
	shapes := func(all []checkpoint.Tensor) (texts []string) {
		for _, t := range all {
			texts = append(texts, fmt.Sprintf("layer %d: %v", t.Layer, t.Shape))
		}
		return texts
	}
	if was, is := shapes(r.Tensors), shapes(tensorsOf(now.Layers)); !slices.Equal(was, is) {
		i := 0
		for i < min(len(was), len(is)) && was[i] == is[i] {
			i++
		}
		return &ResumeError{&change.Refusal{Never: true, Changes: []rundir.Change{{
			Name: fmt.Sprintf("tensor %d", i), Was: append(was, "none")[min(i, len(was))], Is: append(is, "none")[min(i, len(is))],
		}}}}
	}
	return nil
}

// lineage returns what the run was before that is resumed after a step.
func (r *Resume) lineage(now control.Ready, from int) ([]rundir.Ancestor, error) {
	if now.Job.Steps < from {
		return nil, &ResumeError{fmt.Errorf("the run cannot be resumed with --steps %d: it continues after step %d", now.Job.Steps, from)}
	}
	all, err := r.Job.Resumed(from, now.Job.Plain(), change.Between)
	switch {
	case err != nil:
		return nil, &ResumeError{fmt.Errorf("job.json: lineage: %w", err)}
	case len(all) > maxLineage:
		return nil, &ResumeError{fmt.Errorf("the run was changed %d times, which is the most; start another one with --init-from", maxLineage)}
	}
	return all, nil
}

// maxLineage is how often a run can be changed: job.json has each job that it was.
const maxLineage = 1000

// maxNumber bounds the number of a plan that a file may claim.
const maxNumber = 1 << 40

// written is the version of a line of plans.jsonl.
func written(p *rundir.Plan) id.Version {
	was, err := plan.Parse(p.Plan)
	if err != nil {
		return id.Version{}
	}
	return was.Version
}

// checkpoints are made one at a time: the workers are asked for their parts, each owner of shards writes a file and reports it, and
// when all parts are there, and the step is in metrics.jsonl, the manifest is committed.
type checkpoints struct {
	every    time.Duration // 0 for none but that of a stopped run
	steps    int           // above 0, workers make one at a multiple of it as soon as they are asked
	due      time.Time
	asked    bool
	parts    map[partsKey]map[id.WorkerID]part
	whole    []made     // to be committed, one after the other
	underway bool       // the first of them is being committed
	newest   int        // step of the newest, 0 for none
	made     time.Time  // when the newest was made, or training began
	why      string     // why no newer one could be made; "" as long as none has failed since
	proposed id.Version // newest plan that was to be agreed
	from     int        // step after which this start of the run began
	away     string     // why the newest is not at the target; "" if it is, or none was to be

	// Of a run that is resumed by several hosts (Resume.Gather).
	sought  bool
	found   int  // step of the checkpoint that it begins with; 0 until it is found
	none    bool // there is none, and the run begins after step 0
	refused []string
}

// made is a checkpoint of which all files are there.
type made struct {
	checkpoint.Manifest
	writers []int     // places of the workers that wrote its files
	began   time.Time // when the first part of the state was captured
}

// maxPartial bounds the checkpoints that are not whole: one at a time is asked for, and a run that is stopped makes one more.
const maxPartial = 8

type partsKey struct {
	step    int
	version id.Version // of a plan whose owners write the parts
}

type part struct {
	file  checkpoint.File
	place int // of the worker
	rule  string
	began time.Time // when the state was captured
	err   string    // why there is no file; "" if there is one
}

// next sets when the next checkpoint is due.
func (c *checkpoints) next(now time.Time) {
	switch {
	case c.steps > 0:
		c.due = now.Add(askAgain)
	case c.every > 0:
		c.due = now.Add(c.every)
	}
}

// askAgain is how long workers that make checkpoints at multiples of a number of steps remain unasked at most.
const askAgain = time.Second

// committing reports whether a checkpoint is being made whole.
func (c *checkpoints) committing() bool { return len(c.whole) > 0 }

// idle reports whether no checkpoint is being made.
func (c *checkpoints) idle() bool {
	return !c.asked && !c.underway && len(c.parts)+len(c.whole) == 0
}

// put adds a part.
func (c *checkpoints) put(key partsKey, owner id.WorkerID, p part) {
	if c.parts == nil {
		c.parts = make(map[partsKey]map[id.WorkerID]part)
	}
	if c.parts[key] == nil {
		c.parts[key] = make(map[id.WorkerID]part)
	}
	c.parts[key][owner] = p
}

// askForCheckpoint asks for a checkpoint that is due. One of a multiple of steps always is.
func (s *Session) askForCheckpoint() {
	c := &s.checkpoints
	if c.due.IsZero() || c.steps == 0 && s.now.Before(c.due) {
		return
	}
	c.next(s.now)
	if s.phase != training || s.end.stop != "" || !c.idle() {
		return
	}
	c.asked = true
	for _, w := range s.workers {
		if w.state == working {
			s.send(w, control.Save{})
		}
	}
}

// saved takes in a part of a checkpoint.
func (s *Session) saved(w *worker, m control.Saved) {
	c, who := &s.checkpoints, w.who
	bad := func(format string, args ...any) {
		s.judge(&ProtocolError{int(who.ID), fmt.Sprintf(format, args...) + s.at()})
	}
	v := id.Version{Generation: m.Generation, N: m.N}
	p, ok := s.known[uint64(m.N)]
	if s.tookOver() && !ok {
		return // of a plan so long ago that it was not inherited, reported to the leader before
	}
	if !ok || p.Version != v {
		bad("saved a part of a checkpoint under plan %v, which is not known,", v)
		return
	}
	if in, _ := p.Worker(who.ID); in.Incarnation != who.Incarnation {
		bad("saved a part of a checkpoint under plan %v, which another one of its lives was in,", v)
		return
	}
	key := partsKey{m.Step, v}
	if s.tookOver() && m.Step <= c.newest {
		return // reported to the leader before, which made it whole
	}
	switch _, again := c.parts[key][who.ID]; {
	case len(c.parts) > maxPartial:
		bad("saved parts of %d checkpoints", len(c.parts))
		return
	case m.Step < 1 || m.Step > s.job.Steps || again:
		bad("saved a part of a checkpoint of step %d", m.Step)
		return
	case !slices.Contains(ownersOf(&p), who.ID):
		bad("saved a part of a checkpoint and owns nothing under plan %v,", v)
		return
	}
	c.asked = false
	came := part{place: w.place, rule: m.Rule, began: time.Unix(0, m.Began), err: OneLine(m.Err)}
	if m.Err == "" && (json.Unmarshal(m.File, &came.file) != nil || m.Rule == "") {
		bad("saved a part of a checkpoint that is none")
		return
	}
	c.put(key, who.ID, came)
	s.commitCheckpoints()
}

// unsaved takes in that no checkpoint of a step could be made. It is an event where the cause is another one than the last time.
func (s *Session) unsaved(step int, why string) {
	c := &s.checkpoints
	if c.why == why {
		return
	}
	c.why = why
	since := "the start"
	if c.newest > 0 {
		since = fmt.Sprintf("step %d", c.newest)
	}
	reason := fmt.Sprintf("no checkpoint of step %d: %s; there is none since %s, %s", step, why, since, c.made.Format(time.TimeOnly))
	s.then(s.event(eventUnsaved, reason), Show{view.Unsaved{Step: c.newest, Since: c.made, Why: why}})
}

// ownersOf returns the owners of shards under a plan, by WorkerID.
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

// commitCheckpoints commits the checkpoints of which all parts are there, and drops those of which parts never will be, since their
// owners are gone.
func (s *Session) commitCheckpoints() {
	c := &s.checkpoints
	keys := slices.SortedFunc(maps.Keys(c.parts), func(a, b partsKey) int { return cmp.Or(a.step-b.step, a.version.Compare(b.version)) })
	for _, key := range keys {
		parts := c.parts[key]
		p := s.known[uint64(key.version.N)]
		owners := ownersOf(&p)
		lost := slices.IndexFunc(owners, func(w id.WorkerID) bool {
			in, _ := p.Worker(w)
			x := s.find(in)
			_, ok := parts[w]
			return !ok && (x == nil || x.state >= done)
		})
		failed := slices.IndexFunc(owners, func(w id.WorkerID) bool { return parts[w].err != "" })
		switch {
		case lost >= 0:
			delete(c.parts, key)
			s.unsaved(key.step, fmt.Sprintf("worker %d has gone", owners[lost]))
		case len(parts) == len(owners) && failed >= 0: // no other worker writes to it any more
			delete(c.parts, key)
			s.unsaved(key.step, fmt.Sprintf("worker %d: %s", owners[failed], parts[owners[failed]].err))
			s.then(DropCheckpoints{key.step})
		case len(parts) == len(owners) && key.step <= s.records.last.Step:
			delete(c.parts, key)
			m := made{Manifest: checkpoint.Manifest{Job: s.job.ID(), Step: key.step, Plan: key.version, Rule: parts[owners[0]].rule}}
			m.Made = rundir.Time{Time: s.now.UTC().Truncate(time.Millisecond)}
			if step, known := s.records.at(key.step); known {
				m.Loss, m.ValLoss = &step.Loss, step.ValLoss
			}
			for _, l := range profile(s.model).Layers {
				size := 0
				for _, n := range l.Tensors {
					size += n
				}
				m.Layers = append(m.Layers, size)
			}
			m.Describe(tensorsOf(s.model.Layers))
			for _, w := range owners {
				m.Files = append(m.Files, parts[w].file)
				m.writers = append(m.writers, parts[w].place)
				if b := parts[w].began; m.began.IsZero() || b.Before(m.began) {
					m.began = b
				}
			}
			c.whole = append(c.whole, m)
		}
	}
	s.commitNext()
	if c.steps > 0 {
		s.askForCheckpoint()
	}
}

// tensorsOf describes the tensors of a model, as far as the workers did.
func tensorsOf(layers []control.Layer) (all []checkpoint.Tensor) {
	for layer, l := range layers {
		for i := range min(len(l.Names), len(l.Shapes)) {
			all = append(all, checkpoint.Tensor{Layer: layer, Name: l.Names[i], Shape: l.Shapes[i]})
		}
	}
	return all
}

// Saved returns of which run the newest checkpoint is, and its step, while it may be copied: 0 where there is none, and outside of
// training.
func (s *Session) Saved() (of rundir.Eras, step int) {
	if s.phase != training {
		return nil, 0
	}
	return s.job.Eras(), s.checkpoints.newest
}

func (s *Session) commitNext() {
	if c := &s.checkpoints; !c.underway && len(c.whole) > 0 {
		c.underway = true
		s.then(CommitCheckpoint{c.whole[0].Manifest, c.whole[0].writers})
	}
}

// checkpointCommitted takes in that a checkpoint is whole, or will not be.
func (s *Session) checkpointCommitted(e CheckpointCommitted) {
	if e.Err != nil {
		s.unsaved(e.Step, OneLine(e.Err.Error()))
		s.then(DropCheckpoints{e.Step})
		return
	}
	c := &s.checkpoints
	c.newest, c.made = max(c.newest, e.Step), s.now
	s.then(s.event(eventCheckpoint, fmt.Sprintf("the state after step %d is saved", e.Step)))
	if c.why != "" {
		c.why = ""
		s.then(Show{view.Unsaved{}})
	}
	s.archive(e.Step)
	var began time.Time
	if c.underway {
		began = c.whole[0].began
	}
	s.trace(s.tr.Checkpoint(s.moment(), e.Step, began))
	s.tell(controller.Saved{Step: e.Step, Dir: s.cfg.RunDir})
}

// archive has a checkpoint copied to the target of the run, if it has one; step 0 only claims that.
func (s *Session) archive(step int) {
	if s.cfg.Checkpoints != "" {
		s.then(ArchiveCheckpoint{Step: step, From: s.checkpoints.from, Job: s.job, Data: s.model.Data})
	}
}

// archived takes in whether a checkpoint is at the target. It is an event where the cause is another one than the last time.
func (s *Session) archived(e Archived) {
	c := &s.checkpoints
	switch {
	case e.Err != nil:
		why := OneLine(e.Err.Error())
		if c.away == why {
			return
		}
		c.away = why
		text := "no checkpoint goes to " + why
		if e.Step > 0 {
			text = fmt.Sprintf("the checkpoint of step %d is in the run directory only: %s", e.Step, why)
		}
		s.then(s.event(eventUnarchived, text), Show{view.Note(text)})
	case e.Step > 0:
		text := fmt.Sprintf("the state after step %d is in %s", e.Step, s.cfg.Checkpoints)
		if s.then(s.event(eventArchived, text)); c.away != "" {
			c.away = ""
			s.then(Show{view.Note(text)})
		}
	}
}

// checkpointsPruned continues after all work on a checkpoint.
func (s *Session) checkpointsPruned(e CheckpointsPruned) {
	c := &s.checkpoints
	c.underway, c.whole = false, c.whole[1:]
	if e.Err != nil {
		s.note("old checkpoints: %s", OneLine(e.Err.Error()))
	}
	s.commitNext()
	if c.steps > 0 {
		s.askForCheckpoint()
	}
	s.conclude()
}

// seek has the hosts get the checkpoint from which the run resumes, once.
func (s *Session) seek() {
	c := &s.checkpoints
	if c.sought {
		return
	}
	c.sought = true
	s.then(Show{view.Note("gathering the newest checkpoint")},
		VerifyCheckpoint{Propose{Order: control.Order{Passed: id.Point{Step: math.MaxInt}}}, s.cfg.Resume.Job.Eras()})
}

// foundCheckpoint takes in from which checkpoint the run resumes.
func (s *Session) foundCheckpoint(e CheckpointVerified) {
	c := &s.checkpoints
	switch again := s.cfg.Resume; {
	case s.phase > training:
	case e.Step == 0 && again.OrBegin && len(e.Refused) == 0:
		if c.none = true; s.allPrepared() {
			s.start()
		}
	case e.Step == 0:
		s.judge(&GatherError{e.Refused})
	case e.Step > again.Step:
		s.judge(&GatherError{[]string{fmt.Sprintf("the checkpoint of step %d is newer than the records of the machine that resumes, which end at step %d: resume on the one whose metrics.jsonl has most steps", e.Step, again.Step)}})
	default:
		c.found, c.refused = e.Step, e.Refused
		if s.allPrepared() {
			s.start()
		}
	}
}

// checkpointVerified proposes the plan that begins from a checkpoint, or has another plan made if that cannot be used.
func (s *Session) checkpointVerified(e CheckpointVerified) {
	if s.checkpoints.sought && s.checkpoints.found == 0 && !s.checkpoints.none {
		s.foundCheckpoint(e)
		return
	}
	if e.Err != nil {
		s.judge(&FileError{Err: e.Err})
		return
	}
	for _, text := range e.Refused {
		s.then(s.event(eventNote, text))
	}
	if floor := s.job.Floor(); e.Step < floor {
		s.judge(&FileError{Err: fmt.Errorf("no whole checkpoint of step %d or a later one is left, and the run was another one before: launcher resume continues from an older one", floor)})
		return
	}
	switch order := &e.Propose.Order; {
	case order.Plan.Version != s.checkpoints.proposed: // another plan has come to take its place
	case e.Step >= order.Passed.Step:
		s.first(e.Propose)
	default:
		older := controller.Saved{Step: e.Step}
		if s.checkpoints.newest = e.Step; e.Step > 0 {
			older.Dir = order.From
		}
		s.tell(older)
	}
}
