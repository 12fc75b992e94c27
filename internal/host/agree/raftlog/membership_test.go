package raftlog

import (
	"context"
	"fmt"

	"github.com/hashicorp/raft"

	"github.com/soliton-train/soliton/internal/host/agree"
)

// No run changes the members of its agreement, so what does it is here: a node has to bear it.

// Addr returns where other nodes reach this one.
func (n *Node) Addr() string { return string(n.net.LocalAddr()) }

// AddVoter makes a server a voter, or changes its address. One that has not
// been a non-voter before has nothing of the log yet, and counts for the majority
// all the same.
func (n *Node) AddVoter(ctx context.Context, s agree.Server) error {
	return n.change(ctx, s, func() raft.IndexFuture {
		return n.raft.AddVoter(raft.ServerID(s.ID), raft.ServerAddress(s.Addr), 0, n.config.Timeout)
	})
}

// AddNonvoter adds a server that gets the log and does not vote. A voter stays
// one.
func (n *Node) AddNonvoter(ctx context.Context, s agree.Server) error {
	return n.change(ctx, s, func() raft.IndexFuture {
		return n.raft.AddNonvoter(raft.ServerID(s.ID), raft.ServerAddress(s.Addr), 0, n.config.Timeout)
	})
}

// Remove takes a server out of the configuration. A majority of the voters
// with it and of those without it must live.
func (n *Node) Remove(ctx context.Context, id string) error {
	return n.change(ctx, agree.Server{ID: id}, func() raft.IndexFuture {
		return n.raft.RemoveServer(raft.ServerID(id), 0, n.config.Timeout)
	})
}

func (n *Node) change(ctx context.Context, s agree.Server, ask func() raft.IndexFuture) error {
	if err := validate(s); err != nil {
		return fmt.Errorf("agree: server %.64q: %w", s.ID, err)
	}
	_, err := n.await(ctx, func() (raft.IndexFuture, func() error) {
		return ask(), func() error { return nil }
	})
	return err
}
