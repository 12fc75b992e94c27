package agent

import (
	"context"
	"testing"
	"time"

	"github.com/soliton-train/soliton/elastic/plan"
	"github.com/soliton-train/soliton/elastic/ring"
)

// A worker with what it was told becomes a member, and the session hears of it.
func TestGossip(t *testing.T) {
	g, err := openGossip("job", "", "", nil, time.Second, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer g.close()
	heard := make(chan gossiped)
	done := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	defer func() { cancel(); <-done }()
	go func() {
		defer close(done)
		g.tell(ctx, func(e event) bool {
			select {
			case heard <- e.(gossiped):
				return true
			case <-ctx.Done():
				return false
			}
		})
	}()
	r, err := ring.Open(ring.Config{
		Self: ring.Identity{Kind: ring.Worker, Worker: 3, Incarnation: 1, Host: ring.LocalHost, Addr: "127.0.0.1:1"},
		Job:  g.c.Job, SecretKey: g.c.Key, Detect: g.c.Detect, Members: g.c.Size,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Join(t.Context(), g.c.Seeds...); err != nil {
		t.Fatal(err)
	}
	if e := <-heard; e.who != (plan.Worker{ID: 3, Incarnation: 1}) || e.state != ring.StateAlive || e.by != "" {
		t.Errorf("%+v", e)
	}
	r.Close() // as a crash
	for e := range heard {
		if e.state == ring.StateSuspect && e.by == "" {
			t.Errorf("nobody suspects it: %+v", e)
		}
		if e.state == ring.StateDead {
			break
		}
	}
}
