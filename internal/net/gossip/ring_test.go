package gossip

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/soliton-train/soliton/internal/id"
	"go.uber.org/goleak"
)

// A probe of the library that is under way at Close ends by itself, at its timeout.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/hashicorp/memberlist.(*Memberlist).probeNode"))
}

func worker(w, incarnation int) Identity {
	return Identity{
		Kind: Worker, Worker: id.WorkerID(w), Incarnation: incarnation, Host: fmt.Sprintf("h%d", w%2), Addr: fmt.Sprintf("127.0.0.1:%d", 5000+w),
	}
}

// cluster opens members over the lan, all joined by way of the first.
func cluster(t *testing.T, l *lan, ids ...Identity) []*Ring {
	t.Helper()
	// The library's own goroutines end by their timers, and a bubble's clock stands still once its function is over.
	t.Cleanup(func() { <-time.After(time.Second) })
	var rings []*Ring
	for _, id := range ids {
		rings = append(rings, join(t, l, id, rings...))
	}
	for _, r := range rings {
		for _, id := range ids {
			r.await1(t, Joined, id.Name())
		}
	}
	return rings
}

func join(t *testing.T, l *lan, id Identity, to ...*Ring) *Ring {
	t.Helper()
	r, err := open(Config{Self: id, Members: 8}, l.plug())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	if len(to) > 0 {
		if err := r.Join(t.Context(), to[0].Addr()); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// await1 reads events until the wanted one, or, where that must have come
// before, until the state it leads to is there; of ourselves there are none.
func (r *Ring) await1(t *testing.T, kind EventKind, name string) Event {
	t.Helper()
	if kind == Joined && r.member(name).State == StateAlive && r.member(name).Host != "" {
		return Event{}
	}
	for {
		select {
		case e, ok := <-r.Events():
			if !ok {
				t.Fatalf("%s: events end before %s %v", r.name, name, kind)
			}
			if e.Kind == kind && e.Member.Name() == name {
				return e
			}
			if e.Member.Name() == name && (e.Kind == Dead || e.Kind == Left) {
				t.Fatalf("%s: event %v, want %s %v", r.name, e, name, kind)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("%s: no event %s %v within 30s; members are %v", r.name, name, kind, r.Members())
		}
	}
}

func (r *Ring) member(name string) Member {
	for _, m := range r.Members() {
		if m.Name() == name {
			return m
		}
	}
	return Member{}
}

func eight() (ids []Identity) {
	for i := range 6 {
		ids = append(ids, worker(i, 1))
	}
	return append(ids, Identity{Kind: Agent, Incarnation: 1, Host: "h0", Addr: "a0"}, Identity{Kind: Agent, Incarnation: 1, Host: "h1", Addr: "a1"})
}

func TestEight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ids := eight()
		rings := cluster(t, newLAN(), ids...)
		for _, r := range rings {
			var got []string
			for _, m := range r.Members() {
				got = append(got, m.Name()+" "+m.Addr+" "+m.State.String())
			}
			want := []string{
				"agent-h0.1 a0 alive", "agent-h1.1 a1 alive", "worker-0.1 127.0.0.1:5000 alive", "worker-1.1 127.0.0.1:5001 alive",
				"worker-2.1 127.0.0.1:5002 alive", "worker-3.1 127.0.0.1:5003 alive", "worker-4.1 127.0.0.1:5004 alive", "worker-5.1 127.0.0.1:5005 alive",
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s knows %q, want %q", r.name, got, want)
			}
		}
	})
}

func TestPlanSpreads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rings := cluster(t, newLAN(), eight()...)
		rings[3].SetPlan(id.Version{Generation: 1, N: 1})
		rings[3].SetPlan(id.Version{Generation: 1, N: 7})
		rings[3].SetPlan(id.Version{Generation: 1, N: 6}) // late, so left out
		for i, r := range rings {
			for want := (id.Version{Generation: 1, N: 7}); i != 3 && r.member("worker-3.1").Plan != want; {
				r.await1(t, Changed, "worker-3.1")
			}
		}
		if got := rings[3].member("worker-3.1").Plan.N; got != 7 {
			t.Errorf("the member itself lists plan 1.%d, want 1.7", got)
		}
	})
}

// A member that is killed says nothing; the others suspect it and then say that it
// is dead, all of them.
func TestKilled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rings := cluster(t, newLAN(), eight()...)
		killed := time.Now()
		rings[2].Close()
		suspicions := 0
		for i, r := range rings {
			if i == 2 {
				continue
			}
			var d Event
			for d = range r.Events() {
				if d.Kind == Dead {
					break
				}
				if d.Kind != Suspected {
					continue
				}
				suspicions++
				if d.By == "worker-2.1" || r.member(d.By).Host == "" || d.Member.Name() != "worker-2.1" || d.Member.State != StateSuspect {
					t.Errorf("%s: %v of state %v, want one of worker-2.1 by another member", r.name, d, d.Member.State)
				}
			}
			if d.By == "" || d.By == "worker-2.1" || d.Member.State != StateDead || r.member("worker-2.1").State != StateDead {
				t.Errorf("%s: %v, state %v, and %v in Members", r.name, d, d.Member.State, r.member("worker-2.1"))
			}
			// Five of a hundred losses take longer than the budget.
			if took := d.Time.Sub(killed); took > 3*r.config.Detect {
				t.Errorf("%s: found after %v, budget %v", r.name, took, r.config.Detect)
			}
			if len(r.Members()) != 8 {
				t.Errorf("%s: %d members, want 8 with the dead one", r.name, len(r.Members()))
			}
		}
		if suspicions == 0 { // one member may hear of the death first, not all
			t.Error("dead without having been suspected")
		}
	})
}

func TestLeave(t *testing.T) {
	for _, n := range []int{2, 8} { // of two, the other one has nobody to tell
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rings := cluster(t, newLAN(), eight()[:n]...)
				if err := rings[1].Leave(t.Context()); err != nil {
					t.Error(err)
				}
				rings[1].Close()
				for i, r := range rings {
					if i == 1 {
						continue
					}
					if e := r.await1(t, Left, "worker-1.1"); e.Member.State != StateLeft || r.member("worker-1.1").State != StateLeft {
						t.Errorf("%s: %v of state %v", r.name, e, e.Member.State)
					}
				}
				if err := rings[1].Leave(t.Context()); !errors.Is(err, ErrClosed) {
					t.Errorf("Leave after Close: %v, want ErrClosed", err)
				}
			})
		})
	}
}

// A goodbye that only an exchange of states brings is one, too.
func TestLeftWhileAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLAN()
		rings := cluster(t, l, eight()[:4]...)
		l.sever(rings[3].Addr(), true)
		if err := rings[1].Leave(t.Context()); err != nil {
			t.Error(err)
		}
		for _, r := range rings[:1] {
			r.await1(t, Left, "worker-1.1")
		}
		l.sever(rings[3].Addr(), false)
		if err := rings[3].Join(t.Context(), rings[0].Addr()); err != nil {
			t.Error(err)
		}
		rings[3].await1(t, Left, "worker-1.1")
	})
}

// A pause that is shorter than the time of suspicion is refuted, a longer one
// is a death, after which the member comes back by itself.
func TestPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLAN()
		rings := cluster(t, l, eight()...)
		l.sever(rings[5].Addr(), true)
		rings[0].await1(t, Suspected, "worker-5.1")
		l.sever(rings[5].Addr(), false)
		for _, r := range rings[:5] {
			if r.member("worker-5.1").State == StateSuspect {
				r.await1(t, Refuted, "worker-5.1")
			}
		}

		l.sever(rings[5].Addr(), true)
		for _, r := range rings[:5] {
			r.await1(t, Dead, "worker-5.1")
		}
		l.sever(rings[5].Addr(), false)
		for _, r := range rings[:5] {
			r.await1(t, Joined, "worker-5.1")
		}
	})
}

// A new life takes the place of the old one, whatever the old one does then.
func TestFencing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLAN()
		rings := cluster(t, l, eight()...)
		frozen := rings[4]
		l.sever(frozen.Addr(), true)
		second := join(t, l, worker(4, 2), rings[0])
		others := append(slices.Clone(rings[:4]), rings[5:]...)
		for _, r := range others {
			r.await1(t, Joined, "worker-4.2")
		}
		healed := time.Now()
		l.sever(frozen.Addr(), false)
		frozen.SetPlan(id.Version{Generation: 9, N: 9})
		if err := frozen.Join(t.Context(), rings[0].Addr(), rings[1].Addr()); err != nil {
			t.Error(err)
		}
		frozen.await1(t, Joined, "worker-4.2") // it is told of its successor
		time.Sleep(5 * time.Second)
		synctest.Wait()
		for _, r := range append(others, second, frozen) {
			if m := r.member("worker-4.2"); m.State != StateAlive || m.Plan != (id.Version{}) {
				t.Errorf("%s: second life is %v with plan %v", r.name, m, m.Plan)
			}
			if n := len(r.Members()); n != 8 {
				t.Errorf("%s: %d members, want 8", r.name, n)
			}
			for r != frozen {
				select {
				case e := <-r.Events():
					if e.Member.Name() == "worker-4.1" && e.Time.After(healed) {
						t.Errorf("%s: event of the first life: %v", r.name, e)
					}
					continue
				default:
				}
				break
			}
		}
	})
}

// Who does not read events misses some, is told so, and the library goes on.
func TestMissed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rings := cluster(t, newLAN(), eight()[:2]...)
		r := rings[0]
		const more = 100
		synctest.Wait()
		select { // the other one's join, unless it was read
		case <-r.Events():
			synctest.Wait()
		default:
		}
		r.mu.Lock()
		for range maxQueued + more {
			r.emit(Changed, r.members["worker-1"], "")
		}
		r.mu.Unlock()
		kept := 0
		for e := range r.Events() {
			if e.Kind == Missed {
				if kept+e.Dropped != maxQueued+more || e.Dropped > more {
					t.Errorf("%d events kept and %d dropped of %d", kept, e.Dropped, maxQueued+more)
				}
				break
			}
			if e.Kind == Changed {
				kept++
			}
		}
		rings[1].Close()
		for r.member("worker-1.1").State != StateDead {
			r.await1(t, Dead, "worker-1.1")
		}
	})
}

// Everything that can wait ends with Close.
func TestCloseEndsWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLAN()
		rings := cluster(t, l, eight()[:2]...)
		far := l.plug()
		l.sever(far.addr.String(), true)
		ended := make(chan error)
		go func() { ended <- rings[0].Join(context.Background(), far.addr.String()) }()
		synctest.Wait()
		begin := time.Now()
		rings[0].Close()
		if err := <-ended; !errors.Is(err, ErrClosed) {
			t.Errorf("Join: %v, want ErrClosed", err)
		}
		for range rings[0].Events() {
		}
		rings[0].Close() // again, for nothing
		if took := time.Since(begin); took > 0 {
			t.Errorf("Close took %v", took)
		}
		ctx, cancel := context.WithCancel(t.Context())
		go func() { ended <- rings[1].Join(ctx, far.addr.String()) }()
		synctest.Wait()
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Join: %v, want canceled", err)
		}
	})
}

// The same over the machine's own network: with a key, and without.
func TestLoopback(t *testing.T) {
	for _, key := range []string{"", "0123456789abcdef0123456789abcdef"} {
		t.Run(fmt.Sprintf("key of %d bytes", len(key)), func(t *testing.T) {
			t.Parallel()
			var rings []*Ring
			for _, id := range eight() {
				r, err := Open(Config{Self: id, Job: "a", SecretKey: []byte(key), Members: 8, Detect: 3 * time.Second}) // a busy machine is not to look like a loss
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(r.Close)
				rings = append(rings, r)
				if err := r.Join(t.Context(), rings[0].Addr()); err != nil {
					t.Fatal(err)
				}
			}
			for _, r := range rings {
				for _, id := range eight() {
					r.await1(t, Joined, id.Name())
				}
			}
			rings[1].SetPlan(id.Version{Generation: 1, N: 2})
			rings[0].await1(t, Changed, "worker-1.1")
			if err := rings[5].Leave(t.Context()); err != nil {
				t.Log(err) // a machine that is too slow has told nobody in time
			} else {
				rings[0].await1(t, Left, "worker-5.1")
			}
			rings[2].Close()
			rings[0].await1(t, Suspected, "worker-2.1")
			rings[0].await1(t, Dead, "worker-2.1")
		})
	}
}

func TestStrangersAreRefused(t *testing.T) {
	a := Config{Self: worker(0, 1), Job: "a", SecretKey: []byte("0123456789abcdef")}
	r, err := Open(a)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for what, change := range map[string]func(*Config){
		"another key": func(c *Config) { c.SecretKey = []byte("fedcba9876543210") },
		"no key":      func(c *Config) { c.SecretKey = nil },
		"another job": func(c *Config) { c.Job = "b" },
	} {
		c := a
		c.Self = worker(1, 1)
		change(&c)
		stranger, err := Open(c)
		if err != nil {
			t.Fatal(err)
		}
		err = stranger.Join(t.Context(), r.Addr())
		if !errors.Is(err, ErrNoMember) || strings.Contains(err.Error(), "\n") || strings.Contains(err.Error(), "fedcba") {
			t.Errorf("%s: %v, want ErrNoMember on one line", what, err)
		}
		if len(r.Members()) != 1 || len(stranger.Members()) != 1 {
			t.Errorf("%s: members are %v and %v", what, r.Members(), stranger.Members())
		}
		stranger.Close()
	}
}

func TestClaims(t *testing.T) {
	var logged bytes.Buffer
	r := &Ring{name: "worker-0.1", members: make(map[string]*entry), queued: make(chan struct{}, 1)}
	put := func(id Identity) { r.members[id.key()] = &entry{Member: Member{Identity: id}} }
	put(worker(0, 1))
	put(worker(3, 2))
	for _, c := range []struct {
		name string
		id   Identity
		meta []byte
		ok   bool
	}{
		{"a new life", worker(3, 3), nil, true},
		{"the same", worker(3, 2), nil, true},
		{"an older life", worker(3, 1), nil, false},
		{"another's metadata", worker(3, 2), worker(4, 2).encode(), false},
		{"garbage", worker(3, 2), []byte("garbage"), false},
		{"more behind", worker(3, 2), append(worker(3, 2).encode(), 0), false},
		{"none", worker(3, 2), []byte{}, false},
	} {
		if c.meta == nil {
			c.meta = c.id.encode()
		}
		if err := r.admit(c.id.Name(), c.meta); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
	}

	// Claims about nobody, an older life and ourselves change nothing.
	for _, name := range []string{"", "x", "worker-3.1", "worker-9.1", "worker-0.1"} {
		r.sent(claim{kind: suspectType, Node: name, From: "x", Incarnation: 5})
		r.received(claim{kind: deadType, Node: name, From: "x", Incarnation: 5})
	}
	// A suspicion that is older than what was heard does not count, nor does an
	// older word end one.
	r.sent(claim{kind: aliveType, Node: "worker-3.2", Incarnation: 4})
	r.sent(claim{kind: suspectType, Node: "worker-3.2", From: "x", Incarnation: 3})
	if len(r.queue) != 0 {
		t.Errorf("events %v, want none", r.queue)
	}
	r.sent(claim{kind: suspectType, Node: "worker-3.2", From: "x", Incarnation: 4})
	r.sent(claim{kind: suspectType, Node: "worker-3.2", From: "y", Incarnation: 4})
	r.sent(claim{kind: aliveType, Node: "worker-3.2", Incarnation: 4})
	r.sent(claim{kind: aliveType, Node: "worker-3.2", Incarnation: 5})
	var got []string
	for _, e := range r.queue {
		got = append(got, e.String())
	}
	if want := []string{"worker-3.2 suspected, says x", "worker-3.2 refuted"}; !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}

	// How a member ended.
	for _, c := range []struct {
		name           string
		sent, received []claim
		want           string
	}{
		{"nothing was said", nil, nil, "worker-3.2 left"},
		{"we suspected it", []claim{{suspectType, 5, "worker-3.2", "x"}}, nil, "worker-3.2 dead, says worker-0.1"},
		{"another says so", nil, []claim{{deadType, 5, "worker-3.2", "y"}}, "worker-3.2 dead, says y"},
		{"its suspicion was not passed on", nil, []claim{{suspectType, 5, "worker-3.2", "y"}}, "worker-3.2 dead, says y"},
		{"an old death", nil, []claim{{deadType, 4, "worker-3.2", "y"}}, "worker-3.2 left"},
		{"a death it outlived", nil, []claim{{deadType, 5, "worker-3.2", "y"}, {aliveType, 6, "worker-3.2", ""}}, "worker-3.2 left"},
		{"a goodbye while suspected", []claim{{suspectType, 5, "worker-3.2", "x"}}, []claim{{deadType, 5, "worker-3.2", "worker-3.2"}}, "worker-3.2 left"},
	} {
		put(worker(3, 2))
		r.members["worker-3"].heard = 5
		for _, s := range c.sent {
			r.sent(s)
		}
		for _, s := range c.received {
			r.received(s)
		}
		r.gone(&memberlist.Node{Name: "worker-3.2"})
		if got := r.queue[len(r.queue)-1].String(); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}

	l := libraryLogger(slog.New(slog.NewTextHandler(&logged, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}})))
	l.Print("[ERR] memberlist: a\nb")
	l.Print("[DEBUG] memberlist: quiet")
	l.Print("plain")
	if want := "level=WARN msg=\"a\\nb\"\nlevel=INFO msg=plain\n"; logged.String() != want {
		t.Errorf("logged %q, want %q", logged.String(), want)
	}
}

// A ring that is full forgets who has been gone for longest, and nobody who is there.
func TestFull(t *testing.T) {
	r := &Ring{members: make(map[string]*entry)}
	for i := range MaxMembers {
		r.members[worker(i, 1).key()] = &entry{Member: Member{Identity: worker(i, 1), Since: time.Unix(int64(i), 0)}}
	}
	next := worker(MaxMembers, 1)
	if err := r.admit(next.Name(), next.encode()); err == nil {
		t.Error("another member was admitted")
	}
	r.members["worker-9"].State, r.members["worker-7"].State = StateDead, StateLeft
	if err := r.admit(next.Name(), next.encode()); err != nil {
		t.Error(err)
	}
	if got := r.oldestGone(); got != "worker-7" {
		t.Errorf("oldest is %s, want worker-7", got)
	}
}
