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

// agreement is the log of what was decided, in the run directory: one voter, which agrees with
// itself. Its generation is on the disk before any plan of it is made, so the version of a plan that any worker
// has seen is never given again.
type agreement struct {
	node    agree.Log
	term    uint64        // in which the entries are made; 0 where there is one agent
	entries chan proposal // in the order of their versions
}

type proposal struct {
	entry agree.Entry
	began time.Time
}

// openAgreement opens the log of a run that begins, in a generation after one that may be in
// no log of this host.
func openAgreement(dir *rundir.Dir, after int) (*agreement, error) {
	path, err := dir.MakeStore()
	if err != nil {
		return nil, err
	}
	node, err := agree.OpenLocal(path, "host-0", after)
	if err != nil {
		return nil, err
	}
	return &agreement{node: node, entries: make(chan proposal, 64)}, nil
}

// run commits what is proposed, one after the other, and tells of it, until ctx ends.
func (a *agreement) run(ctx context.Context, post func(session.Event) bool) {
	for {
		select {
		case p := <-a.entries:
			if _, err := a.node.Propose(ctx, p.entry); err != nil {
				switch l := a.node.Leadership(); {
				case ctx.Err() != nil:
					return
				case a.term == 0 || l.Ready && l.Term == a.term && errors.Is(err, agree.ErrInvalid):
					post(session.FileFailed{Err: err})
					return
				}
				if _, again := p.entry.(agree.Job); again {
					continue // the leader before this one had it agreed
				}
				if l := a.node.Leadership(); l.Ready && l.Term == a.term && errors.Is(err, agree.ErrStale) {
					continue // a newer one has taken its place
				}
				return // another one leads, which ends this
			}
			if e, ok := p.entry.(agree.Plan); ok && !post(session.Agreed{Version: e.Version, Proposed: p.began}) {
				return
			}
		case <-a.node.Broken():
			post(session.FileFailed{Err: a.node.Sync()})
			return
		case <-ctx.Done():
			return
		}
	}
}

// propose hands over an entry and does not wait, as long as the disk follows.
func (a *agreement) propose(e agree.Entry) { a.entries <- proposal{e, time.Now()} }

// job is the entry of a run's job.
func (a *agreement) job(j rundir.Job) (agree.Entry, error) {
	text, err := json.Marshal(j)
	return agree.Job{Generation: a.node.State().Generation, Data: text}, err
}

// plan is the entry of an order.
func (a *agreement) plan(o control.Order, reason string) (agree.Entry, error) {
	text, err := o.Encode()
	return agree.Plan{Term: a.term, Version: o.Plan.Version, Reason: reason[:min(len(reason), agree.MaxReason)], Data: text}, err
}
