package group_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/commtest"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/timing"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	for env, run := range peers {
		if arg := os.Getenv(env); arg != "" {
			run(arg)
			return
		}
	}
	goleak.VerifyTestMain(m)
}

// peers are what this test binary runs as a process of its own where the environment variable is set, with its value.
var peers = map[string]func(string){envPeer: peerProcess}

func inMem() commtest.Network {
	m := transport.NewMem()
	return func(testing.TB, int) transport.Transport { return m }
}

func inTCP(testing.TB, int) transport.Transport { return transport.TCP{} }

// team is a cluster with one group under version 1/1.
func team(t *testing.T, n int, network commtest.Network) ([]*comm.Endpoint, []*group.Group, id.Version) {
	t.Helper()
	es, _ := commtest.Cluster(t, n, comm.Config{}, network)
	v := id.Version{Generation: 1, N: 1}
	return es, commtest.Groups(t, es, 5, v), v
}

// lossy is a network whose connections the test can close.
type lossy struct {
	*transport.Mem
	mu    sync.Mutex
	conns []lossyConn
}

type lossyConn struct {
	from int
	to   string
	net.Conn
}

func (l *lossy) network(_ testing.TB, i int) transport.Transport { return lossyEnd{l, i} }

type lossyEnd struct {
	*lossy
	i int
}

func (l lossyEnd) Dial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := l.Mem.Dial(ctx, addr)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil {
		l.conns = append(l.conns, lossyConn{l.i, addr, c})
	}
	return c, err
}

// lose closes the connections between two workers.
func (l *lossy) lose(es []*comm.Endpoint, i, j int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.conns {
		if c.from == i && c.to == es[j].Addr() || c.from == j && c.to == es[i].Addr() {
			c.Close()
		}
	}
}

func sessions(es []*comm.Endpoint) (s []id.Session) {
	for _, e := range es {
		s = append(s, e.Self())
	}
	return s
}

func editAll(ctx context.Context, gs []*group.Group, v id.Version, members []id.Session) []error {
	return each(gs, func(g *group.Group) error {
		_, err := g.Edit(ctx, v, members)
		return err
	})
}

func each(gs []*group.Group, f func(*group.Group) error) []error {
	errs := make([]error, len(gs))
	var wg sync.WaitGroup
	for i, g := range gs {
		wg.Go(func() { errs[i] = f(g) })
	}
	wg.Wait()
	return errs
}

// blocking are all calls of a group that wait, each made by rank 0 in a group
// of three where no other member takes part.
var blocking = map[string]func(ctx context.Context, g *group.Group, call group.Call) error{
	"send": func(ctx context.Context, g *group.Group, call group.Call) error {
		return g.Send(ctx, call, 1, make([]byte, 1<<20))
	},
	"receive": func(ctx context.Context, g *group.Group, call group.Call) error {
		_, err := g.Receive(ctx, call, 1, make([]byte, 1<<20))
		return err
	},
	"barrier": func(ctx context.Context, g *group.Group, call group.Call) error { return g.Barrier(ctx, call) },
	"broadcast": func(ctx context.Context, g *group.Group, call group.Call) error {
		return g.Broadcast(ctx, call, 1, make([]byte, 100))
	},
	"broadcast at the root": func(ctx context.Context, g *group.Group, call group.Call) error {
		return g.Broadcast(ctx, call, 0, make([]byte, 1<<20))
	},
	"all-gather": func(ctx context.Context, g *group.Group, call group.Call) error {
		return g.AllGather(ctx, call, make([]byte, 99), group.Parts(99, 3))
	},
	"reduce-scatter": func(ctx context.Context, g *group.Group, call group.Call) error {
		return g.ReduceScatter(ctx, call, make([]float32, 99), group.Parts(99, 3))
	},
	"all-reduce": func(ctx context.Context, g *group.Group, call group.Call) error {
		return g.AllReduce(ctx, call, make([]float32, 99))
	},
	"tree reduction": func(ctx context.Context, g *group.Group, call group.Call) error {
		t := group.Tree{Micros: 3, Nodes: [][]tree.Node{{{Lo: 0, Hi: 1}}, {{Lo: 1, Hi: 2}}, {{Lo: 2, Hi: 3}}}, Shards: []group.TreeShard{{0, 0, 9, 0}, {0, 9, 18, 1}}}
		sum := func(int, tree.Node) []float32 { return make([]float32, 9) }
		return g.TreeReduce(ctx, call, t, sum, func(int) []float32 { return make([]float32, 9) }, nil)
	},
}

// Every blocking call of a group ends with its context, an edit, the close of
// the group or endpoint, another member's failure, and the loss of a link,
// with the error of that class; and the next version works.
func TestBlockingCallsEnd(t *testing.T) {
	type ending struct {
		name   string
		end    func(t *testing.T, es []*comm.Endpoint, gs []*group.Group, cancel context.CancelFunc)
		class  error
		remote bool
		closed bool
	}
	var links *lossy
	endings := []ending{
		{"context", func(_ *testing.T, _ []*comm.Endpoint, _ []*group.Group, cancel context.CancelFunc) { cancel() }, context.Canceled, false, false},
		{"edit", func(t *testing.T, es []*comm.Endpoint, gs []*group.Group, _ context.CancelFunc) {
			if _, err := gs[0].Edit(t.Context(), id.Version{Generation: 1, N: 2}, sessions(es)); err != nil {
				t.Error(err)
			}
		}, comm.ErrVersion, false, false},
		{"close of the group", func(_ *testing.T, _ []*comm.Endpoint, gs []*group.Group, _ context.CancelFunc) { gs[0].Close() }, comm.ErrClosed, false, true},
		{"close of the endpoint", func(_ *testing.T, es []*comm.Endpoint, _ []*group.Group, _ context.CancelFunc) { es[0].Close() }, comm.ErrClosed, false, true},
		{"another member's failure", func(t *testing.T, _ []*comm.Endpoint, gs []*group.Group, _ context.CancelFunc) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := gs[2].Barrier(ctx, group.Call{Version: id.Version{Generation: 1, N: 1}, Step: 77}); !errors.Is(err, context.Canceled) {
				t.Errorf("rank 2: %v", err)
			}
		}, comm.ErrAborted, true, false},
		{"loss of a link", func(_ *testing.T, es []*comm.Endpoint, _ []*group.Group, _ context.CancelFunc) {
			links.lose(es, 0, 1)
		}, comm.ErrLink, true, false},
		{"eviction of a member", func(_ *testing.T, es []*comm.Endpoint, _ []*group.Group, _ context.CancelFunc) {
			es[0].SetMembers([]comm.Peer{{Session: es[1].Self(), Addr: es[1].Addr()}})
		}, comm.ErrNotMember, true, true},
	}
	for name, call := range blocking {
		for _, a := range []group.Algorithm{group.Direct, group.Ring} {
			for _, ending := range endings {
				t.Run(name+"/"+a.String()+"/"+ending.name, func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						links = &lossy{Mem: transport.NewMem()}
						es, gs, v := team(t, 3, links.network)
						ctx, cancel := context.WithCancel(t.Context())
						defer cancel()
						result := make(chan error, 1)
						go func() { result <- call(ctx, gs[0], group.Call{Version: v, Step: 4, Algorithm: a, Priority: comm.Bulk}) }()
						synctest.Wait()
						select {
						case err := <-result:
							t.Fatalf("it did not wait: %v", err)
						default:
						}
						ending.end(t, es, gs, cancel)
						err := <-result
						var ge *group.Error
						if !errors.Is(err, ending.class) || !errors.As(err, &ge) || ge.Step != 4 || ge.Version != v || ge.Remote != ending.remote {
							t.Fatalf("it ended with %v (%+v)", err, ge)
						}
						if ending.closed {
							return
						}
						// Until the edit all operations fail at once; afterwards they work.
						if !errors.Is(ending.class, comm.ErrVersion) {
							if err := gs[0].Barrier(t.Context(), group.Call{Version: v, Step: 5}); !errors.Is(err, ending.class) {
								t.Errorf("the next operation: %v", err)
							}
						}
						synctest.Wait() // both ends have noticed; see group.Group.Edit
						next := id.Version{Generation: 1, N: 3}
						for i, err := range editAll(t.Context(), gs, next, sessions(es)) {
							if err != nil {
								t.Errorf("edit of rank %d: %v", i, err)
							}
						}
						if err := gs[0].Barrier(t.Context(), group.Call{Version: v, Step: 6}); !errors.Is(err, comm.ErrVersion) {
							t.Errorf("an operation under the old version: %v", err)
						}
						for i, err := range each(gs, func(g *group.Group) error {
							return g.AllReduce(t.Context(), group.Call{Version: next, Step: 4}, make([]float32, 1000))
						}) {
							if err != nil {
								t.Errorf("rank %d after the edit: %v", i, err)
							}
						}
					})
				})
			}
		}
	}
}

// Connect and Edit end too.
func TestConnectEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		es, _ := commtest.Cluster(t, 3, comm.Config{}, inMem())
		es[2].Close()
		g, err := group.New(es[0], 1)
		if err != nil {
			t.Fatal(err)
		}
		edit := func(ctx context.Context, n int) chan error {
			end := make(chan error, 1)
			go func() {
				_, err := g.Edit(ctx, id.Version{Generation: 1, N: n}, sessions(es))
				end <- err
			}()
			synctest.Wait()
			return end
		}
		ctx, cancel := context.WithCancel(t.Context())
		waiting := edit(ctx, 1)
		cancel()
		if err := <-waiting; !errors.Is(err, context.Canceled) {
			t.Errorf("edit with its context over: %v", err)
		}
		waiting = edit(t.Context(), 2)
		if _, err := g.Edit(t.Context(), id.Version{Generation: 1, N: 3}, sessions(es[:2])); err != nil {
			t.Errorf("edit to those who live: %v", err)
		}
		if err := <-waiting; !errors.Is(err, comm.ErrVersion) {
			t.Errorf("edit that was overtaken: %v", err)
		}
		waiting = edit(t.Context(), 4)
		es[0].SetMembers([]comm.Peer{{Session: es[1].Self(), Addr: es[1].Addr()}})
		if err := <-waiting; !errors.Is(err, comm.ErrNotMember) {
			t.Errorf("edit with an evicted member: %v", err)
		}
		if _, err := g.Edit(t.Context(), id.Version{Generation: 1, N: 4}, sessions(es[:2])); !errors.Is(err, comm.ErrVersion) {
			t.Errorf("edit to the present version: %v", err)
		}
		if _, err := g.Edit(t.Context(), id.Version{Generation: 1, N: 5}, sessions(es[1:2])); !errors.Is(err, comm.ErrNotMember) {
			t.Errorf("edit without ourselves: %v", err)
		}
		waiting = make(chan error, 1)
		es[0].SetMembers([]comm.Peer{{Session: es[2].Self(), Addr: es[2].Addr()}})
		go func() {
			_, err := es[0].Connect(t.Context(), es[2].Self())
			waiting <- err
		}()
		synctest.Wait()
		es[0].Close()
		if err := <-waiting; !errors.Is(err, comm.ErrClosed) {
			t.Errorf("connect on a closed endpoint: %v", err)
		}
	})
}

// A frozen member delays no other for longer than the edit that leaves it
// out, and what it sends after it thaws is refused.
func TestFrozenMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		plan, err := commtest.ParseFaults("stall 2>*@frame:8")
		if err != nil {
			t.Fatal(err)
		}
		f, m := commtest.NewFaults(plan), transport.NewMem()
		es, gs, v := team(t, 3, func(_ testing.TB, i int) transport.Transport { return f.Transport(string(rune('0'+i)), m) })
		result := make(chan []error, 1)
		go func() {
			result <- each(gs[:2], func(g *group.Group) error {
				for step := uint64(0); ; step++ {
					if err := g.AllReduce(t.Context(), group.Call{Version: v, Step: step}, make([]float32, 10)); err != nil {
						return err
					}
				}
			})
		}()
		third := make(chan error, 1)
		go func() {
			for step := uint64(0); ; step++ {
				if err := gs[2].AllReduce(t.Context(), group.Call{Version: v, Step: step}, make([]float32, 10)); err != nil {
					third <- err
					return
				}
			}
		}()
		synctest.Wait()
		if len(f.Fired()) == 0 {
			t.Fatal("no member stalled")
		}
		for i, e := range es[:2] {
			if err := e.SetMembers([]comm.Peer{{Session: es[1-i].Self(), Addr: es[1-i].Addr()}}); err != nil {
				t.Fatal(err)
			}
		}
		for _, err := range <-result {
			if !errors.Is(err, comm.ErrNotMember) && !errors.Is(err, comm.ErrAborted) {
				t.Error(err)
			}
		}
		if errs := editAll(t.Context(), gs[:2], id.Version{Generation: 1, N: 2}, sessions(es[:2])); errors.Join(errs...) != nil {
			t.Error(errs)
		}
		if errs := each(gs[:2], func(g *group.Group) error {
			return g.AllReduce(t.Context(), group.Call{Version: id.Version{Generation: 1, N: 2}}, make([]float32, 10))
		}); errors.Join(errs...) != nil {
			t.Error(errs)
		}
		if err := <-third; !errors.Is(err, comm.ErrLink) && !errors.Is(err, comm.ErrAborted) {
			t.Errorf("the evicted member: %v", err)
		}
		for _, e := range es[:2] {
			for _, s := range e.Stats() {
				if s.Links != 1 {
					t.Errorf("survivors have had %d links", s.Links)
				}
			}
		}
	})
}

// A member that has lost no link is told of one that others have lost, but not at once: after a death all find out by themselves, and edit the group.
func TestNoticeOfALostLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		links := &lossy{Mem: transport.NewMem()}
		es, gs, v := team(t, 3, links.network)
		third := make(chan error, 1)
		go func() { third <- gs[2].Barrier(t.Context(), group.Call{Version: v, Step: 1}) }()
		synctest.Wait()
		began := time.Now()
		links.lose(es, 0, 1)
		if err := <-third; !errors.Is(err, comm.ErrAborted) || time.Since(began) != timing.Notice {
			t.Errorf("after %v: %v", time.Since(began), err)
		}

		v.N++
		if errs := editAll(t.Context(), gs, v, sessions(es)); errors.Join(errs...) != nil {
			t.Fatal(errs)
		}
		sent := func() (n int64) {
			for _, s := range es[0].Stats() {
				n += s.MessagesSent
			}
			return n
		}
		before := sent()
		links.lose(es, 0, 1)
		synctest.Wait()
		v.N++
		if errs := editAll(t.Context(), gs, v, sessions(es)); errors.Join(errs...) != nil {
			t.Fatal(errs)
		}
		time.Sleep(2 * timing.Notice)
		if n := sent() - before; n > 0 {
			t.Errorf("%d messages about a version that is over", n)
		}
	})
}

// The plan of a tree reduction sends the fewest messages of all placements,
// and every rank has what it sends.
func TestPlanTree(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 400 {
		m, n := 1+r.IntN(9), 1+r.IntN(3)
		route := make([]int, m)
		for i := range route {
			route[i] = r.IntN(n)
		}
		if r.IntN(2) == 0 {
			slices.Sort(route)
		}
		nodes := make([][]tree.Node, n)
		var maximal func(tree.Node)
		maximal = func(at tree.Node) {
			if owner := route[at.Lo]; !slices.ContainsFunc(route[at.Lo:at.Hi], func(o int) bool { return o != owner }) {
				nodes[owner] = append(nodes[owner], at)
				return
			}
			l, r := at.Split()
			maximal(l)
			maximal(r)
		}
		root := tree.Root(m)
		maximal(root)
		owner := r.IntN(n)
		p, err := group.PlanTree(m, nodes, owner, r.IntN(3))
		if err != nil {
			t.Fatal(err)
		}

		// What each rank can make of what it holds, in any order of arrival.
		have := make([]map[tree.Node]bool, n)
		for rank := range have {
			have[rank] = make(map[tree.Node]bool)
			for _, at := range nodes[rank] {
				have[rank][at] = true
			}
		}
		merge := func(rank int) {
			var complete func(tree.Node) bool
			complete = func(at tree.Node) bool {
				if have[rank][at] {
					return true
				}
				if at.Size() == 1 {
					return false
				}
				l, r := at.Split()
				ml, mr := complete(l), complete(r)
				have[rank][at] = ml && mr
				return ml && mr
			}
			complete(root)
		}
		left := slices.Clone(p.Moves)
		for progress := true; progress; {
			progress = false
			for i := 0; i < len(left); i++ {
				mv := left[i]
				merge(mv.From)
				if have[mv.From][mv.Node] {
					have[mv.To][mv.Node] = true
					left = slices.Delete(left, i, i+1)
					i--
					progress = true
				}
			}
		}
		merge(owner)
		if len(left) > 0 || !have[owner][root] {
			t.Fatalf("route %v to %d: %v never come about in %v", route, owner, left, p.Moves)
		}

		// The oracle tries every place for every addition.
		at := make(map[tree.Node]int)
		for rank, held := range nodes {
			for _, n := range held {
				at[n] = rank
			}
		}
		var best func(n tree.Node, rank int) int
		best = func(node tree.Node, rank int) int {
			if h, held := at[node]; held {
				if h == rank {
					return 0
				}
				return 1
			}
			l, r := node.Split()
			least := 1 << 30
			for place := range n {
				c := best(l, place) + best(r, place)
				if place != rank {
					c++
				}
				least = min(least, c)
			}
			return least
		}
		if want := best(root, owner); len(p.Moves) != want {
			t.Fatalf("route %v to %d: %d messages %v, the fewest are %d", route, owner, len(p.Moves), p.Moves, want)
		}
	}
	for _, bad := range [][][]tree.Node{
		{{{Lo: 0, Hi: 2}}, {{Lo: 1, Hi: 2}, {Lo: 2, Hi: 4}}},
		{{{Lo: 0, Hi: 2}}, {{Lo: 2, Hi: 3}}},
		{{{Lo: 0, Hi: 1}}, {{Lo: 1, Hi: 3}}},
		{{{Lo: 0, Hi: 4}}, {{Lo: 0, Hi: 4}}},
	} {
		if _, err := group.PlanTree(4, bad, 0, 0); !errors.Is(err, comm.ErrUsage) {
			t.Errorf("nodes %v were accepted: %v", bad, err)
		}
	}
}

func TestChoice(t *testing.T) {
	// So many members on two processors of one machine.
	together := func(n int) group.Place { return group.Place{Crowd: float64(n) / 2, Together: true} }
	apart := group.Place{}
	for _, c := range []struct {
		op    group.Op
		n     int
		size  int64
		place group.Place
		want  group.Algorithm
	}{
		{group.OpAllReduce, 4, 64, apart, group.Direct}, {group.OpAllReduce, 4, 64 << 20, apart, group.Pairwise}, {group.OpAllReduce, 8, 64 << 20, apart, group.Halving}, {group.OpAllReduce, 7, 64 << 20, apart, group.Ring}, {group.OpBarrier, 8, 0, apart, group.Direct},
		{group.OpBroadcast, 2, 1 << 20, apart, group.Direct}, {group.OpBroadcast, 8, 64 << 20, apart, group.Ring}, {group.OpReduceScatter, 16, 64 << 20, apart, group.Ring}, {group.OpReduceScatter, 3, 1 << 20, apart, group.Direct},
		{group.OpAllReduce, 8, 64 << 10, group.Place{Crowd: 8}, group.Halving}, {group.OpAllReduce, 6, 64 << 10, group.Place{Crowd: 8}, group.Pairwise},
		{group.OpAllReduce, 2, 1 << 10, together(2), group.Direct}, {group.OpAllReduce, 4, 1 << 10, together(4), group.Direct},
		{group.OpAllReduce, 4, 64 << 10, together(4), group.Halving}, {group.OpAllReduce, 8, 64 << 10, together(8), group.Halving}, {group.OpAllReduce, 6, 64 << 10, together(6), group.Pairwise},
		{group.OpAllReduce, 4, 1 << 20, together(4), group.Pairwise}, {group.OpAllReduce, 8, 512 << 10, together(8), group.Halving}, {group.OpAllReduce, 8, 2 << 20, together(8), group.Pairwise},
		{group.OpAllReduce, 4, 16 << 20, together(4), group.Ring}, {group.OpBarrier, 8, 0, together(8), group.Direct},
	} {
		if got := group.Choose(c.op, c.n, c.size, 256<<10, 4, c.place); got != c.want {
			t.Errorf("%v of %d bytes in %d members, %+v: %v, want %v", c.op, c.size, c.n, c.place, got, c.want)
		}
	}
	for _, c := range []struct {
		op   group.Op
		size int
		want group.Algorithm
	}{{group.OpAllReduce, 16 << 10, group.Direct}, {group.OpAllReduce, 64 << 10, group.Pairwise}, {group.OpAllGather, 16 << 20, group.Direct}} {
		if got := group.ChooseNear(c.op, c.size); got != c.want {
			t.Errorf("%v of %d bytes on a host: %v, want %v", c.op, c.size, got, c.want)
		}
	}
}
