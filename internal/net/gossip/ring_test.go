package gossip

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
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
			r.await(t, id.Name(), StateAlive)
		}
	}
	return rings
}

func join(t *testing.T, l *lan, id Identity, to ...*Ring) *Ring {
	t.Helper()
	r, err := open(Config{Self: id, Detect: time.Second, Members: 8}, l.plug())
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

// await waits until the ring believes that of a member.
func (r *Ring) await(t *testing.T, name string, state State) Member {
	t.Helper()
	late := time.After(30 * time.Second)
	for {
		if m := r.member(name); m.Host != "" && m.State == state {
			return m
		}
		select {
		case <-r.Changed():
		case <-late:
			t.Fatalf("%s: %s is not %v within 30s; members are %v", r.name, name, state, r.Members())
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

// A killed member says nothing; all others believe that it is dead, and those that did not hear it from another one have suspected it.
func TestKilled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rings := cluster(t, newLAN(), eight()...)
		killed := time.Now()
		rings[2].Close()
		var suspicions atomic.Int32
		var all sync.WaitGroup
		for i, r := range rings {
			if i == 2 {
				continue
			}
			all.Go(func() {
				m := r.member("worker-2.1")
				for ; m.State != StateDead; m = r.member("worker-2.1") {
					if m.State == StateSuspect {
						suspicions.Add(1)
					}
					if m.State == StateSuspect && (m.By == "worker-2.1" || r.member(m.By).Host == "") {
						t.Errorf("%s: %v, want a suspicion by another member", r.name, m)
					}
					<-r.Changed()
				}
				if m.By == "" || m.By == "worker-2.1" {
					t.Errorf("%s: %v, want a death that another member reports", r.name, m)
				}
				// Five of a hundred losses take longer than the budget.
				if took := m.Since.Sub(killed); took > 3*r.config.Detect {
					t.Errorf("%s: found after %v, budget %v", r.name, took, r.config.Detect)
				}
				if len(r.Members()) != 8 {
					t.Errorf("%s: %d members, want 8 with the dead one", r.name, len(r.Members()))
				}
			})
		}
		all.Wait()
		if suspicions.Load() == 0 { // one member may hear of the death first, not all
			t.Error("dead without having been suspected")
		}
	})
}

// A pause that is shorter than the time of suspicion is refuted, a longer one
// is a death, after which the member comes back by itself.
func TestPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLAN()
		rings := cluster(t, l, eight()...)
		l.sever(rings[5].Addr(), true)
		rings[0].await(t, "worker-5.1", StateSuspect)
		l.sever(rings[5].Addr(), false)
		for _, r := range rings[:5] {
			if m := r.await(t, "worker-5.1", StateAlive); m.By != "" {
				t.Errorf("%s: %v after the pause", r.name, m)
			}
		}

		l.sever(rings[5].Addr(), true)
		for _, r := range rings[:5] {
			r.await(t, "worker-5.1", StateDead)
		}
		l.sever(rings[5].Addr(), false)
		for _, r := range rings[:5] {
			r.await(t, "worker-5.1", StateAlive)
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
			r.await(t, "worker-4.2", StateAlive)
		}
		l.sever(frozen.Addr(), false)
		if err := frozen.Join(t.Context(), rings[0].Addr(), rings[1].Addr()); err != nil {
			t.Error(err)
		}
		frozen.await(t, "worker-4.2", StateAlive) // it is told of its successor
		time.Sleep(5 * time.Second)
		synctest.Wait()
		for _, r := range append(others, second, frozen) {
			if m := r.member("worker-4.2"); m.State != StateAlive || m.By != "" {
				t.Errorf("%s: second life is %v", r.name, m)
			}
			if n := len(r.Members()); n != 8 {
				t.Errorf("%s: %d members, want 8", r.name, n)
			}
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
					r.await(t, id.Name(), StateAlive)
				}
			}
			rings[2].Close()
			if m := rings[0].await(t, "worker-2.1", StateDead); m.By == "" {
				t.Errorf("%v, and no member says so", m)
			}
		})
	}
}

func TestStrangersAreRefused(t *testing.T) {
	rejected := new(auth.Tally)
	a := Config{Self: worker(0, 1), Job: "a", Detect: time.Second, Members: 8, SecretKey: []byte("0123456789abcdef")}
	counting := a
	counting.Rejected = rejected
	r, err := Open(counting)
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
	// Theirs, a packet, and a caller that says nothing; not a member that joins.
	packet, err := net.Dial("udp", r.Addr())
	if err == nil {
		defer packet.Close()
		_, err = packet.Write([]byte("what is this"))
	}
	if err != nil {
		t.Fatal(err)
	}
	silent, err := net.Dial("tcp", r.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	a.Self = worker(2, 1)
	member, err := Open(a)
	if err != nil {
		t.Fatal(err)
	}
	defer member.Close()
	if err := member.Join(t.Context(), r.Addr()); err != nil {
		t.Error(err)
	}
	awaitCounts(t, rejected, []int64{auth.NoSecret: 4, auth.Silent: 1, auth.Malformed: 0})
}

// awaitCounts waits until so many were rejected.
func awaitCounts(t *testing.T, of *auth.Tally, want []int64) {
	t.Helper()
	for began := time.Now(); !slices.Equal(of.Counts(), want); {
		if time.Since(began) > 20*time.Second {
			t.Fatalf("counted: %v, not %v", of.Counts(), want)
		}
		time.Sleep(time.Millisecond)
	}
}

// Callers that stay silent, as many as a ring takes, do not keep out a member that joins.
func TestSquatters(t *testing.T) {
	rejected := new(auth.Tally)
	c := Config{Rejected: rejected, Self: worker(0, 1), Detect: time.Minute, Members: 8, SecretKey: []byte("0123456789abcdef")}
	r, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for range maxStreams {
		silent, err := net.Dial("tcp", r.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer silent.Close()
	}
	c.Self = worker(1, 1)
	joins, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	defer joins.Close()
	if err := joins.Join(t.Context(), r.Addr()); err != nil {
		t.Error(err)
	}
	awaitCounts(t, rejected, []int64{auth.Crowded: 1, auth.Malformed: 0})
}

// Where handlers are slow to close the streams that newer ones have replaced, streams wait, and nothing else does.
func TestManySlowStreams(t *testing.T) {
	inside := newLAN().plug()
	ignore := func([]byte) {}
	w := newWatch(inside, ignore, ignore, func([]byte) bool { return false }, nil)
	taken, theirs := make(chan net.Conn, 3*maxStreams), make([]net.Conn, 0, 2*maxStreams+1)
	var library sync.WaitGroup
	library.Go(func() {
		for {
			select {
			case c := <-w.StreamCh():
				taken <- c
			case <-w.closing:
				return
			}
		}
	})
	for range 2*maxStreams + 1 { // the last one has to wait
		here, there := net.Pipe()
		theirs = append(theirs, here)
		inside.streams <- there
	}
	inside.packets <- &memberlist.Packet{Buf: []byte("x")}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		<-w.PacketCh()
		(<-taken).Close()
		for range 2 * maxStreams {
			<-taken
		}
	}()
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Fatal("packets, or the end of a stream, wait for streams")
	}
	if err := w.Shutdown(); err != nil {
		t.Error(err)
	}
	library.Wait()
	for _, c := range theirs {
		c.Close()
	}
}

// What a stranger sends on a stream is kept within a bound.
func TestLongStream(t *testing.T) {
	r, err := Open(Config{Self: worker(0, 1), Detect: time.Minute, Members: 8, SecretKey: []byte("0123456789abcdef")})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	c, err := net.Dial("tcp", r.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const encrypted, size = 10, 20 << 20 // the library takes as much
	head := binary.BigEndian.AppendUint32([]byte{encrypted}, size)
	if _, err := c.Write(head); err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(c, io.LimitReader(zeros{}, size)); err == nil {
		t.Errorf("%d bytes were read", n)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func TestClaims(t *testing.T) {
	r := &Ring{name: "worker-0.1", members: make(map[string]*entry), changed: make(chan struct{}, 1)}
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

	// Claims about an unknown member, an older life and ourselves change nothing.
	for _, name := range []string{"", "x", "worker-3.1", "worker-9.1", "worker-0.1"} {
		r.sent(claim{kind: suspectType, Node: name, From: "x", Incarnation: 5})
		r.received(claim{kind: deadType, Node: name, From: "x", Incarnation: 5})
	}
	// A suspicion that is older than what was heard does not count, nor does an
	// older word end one.
	r.sent(claim{kind: aliveType, Node: "worker-3.2", Incarnation: 4})
	r.sent(claim{kind: suspectType, Node: "worker-3.2", From: "x", Incarnation: 3})
	believed := func(want string) {
		t.Helper()
		m := r.members["worker-3"]
		got := fmt.Sprintf("%s on %s %v", m.Name(), m.Host, m.State)
		if m.By != "" {
			got += ", says " + m.By
		}
		if got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	believed("worker-3.2 on h1 alive")
	r.sent(claim{kind: suspectType, Node: "worker-3.2", From: "x", Incarnation: 4})
	r.sent(claim{kind: suspectType, Node: "worker-3.2", From: "y", Incarnation: 4})
	r.sent(claim{kind: aliveType, Node: "worker-3.2", Incarnation: 4})
	believed("worker-3.2 on h1 suspect, says x")
	r.sent(claim{kind: aliveType, Node: "worker-3.2", Incarnation: 5})
	believed("worker-3.2 on h1 alive")

	// Whose word a death is.
	for _, c := range []struct {
		name           string
		sent, received []claim
		want           string
	}{
		{"we suspected it", []claim{{suspectType, 5, "worker-3.2", "x"}}, nil, "worker-0.1"},
		{"another says so", nil, []claim{{deadType, 5, "worker-3.2", "y"}}, "y"},
		{"its suspicion was not passed on", nil, []claim{{suspectType, 5, "worker-3.2", "y"}}, "y"},
		{"an old death", nil, []claim{{deadType, 4, "worker-3.2", "y"}}, "worker-0.1"},
		{"a death it outlived", nil, []claim{{deadType, 5, "worker-3.2", "y"}, {aliveType, 6, "worker-3.2", ""}}, "worker-0.1"},
	} {
		put(worker(3, 2))
		r.members["worker-3"].heard = 5
		for _, s := range c.sent {
			r.sent(s)
		}
		for _, s := range c.received {
			r.received(s)
		}
		r.died(&memberlist.Node{Name: "worker-3.2"})
		believed("worker-3.2 on h1 dead, says " + c.want)
	}
}

// A full ring forgets the member that has been dead for longest, and none that is there.
func TestFull(t *testing.T) {
	r := &Ring{members: make(map[string]*entry)}
	for i := range MaxMembers {
		r.members[worker(i, 1).key()] = &entry{Member: Member{Identity: worker(i, 1), Since: time.Unix(int64(i), 0)}}
	}
	next := worker(MaxMembers, 1)
	if err := r.admit(next.Name(), next.encode()); err == nil {
		t.Error("another member was admitted")
	}
	r.members["worker-9"].State, r.members["worker-7"].State = StateDead, StateDead
	if err := r.admit(next.Name(), next.encode()); err != nil {
		t.Error(err)
	}
	if got := r.oldestDead(); got != "worker-7" {
		t.Errorf("oldest is %s, want worker-7", got)
	}
}
