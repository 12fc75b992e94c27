package process

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/worker/engine"
)

// errRestart says that the state of the run is given up, and that it goes on
// from the order of recovery.restart.
var errRestart = errors.New("the run goes back to a checkpoint")

// recovery carries what the agent and the engine have to say to each other
// about plans. The engine of the moment may be missing: before the first, and
// while a restart makes another.
type recovery struct {
	w *Worker

	agent atomic.Pointer[time.Time] // when it was heard of last

	broken chan id.Session // the other ends of links that broke

	mu     sync.Mutex
	engine *engine.Engine
	early  []func(*engine.Engine) // what the next engine is to be told
	again  *controller.Order      // that restarts the run
	signal chan struct{}          // closed when again is set
}

// held returns what keeps this worker from commits: that it has not heard its agent for longer
// than the budget, within which others may have given it up. A worker that was frozen and wakes
// finds itself held.
func (r *recovery) held(budget time.Duration) func() bool {
	if budget == 0 {
		return nil
	}
	r.beaten()
	return func() bool { return time.Since(*r.agent.Load()) > budget }
}

// beaten takes note that the agent is there, and has a majority with it.
func (r *recovery) beaten() {
	now := time.Now()
	r.agent.Store(&now)
	r.mu.Lock()
	e := r.engine
	r.mu.Unlock()
	if e != nil {
		e.Wake()
	}
}

// hear takes in a Query, an Order or a Fill.
func (r *recovery) hear(m control.Message) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var tell func(*engine.Engine)
	switch m := m.(type) {
	case control.Query:
		b, came := id.Ballot{Term: m.Term, Attempt: m.Attempt}, time.Now()
		tell = func(e *engine.Engine) {
			e.Query(b, func(report controller.Report) {
				body, err := report.Encode()
				if err != nil {
					panic(fmt.Sprintf("process: %v", err)) // plain numbers
				}
				_ = r.w.send(control.Answer{Term: b.Term, Attempt: b.Attempt, Report: body}) // without an agent, this worker ends
				r.w.spans.answered(m.Trace, came)
			})
		}
	case control.Order:
		order, err := controller.ParseOrder(m.Order)
		if err != nil {
			return err
		}
		r.w.spans.ordered(order, m.Trace)
		if order.Restart {
			r.again, r.early = &order, nil
			close(r.restarting())
			if r.engine != nil {
				r.engine.Abandon(errRestart)
			}
			return nil
		}
		tell = func(e *engine.Engine) { e.Order(order) }
	case control.Fill:
		fill, err := controller.ParseFill(m.Fill)
		if err != nil {
			return err
		}
		tell = func(e *engine.Engine) { e.Fill(fill) }
	}
	if r.engine == nil || r.again != nil {
		r.early = append(r.early, tell)
	} else {
		tell(r.engine)
	}
	return nil
}

// enter makes an engine that of the moment.
func (r *recovery) enter(e *engine.Engine) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.engine = e
	if r.again != nil {
		e.Abandon(errRestart) // another one came meanwhile
		return
	}
	for _, tell := range r.early {
		tell(e)
	}
	r.early = nil
}

func (r *recovery) leave(*engine.Engine) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.engine = nil
}

// restarting returns the channel of the next restart; r.mu is held.
func (r *recovery) restarting() chan struct{} {
	if r.signal == nil {
		r.signal = make(chan struct{})
	}
	return r.signal
}

// restarted returns a channel that is closed when the run is to restart.
func (r *recovery) restarted() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.restarting()
}

// restart returns the order to go on from.
func (r *recovery) restart() controller.Order {
	r.mu.Lock()
	defer r.mu.Unlock()
	o := *r.again
	r.again, r.signal = nil, nil
	return o
}

// cause returns why an operation of the engine has failed.
func (r *recovery) cause(err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.again != nil {
		return errRestart
	}
	return err
}

// applied tells the agent of a plan that is live here.
func (r *recovery) applied(a engine.Applied) {
	now := time.Now()
	_ = r.w.send(control.Applied{
		Term: a.Ballot.Term, Attempt: a.Ballot.Attempt, Generation: a.Version.Generation, N: a.Version.N,
		Opened: a.Opened, Edit: int64(a.Edit), Resume: int64(a.Resume),
	})
	r.w.gossip.applied(a.Version)
	r.w.spans.applied(a, now)
}

// repaired tells the agent of a block that was altered here, and is as it was
// again.
func (r *recovery) repaired(layer string, x engine.Repair) {
	_ = r.w.send(control.Repaired{Step: x.Step, Try: x.Try, Layer: layer, Block: x.Block, Target: x.Target.String()})
}

// flip flips a bit of this worker's state.
func (r *recovery) flip(t engine.Target) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.engine != nil {
		r.engine.Flip(t)
	}
}

// link tells of a link that broke. It is called by the goroutine of the link.
func (r *recovery) link(ev comm.LinkEvent) {
	if ev.Up || ev.Link == 0 || errors.Is(ev.Err, comm.ErrNotMember) {
		return
	}
	r.mu.Lock()
	e := r.engine
	r.mu.Unlock()
	if e == nil {
		return
	}
	e.LinkLost(ev.Peer)
	select {
	case r.broken <- ev.Peer:
	default: // the agent has heard of enough
	}
}
