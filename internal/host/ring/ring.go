// Package ring is a host's membership in the gossip ring, in which the hosts and workers of a run probe each other. What the
// ring says of a worker is evidence beside the heartbeats that its host hears.
package ring

import (
	"cmp"
	"context"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/gossip"
	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/internal/plan"
)

// keySize is the key size of AES-128, in bytes.
const keySize = 16

// Member is the membership of a host.
type Member struct {
	ring  *gossip.Ring
	c     control.Ring // for workers
	tasks sync.WaitGroup
	end   context.CancelFunc
	ctx   context.Context

	seed string // the agent that we joined last; of join, which is called by one goroutine at a time
}

// Open makes the ring of a run, which other members then join. host and addr are those of this host, in its ports, detect is
// that of [timing.Policy.RingOf], size is the expected number of members. Hosts with a secret derive the key of the ring from it.
// rejected counts what others without the key send.
func Open(job, host, addr string, in ports.Range, secret []byte, rejected *auth.Tally, detect time.Duration, size int) (*Member, error) {
	key := make([]byte, keySize)
	if len(secret) == 0 {
		_, _ = rand.Read(key) // it never fails
	} else {
		var err error
		if key, err = hkdf.Key(sha256.New, secret, []byte(job), "soliton ring, version 1", keySize); err != nil {
			return nil, err
		}
	}
	size = min(max(size, 2), gossip.MaxMembers)
	r, err := gossip.Open(gossip.Config{
		Self:   gossip.Identity{Kind: gossip.Agent, Host: cmp.Or(host, gossip.LocalHost), Addr: addr},
		Listen: gossip.BesideOf(addr), Ports: in, Job: job, SecretKey: key, Rejected: rejected, Detect: detect, Members: size,
	})
	if err != nil {
		return nil, err
	}
	g := &Member{ring: r, c: control.Ring{Job: job, Key: key, Seeds: []string{r.Addr()}, Detect: detect, Size: size}}
	g.ctx, g.end = context.WithCancel(context.Background())
	return g, nil
}

// Close ends the membership.
func (g *Member) Close() {
	g.end()
	g.ring.Close()
	g.tasks.Wait()
}

// Ring returns what workers are told.
func (g *Member) Ring() control.Ring { return g.c }

// Join joins the ring of another host, in the background. It does nothing for a nil member.
func (g *Member) Join(seeds []string) {
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

// Tell posts the state of each worker in the ring, and then each change, until ctx ends.
func (g *Member) Tell(ctx context.Context, post func(session.Event) bool) {
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
