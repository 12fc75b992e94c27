package trainer

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/soliton-train/soliton/elastic/plan"
	"github.com/soliton-train/soliton/elastic/ring"
	"github.com/soliton-train/soliton/internal/control"
)

// gossip is this worker's membership of the ring of the run. It forms beside the training,
// which neither waits for it nor fails with it: what the others suspect is evidence for the
// agent, which is a member itself.
type gossip struct {
	mu   sync.Mutex
	ring *ring.Ring   // nil while there is none
	plan plan.Version // newest that was applied
}

// join makes the worker a member until the returned function is called.
func (g *gossip) join(ctx context.Context, c control.Ring, me self, addr string) (leave func()) {
	if len(c.Seeds) == 0 {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var beside sync.WaitGroup
	beside.Go(func() {
		if err := g.form(ctx, c, me, addr); err != nil {
			fmt.Fprintf(os.Stderr, "%s: this worker is no member of the gossip ring: %v\n", program(), err)
		}
	})
	return func() {
		cancel()
		beside.Wait()
	}
}

// form joins the ring, and stays in it until ctx ends. The seeds are agents; if none of them
// answers they may be busy.
func (g *gossip) form(ctx context.Context, c control.Ring, me self, addr string) error {
	r, err := ring.Open(ring.Config{
		Listen: ring.BesideOf(addr), Job: c.Job, SecretKey: c.Key, Detect: c.Detect, Members: c.Size,
		Self: ring.Identity{
			Kind: ring.Worker, Worker: me.id(), Incarnation: int(me.session.Incarnation), Addr: addr, Host: cmp.Or(c.Host, ring.LocalHost),
		},
	})
	if err != nil {
		return err
	}
	defer r.Close()
	g.mu.Lock()
	g.ring = r
	r.SetPlan(g.plan)
	g.mu.Unlock()
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

// applied lets the others know which plan is live here.
func (g *gossip) applied(v plan.Version) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.plan = v; g.ring != nil {
		g.ring.SetPlan(v)
	}
}
