package ring

import (
	"context"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/gossip"
	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/internal/plan"
)

// A worker with what it was told becomes a member, and the session hears of it.
func TestGossip(t *testing.T) {
	g, err := Open("job", "", "", ports.Range{}, nil, nil, 2*time.Second, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	heard := make(chan session.Gossip)
	done := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	defer func() { cancel(); <-done }()
	go func() {
		defer close(done)
		g.Tell(ctx, func(e session.Event) bool {
			select {
			case heard <- e.(session.Gossip):
				return true
			case <-ctx.Done():
				return false
			}
		})
	}()
	r, err := gossip.Open(gossip.Config{
		Self: gossip.Identity{Kind: gossip.Worker, Worker: 3, Incarnation: 1, Host: gossip.LocalHost, Addr: "127.0.0.1:1"},
		Job:  g.c.Job, SecretKey: g.c.Key, Detect: g.c.Detect, Members: g.c.Size,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Join(t.Context(), g.c.Seeds...); err != nil {
		t.Fatal(err)
	}
	if e := <-heard; e.Worker != (plan.Worker{ID: 3, Incarnation: 1}) || e.State != gossip.StateAlive || e.By != "" {
		t.Errorf("%+v", e)
	}
	r.Close() // as a crash
	for e := range heard {
		if e.State == gossip.StateSuspect && e.By == "" {
			t.Errorf("nobody suspects it: %+v", e)
		}
		if e.State == gossip.StateDead {
			break
		}
	}
}
