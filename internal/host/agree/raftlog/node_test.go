package raftlog

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/timing"
)

func version(generation, n int) id.Version { return id.Version{Generation: generation, N: n} }

const childDir = "SOLITON_AGREE_TEST_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		fmt.Println(commitUntilKilled(dir))
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// patience is how long a test waits for what must come.
const patience = 60 * time.Second

// alone are the servers of a run on host a.
var alone = []agree.Server{{ID: "a", Voter: true}}

// A heard is what a node has told.
type heard struct {
	mu      sync.Mutex
	entries []agree.Entry
	states  []agree.State
}

func (h *heard) add(e agree.Entry, s agree.State) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.entries, h.states = append(h.entries, e), append(h.states, s)
}

// count is how many entries were heard.
func (h *heard) count() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.entries)
}

// first is the first entry that was heard, of one at least.
func (h *heard) first() agree.Entry {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.entries[0]
}

// plans are the versions heard of, in order, since the last snapshot.
func (h *heard) plans() (all []int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, e := range h.entries {
		switch e := e.(type) {
		case nil:
			all = nil
			for _, p := range h.states[i].Plans {
				all = append(all, p.Version.N)
			}
		case agree.Plan:
			all = append(all, e.Version.N)
		}
	}
	return all
}

// A cluster is nodes in this process.
type cluster struct {
	t      *testing.T
	memory *Memory
	dirs   map[string]string
	nodes  map[string]*Node
	heard  map[string]*heard

	patience time.Duration // Config.Timeout
}

func newCluster(t *testing.T) *cluster {
	c := &cluster{t, NewMemory(), map[string]string{}, map[string]*Node{}, map[string]*heard{}, 700 * time.Millisecond}
	t.Cleanup(func() {
		c.memory.Heal()
		for id := range c.nodes {
			c.close(id)
		}
	})
	return c
}

func (c *cluster) config(id string) Config {
	if c.dirs[id] == "" {
		c.dirs[id] = c.t.TempDir()
	}
	c.heard[id] = new(heard)
	return Config{Dir: c.dirs[id], Host: id, memory: c.memory, Timeout: c.patience, Apply: c.heard[id].add}
}

func (c *cluster) open(config Config) *Node { return c.keep(Open(config)) }

func (c *cluster) create(config Config, servers ...agree.Server) *Node {
	return c.keep(Create(config, servers))
}

func (c *cluster) keep(n *Node, err error) *Node {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
	c.nodes[n.id] = n
	if id, host := n.id, n.config.Host; id != host { // it has joined
		c.heard[id], c.dirs[id] = c.heard[host], c.dirs[host]
		delete(c.heard, host)
		delete(c.dirs, host)
	}
	return n
}

// join opens a node on a host without a log.
func (c *cluster) join(host string) *Node {
	c.t.Helper()
	config := c.config(host)
	config.Join = true
	return c.open(config)
}

func (c *cluster) close(id string) {
	c.t.Helper()
	if err := c.nodes[id].Close(); err != nil {
		c.t.Errorf("close %s: %v", id, err)
	}
	delete(c.nodes, id)
}

// start opens voters with the names a, b, c and so on.
func (c *cluster) start(voters int) (ids []string) {
	c.t.Helper()
	var all []agree.Server
	for i := range voters {
		ids = append(ids, string(rune('a'+i)))
		all = append(all, agree.Server{ID: ids[i], Voter: true})
	}
	for _, id := range ids {
		c.create(c.config(id), all...)
	}
	return ids
}

func (c *cluster) eventually(what string, condition func() bool) {
	c.t.Helper()
	end := time.Now().Add(patience)
	for !condition() {
		if time.Now().After(end) {
			c.t.Fatalf("after %v not yet: %s", patience, what)
		}
		time.Sleep(time.Millisecond)
	}
}

// leader waits until one of the nodes, of all if none is named, is ready.
func (c *cluster) leader(among ...string) *Node {
	c.t.Helper()
	var found *Node
	c.eventually("a leader", func() bool {
		for id, n := range c.nodes {
			if (len(among) == 0 || slices.Contains(among, id)) && n.Leadership().Ready {
				found = n
			}
		}
		return found != nil
	})
	return found
}

// ask asks the leader until it has an answer, through changes of leader.
func (c *cluster) ask(what string, question func(lead *Node) error, among ...string) {
	c.t.Helper()
	c.eventually(what, func() bool {
		err := question(c.leader(among...))
		var moved *agree.NotLeaderError
		switch {
		case err == nil, errors.Is(err, agree.ErrStale): // an attempt before was committed after all
			return true
		case errors.As(err, &moved), errors.Is(err, agree.ErrUncertain):
			return false
		}
		c.t.Fatalf("%s: %v", what, err)
		return false
	})
}

// change asks for a change of the servers until it is made.
func (c *cluster) change(what string, question func(lead *Node) error) {
	c.t.Helper()
	c.ask(what, func(lead *Node) error {
		err := question(lead)
		if errors.Is(err, agree.ErrStale) { // the one before was not committed yet
			return agree.ErrUncertain
		}
		return err
	})
}

// commit proposes until the entry is in.
func (c *cluster) commit(e agree.Entry, among ...string) {
	c.t.Helper()
	c.ask(e.String(), func(lead *Node) error { _, err := lead.Propose(c.t.Context(), e); return err }, among...)
}

func (c *cluster) plans(from, to int, among ...string) {
	c.t.Helper()
	for n := from; n <= to; n++ {
		c.commit(agree.Plan{Version: version(1, n), Data: []byte(fmt.Sprint("plan ", n))}, among...)
	}
}

// agreed waits until the nodes have heard of plans 1 to n.
func (c *cluster) agreed(n int, ids ...string) {
	c.t.Helper()
	var want []int
	for i := 1; i <= n; i++ {
		want = append(want, i)
	}
	for _, id := range ids {
		c.eventually(fmt.Sprintf("%d plans at %s", n, id), func() bool { return len(c.heard[id].plans()) >= n })
		if got := c.heard[id].plans(); !slices.Equal(got, want) {
			c.t.Errorf("%s heard of plans %v, want 1 to %d", id, got, n)
		}
	}
}

// The budget is such that a node which waits for its timer never leads.
func TestSingleVoterLeadsAtOnce(t *testing.T) {
	n, err := Create(Config{
		Dir: filepath.Join(t.TempDir(), "agree"), Host: "a", Timeout: 10 * time.Hour, Listener: listen(t),
	}, alone)
	if err != nil {
		t.Fatal(err)
	}
	l := <-n.Changes()
	for !l.Ready {
		l = <-n.Changes()
	}
	if l.Leader != "a" || l.Term != n.Term() || n.Leadership() != l {
		t.Errorf("leadership %+v in term %d", l, n.Term())
	}
	if _, err := n.Propose(t.Context(), agree.Generation{N: 1}); err != nil {
		t.Error(err)
	}
	index, err := n.Propose(t.Context(), agree.Plan{Term: l.Term, Version: version(1, 1)})
	if s := n.State(); err != nil || s.Index != index || s.Newest != version(1, 1) || s.Leader != "a" || s.Term != l.Term {
		t.Errorf("index %d, %v; state %+v", index, err, s)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if _, open := <-n.Changes(); open {
		t.Error("after Close there is another leadership")
	}
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestVersionsNeverRepeat(t *testing.T) {
	c := newCluster(t)
	c.start(1)
	c.commit(agree.Generation{N: 1})
	c.plans(1, 5)
	for generation := 2; generation < 5; generation++ {
		before := c.nodes["a"].State()
		c.close("a")
		n := c.open(c.config("a"))
		c.leader()
		s := n.State()
		if s.Newest != before.Newest || s.Generation != generation-1 || !reflect.DeepEqual(s.Plans, before.Plans) {
			t.Fatalf("after a restart %+v, want %+v", s, before)
		}
		for _, e := range []agree.Entry{agree.Generation{N: generation - 1}, agree.Plan{Version: before.Newest}, agree.Plan{Version: version(1, 5)}} {
			if _, err := n.Propose(t.Context(), e); !errors.Is(err, agree.ErrStale) {
				t.Errorf("%v: %v, want %v", e, err, agree.ErrStale)
			}
		}
		c.commit(agree.Generation{N: generation})
		if _, err := n.Propose(t.Context(), agree.Plan{Version: version(generation-1, 99)}); !errors.Is(err, agree.ErrStale) {
			t.Errorf("a plan of the generation before: %v, want %v", err, agree.ErrStale)
		}
		c.commit(agree.Plan{Version: version(generation, 1)})
	}
}

// commitUntilKilled prints the number of each plan when it is committed.
func commitUntilKilled(dir string) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	c := Config{Dir: dir, Host: "a", Listener: l, Timeout: time.Second}
	open := func() (*Node, error) { return Open(c) }
	if left, err := os.ReadDir(dir); err == nil && len(left) == 0 {
		open = func() (*Node, error) { return Create(c, alone) }
	}
	n, err := open()
	if err != nil {
		return err
	}
	for l := range n.Changes() {
		if l.Ready {
			break
		}
	}
	generation := n.State().Generation + 1
	if _, err := n.Propose(context.Background(), agree.Generation{N: generation}); err != nil {
		return err
	}
	for i := 1; ; i++ {
		if _, err := n.Propose(context.Background(), agree.Plan{Version: version(generation, i), Data: make([]byte, 5000)}); err != nil {
			return err
		}
		fmt.Println(i)
	}
}

// A process that is killed while it commits has all that it said it had.
func TestKilledProcess(t *testing.T) {
	c := newCluster(t)
	dir := c.config("a").Dir
	for generation := 1; generation <= 3; generation++ {
		child := exec.CommandContext(t.Context(), os.Args[0])
		child.Env = append(os.Environ(), childDir+"="+dir)
		out, err := child.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		last := 0
		for lines := bufio.NewScanner(out); lines.Scan(); {
			n, err := strconv.Atoi(lines.Text())
			if err != nil {
				t.Fatalf("the process says %q", lines.Text())
			}
			if last = n; last == 20 {
				if err := child.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
		}
		_ = child.Wait() // it was killed
		n := c.open(c.config("a"))
		c.leader()
		if s := n.State(); last < 20 || s.Generation != generation || s.Newest.Compare(version(generation, last)) < 0 {
			t.Errorf("the process had plan %d.%d, and the log has %v", generation, last, s.Newest)
		}
		c.close("a")
	}
}

func TestAllHearTheSame(t *testing.T) {
	c := newCluster(t)
	ids := c.start(3)
	c.commit(agree.Generation{N: 1})
	c.commit(agree.Job{Generation: 1, Data: []byte("job")})
	c.plans(1, 10)
	c.agreed(10, ids...)
	want := []agree.Server{{ID: "a", Addr: "a", Voter: true}, {ID: "b", Addr: "b", Voter: true}, {ID: "c", Addr: "c", Voter: true}}
	for _, id := range ids {
		s := c.nodes[id].State()
		if string(s.Job.Data) != "job" || !slices.Equal(s.Servers, want) {
			t.Errorf("%s: %+v", id, s)
		}
	}
	lead := c.leader()
	for _, id := range ids {
		if id == lead.id {
			continue
		}
		c.eventually(id+" names the leader", func() bool {
			var refused *agree.NotLeaderError
			_, err := c.nodes[id].Propose(t.Context(), agree.Generation{N: 1})
			if !errors.As(err, &refused) { // it leads meanwhile, and refuses what is there already
				return errors.Is(err, agree.ErrStale)
			}
			return refused.Leader == agree.Server{ID: refused.Leader.ID, Addr: refused.Leader.ID, Voter: true}
		})
	}
}

// Leaders die one after another, until those left are just a majority.
func TestLeadersDie(t *testing.T) {
	for _, voters := range []int{3, 5} {
		t.Run(fmt.Sprint(voters), func(t *testing.T) {
			c := newCluster(t)
			c.start(voters)
			c.commit(agree.Generation{N: 1})
			plans, term := 0, uint64(0)
			for {
				c.plans(plans+1, plans+5)
				plans += 5
				if len(c.nodes) == voters/2+1 {
					break
				}
				lead := c.leader()
				if lead.Term() <= term {
					t.Errorf("leader in term %d after term %d", lead.Term(), term)
				}
				term = lead.Term()
				c.memory.Cut(lead.id) // the others hear no farewell
				c.close(lead.id)
				c.memory.Heal()
			}
			for id := range c.nodes {
				c.agreed(plans, id)
			}
		})
	}
}

// fullStore has no room for the first writes.
type fullStore struct {
	raft.StableStore
	full  int
	tried int
}

func (s *fullStore) SetUint64([]byte, uint64) error {
	if s.tried++; s.tried <= s.full {
		return &fs.PathError{Op: "write", Path: "log.db", Err: unix.ENOSPC}
	}
	return nil
}

// A node whose disk is full does not vote until its vote is on the disk. When it is closed, it ends.
func TestVoteOnAFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quit := make(chan struct{})
		s := &fullStore{full: 3}
		if err := (votes{s, quit}).SetUint64([]byte("term"), 7); err != nil || s.tried != 4 {
			t.Errorf("%v after %d attempts", err, s.tried)
		}
		s = &fullStore{full: 1 << 30}
		voted, ended := false, make(chan struct{})
		go func() {
			defer close(ended)
			_ = votes{s, quit}.SetUint64([]byte("term"), 7)
			voted = true
		}()
		time.Sleep(10 * timing.Disk)
		close(quit)
		<-ended
		if voted {
			t.Error("it has voted")
		}
	})
}

// Where votes come later than a candidate usually waits for them, it waits longer, and a leader is elected.
func TestLateVotes(t *testing.T) {
	c := newCluster(t)
	c.memory.votes = 3 * timing.LogOf(c.config("a").Timeout).Election
	c.start(3)
	c.commit(agree.Generation{N: 1})
	c.plans(1, 3)
}

func TestBackoff(t *testing.T) {
	p := newBackoff(time.Second)
	var waits, times []time.Duration
	for range 6 {
		waits, times = append(waits, p.wait()/time.Second), append(times, p.next()/time.Second)
	}
	if want := []time.Duration{3, 6, 12, 24, 48, 48}; !slices.Equal(waits, want) {
		t.Errorf("waits %d, want %d", waits, want)
	}
	if want := []time.Duration{2, 4, 8, 16, 16, 16}; !slices.Equal(times, want) {
		t.Errorf("times %d, want %d", times, want)
	}
	if !p.heard(true) || p.heard(true) || p.wait() != calm*time.Second {
		t.Errorf("with a leader: %+v", p)
	}
	if !p.heard(false) || p.wait() != 48*time.Second { // it did not stay
		t.Errorf("without it: %+v", p)
	}
	p.heard(true)
	if p.next() != time.Second {
		t.Errorf("after it has stayed: %+v", p)
	}
}

// Who knows that the leader is gone need not wait until it has missed it.
func TestStand(t *testing.T) {
	c := newCluster(t)
	c.start(3)
	c.commit(agree.Generation{N: 1})
	led := c.leader()
	for id, n := range c.nodes {
		if n == led {
			continue
		}
		term := led.Term()
		c.close(led.id)
		n.Stand()
		if next := c.leader(); next.Term() <= term {
			t.Errorf("%s stood, and the term is still %d", id, term)
		}
		c.plans(1, 3)
		return
	}
}

// Nodes that miss the leader elect another one before their patience ends, and one of them alone does not depose it.
func TestMiss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		defer func() {
			c.memory.Heal()
			for id := range c.nodes {
				c.close(id)
			}
		}()
		c.patience = 40 * time.Second
		election := timing.LogOf(c.patience).Election
		ids := c.start(3)
		c.commit(agree.Generation{N: 1})
		led := c.leader()
		others := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return id == led.id })
		term := led.Term()
		miss := func() {
			for _, id := range others {
				c.nodes[id].Miss()
				time.Sleep(timing.Stagger)
			}
		}
		miss()
		time.Sleep(election)
		if c.leader() != led || led.Term() != term {
			t.Fatalf("a leader that is heard was deposed: term %d, was %d", led.Term(), term)
		}
		c.memory.Cut(led.id)
		began := time.Now()
		time.Sleep(election)
		miss()
		c.eventually("another one leads", func() bool {
			return slices.ContainsFunc(others, func(id string) bool { return c.nodes[id].Leadership().Leader == id })
		})
		if took := time.Since(began); took > election+election/8 {
			t.Errorf("another one leads after %v, of elections after %v", took, election)
		}
	})
}

// Who is cut off does not go on to terms that would depose the leader of the others afterwards.
func TestCutNodeKeepsItsTerm(t *testing.T) {
	c := newCluster(t)
	c.start(3)
	c.commit(agree.Generation{N: 1})
	led := c.leader()
	for id, n := range c.nodes {
		if n == led {
			continue
		}
		c.eventually("it follows the leader", func() bool { return n.Leadership().Leader == led.id })
		term := n.Term()
		c.memory.Cut(id)
		c.eventually("it knows that it has no leader", func() bool { return n.Leadership().Leader == "" })
		c.plans(1, 3)
		if n.Term() != term {
			t.Errorf("%s went from term %d to %d alone", id, term, n.Term())
		}
		c.memory.Heal()
		c.agreed(3, id)
		return
	}
}

func TestMinorityCommitsNothing(t *testing.T) {
	c := newCluster(t)
	ids := c.start(3)
	c.commit(agree.Generation{N: 1})
	c.plans(1, 3)
	cut := c.leader()
	id := cut.id
	c.memory.Cut(id)
	others := slices.DeleteFunc(slices.Clone(ids), func(o string) bool { return o == id })

	var moved *agree.NotLeaderError
	if _, err := cut.Propose(t.Context(), agree.Plan{Version: version(1, 100)}); !errors.Is(err, agree.ErrUncertain) && !errors.As(err, &moved) {
		t.Fatalf("the minority's leader answers %v", err)
	}
	c.eventually("the minority knows that it has no leader", func() bool { return cut.Leadership().Leader == "" })
	if _, err := cut.Propose(t.Context(), agree.Plan{Version: version(1, 101)}); !errors.As(err, &moved) {
		t.Errorf("the minority answers %v, want a NotLeaderError", err)
	}
	if err := cut.AddNonVoter(t.Context(), agree.Server{ID: "z", Addr: "z"}); !errors.As(err, &moved) {
		t.Errorf("the minority answers %v, want a NotLeaderError", err)
	}

	c.plans(4, 6, others...)
	c.memory.Heal()
	c.plans(7, 9)
	c.agreed(9, ids...) // and nobody has heard of 100
}

func TestServersJoinAndLeave(t *testing.T) {
	c := newCluster(t)
	c.start(1)
	c.commit(agree.Generation{N: 1})
	c.plans(1, 3)
	id := c.join("b").id // waits to be added
	b := agree.Server{ID: id, Addr: id}
	c.change("add b", func(lead *Node) error { return lead.AddNonVoter(t.Context(), b) })
	c.agreed(3, id)
	c.plans(4, 4)
	c.agreed(4, "a", id)
	want := []agree.Server{{ID: "a", Addr: "a", Voter: true}, b}
	c.eventually("b knows the servers", func() bool { return slices.Equal(c.nodes[id].State().Servers, want) })

	c.change("promote b", func(lead *Node) error { return lead.Promote(t.Context(), id) })
	if s, ok := c.leader().State().Server(id); !ok || !s.Voter {
		t.Errorf("b is %+v, want a voter", s)
	}
	c.change("remove a", func(lead *Node) error { return lead.Remove(t.Context(), "a") })
	c.plans(5, 8, id)
	if got := c.nodes[id].State().Servers; !slices.Equal(got, []agree.Server{{ID: id, Addr: id, Voter: true}}) {
		t.Errorf("servers %v", got)
	}
	c.agreed(8, id)

	for _, bad := range []agree.Server{{}, {ID: strings.Repeat("x", agree.MaxName+1)}, {ID: "x", Addr: strings.Repeat("x", agree.MaxName+1)}} {
		if err := c.nodes[id].AddNonVoter(t.Context(), bad); !errors.Is(err, agree.ErrInvalid) || len(err.Error()) > 300 {
			t.Errorf("%.20q is added: %v", bad.ID, err)
		}
	}
}

// A snapshot takes the place of the log, for its own node and for a new one.
func TestSnapshots(t *testing.T) {
	c := newCluster(t)
	c.start(1)
	c.commit(agree.Generation{N: 1})
	c.plans(1, agree.MaxPlans+4)
	compact := func() {
		t.Helper()
		n := c.nodes["a"]
		settings := n.raft.ReloadableConfig()
		settings.TrailingLogs = 0
		if err := n.raft.ReloadConfig(settings); err != nil {
			t.Fatal(err)
		}
		if err := n.raft.Snapshot().Error(); err != nil {
			t.Fatal(err)
		}
	}
	compact()
	before := c.nodes["a"].State()
	c.close("a")
	c.open(c.config("a"))
	lead := c.leader()
	after := lead.State()
	if after.Newest != before.Newest || after.Earlier != 4 || !reflect.DeepEqual(normal(after).Plans, normal(before).Plans) ||
		!slices.Equal(after.Servers, before.Servers) {
		t.Errorf("after a restart\n%+v\nwant\n%+v", after, before)
	}
	c.eventually("a hears", func() bool { return c.heard["a"].count() > 0 })
	if e := c.heard["a"].first(); e != nil {
		t.Errorf("the first that is heard is %v, want a snapshot", e)
	}
	if _, err := lead.Propose(t.Context(), agree.Plan{Version: before.Newest}); !errors.Is(err, agree.ErrStale) {
		t.Errorf("an old version: %v, want %v", err, agree.ErrStale)
	}

	c.commit(agree.Plan{Version: version(1, 100)})
	compact()
	b := c.join("b")
	if err := lead.AddNonVoter(t.Context(), agree.Server{ID: b.id, Addr: b.id}); err != nil {
		t.Fatal(err)
	}
	c.eventually("b has the state", func() bool { return b.State().Newest == version(1, 100) })
	c.eventually("b hears", func() bool { return c.heard[b.id].count() > 0 })
	if e := c.heard[b.id].first(); e != nil {
		t.Errorf("the first that b hears is %v, want a snapshot", e)
	}
}

// Nodes on TCP with a secret, all killed and opened again at other addresses.
func TestTCP(t *testing.T) {
	secure := secretTLS(t, "s")
	c := newCluster(t)
	ids := []string{"a", "b", "c"}
	for start := 1; start <= 2; start++ {
		listeners, addrs := map[string]net.Listener{}, map[string]string{}
		var all []agree.Server
		for _, id := range ids {
			listeners[id] = listen(t)
			addrs[id] = listeners[id].Addr().String()
			all = append(all, agree.Server{ID: id, Addr: addrs[id], Voter: true})
		}
		for _, id := range ids {
			config := c.config(id)
			config.memory, config.Listener, config.TLS = nil, listeners[id], secure
			config.Resolve = func(id string) string { return addrs[id] }
			open := func() *Node { return c.create(config, all...) }
			if start > 1 {
				open = func() *Node { return c.open(config) }
			}
			if n := open(); parseAddress(n.net.LocalAddr()) != (address{id, addrs[id]}) {
				t.Errorf("%s is at %s, want %s", id, n.net.LocalAddr(), addrs[id])
			}
		}
		c.commit(agree.Generation{N: start})
		c.commit(agree.Plan{Version: version(start, 1)})
		for _, id := range ids {
			c.eventually("the newest plan at "+id, func() bool { return c.nodes[id].State().Newest == version(start, 1) })
		}
		if start == 2 {
			strangers(t, addrs["a"])
		}
		for _, id := range ids {
			c.close(id)
		}
	}
}

// secretTLS returns the configuration of nodes that share a secret of one letter.
func secretTLS(t testing.TB, letter string) *tls.Config {
	t.Helper()
	c, err := transport.TLSFromSecret(bytes.Repeat([]byte(letter), transport.MinSecret))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// strangers shows that a node ends connections of those who do not know the secret.
func strangers(t *testing.T, addr string) {
	t.Helper()
	ended := func(name string, conn net.Conn) {
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write([]byte{0, 0x90}) // an RPC of raft begins so
		_, err := io.Copy(io.Discard, conn)
		if late := (net.Error)(nil); errors.As(err, &late) && late.Timeout() {
			t.Errorf("%s: the connection stays", name)
		}
	}
	plain, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	ended("plain", plain)
	other := secretTLS(t, "o")
	other.NextProtos = []string{"soliton-agree-2"}
	if conn, err := tls.Dial("tcp", addr, other); err == nil {
		ended("another secret", conn)
		t.Error("a dialling node takes another secret for its own")
	}
	other.VerifyConnection = nil
	conn, err := tls.Dial("tcp", addr, other)
	if err != nil {
		return // the alert came early
	}
	ended("another secret, unchecked", conn)
}

// Whoever waits for an answer that cannot come is released by Close and by its context.
// A node that advertises an address still dials from the one that it listens on: what cuts its host off then ends this direction too.
func TestDialsFromItsAddress(t *testing.T) {
	listen := func(addr string) net.Listener {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Skip("needs a second loopback address: ", err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	own, other := listen("127.0.0.2:0"), listen("127.0.0.1:0")
	s := newStream(Config{Listener: own, Advertise: own.Addr().String(), Timeout: patience}, "a")
	t.Cleanup(func() { s.Close() })
	var dialling sync.WaitGroup
	defer dialling.Wait()
	dialling.Go(func() {
		if c, err := s.Dial(raft.ServerAddress("b@"+other.Addr().String()), patience); err == nil {
			c.Close()
		}
	})
	conn, err := other.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if from, _, _ := net.SplitHostPort(conn.RemoteAddr().String()); from != "127.0.0.2" {
		t.Errorf("it dials from %s, want 127.0.0.2", from)
	}
	conn.Close()
}

func TestCloseWhileWaiting(t *testing.T) {
	c := newCluster(t)
	config := c.config("a")
	held, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	config.Apply = func(e agree.Entry, _ agree.State) {
		if e == (agree.Generation{N: 7}) {
			once.Do(func() { close(held) })
			<-release
		}
	}
	n := c.create(config, alone...)
	c.leader()

	answers := make(chan error, 2)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { _, err := n.Propose(ctx, agree.Generation{N: 7}); answers <- err }()
	<-held
	cancel()
	if err := <-answers; !errors.Is(err, agree.ErrUncertain) || !errors.Is(err, context.Canceled) {
		t.Errorf("after the context's end: %v", err)
	}
	go func() { _, err := n.Propose(t.Context(), agree.Generation{N: 8}); answers <- err }()
	c.eventually("the proposal is in the log", func() bool { return n.raft.LastIndex() >= 4 })
	closed := make(chan error)
	for range 2 {
		go func() { closed <- n.Close() }()
	}
	if err := <-answers; !errors.Is(err, agree.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	close(release)
	for range 2 {
		if err := <-closed; err != nil {
			t.Error(err)
		}
	}
	if _, err := n.Propose(t.Context(), agree.Generation{N: 9}); !errors.Is(err, agree.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	if _, err := n.Propose(ctx, agree.Generation{N: 9}); !errors.Is(err, context.Canceled) || errors.Is(err, agree.ErrUncertain) {
		t.Errorf("with a context that has ended: %v", err)
	}
}

func TestProposeRefusesBadEntries(t *testing.T) {
	c := newCluster(t)
	c.start(1)
	n := c.nodes["a"]
	c.leader()
	last := n.raft.LastIndex()
	for name, e := range map[string]agree.Entry{
		"nil": nil, "servers": agree.Servers{}, "oversized": agree.Job{Generation: 1, Data: make([]byte, agree.MaxData+1)},
		"long reason": agree.Plan{Reason: strings.Repeat("x", agree.MaxReason+1)}, "long name": agree.Leader{ID: strings.Repeat("x", agree.MaxName+1)},
	} {
		if _, err := n.Propose(t.Context(), e); !errors.Is(err, agree.ErrInvalid) {
			t.Errorf("%s: %v, want %v", name, err, agree.ErrInvalid)
		}
	}
	if got := n.raft.LastIndex(); got != last {
		t.Errorf("the log has grown from %d to %d", last, got)
	}
	// What a foreign node might put into the log.
	for _, data := range broken {
		f := n.raft.Apply(data, 0)
		if err := f.Error(); err != nil {
			t.Fatal(err)
		}
		if v := f.Response().(verdict); !errors.Is(v.err, agree.ErrInvalid) {
			t.Errorf("%x: %v, want %v", data, v.err, agree.ErrInvalid)
		}
	}
	c.commit(agree.Generation{N: 1})
}

func TestOpenRefuses(t *testing.T) {
	c := newCluster(t)
	config := c.config("a")
	c.create(config, alone...)
	config.memory, config.Listener = nil, listen(t)
	if n, err := Open(config); !errors.Is(err, agree.ErrInUse) {
		if err == nil {
			_ = n.Close()
		}
		t.Errorf("a directory that is open: %v, want %v", err, agree.ErrInUse)
	}
	l := listen(t)
	if _, err := Open(Config{Listener: l}); err == nil {
		t.Error("no directory, and no error")
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the listener is left open: %v", err)
	}
}

func TestValidateReportsAll(t *testing.T) {
	anywhere, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer anywhere.Close()
	wrong := Config{Timeout: time.Millisecond, TLS: new(tls.Config), Listener: anywhere, memory: NewMemory(), Join: true}
	got := errors.Join(wrong.Validate(), wrong.validateServers([]agree.Server{{ID: "a", Addr: "x"}, {ID: "a", Addr: "x"}, {}}))
	want := []string{
		"agree: Dir is empty", "agree: Host has 0 bytes", "agree: Timeout is 1ms",
		"agree: Listener is nil or not the only network", "agree: Listener 0.0.0.0:", "agree: Join is set for a new run",
		"agree: servers[1]: ID \"a\" is there twice", "agree: servers[2]: ID has 0 bytes", "agree: the servers of a new run have no voter",
	}
	lines := strings.Split(fmt.Sprint(got), "\n")
	if len(lines) != len(want) {
		t.Fatalf("got %d faults, want %d:\n%v", len(lines), len(want), got)
	}
	for i, w := range want {
		if !strings.HasPrefix(lines[i], w) {
			t.Errorf("got %q, want it to begin with %q", lines[i], w)
		}
	}
	for name, c := range map[string]Config{
		"not loopback without secret": {Dir: "d", Host: "a", Listener: anywhere, Advertise: "h:1"},
		"no network":                  {Dir: "d", Host: "a"},
		"an ID for a host":            {Dir: "d", Host: agree.NewServerID("a"), memory: NewMemory()},
	} {
		c.Timeout = time.Second
		if err := c.Validate(); err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want one fault", name, err)
		}
	}
	right := Config{Dir: "d", Host: "a", memory: NewMemory(), Timeout: time.Second}
	if err := errors.Join(right.Validate(), right.validateServers(alone)); err != nil {
		t.Error(err)
	}
	if err := right.validateServers([]agree.Server{{ID: "b", Addr: "b", Voter: true}}); err == nil {
		t.Error("a run that lacks its host begins")
	}
	right.memory, right.Listener, right.TLS = nil, anywhere, new(tls.Config)
	if err := right.validateServers(append(slices.Clone(alone), agree.Server{ID: "b", Addr: "h:1"})); err == nil {
		t.Error("others know no address of this host")
	}
}

func TestLogsGoDown(t *testing.T) {
	var out bytes.Buffer
	l := newLogger(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelInfo})))
	l.Info("quiet")
	l.Warn("election", "node", "a")
	l.With("peer", "b").Error("lost", "servers", raft.Server{ID: "c"})
	text := out.String()
	if strings.Contains(text, "quiet") || !strings.Contains(text, "level=INFO msg=election part=raft node=a") ||
		!strings.Contains(text, "level=WARN msg=lost part=raft peer=b") {
		t.Errorf("logged %q", text)
	}
}

// BenchmarkCommit measures from Propose to its return, with synced files and,
// for more than one voter, TCP and TLS on the loopback interface.
func BenchmarkCommit(b *testing.B) {
	for _, voters := range []int{1, 3, 5} {
		b.Run(fmt.Sprintf("voters=%d", voters), func(b *testing.B) { benchmarkCommit(b, voters) })
	}
}

func benchmarkCommit(b *testing.B, voters int) {
	var all []agree.Server
	var listeners []net.Listener
	for i := range voters {
		l := listen(b)
		listeners = append(listeners, l)
		all = append(all, agree.Server{ID: fmt.Sprint(i), Addr: l.Addr().String(), Voter: true})
	}
	ready := make(chan *Node, 100)
	var readers sync.WaitGroup
	var nodes []*Node
	for i, l := range listeners {
		n, err := Create(Config{
			Dir: b.TempDir(), Host: all[i].ID, Listener: l, TLS: secretTLS(b, "s"), Timeout: 2 * time.Second,
		}, all)
		if err != nil {
			b.Fatal(err)
		}
		nodes = append(nodes, n)
		readers.Go(func() {
			for l := range n.Changes() {
				if l.Ready {
					ready <- n
				}
			}
		})
	}
	lead := <-ready
	if _, err := lead.Propose(b.Context(), agree.Generation{N: 1}); err != nil {
		b.Fatal(err)
	}
	order := make([]byte, 4<<10)
	var took []time.Duration
	for n := 1; b.Loop(); n++ {
		begin := time.Now()
		if _, err := lead.Propose(b.Context(), agree.Plan{Version: version(1, n), Data: order}); err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(begin))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1e3, "ms-median")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1e3, "ms-p99")
	for _, n := range nodes {
		if err := n.Close(); err != nil {
			b.Error(err)
		}
	}
	readers.Wait()
}

// broken are bytes that no node can read as an entry.
var broken = [][]byte{{}, {1}, {1, 200}, {2, 1, 1}, {1, 1, 0xa1, '7'}}

// An entry that no node can read changes nothing but the index, and is refused.
func TestMachineRefusesBrokenEntries(t *testing.T) {
	for _, data := range broken {
		m := newMachine(func(e agree.Entry, _ agree.State) { t.Errorf("%x: heard of %v", data, e) })
		v := m.Apply(&raft.Log{Index: 3, Term: 2, Data: data}).(verdict)
		if !errors.Is(v.err, agree.ErrInvalid) || !reflect.DeepEqual(*m.state.Load(), agree.State{Index: 3}) {
			t.Errorf("%x: %v; state %+v", data, v.err, *m.state.Load())
		}
	}
}

// normal makes states comparable: no elements are as good as none.
func normal(s agree.State) agree.State {
	s.Plans, s.Servers = append([]agree.Plan(nil), s.Plans...), append([]agree.Server(nil), s.Servers...)
	return s
}
