package raftlog

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/testkit/require"
)

// cables are a network of nodes in one process of which each direction between two nodes can be cut.
type cables struct {
	mu    sync.Mutex
	nodes map[string]*raft.InmemTransport
	cut   map[[2]string]bool // from, to
}

func (c *cables) join(id string, timeout time.Duration) rpcTransport {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, t := raft.NewInmemTransportWithTimeout(raft.ServerAddress(id), timeout)
	for other, o := range c.nodes {
		t.Connect(raft.ServerAddress(other), o)
		o.Connect(raft.ServerAddress(id), t)
	}
	c.nodes[id] = t
	t.Connect(raft.ServerAddress(id), t)
	return &cable{t, c, id}
}

func (c *cables) leave(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, t := range c.nodes {
		t.Disconnect(raft.ServerAddress(id))
	}
	delete(c.nodes, id)
}

// set replaces all cuts.
func (c *cables) set(cut map[[2]string]bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = cut
}

var errCut = errors.New("cut")

// call makes a call through two directions: without the first it does not arrive, without the second its answer is lost.
func (c *cables) call(from string, to raft.ServerAddress, do func() error) error {
	passes := func(a, b string) error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.cut[[2]string{a, b}] {
			return errCut
		}
		return nil
	}
	if err := passes(from, string(to)); err != nil {
		return err
	}
	if err := do(); err != nil {
		return err
	}
	return passes(string(to), from)
}

// cable is the end of a node.
type cable struct {
	*raft.InmemTransport
	c  *cables
	id string
}

func (t *cable) AppendEntriesPipeline(raft.ServerID, raft.ServerAddress) (raft.AppendPipeline, error) {
	return nil, raft.ErrPipelineReplicationNotSupported
}

func (t *cable) AppendEntries(id raft.ServerID, to raft.ServerAddress, q *raft.AppendEntriesRequest, a *raft.AppendEntriesResponse) error {
	return t.c.call(t.id, to, func() error { return t.InmemTransport.AppendEntries(id, to, q, a) })
}

func (t *cable) RequestVote(id raft.ServerID, to raft.ServerAddress, q *raft.RequestVoteRequest, a *raft.RequestVoteResponse) error {
	return t.c.call(t.id, to, func() error { return t.InmemTransport.RequestVote(id, to, q, a) })
}

func (t *cable) RequestPreVote(id raft.ServerID, to raft.ServerAddress, q *raft.RequestPreVoteRequest, a *raft.RequestPreVoteResponse) error {
	return t.c.call(t.id, to, func() error { return t.InmemTransport.RequestPreVote(id, to, q, a) })
}

// What nodes agree on, through random partitions, one-way ones, and candidates whose evidence is false: never two plans of one version, never two
// leaders of one term, and no plan is lost that was proposed with success. 200 schedules: go test -run TestPartitions -args -all.
func TestPartitions(t *testing.T) {
	schedules := 2
	if require.All() {
		schedules = 200
	}
	for seed := range schedules {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { partition(t, uint64(seed)) })
	}
}

func partition(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 15))
	c, net := newCluster(t), &cables{nodes: make(map[string]*raft.InmemTransport)}
	var servers []agree.Server
	for i := range 3 + 2*r.IntN(2) {
		servers = append(servers, agree.Server{ID: string(rune('a' + i)), Voter: true})
	}
	for _, s := range servers {
		config := c.config(s.ID)
		config.memory, config.Timeout = net, 400*time.Millisecond
		c.create(config, servers...)
	}
	c.commit(agree.Generation{N: 1})

	var mu sync.Mutex
	agreed, led := make(map[id.Version]string), make(map[uint64]string)
	ctx, end := context.WithCancel(t.Context())
	var proposing sync.WaitGroup
	for _, n := range c.nodes {
		proposing.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				if l := n.Leadership(); l.Ready {
					mu.Lock()
					if other := led[l.Term]; other != "" && other != n.id {
						t.Errorf("%s and %s lead in term %d", other, n.id, l.Term)
					}
					led[l.Term] = n.id
					mu.Unlock()
					v, data := version(1, n.State().Newest.N+1), fmt.Sprint(n.id, i)
					if _, err := n.Propose(ctx, agree.Plan{Version: v, Data: []byte(data)}); err == nil {
						mu.Lock()
						if other, twice := agreed[v]; twice {
							t.Errorf("plans %s and %s are both %v", other, data, v)
						}
						agreed[v] = data
						mu.Unlock()
					}
				}
				<-time.After(3 * time.Millisecond)
			}
		})
	}
	ids := slices.Sorted(maps.Keys(c.nodes))
	for range 8 + r.IntN(8) {
		cut := make(map[[2]string]bool)
		in, out := r.IntN(2) == 0, r.IntN(2) == 0
		for _, a := range ids {
			away := r.IntN(2) == 0
			for _, b := range ids {
				if away && a != b {
					cut[[2]string{a, b}] = cut[[2]string{a, b}] || out
					cut[[2]string{b, a}] = cut[[2]string{b, a}] || in
				}
			}
		}
		net.set(cut)
		switch n := c.nodes[ids[r.IntN(len(ids))]]; r.IntN(3) {
		case 0:
			n.Stand()
		case 1:
			n.Miss()
		}
		<-time.After(time.Duration(5+r.IntN(150)) * time.Millisecond) // the schedule
	}
	net.set(nil)
	newest := 0
	c.eventually("a plan after all", func() bool {
		mu.Lock()
		defer mu.Unlock()
		was := newest
		for v := range agreed {
			newest = max(newest, v.N)
		}
		return was > 0 && newest > was
	})
	end()
	proposing.Wait()
	c.eventually("the same everywhere", func() bool {
		for _, n := range c.nodes {
			if n.State().Newest != c.nodes[ids[0]].State().Newest || n.State().Newest.N < newest {
				return false
			}
		}
		return true
	})
	for _, id := range ids {
		h := c.heard[id]
		h.mu.Lock()
		for _, e := range h.entries {
			p, ok := e.(agree.Plan)
			if !ok {
				continue
			}
			if other, known := agreed[p.Version]; known && other != string(p.Data) {
				t.Errorf("%s has plan %v as %s, another node as %s", id, p.Version, p.Data, other)
			}
			agreed[p.Version] = string(p.Data)
		}
		h.mu.Unlock()
	}
	for n := 1; n <= newest; n++ {
		if agreed[version(1, n)] == "" {
			t.Errorf("plan %d is missing", n)
		}
	}
}
