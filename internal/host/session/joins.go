package session

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/host/session/change"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/timing"
)

// Workers that start during training say Hello and Ready as all do, get a Start without a plan, and wait for the controller to give
// them a part. Until then nothing that is wrong with one ends the run: it is refused.

const (
	// MaxWorkers bounds the workers of a run, including those that were lost.
	MaxWorkers = 1 << 12

	// maxFirstTries is how many replacements of a worker in a row may be lost before training, where the end of the run costs nothing.
	maxFirstTries = 3
)

// roster knows which workers were started.
type roster struct {
	lives    map[id.WorkerID]int    // incarnations of each worker
	tries    map[id.WorkerID]int    // the newest of them in a row that have committed nothing
	refused  map[id.WorkerID]bool   // another incarnation would end the same way
	away     map[id.WorkerID]string // hosts with which workers were lost, to be restarted when they are back
	gone     map[string]bool        // those of them whose agents have exited
	early    map[string]int         // workers of hosts that came before training
	pending  int                    // processes that are being started
	due      []dueStart             // the pending ones that are started later
	joinedBy map[int]uint64         // plans by which workers got a part, as earlier leaders have written down
}

// dueStart is the start of a worker after a pause.
type dueStart struct {
	at  time.Time
	who plan.Worker
}

func newRoster() roster {
	return roster{
		lives: make(map[id.WorkerID]int), tries: make(map[id.WorkerID]int), refused: make(map[id.WorkerID]bool), away: make(map[id.WorkerID]string), gone: make(map[string]bool),
		early: make(map[string]int),
	}
}

// cancel drops the starts that are due later.
func (r *roster) cancel() {
	r.pending -= len(r.due)
	r.due = nil
}

// unused returns the least WorkerID above all that were used.
func (r *roster) unused() (next id.WorkerID) {
	for used := range r.lives {
		next = max(next, used+1)
	}
	return next
}

// begin returns the next incarnation of a worker.
func (r *roster) begin(w id.WorkerID, host string) plan.Worker {
	who := plan.Worker{ID: w, Incarnation: r.lives[w], Host: host}
	delete(r.away, w)
	r.lives[w]++
	r.pending++
	r.tries[w]++
	return who
}

// awaitsHost reports whether a host may come back by itself with which workers were lost.
func (r *roster) awaitsHost() bool {
	for _, host := range r.away {
		if !r.gone[host] {
			return true
		}
	}
	return false
}

// awaits reports whether workers may come without being asked for: they start, or were lost with a host that may be back.
func (s *Session) awaits() bool {
	return s.end.stop == "" && (s.roster.pending > 0 || s.roster.awaitsHost() ||
		slices.ContainsFunc(s.workers, func(w *worker) bool { return w.state < working && !w.over() && w.fault == nil }))
}

// add starts workers with new WorkerIDs.
func (s *Session) add(n int) {
	var a AnswerAdd
	switch {
	case !s.cfg.CanStart:
		a.Refusal = "this run has no worker processes"
	case s.phase < training:
		a.Refusal = "the run has not begun yet"
	case s.phase > training:
		a.Refusal = "the run is at its end"
	case n < 1 || n > MaxWorkers-len(s.workers):
		a.Refusal = fmt.Sprintf("a run has at most %d workers", MaxWorkers)
	default:
		next := s.roster.unused()
		for w := next; w < next+id.WorkerID(n); w++ {
			s.launch(w, "", fmt.Sprintf("worker %d is started", w))
			a.IDs = append(a.IDs, int(w))
		}
	}
	s.then(a)
}

// respawns reports whether a worker that is lost is to be replaced.
func (s *Session) respawns(w id.WorkerID) bool {
	return s.cfg.Respawn && s.cfg.CanStart && s.phase <= training && s.end.stop == "" && len(s.workers) < MaxWorkers && !s.roster.refused[w]
}

// replace has a worker that was lost in training continue, if it was fenced, or restarts it, if the user wants that.
func (s *Session) replace(w *worker) {
	switch {
	case s.phase != training:
	case w.exit == fenced:
		who := s.roster.begin(w.who.ID, w.who.Host)
		reason := fmt.Sprintf("worker %d joins again when it is heard within %v", w.who.ID, timing.Of(s.cfg.Detect).Grace)
		s.then(s.about(w.who.ID, eventBegin, reason), FenceWorker{w.place, who})
	case s.respawns(w.who.ID):
		s.launchAfter(timing.RespawnStart, w.who.ID, w.who.Host, fmt.Sprintf("worker %d is restarted", w.who.ID))
	}
}

// exclude has the run continue without a worker. If it is well, or has missed heartbeats, so that it may be stopped for a while only,
// it is fenced, unless no other worker continues the run meanwhile, or it may be in a call of OnStep, which another worker is to
// repeat: then it is killed.
func (s *Session) exclude(w *worker) {
	if s.fences(w) && (w.well || !w.stopped.IsZero() || !w.heard.Heard.IsZero() && w.heard.Silence(s.now) > timing.Of(s.cfg.Detect).Pause) {
		s.silent = append(s.silent, w)
		return
	}
	s.kill(w)
}

// fences reports whether the session of a worker can end without its process.
func (s *Session) fences(w *worker) bool {
	return s.phase == training && s.cfg.CanStart && !s.isLast(w) && len(s.workers) < MaxWorkers && w.exit == running &&
		!w.overdue && !s.deliveries.Calling(w.who)
}

// isLast reports whether processes may start, and no other worker of the plan can continue the run. Then nothing is gained if the run
// continues without it.
func (s *Session) isLast(w *worker) bool {
	return s.phase == training && s.cfg.CanStart && s.hasPart(w) && !slices.ContainsFunc(s.workers, func(x *worker) bool {
		return x != w && s.goesOn(x)
	})
}

// fence ends the session of a worker at once, and not its process.
func (s *Session) fence(w *worker) {
	if s.phase != training || w.exit != running {
		return
	}
	w.exitTo(fenced)
	w.status, w.ended = Status{Code: -1, Text: "fenced"}, s.now
	if s.ended(w); s.phase != training {
		s.kill(w)
	}
}

// fenced takes in that the process of a fenced worker has a place for its next session.
func (s *Session) fenced(e Fenced) {
	s.roster.pending--
	s.enlist(&worker{who: e.As, fences: true, pid: s.workers[e.Worker].pid, hello: s.now.Add(timing.Of(s.cfg.Detect).Grace)}, view.Awaited)
}

// replaceFirst restarts a worker that was lost before training.
func (s *Session) replaceFirst(w *worker) {
	cause := OneLine(stoppedBy(s.death(w)))
	w.set(gone)
	w.joins = true // it never had a part
	s.records.lost++
	s.launch(w.who.ID, w.who.Host, fmt.Sprintf("%s, before training began: it is restarted", cause))
}

// beginWithout leaves out a worker that was lost before training and is not replaced, or ends the run where the others are too few.
func (s *Session) beginWithout(w *worker) {
	if have, need := len(s.beginners())-1, max(s.cfg.MinWorkers, s.cfg.Stages, 1); have < need {
		s.end.lost = w
		err := s.death(w)
		if have > 0 {
			flag := "--min-workers"
			if s.cfg.Stages == need {
				flag = "--stages"
			}
			err = fmt.Errorf("%w: %s left, and %s is %d; with --respawn it would be replaced", err, plan.Count(have, "worker"), flag, need)
		}
		s.judge(err)
		return
	}
	w.set(gone)
	w.joins = true // it never had a part
	s.records.lost++
	s.then(Show{view.Note(OneLine(stoppedBy(s.death(w))) + ", before training began: it begins without it")})
	if s.allPrepared() {
		s.start()
	}
}

// launch starts a worker: at once the first time, and after growing pauses while its incarnations commit nothing.
func (s *Session) launch(w id.WorkerID, host, reason string) {
	s.launchAfter(0, w, host, reason)
}

// launchAfter is launch after a pause at least, of which people need not know.
func (s *Session) launchAfter(least time.Duration, w id.WorkerID, host, reason string) {
	pause := max(timing.Respawn(s.roster.tries[w]), least)
	who := s.roster.begin(w, host)
	if pause > least {
		reason += fmt.Sprintf(" in %v", pause)
	}
	if pause > 0 {
		s.roster.due = append(s.roster.due, dueStart{s.now.Add(pause), who})
	}
	if s.phase < training { // the run has no files yet
		s.then(Show{view.Note(reason)})
	} else {
		s.then(s.about(w, eventBegin, reason))
	}
	if pause == 0 {
		s.then(StartWorker{who})
	}
}

// startDue starts the workers whose pause is over.
func (s *Session) startDue() {
	s.roster.due = slices.DeleteFunc(s.roster.due, func(d dueStart) bool {
		if s.now.Before(d.at) {
			return false
		}
		s.then(StartWorker{d.who})
		return true
	})
}

// hostBack restarts the workers that were lost with a host, and starts as many others as it brings beyond them.
func (s *Session) hostBack(host string, workers int) {
	if s.phase < training && workers > 0 {
		s.roster.early[host] = workers
	}
	if s.phase != training || s.end.stop != "" {
		return
	}
	for _, id := range slices.Sorted(maps.Keys(s.roster.away)) {
		if s.roster.away[id] == host && len(s.workers) < MaxWorkers {
			s.launch(id, host, fmt.Sprintf("%s is back: worker %d is restarted", host, id))
			workers--
		}
	}
	for ; workers > 0 && len(s.workers) < MaxWorkers; workers-- {
		id := s.roster.unused()
		s.launch(id, host, fmt.Sprintf("%s joins: worker %d is started", host, id))
	}
}

// bringEarly does so for the hosts that came before training.
func (s *Session) bringEarly() {
	if s.phase != training {
		return
	}
	for _, host := range slices.Sorted(maps.Keys(s.roster.early)) {
		workers := s.roster.early[host]
		delete(s.roster.early, host)
		s.hostBack(host, workers)
	}
}

// started takes in that a process was started.
func (s *Session) started(e WorkerStarted) {
	s.roster.pending--
	if e.Err != nil {
		s.cannotStart(e)
		return
	}
	s.enlist(&worker{who: e.Worker, hello: s.now.Add(s.cfg.HelloTimeout)}, view.Begins)
}

// enlist gives a worker a place.
func (s *Session) enlist(w *worker, how string) {
	w.joins = s.phase >= training
	w.fresh = w.joins
	w.place = len(s.workers)
	s.workers = append(s.workers, w)
	if s.phase > training {
		s.kill(w)
		return
	}
	s.then(w.row(how))
	if w.pid > 0 {
		s.then(s.processes())
	}
}

// cannotStart takes in that a process could not be started.
func (s *Session) cannotStart(e WorkerStarted) {
	cause := fmt.Sprintf("worker %d cannot be started: %v", e.Worker.ID, OneLine(e.Err.Error()))
	if s.phase == starting && s.roster.tries[e.Worker.ID] >= maxFirstTries {
		s.judge(errors.New(cause))
		return
	}
	if s.phase == training {
		s.then(s.event(eventRefused, cause))
	}
	if s.respawns(e.Worker.ID) {
		s.launch(e.Worker.ID, e.Worker.Host, fmt.Sprintf("worker %d is restarted", e.Worker.ID))
	}
}

// join lets a worker join that is ready and has the run's job.
func (s *Session) join(w *worker) {
	if field, values := change.First(s.model, w.ready); field != "" {
		s.refuse(w, &DifferError{Worker: w.id(), Than: 0, Field: field, Values: values})
		return
	}
	if s.phase > training {
		s.kill(w)
		return
	}
	w.set(working)
	start := s.startMessage()
	start.Ring, start.Joins = s.ringOf(w), true
	s.send(w, start)
	if s.end.stop != "" { // all that were asked may be lost
		s.send(w, control.Stop{Reason: string(s.end.stop)})
	}
	s.then(w.row("joins"))
	s.tell(controller.Joined{Worker: w.who, Addr: w.ready.Addr})
}

// refuse ends a worker that has no part in the plan yet. The run continues.
func (s *Session) refuse(w *worker, err error) {
	if s.phase == ending || w.state == gone || w.fault != nil {
		return
	}
	w.fault, w.failed = err, true
	s.roster.refused[w.who.ID] = true
	s.kill(w)
	reason := fmt.Sprintf("worker %d: %s", w.id(), OneLine(err.Error()))
	where := ""
	if w.who.Host != "" {
		where = " of " + w.who.Host
	}
	s.then(s.about(w.who.ID, eventRefused, reason), Show{view.Note(reason + "; this worker" + where + " is refused, and the run goes on without it")})
}

// loseJoiner takes in that a worker has exited before it had a part.
func (s *Session) loseJoiner(w *worker) {
	w.set(gone)
	cause := OneLine(stoppedBy(s.death(w)))
	if !w.failed {
		kind := eventLost
		if w.hasLeft() {
			kind = eventLeft
		}
		e := s.about(w.who.ID, kind, cause+", before it had a part")
		s.noteHost(&e, w)
		s.then(e)
	}
	s.then(w.row("gone"), s.processes())
	s.tell(controller.Dead{Worker: w.who, Cause: cause, How: controller.Reaped, Died: w.ended, Awaits: s.awaits()})
	if !w.hasLeft() {
		s.replace(w)
	}
	s.conclude()
}

// noteHost remembers the host with which a worker was lost.
func (s *Session) noteHost(e *WriteEvent, w *worker) {
	if !w.status.Lost.IsZero() {
		e.Event.Host, s.roster.away[w.who.ID] = w.who.Host, w.who.Host
		s.roster.gone[w.who.Host] = w.status.Gone
	}
}
