package process

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/timing"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/engine"
)

// errRollback reports a rollback: the worker discards its state and continues from
// the order of recovery.rollback.
var errRollback = errors.New("the run rolls back to a checkpoint")

// recovery passes messages about plans between the agent and the current engine.
// There is no engine before the first order and during a rollback.
type recovery struct {
	w *Worker

	agent atomic.Pointer[time.Time] // when its last heartbeat came
	told  atomic.Bool               // it has said that this worker is not to commit

	broken chan id.Session // the other ends of links that broke
	copies sync.Once       // says that the memory of a peer on this host is not read
	boards sync.Once       // says that memory is not shared with a peer on this host

	mu      sync.Mutex
	failing map[id.Session]time.Time // since when dialling peers fails to which there never was a link
	engine  *engine.Engine
	early   []func(*engine.Engine) // messages for the next engine
	first   bool                   // the first order is still to come; never for a worker that joins
	order   *control.Order         // order to begin from: the first one, or one that rolls the run back
	signal  chan struct{}          // closed while order is set
}

// held returns what reports whether this worker must not enter a commit: its agent has said so, or has been silent
// for longer than the budget, so others may have evicted the worker. A worker that was frozen wakes
// up held.
func (r *recovery) held(budget time.Duration) func() bool {
	if budget == 0 {
		return r.told.Load
	}
	r.beaten()
	agent := timing.Of(budget).Agent()
	return func() bool {
		if r.told.Load() {
			return true
		}
		failed, _ := agent.Suspect(timing.History{Heard: *r.agent.Load()}, time.Now(), 0)
		return failed
	}
}

// beaten records a heartbeat of the agent, which sends them only with a majority.
func (r *recovery) beaten() {
	now := time.Now()
	r.agent.Store(&now)
	r.wake()
}

// hold records whether the agent lets this worker commit.
func (r *recovery) hold(on bool) {
	r.told.Store(on)
	r.wake()
}

// wake has the engine look whether it is held.
func (r *recovery) wake() {
	r.mu.Lock()
	e := r.engine
	r.mu.Unlock()
	if e != nil {
		e.Wake()
	}
}

// hear passes a Query, an Order or a Fill to the engine, now or once there is one. A worker that Start lets join
// begins without an order.
func (r *recovery) hear(m control.Message) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var tell func(*engine.Engine)
	switch m := m.(type) {
	case control.Start:
		r.first = r.first && !m.Joins
		return
	case control.Query:
		came := time.Now()
		tell = func(e *engine.Engine) {
			e.Query(m.Ballot, func(report control.Report) {
				_ = r.w.send(control.Answer{Ballot: m.Ballot, Report: report}) // without an agent, this worker ends
				r.w.spans.answered(m.Trace, came)
			})
		}
	case control.Order:
		r.w.spans.ordered(m, m.Trace)
		if m.Rollback {
			r.early = nil
		} else if !r.first || m.Ballot != (id.Ballot{}) {
			tell = func(e *engine.Engine) { e.Order(m) }
			break
		}
		if r.order == nil {
			close(r.signal)
		}
		r.order, r.first = &m, false
		if r.engine != nil {
			r.engine.Abandon(errRollback)
		}
		return
	case control.Fill:
		tell = func(e *engine.Engine) { e.Fill(m) }
	}
	if r.engine == nil || r.order != nil {
		r.early = append(r.early, tell)
	} else {
		tell(r.engine)
	}
}

// enter makes e the current engine.
func (r *recovery) enter(e *engine.Engine) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.engine = e
	if r.order != nil {
		e.Abandon(errRollback) // another rollback came meanwhile
		return
	}
	for _, tell := range r.early {
		tell(e)
	}
	r.early = nil
}

func (r *recovery) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.engine = nil
}

// ordered returns a channel that is closed once there is an order to begin from.
func (r *recovery) ordered() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.signal
}

// begin takes the order to begin from.
func (r *recovery) begin() control.Order {
	r.mu.Lock()
	defer r.mu.Unlock()
	o := *r.order
	r.order, r.signal = nil, make(chan struct{})
	return o
}

// cause returns why an operation of the engine failed.
func (r *recovery) cause(err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.order != nil {
		return errRollback
	}
	return err
}

// tell tells the agent what the engine says.
func (r *recovery) tell(m control.Message) {
	now := time.Now()
	_ = r.w.send(m) // without an agent, this worker ends
	if live, ok := m.(control.Applied); ok {
		r.w.spans.applied(live, now)
	}
}

// flip flips a bit of this worker's state.
func (r *recovery) flip(t core.Target) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.engine != nil {
		r.engine.Flip(t)
	}
}

// never keeps since when links to peers fail that were never up, and reports whether that of an event has failed for too long.
func (r *recovery) never(ev comm.LinkEvent) bool {
	if ev.Up || ev.Link > 0 || errors.Is(ev.Err, comm.ErrNotMember) {
		delete(r.failing, ev.Peer)
		return false
	}
	since, known := r.failing[ev.Peer]
	if !known {
		if r.failing == nil {
			r.failing = make(map[id.Session]time.Time)
		}
		since = time.Now()
		r.failing[ev.Peer] = since
	}
	return time.Since(since) >= timing.Handshake
}

// link reports a broken link to the engine and the agent. The goroutine of the link calls it.
func (r *recovery) link(ev comm.LinkEvent) {
	if ev.Copies != nil {
		r.copies.Do(func() {
			complain(fmt.Errorf("messages of worker %d pass through a socket: %w", ev.Peer.Worker, ev.Copies))
		})
	}
	if ev.Board != nil {
		r.boards.Do(func() {
			complain(fmt.Errorf("what all workers are to have goes to worker %d in messages, not through memory that both share: %w", ev.Peer.Worker, ev.Board))
		})
	}
	r.mu.Lock()
	e, late := r.engine, r.never(ev)
	r.mu.Unlock()
	if ev.Up || errors.Is(ev.Err, comm.ErrNotMember) || e == nil {
		return
	}
	switch {
	case ev.Link > 0:
		e.LinkLost(ev.Peer)
	case !late: // perhaps the other end has not come so far
		return
	}
	select {
	case r.broken <- ev.Peer:
	default: // the agent has enough reports
	}
}
