package process

import (
	"cmp"
	"context"
	"fmt"
	"sync"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/worker/core"
)

// deliveries are the calls of OnStep, which the agent asks for; see [control.Deliver].
type deliveries struct {
	mu    sync.Mutex
	asked []control.Deliver
	came  chan struct{} // has an element when asked does

	// The goroutine that trains has the others.
	caller bool // this worker makes the calls
	told   int  // newest step that is delivered
	lines  Lines
}

func (c *deliveries) put(m control.Deliver) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked = append(c.asked, m)
	select {
	case c.came <- struct{}{}:
	default:
	}
}

func (c *deliveries) take() (all []control.Deliver) {
	c.mu.Lock()
	defer c.mu.Unlock()
	all, c.asked = c.asked, nil
	return all
}

// deliver makes the calls that the agent asks for. If this worker is the one that makes them, it waits for that of a step, so that no
// further step is computed before.
func (w *Worker) deliver(ctx context.Context, j *Job, step int) error {
	c := &w.deliveries
	for {
		for _, m := range c.take() {
			if err := w.call(j, m); err != nil {
				return err
			}
		}
		if !c.caller || c.told >= step {
			return nil
		}
		if released, err := w.waitAsked(ctx); err != nil || released { // the run continues without this worker
			return cmp.Or(err, core.ErrLeft)
		}
	}
}

// waitAsked waits until the agent asks for calls or releases this worker. A rollback is an error.
func (w *Worker) waitAsked(ctx context.Context) (released bool, err error) {
	select {
	case <-w.deliveries.came:
		return false, nil
	case <-w.release:
		return true, nil
	case <-w.recovery.ordered():
		return false, errRollback
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

// call calls OnStep, unless it has returned for that step before.
func (w *Worker) call(j *Job, m control.Deliver) error {
	c := &w.deliveries
	c.caller = true
	if m.After > c.told {
		c.told = m.After
		c.lines.resume(m.Files)
	}
	if m.Step == nil {
		return nil
	}
	if m.Step.Step > c.told && j.OnStep != nil {
		at := w.step
		w.step = m.Step.Step
		err := w.user(control.CallOnStep, func() error { return j.OnStep(Call{Step: *m.Step, Again: m.Again, Lines: &c.lines}) })
		if err = cmp.Or(err, c.lines.err); err != nil {
			return fmt.Errorf("OnStep of step %d: %w", m.Step.Step, err)
		}
		w.step = at
	}
	c.told = max(c.told, m.Step.Step)
	return w.send(control.Delivered{Step: c.told, Files: c.lines.files()})
}

// leaveCalls says that this worker makes no calls any more.
func (w *Worker) leaveCalls(j *Job) error {
	w.deliveries.take()
	if j.OnStep == nil {
		return nil
	}
	return w.send(control.Delivered{Step: w.deliveries.told, Files: w.deliveries.lines.files(), Left: true})
}
