package process

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/gossip"
	"github.com/soliton-train/soliton/internal/net/transport"
)

// joinRing makes the worker a member of the gossip ring of the run until the returned function is called. Training neither waits
// for the ring nor fails with it: suspicions of other members are evidence for the agent, which is a member itself.
func joinRing(ctx context.Context, c control.Ring, me Self, addr string) (leave func()) {
	if len(c.Seeds) == 0 {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var beside sync.WaitGroup
	beside.Go(func() {
		if err := stayInRing(ctx, c, me, addr); err != nil {
			complain(fmt.Errorf("this worker is no member of the gossip ring: %w", err))
		}
	})
	return func() {
		cancel()
		beside.Wait()
	}
}

// stayInRing joins the ring and stays a member until ctx ends. The seeds are agents, which may be too busy to answer at first.
func stayInRing(ctx context.Context, c control.Ring, me Self, addr string) error {
	r, err := gossip.Open(gossip.Config{
		Listen: gossip.BesideOf(transport.Far(addr)), Ports: me.Ports, Job: c.Job, SecretKey: c.Key, Rejected: me.Rejected, Detect: c.Detect, Members: c.Size,
		Self: gossip.Identity{
			Kind: gossip.Worker, Worker: me.id(), Incarnation: me.Session.Incarnation, Addr: addr, Host: cmp.Or(c.Host, gossip.LocalHost),
		},
	})
	if err != nil {
		return err
	}
	defer r.Close()
	for r.Join(ctx, c.Seeds...) != nil {
		select {
		case <-time.After(c.Detect):
		case <-ctx.Done():
			return nil
		}
	}
	<-ctx.Done()
	return nil
}
