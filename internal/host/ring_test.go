package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/gossip"
	"github.com/soliton-train/soliton/internal/plan"
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
	if e := <-heard; e.who != (plan.Worker{ID: 3, Incarnation: 1}) || e.state != gossip.StateAlive || e.by != "" {
		t.Errorf("%+v", e)
	}
	r.Close() // as a crash
	for e := range heard {
		if e.state == gossip.StateSuspect && e.by == "" {
			t.Errorf("nobody suspects it: %+v", e)
		}
		if e.state == gossip.StateDead {
			break
		}
	}
}

// weighing is a session of 3 workers that are heard at time 0, with a budget of 4 s.
func weighing(t *testing.T) (s *session, at func(ms int) time.Time) {
	r := trainingOf(t, Config{Detect: 4 * time.Second}, 3)
	began := r.now
	at = func(ms int) time.Time { return began.Add(time.Duration(ms) * time.Millisecond) }
	for id := range 3 {
		r.s.workers[id].pid = 1000 + id
		r.s.step(at(0), received{id, control.Beat{}})
		r.s.step(at(0), gossiped{who: plan.Worker{ID: plan.WorkerID(id)}, state: gossip.StateAlive})
	}
	return r.s, at
}

func TestSuspicionIsWeighed(t *testing.T) {
	suspect := func(state gossip.State) gossiped {
		return gossiped{who: plan.Worker{ID: 1}, state: state, by: "worker 2"}
	}
	type moment struct {
		ms int
		e  event
	}
	tick := watchTick{}
	for _, c := range []struct {
		name    string
		moments []moment
		killed  int // at which of them; -1: not at all
		text    string
	}{
		{"silent, and nobody suspects it", []moment{{2100, tick}, {2900, tick}, {3100, tick}}, 2, "worker 1 has been silent for 3s"},
		{"silent and suspected", []moment{{500, suspect(gossip.StateSuspect)}, {1900, tick}, {2100, tick}}, 2, "worker 1 has been silent for 2s, and worker 2 cannot reach it"},
		{"silent and called dead", []moment{{900, suspect(gossip.StateSuspect)}, {1400, suspect(gossip.StateDead)}, {2100, tick}}, 2, "worker 1 has been silent for 2s, and worker 2 cannot reach it"},
		{"suspected of late", []moment{{1900, suspect(gossip.StateSuspect)}, {2100, tick}, {2850, tick}, {2950, tick}}, 3, "worker 1 has been silent for 2s, and worker 2 cannot reach it"},
		{"suspected, and beats", []moment{{500, suspect(gossip.StateSuspect)}, {600, received{1, control.Beat{}}}, {1500, suspect(gossip.StateDead)}, {2700, tick}}, -1, ""},
		{"refuted", []moment{{500, suspect(gossip.StateSuspect)}, {1000, gossiped{who: plan.Worker{ID: 1}, state: gossip.StateAlive}}, {2700, tick}}, -1, ""},
		{"another life is suspected", []moment{{500, gossiped{who: plan.Worker{ID: 1, Incarnation: 1}, state: gossip.StateDead, by: "worker 2"}}, {2700, tick}}, -1, ""},
		{"the agent was held up", []moment{{500, suspect(gossip.StateSuspect)}, {5000, watchTick{time.Unix(0, 0)}}, {7900, tick}}, -1, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, at := weighing(t)
			killed := -1
			for i, m := range c.moments {
				if w, ok := m.e.(watchTick); ok {
					if w.due.IsZero() {
						w.due = at(m.ms)
					}
					for _, other := range []int{0, 2} {
						s.step(at(m.ms), received{other, control.Beat{}})
					}
					m.e = w
				}
				if len(pick[kill](s.step(at(m.ms), m.e))) > 0 {
					killed = i
					break
				}
			}
			if killed != c.killed {
				t.Fatalf("killed at moment %d, want %d", killed, c.killed)
			}
			if killed >= 0 {
				var silent *SilentError
				if err := s.death(1); !errors.As(err, &silent) || silent.cause() != c.text {
					t.Errorf("%v, want %q", err, c.text)
				}
			}
		})
	}
}

// The ring and the agent differ: that is told once, and ends nobody. What the ring says goes on
// to the controller, for links that break.
func TestRingDiffers(t *testing.T) {
	s, at := weighing(t)
	notes := 0
	for i := range 3 {
		now := at(1000 * (i + 1))
		for id := range 3 {
			s.step(now, received{id, control.Beat{}})
		}
		for _, state := range []gossip.State{gossip.StateSuspect, gossip.StateDead, gossip.StateAlive} {
			e := gossiped{who: plan.Worker{ID: 1}, state: state}
			if state != gossip.StateAlive {
				e.by = "worker 2"
			}
			effects := s.step(now, e)
			notes += len(pick[writeEvent](effects))
			if len(pick[kill](effects)) > 0 {
				t.Fatalf("killed for %v", state)
			}
			if got := pick[writeWorkers](effects); len(got) != 1 || got[0].alive[1].Ring != state.String() {
				t.Errorf("workers.json says %+v, want %v", got, state)
			}
		}
	}
	if notes != 1 {
		t.Errorf("%d notes, want one", notes)
	}
}

func TestNotInTheRing(t *testing.T) {
	s := newSession(Config{Detect: time.Second}.withDefaults(3), 3)
	s.gossip = control.Ring{Seeds: []string{"127.0.0.1:1"}, Key: []byte("0123456789abcdef"), Detect: time.Second}
	now := time.Unix(0, 0)
	for _, e := range prepare(3) {
		for _, e := range s.step(now, e) {
			if p, ok := e.(propose); ok {
				for id, m := range pick[sendMessage](s.step(now, agreedOn{p.order.Plan.Version, now})) {
					if start, ok := m.m.(control.Start); !ok || start.Ring.Seeds[0] != "127.0.0.1:1" || strings.Contains(fmt.Sprintf("%v %+v %#v %s %x", start, start, start, start.Ring.Key, start.Ring.Key), "0123456789") {
						t.Errorf("worker %d is sent %+v", id, m.m)
					}
				}
			}
		}
	}
	for _, id := range []plan.WorkerID{0, 2} {
		s.step(now, gossiped{who: plan.Worker{ID: id}, state: gossip.StateAlive})
	}
	var notes []string
	for i := range 20 {
		now = now.Add(time.Second)
		for id := range 3 {
			s.step(now, received{id, control.Beat{}})
		}
		for _, e := range pick[writeEvent](s.step(now, watchTick{now})) {
			notes = append(notes, fmt.Sprint(i, " ", e.e.Reason))
		}
	}
	if want := []string{"9 not in the gossip ring: [1]; what becomes of these workers their agents alone say"}; !slices.Equal(notes, want) {
		t.Errorf("%q, want %q", notes, want)
	}
}
