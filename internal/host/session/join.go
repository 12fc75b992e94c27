package session

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

// Workers that begin while the run goes on say Hello and Ready as all do, get a Start without a
// plan, and wait for the controller to give them a part. Until then nothing that is wrong with
// one ends the run: it is refused.

const (
	// maxWorkers bounds the sessions of a run, whatever is asked for.
	MaxWorkers = 1 << 12

	// maxTries is how many replacements of a worker in a row may die before they have a part.
	maxTries = 3
)

// add starts workers with new IDs.
func (s *Session) add(now time.Time, e AddWorkers) []Effect {
	refusal := ""
	switch {
	case !s.cfg.CanStart:
		refusal = "this run has no worker processes"
	case s.judged || s.state > training:
		refusal = "the run is at its end"
	case s.state < training:
		refusal = "the run has not begun yet"
	case e.N < 1 || e.N > MaxWorkers-len(s.workers):
		refusal = fmt.Sprintf("a run has at most %d workers", MaxWorkers)
	}
	if refusal != "" {
		return []Effect{AnswerAdd{Refusal: refusal}}
	}
	next := id.WorkerID(0)
	for id := range s.lives {
		next = max(next, id+1)
	}
	var effects []Effect
	var ids []int
	for w := next; w < next+id.WorkerID(e.N); w++ {
		effects = append(effects, s.launch(now, w, "", fmt.Sprintf("worker %d is started", w))...)
		ids = append(ids, int(w))
	}
	return append(effects, AnswerAdd{IDs: ids})
}

// replace starts a worker in the place of one that was lost, if that is wished for.
func (s *Session) replace(now time.Time, dead plan.Worker) []Effect {
	if !s.cfg.Respawn || !s.cfg.CanStart || s.judged || s.state != training || s.stop != "" || len(s.workers) >= MaxWorkers {
		return nil
	}
	if s.tries[dead.ID] >= maxTries {
		return []Effect{s.event(now, "note", fmt.Sprintf("worker %d is not started again: %d replacements have died before they had a part", dead.ID, maxTries))}
	}
	return s.launch(now, dead.ID, dead.Host, fmt.Sprintf("worker %d is started anew", dead.ID))
}

func (s *Session) launch(now time.Time, id id.WorkerID, host, reason string) []Effect {
	who := plan.Worker{ID: id, Incarnation: s.lives[id], Host: host}
	delete(s.away, id)
	s.lives[id]++
	s.tries[id]++
	e := s.event(now, "begin", reason)
	e.Event.Worker = int(id)
	return []Effect{e, StartWorker{who}}
}

// comeBack starts the workers anew that were lost with a host, now that it is back.
func (s *Session) comeBack(now time.Time, host string) []Effect {
	if s.judged || s.state != training || s.stop != "" || s.heir != nil {
		return nil
	}
	var effects []Effect
	for _, id := range slices.Sorted(maps.Keys(s.away)) {
		if s.away[id] == host && len(s.workers) < MaxWorkers {
			effects = append(effects, s.launch(now, id, host, fmt.Sprintf("%s is back: worker %d is started anew", host, id))...)
		}
	}
	return effects
}

// started takes in a worker that was started.
func (s *Session) started(now time.Time, e WorkerStarted) []Effect {
	if e.Err != nil {
		return []Effect{s.event(now, "refused", fmt.Sprintf("worker %d cannot be started: %v", e.Worker.ID, OneLine(e.Err.Error())))}
	}
	s.workers = append(s.workers, worker{who: e.Worker, joins: true, fresh: true, hello: now.Add(s.cfg.HelloTimeout)})
	id := len(s.workers) - 1
	if s.judged || s.state > training {
		return []Effect{Kill{id}}
	}
	return []Effect{s.row(id, "begins")}
}

// enter lets a worker join that is ready and has the run's job.
func (s *Session) enter(now time.Time, id int) []Effect {
	w := &s.workers[id]
	if field, values := difference(s.first, w.ready); field != "" {
		return s.refuse(now, id, &DifferError{Worker: s.id(id), Than: 0, Field: field, Values: values})
	}
	if s.state > training {
		return []Effect{Kill{id}}
	}
	w.state = training
	start := s.startMessage()
	start.Ring = s.ringOf(w)
	effects := []Effect{s.row(id, "joins"), Send{id, start}}
	return append(effects, s.tell(now, controller.Joined{Worker: w.who, Addr: w.ready.Addr})...)
}

// refuse ends a worker that has no part in the plan yet; the run goes on.
func (s *Session) refuse(now time.Time, id int, err error) []Effect {
	w := &s.workers[id]
	w.hello = time.Time{}
	if s.judged || w.gone || w.doom != nil {
		return nil
	}
	w.doom, w.killed = err, true
	w.failed = true
	s.tries[w.who.ID] = maxTries // another one would end the same way
	return []Effect{s.about(now, id, "refused", fmt.Sprintf("worker %d: %s", s.id(id), OneLine(err.Error()))), Kill{id}}
}

// fall goes on without a worker that has ended before it had a part.
func (s *Session) fall(now time.Time, id int) []Effect {
	w := &s.workers[id]
	w.gone, w.hello = true, time.Time{}
	cause := OneLine(stoppedBy(s.death(id)))
	effects := []Effect{}
	if !w.failed {
		kind := "lost"
		if w.status.OK() {
			kind = "left"
		}
		e := s.about(now, id, kind, cause+", before it had a part")
		if !w.status.Lost.IsZero() {
			e.Event.Host, s.away[w.who.ID] = w.who.Host, w.who.Host
		}
		effects = append(effects, e)
	}
	effects = append(effects, s.row(id, "gone"), s.processes())
	effects = append(effects, s.tell(now, controller.Dead{Worker: w.who, Cause: cause, How: controller.Reaped, Died: w.ended})...)
	if !w.status.OK() {
		effects = append(effects, s.replace(now, w.who)...)
	}
	return append(effects, s.conclude(now)...)
}
