package sim

import (
	"fmt"
	"time"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// What a worker and its host tell each other, and the host the leader.

// local is what a host keeps of a worker, for the leaders to come, and what the worker hears once.
type local struct {
	told, heard                time.Time // when the newest message comes to the leader, and to the worker
	said                       []control.Message
	steps                      []control.Step
	saved, done, leave         control.Message
	status                     *session.Status // how it has exited
	started, stopped, released bool
}

// introduce tells what the worker is.
func (w *worker) introduce() {
	c := w.c
	r := control.Ready{Addr: addr(w.self), CheckpointEvery: c.cfg.Checkpoint}
	r.Job = rundir.Job{Program: "gpt", Steps: c.cfg.Steps, GlobalBatch: c.cfg.Micros, MicroBatch: 1, Layers: len(c.cfg.Layers)}
	for i, l := range c.cfg.Layers {
		r.Layers = append(r.Layers, control.Layer{Name: layerName(i), Tensors: l.Tensors})
	}
	w.say(control.Hello{Protocol: control.Protocol, WorkerID: int(w.self.ID), Incarnation: w.self.Incarnation, PID: 1 + int(w.self.ID)})
	w.say(r)
}

func layerName(i int) string { return fmt.Sprintf("layer%d", i) }

// beat has heartbeats told.
func (w *worker) beat() {
	w.c.after(timing.Heartbeat, func() {
		w.run(func() {
			if w.next != nil {
				return
			}
			w.tell(func(place int) session.Event { return session.Received{Worker: place, Message: control.Beat{}} })
			w.beat()
		})
	})
}

// say tells the host something, which passes it on to the leader.
func (w *worker) say(m control.Message) {
	if w.next != nil {
		return
	}
	switch m := m.(type) {
	case control.Hello, control.Ready:
		w.said = append(w.said, m)
	case control.Step:
		w.steps = append(w.steps, m)
	case control.Saved:
		w.saved = m
	case control.Done:
		w.done = m
	case control.Leave:
		w.leave = m
	}
	w.forward(m)
}

// forward tells the leader what the worker said.
func (w *worker) forward(m control.Message) {
	if m != nil {
		w.tell(func(place int) session.Event { return session.Received{Worker: place, Message: m} })
	}
}

// account tells a new leader all that it has to know. last is the newest step in the books.
func (w *worker) account(last *rundir.Metrics) {
	for _, m := range w.said {
		w.forward(m)
	}
	for i, m := range w.steps {
		if last == nil || m.Plan > last.Plan || m.Plan == last.Plan && m.Step > last.Step || i == len(w.steps)-1 {
			w.forward(m)
		}
	}
	w.forward(w.saved)
	w.forward(w.done)
	w.forward(w.leave)
	if w.status != nil {
		w.tellEnd()
	}
}

// relay brings the leader's message to the worker.
func (w *worker) relay(m control.Message) {
	once := func(told *bool) bool {
		was := *told
		*told = true
		return was
	}
	switch m := m.(type) {
	case control.Start:
		if once(&w.started) {
			return
		}
	case control.Stop:
		if once(&w.stopped) {
			return
		}
	case control.Release:
		if once(&w.released) {
			return
		}
	case control.Order:
		if m.Rollback {
			w.done = nil
		}
	case control.Fence:
		w.fence(w.c.workers[id.Session{Worker: w.session.Worker, Incarnation: m.Next}])
		return
	}
	w.run(func() { w.hear(m) })
}

// hear takes in what the leader says.
func (w *worker) hear(m control.Message) {
	switch m := m.(type) {
	case control.Start:
		w.reads = newReads(m.Skipped)
		if w.core == nil && m.Joins {
			w.begins(control.Order{})
		}
	case control.BadSample:
		if w.reads != nil {
			w.judged(m)
		}
	case control.Save:
		w.asked = true
	case control.Stop:
		w.reason = m.Reason
	case control.Release:
		w.exit(session.Status{Text: "exit status 0"})
	case control.Order:
		switch {
		case m.Rollback, w.core == nil && m.Ballot == id.Ballot{}: // a rollback ends the core and begins another one
			w.begins(m)
		case w.core == nil:
			w.early = append(w.early, m)
		default:
			w.step(m)
		}
	case control.Query, control.Fill:
		if w.core == nil {
			w.early = append(w.early, m)
			return
		}
		w.step(m)
	}
}

// measures is how long passes take, as a worker tells it.
func (w *worker) measures(took time.Duration) control.Beat {
	at, _ := w.core.Passed()
	b := control.Beat{Step: max(1, at.Step), Over: 1e9}
	p := w.core.Plan()
	for _, s := range p.StagesOf(w.self.ID) {
		for l := p.Stages[s].Lo; l < p.Stages[s].Hi; l++ {
			b.Layers = append(b.Layers, control.LayerTime{Layer: l, Forward: took.Nanoseconds(), Backward: 2 * took.Nanoseconds()})
		}
	}
	return b
}

// fence ends the session, as the host does: what the process says and how it exits is of the next one. The process hears it when it runs.
func (w *worker) fence(next *worker) {
	w.next = next
	if w.status != nil {
		next.before = nil
		next.exit(*w.status)
		return
	}
	w.status = &session.Status{Code: -1, Text: "fenced"}
	w.run(func() {
		w.c.note("worker %v continues as %v", w.session, next.session)
		w.end()
		next.before, next.sample = nil, w.sample // it keeps the data that it has read
		next.in(w.c.delay(2*time.Millisecond), next.introduce)
		next.beat()
	})
}

// exit ends the process, and closes its connections.
func (w *worker) exit(status session.Status) {
	w.end()
	if w.next != nil {
		w.next.exit(status)
		return
	}
	w.status = &status
	w.tellEnd()
}

// end ends the session.
func (w *worker) end() {
	w.alive, w.frozen, w.deferred = false, false, nil
	for _, x := range w.c.order {
		if x != w {
			w.c.link(w, x).refresh()
		}
	}
}

func (w *worker) tellEnd() {
	status := *w.status
	w.tell(func(place int) session.Event { return session.ConnClosed{Worker: place} })
	w.tell(func(place int) session.Event { return session.WorkerExited{Worker: place, Status: status} })
}
