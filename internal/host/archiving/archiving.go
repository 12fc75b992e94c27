// Package archiving copies the checkpoints of a run to its target, in the background.
package archiving

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/store/archive"
	"github.com/soliton-train/soliton/internal/timing"
)

// Copier copies checkpoints to the target of the run, one at a time, in a goroutine of its own. Of those that come meanwhile, only the
// newest is copied. Nothing waits for it but the end of the run, and that for a limited time.
type Copier struct {
	save   func(ctx context.Context, e session.ArchiveCheckpoint) error
	post   func(session.Event) bool
	cancel context.CancelFunc
	over   chan struct{} // closed when no more come
	ended  chan struct{} // closed when the goroutine has ended

	mu     sync.Mutex
	wanted *session.ArchiveCheckpoint
	came   chan struct{} // has an element when wanted may be set

	err error // why the newest is not there; to be read after ended
}

// New starts the goroutine. save makes one try, and post is told what has come of it.
func New(save func(context.Context, session.ArchiveCheckpoint) error, post func(session.Event) bool) *Copier {
	ctx, cancel := context.WithCancel(context.Background())
	a := &Copier{save: save, post: post, cancel: cancel, over: make(chan struct{}), ended: make(chan struct{}), came: make(chan struct{}, 1)}
	go func() {
		defer close(a.ended)
		a.run(ctx)
	}()
	return a
}

// Put has a checkpoint copied.
func (a *Copier) Put(e session.ArchiveCheckpoint) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.wanted == nil || e.Step >= a.wanted.Step {
		a.wanted = &e
	}
	select {
	case a.came <- struct{}{}:
	default:
	}
}

func (a *Copier) run(ctx context.Context) {
	const most = time.Minute
	pause := time.Duration(0)
	over := a.over
	for {
		retry := time.NewTimer(pause)
		came, again := a.came, retry.C
		if pause > 0 {
			came = nil // a target that fails is given time
		} else {
			again = nil
		}
		last := false
		select {
		case <-came:
		case <-again:
		case <-over:
			last, over = true, nil
		case <-ctx.Done():
		}
		retry.Stop()
		if ctx.Err() != nil {
			return
		}
		a.mu.Lock()
		e := a.wanted
		a.mu.Unlock()
		if e != nil {
			a.err = a.save(ctx, *e)
			if ctx.Err() == nil || a.err == nil {
				a.post(session.Archived{Step: e.Step, Err: a.err})
			}
			if a.err == nil {
				pause = 0
				a.mu.Lock()
				if a.wanted == e {
					a.wanted = nil
				}
				a.mu.Unlock()
			} else {
				pause = min(max(2*pause, time.Second), most)
			}
			if errors.Is(a.err, archive.ErrStale) {
				return
			}
		}
		if last || over == nil {
			return
		}
	}
}

// End ends the goroutine. With last, what is wanted is tried once more. It returns why the newest checkpoint is not at the target.
func (a *Copier) End(last bool) error {
	if last {
		close(a.over)
		late := time.AfterFunc(timing.ArchiveEnd, a.cancel)
		defer late.Stop()
	} else {
		a.cancel()
	}
	<-a.ended
	a.cancel()
	return a.err
}
