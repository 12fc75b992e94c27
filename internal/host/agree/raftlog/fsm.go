package raftlog

import (
	"cmp"
	"io"
	"slices"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"github.com/soliton-train/soliton/internal/host/agree"
)

// machine gives raft's log to [agree.State.Apply]. Raft calls it from one goroutine.
type machine struct {
	state atomic.Pointer[agree.State]
	told  func(agree.Entry, agree.State) // may be nil
}

func newMachine(told func(agree.Entry, agree.State)) *machine {
	m := &machine{told: told}
	m.state.Store(new(agree.State))
	return m
}

var _ raft.ConfigurationStore = (*machine)(nil)

// verdict is what Apply returns.
type verdict struct {
	term uint64 // of the entry
	err  error  // of a refused one
}

// Apply returns the verdict on an entry.
func (m *machine) Apply(l *raft.Log) any {
	e, err := agree.Decode(l.Data)
	if err != nil {
		s := *m.state.Load()
		s.Index = l.Index
		m.state.Store(&s)
		return verdict{l.Term, &agree.RefusedError{Entry: "an entry", Class: agree.ErrInvalid, Why: err.Error()}}
	}
	return verdict{l.Term, m.apply(l.Index, l.Term, e)}
}

func (m *machine) apply(index, term uint64, e agree.Entry) error {
	s, err := m.state.Load().Apply(index, term, e)
	m.state.Store(&s)
	if _, own := e.(agree.Leader); err == nil && !own && m.told != nil {
		m.told(e, s)
	}
	return err
}

// StoreConfiguration takes a committed configuration.
func (m *machine) StoreConfiguration(index uint64, c raft.Configuration) {
	_ = m.apply(index, 0, agree.Servers{Servers: servers(c)}) // never refused
}

func servers(c raft.Configuration) []agree.Server {
	var all []agree.Server
	for _, s := range c.Servers {
		all = append(all, agree.Server{ID: string(s.ID), Addr: parseAddress(s.Address).addr, Voter: s.Suffrage == raft.Voter})
	}
	slices.SortFunc(all, func(a, b agree.Server) int { return cmp.Compare(a.ID, b.ID) })
	return all
}

func (m *machine) Snapshot() (raft.FSMSnapshot, error) { return snapshot{*m.state.Load()}, nil }

func (m *machine) Restore(r io.ReadCloser) error {
	s, err := agree.ReadState(r)
	if err != nil {
		return err
	}
	m.state.Store(&s)
	if m.told != nil {
		m.told(nil, s)
	}
	return nil
}

type snapshot struct{ state agree.State }

func (s snapshot) Persist(sink raft.SnapshotSink) error {
	if err := s.state.Write(sink); err != nil {
		_ = sink.Cancel() // the first error counts
		return err
	}
	return sink.Close()
}

func (snapshot) Release() {}
