package host

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// proposer commits what a leader proposes, one entry after the other, so that its loop does not wait.
type proposer struct {
	log     agree.Log
	term    uint64        // in which the entries are made
	entries chan proposal // in the order of their versions
}

type proposal struct {
	entry agree.Entry
	began time.Time
}

// run commits entries and tells of them until ctx ends.
func (p *proposer) run(ctx context.Context, post func(session.Event) bool) {
	for {
		select {
		case next := <-p.entries:
			if _, err := p.log.Propose(ctx, next.entry); err != nil {
				l := p.log.Leadership()
				leads := l.Ready && l.Term == p.term
				_, job := next.entry.(agree.Job)
				switch {
				case ctx.Err() != nil:
					return
				case leads && (errors.Is(err, agree.ErrInvalid) || p.log.Broken() != nil && !errors.Is(err, agree.ErrStale)):
					post(session.FileFailed{Err: err})
					return
				case job, leads && errors.Is(err, agree.ErrStale):
					continue // an earlier leader had the job agreed, or a newer plan has taken the place of this one
				}
				return // another host leads, which ends this
			}
			if e, ok := next.entry.(agree.Plan); ok && !post(session.Agreed{Version: e.Version, Proposed: next.began}) {
				return
			}
		case <-p.log.Broken():
			post(session.FileFailed{Err: p.log.Sync()})
			return
		case <-ctx.Done():
			return
		}
	}
}

// job proposes the job of the run. It does not wait, as long as the log follows.
func (p *proposer) job(j rundir.Job) error {
	text, err := json.Marshal(j)
	if err == nil {
		p.entries <- proposal{agree.Job{Generation: p.log.State().Generation, Data: text}, time.Now()}
	}
	return err
}

// plan proposes an order, as job does.
func (p *proposer) plan(o control.Order, reason string) error {
	text, err := o.Encode()
	if err == nil {
		e := agree.Plan{Term: p.term, Version: o.Plan.Version, Reason: reason[:min(len(reason), agree.MaxReason)], Data: text}
		p.entries <- proposal{e, time.Now()}
	}
	return err
}
