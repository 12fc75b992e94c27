package raftlog

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/hashicorp/raft"

	"github.com/soliton-train/soliton/internal/host/agree"
)

// The leader changes the servers, one change at a time: raft refuses one where the configuration is not the one that it was made
// for. All changes return when they are committed and applied here. Errors are those of Propose, with [agree.ErrStale] where another
// change was first; what a context ends may be committed all the same.

// ID returns the ID of this node's server.
func (n *Node) ID() string { return n.id }

// AddNonVoter adds a server that gets the log and does not vote, or changes the address of a server.
func (n *Node) AddNonVoter(ctx context.Context, s agree.Server) error {
	what := fmt.Sprintf("add server %.64q", s.ID)
	return n.change(ctx, what, func(raft.Configuration) (request, error) {
		if err := validate(s); err != nil {
			return nil, &agree.RefusedError{Entry: what, Class: agree.ErrInvalid, Why: err.Error()}
		}
		return func(index uint64) raft.IndexFuture {
			return n.raft.AddNonvoter(raft.ServerID(s.ID), n.config.address(s), index, n.config.Timeout)
		}, nil
	})
}

// Promote makes a non-voter a voter. It waits until the server has caught up.
func (n *Node) Promote(ctx context.Context, id string) error {
	what := "promote " + id
	if err := n.awaitCaughtUp(ctx, what, id); err != nil {
		return err
	}
	return n.change(ctx, what, func(c raft.Configuration) (request, error) {
		s, err := find(c, what, id)
		return func(index uint64) raft.IndexFuture { return n.raft.AddVoter(s.ID, s.Address, index, n.config.Timeout) }, err
	})
}

// Demote makes a voter a non-voter. It still gets the log.
func (n *Node) Demote(ctx context.Context, id string) error {
	what := "demote " + id
	return n.change(ctx, what, func(c raft.Configuration) (request, error) {
		s, err := find(c, what, id)
		return func(index uint64) raft.IndexFuture { return n.raft.DemoteVoter(s.ID, index, n.config.Timeout) }, errors.Join(err, lastVoter(c, what, id))
	})
}

// Remove takes a server out of the configuration.
func (n *Node) Remove(ctx context.Context, id string) error {
	what := "remove " + id
	return n.change(ctx, what, func(c raft.Configuration) (request, error) {
		return func(index uint64) raft.IndexFuture {
			return n.raft.RemoveServer(raft.ServerID(id), index, n.config.Timeout)
		}, lastVoter(c, what, id)
	})
}

// Transfer has a voter lead, or with "" the other one with the newest log. This node follows it.
func (n *Node) Transfer(ctx context.Context, id string) error {
	ask := n.raft.LeadershipTransfer
	if id != "" {
		configuration := n.raft.GetConfiguration()
		if err := configuration.Error(); err != nil {
			return n.typed(err)
		}
		s, err := find(configuration.Configuration(), "transfer to "+id, id)
		if err != nil {
			return err
		}
		ask = func() raft.Future { return n.raft.LeadershipTransferToServer(s.ID, s.Address) }
	}
	_, err := n.await(ctx, func() (raft.IndexFuture, func() error) {
		return transferred{ask()}, func() error { return nil }
	})
	return err
}

// transferred is a change of the leader, which has no index.
type transferred struct{ raft.Future }

func (transferred) Index() uint64 { return 0 }

func find(c raft.Configuration, what, id string) (raft.Server, error) {
	i := slices.IndexFunc(c.Servers, func(s raft.Server) bool { return string(s.ID) == id })
	if i < 0 {
		return raft.Server{}, &agree.RefusedError{Entry: what, Class: agree.ErrInvalid, Why: "it is no server"}
	}
	return c.Servers[i], nil
}

func lastVoter(c raft.Configuration, what, id string) error {
	if slices.ContainsFunc(c.Servers, func(s raft.Server) bool { return s.Suffrage == raft.Voter && string(s.ID) != id }) {
		return nil
	}
	return &agree.RefusedError{Entry: what, Class: agree.ErrInvalid, Why: "no other server votes"}
}

// A request asks raft for a change, unless the newest configuration is no longer the one at index.
type request func(index uint64) raft.IndexFuture

// change makes a request for the newest configuration and waits until it is committed.
func (n *Node) change(ctx context.Context, what string, prepare func(raft.Configuration) (request, error)) error {
	if n.raft.State() != raft.Leader {
		return n.typed(raft.ErrNotLeader)
	}
	c, index, err := n.files.configuration()
	if err != nil {
		return fmt.Errorf("agree: %s: %w", what, err)
	}
	ask, err := prepare(c)
	if err != nil {
		return err
	}
	_, err = n.await(ctx, func() (raft.IndexFuture, func() error) { return ask(index), func() error { return nil } })
	n.progress.wake()
	var moved *agree.NotLeaderError
	if err == nil || errors.As(err, &moved) || errors.Is(err, agree.ErrUncertain) || errors.Is(err, agree.ErrClosed) {
		return err
	}
	if _, now, e := n.files.configuration(); errors.Is(err, raft.ErrEnqueueTimeout) || e == nil && now != index {
		return &agree.RefusedError{Entry: what, Class: agree.ErrStale, Why: "another change was first"}
	}
	return err
}

// configuration returns the newest configuration, committed or not, and its index, which raft does not tell.
func (f files) configuration() (c raft.Configuration, index uint64, err error) {
	last, err := f.log.LastIndex()
	if err != nil {
		return c, 0, err
	}
	for index := last; index > 0; index-- {
		var l raft.Log
		if err := f.cache.GetLog(index, &l); errors.Is(err, raft.ErrLogNotFound) {
			break // it is in a snapshot
		} else if err != nil {
			return c, 0, err
		}
		if l.Type == raft.LogConfiguration {
			return raft.DecodeConfiguration(l.Data), index, nil
		}
	}
	kept, err := f.snapshots.List()
	if err == nil && len(kept) == 0 {
		err = errors.New("the log has no servers")
	}
	if err != nil {
		return c, 0, err
	}
	return kept[0].Configuration, kept[0].ConfigurationIndex, nil
}

// CaughtUp reports whether a server has all that this leader has committed, but for the newest entries.
func (n *Node) CaughtUp(id string) bool {
	return n.progress.has(id, n.raft.CurrentTerm(), n.raft.CommitIndex())
}

// awaitCaughtUp waits until a server has caught up, or is no longer one, or this node does not lead.
func (n *Node) awaitCaughtUp(ctx context.Context, what, id string) error {
	for {
		moved := n.progress.next()
		if n.raft.State() != raft.Leader {
			return n.typed(raft.ErrNotLeader)
		}
		s, err := find(n.raft.GetConfiguration().Configuration(), what, id)
		if err != nil || s.Suffrage == raft.Voter || n.CaughtUp(id) {
			return err
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return fmt.Errorf("agree: %s: it has not caught up: %w", what, ctx.Err())
		case <-n.closing:
			return agree.ErrClosed
		}
	}
}

// progress is how much of this leader's log the others have. It sees the answers that raft gets.
type progress struct {
	rpcTransport

	mu    sync.Mutex
	ends  map[raft.ServerID]end
	moved chan struct{} // closed when ends change
}

// end is the last entry that a server is known to have in common with the leader of a term.
type end struct{ term, index uint64 }

// maxLag is how many entries a server that has caught up may lack: one message.
const maxLag = 16

func newProgress(t rpcTransport) *progress {
	return &progress{rpcTransport: t, ends: make(map[raft.ServerID]end), moved: make(chan struct{})}
}

// AppendEntries implements raft.Transport.
func (p *progress) AppendEntries(id raft.ServerID, at raft.ServerAddress, request *raft.AppendEntriesRequest, response *raft.AppendEntriesResponse) error {
	err := p.rpcTransport.AppendEntries(id, at, request, response)
	last := request.PrevLogEntry + uint64(len(request.Entries)) // 0 in a heartbeat
	if err != nil || !response.Success || last == 0 {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if now := (end{request.Term, last}); now != p.ends[id] {
		p.ends[id] = now
		p.move()
	}
	return nil
}

// AppendEntriesPipeline implements raft.Transport. There is none, as p would not see its answers: orders come one at a time, and a
// message takes all entries that are there.
func (*progress) AppendEntriesPipeline(raft.ServerID, raft.ServerAddress) (raft.AppendPipeline, error) {
	return nil, raft.ErrPipelineReplicationNotSupported
}

func (p *progress) has(id string, term, index uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.ends[raft.ServerID(id)]
	return e.term == term && e.index+maxLag >= index
}

// next returns a channel that is closed at the next change.
func (p *progress) next() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.moved
}

// wake has all look again that wait.
func (p *progress) wake() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.move()
}

func (p *progress) move() {
	close(p.moved)
	p.moved = make(chan struct{})
}
