package raftlog

import (
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// Memory is a network of nodes in one process, for tests. A node's address is
// its ID.
type Memory struct {
	mu    sync.Mutex
	nodes map[string]*raft.InmemTransport
	cut   []string
	votes time.Duration // that an answer to a candidate takes
}

// NewMemory returns a network without nodes.
func NewMemory() *Memory { return &Memory{nodes: make(map[string]*raft.InmemTransport)} }

// Cut cuts the network in two: these nodes, and all others. It replaces an
// earlier cut.
func (m *Memory) Cut(ids ...string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.cut = slices.Clone(ids)
	m.connect()
}

// Heal undoes Cut.
func (m *Memory) Heal() { m.Cut() }

func (m *Memory) connect() {
	for a, from := range m.nodes {
		for b, to := range m.nodes {
			if slices.Contains(m.cut, a) == slices.Contains(m.cut, b) {
				from.Connect(raft.ServerAddress(b), to)
			} else {
				from.Disconnect(raft.ServerAddress(b))
			}
		}
	}
}

func (m *Memory) join(id string, timeout time.Duration) rpcTransport {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, t := raft.NewInmemTransportWithTimeout(raft.ServerAddress(id), timeout)
	m.nodes[id] = t
	m.connect()
	if m.votes > 0 {
		return slowVotes{t, m.votes}
	}
	return t
}

// slowVotes is a node's transport whose votes come late.
type slowVotes struct {
	*raft.InmemTransport
	by time.Duration
}

func (s slowVotes) RequestVote(id raft.ServerID, to raft.ServerAddress, m *raft.RequestVoteRequest, answer *raft.RequestVoteResponse) error {
	err := s.InmemTransport.RequestVote(id, to, m, answer)
	<-time.After(s.by) // on its way
	return err
}

func (s slowVotes) RequestPreVote(id raft.ServerID, to raft.ServerAddress, m *raft.RequestPreVoteRequest, answer *raft.RequestPreVoteResponse) error {
	err := s.InmemTransport.RequestPreVote(id, to, m, answer)
	<-time.After(s.by) // on its way
	return err
}

func (m *Memory) leave(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, t := range m.nodes {
		t.Disconnect(raft.ServerAddress(id))
	}
	delete(m.nodes, id)
}
