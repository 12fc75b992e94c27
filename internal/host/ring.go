package host

import (
	"cmp"
	"context"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/gossip"
	"github.com/soliton-train/soliton/internal/plan"
)

// The workers of a run and its agents are members of a gossip ring and probe each other. What
// the ring says of a worker is evidence beside that of its agent, which hears it beat and reaps it.

// ringKeySize is that of AES-128.
const ringKeySize = 16

// ringMember is this agent's membership.
type ringMember struct {
	ring  *gossip.Ring
	c     control.Ring // for workers
	tasks sync.WaitGroup
	end   context.CancelFunc
	ctx   context.Context

	seed string // the agent that we joined last; of join, which is called by one goroutine at a time
}

// openGossip makes the ring of a run, or a member that joins it by what a worker of this host is
// told. host and addr are those of this agent, detect is [timing.Policy].Ring, size how many members are expected. Where there
// are several hosts the key follows from their secret, else it is drawn.
func openGossip(job, host, addr string, secret []byte, detect time.Duration, size int) (*ringMember, error) {
	key := make([]byte, ringKeySize)
	if len(secret) == 0 {
		_, _ = rand.Read(key) // it never fails
	} else {
		var err error
		if key, err = hkdf.Key(sha256.New, secret, []byte(job), "soliton ring, version 1", ringKeySize); err != nil {
			return nil, err
		}
	}
	size = min(max(size, 2), gossip.MaxMembers)
	r, err := gossip.Open(gossip.Config{
		Self:   gossip.Identity{Kind: gossip.Agent, Host: cmp.Or(host, gossip.LocalHost), Addr: addr},
		Listen: gossip.BesideOf(addr), Job: job, SecretKey: key, Detect: detect, Members: size,
	})
	if err != nil {
		return nil, err
	}
	g := &ringMember{ring: r, c: control.Ring{Job: job, Key: key, Seeds: []string{r.Addr()}, Detect: detect, Size: size}}
	g.ctx, g.end = context.WithCancel(context.Background())
	return g, nil
}

// close ends the membership.
func (g *ringMember) close() {
	g.end()
	g.ring.Close()
	g.tasks.Wait()
}

// join makes one ring of ours and that of another agent, in the background. A nil ringMember
// joins none.
func (g *ringMember) join(seeds []string) {
	if g == nil || len(seeds) == 0 || seeds[0] == g.ring.Addr() || seeds[0] == g.seed {
		return
	}
	g.seed = seeds[0]
	g.tasks.Go(func() {
		for g.ring.Join(g.ctx, seeds...) != nil {
			select {
			case <-time.After(g.c.Detect):
			case <-g.ctx.Done():
				return
			}
		}
	})
}

// tell hands on what the ring believes of each worker, and then each change, until ctx ends.
func (g *ringMember) tell(ctx context.Context, post func(session.Event) bool) {
	type life struct {
		incarnation int
		state       gossip.State
	}
	var told map[id.WorkerID]life
	for {
		members := g.ring.Members()
		all := make(map[id.WorkerID]life)
		for _, m := range members {
			if m.Kind != gossip.Worker {
				continue
			}
			is := life{m.Incarnation, m.State}
			all[m.Worker] = is
			if was, ok := told[m.Worker]; ok && was == is {
				continue
			}
			e := session.Gossip{Worker: plan.Worker{ID: m.Worker, Incarnation: m.Incarnation}, State: m.State}
			if m.State == gossip.StateSuspect || m.State == gossip.StateDead {
				e.By = accuser(m.By, members)
			}
			if !post(e) {
				return
			}
		}
		told = all
		select {
		case <-g.ring.Changed():
		case <-ctx.Done():
			return
		}
	}
}

// accuser says in words which member, by its name, cannot reach a worker.
func accuser(by string, members []gossip.Member) string {
	for _, m := range members {
		switch {
		case m.Name() != by:
		case m.Kind == gossip.Worker:
			return fmt.Sprintf("worker %d", m.Worker)
		case m.Host == gossip.LocalHost:
			return "the agent"
		default:
			return "the agent of " + m.Host
		}
	}
	return "the ring"
}

// openRing makes the member of a host, nil if there is to be no ring: without failure detection, or with one worker in
// all. Several hosts find each other by the Start that a leader sends to their workers.
func openRing(c *Config) (*ringMember, error) {
	if c.Detect == 0 || c.Fixed && c.Workers == 1 {
		return nil, nil
	}
	job := rand.Text()
	if !c.alone() {
		sum := sha256.Sum256([]byte(c.RunDir.Path()))
		job = hex.EncodeToString(sum[:8])
	}
	self := c.Hosts[c.Self]
	return openGossip(job, self.Name, self.Link, c.Secret, c.times().Ring, c.Workers+len(c.Hosts))
}
