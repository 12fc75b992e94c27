package commtest

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/net/transport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func mem() Network {
	m := transport.NewMem()
	return func(testing.TB, int) transport.Transport { return m }
}

func tcp(testing.TB, int) transport.Transport { return transport.TCP{} }

// delayed wraps a network with faults that lose nothing.
func delayed(inner Network) Network {
	plan, err := ParseFaults("delay *>*@frame:2 3ms, delay *>*@byte:100 1ms, stall 0>1@frame:9 5ms, delay 1>0@byte:5000 2ms")
	if err != nil {
		panic(err)
	}
	f := NewFaults(plan)
	return func(tb testing.TB, i int) transport.Transport { return f.Transport(fmt.Sprint(i), inner(tb, i)) }
}

func TestTCP(t *testing.T) {
	TestTransport(t, tcp)
	TestEndpoints(t, tcp)
}

// host is unix sockets of one host; far, which may be nil, would reach others.
func host(t *testing.T, far transport.Transport) Network {
	folder := t.TempDir()
	return func(_ testing.TB, i int) transport.Transport {
		return transport.Host{Folder: folder, Name: fmt.Sprint(i), Far: far}
	}
}

func TestHost(t *testing.T) {
	for _, far := range []transport.Transport{nil, transport.TCP{}} {
		TestTransport(t, host(t, far))
		TestEndpoints(t, host(t, far))
	}
}

func TestFaultyHost(t *testing.T) {
	TestTransport(t, delayed(host(t, nil)))
	TestEndpoints(t, delayed(host(t, nil)))
}

// secured is TCP under TLS with one secret.
func secured(t *testing.T) Network {
	cfg, err := transport.TLSFromSecret([]byte("a secret of the test"))
	if err != nil {
		t.Fatal(err)
	}
	return func(testing.TB, int) transport.Transport { return transport.TCP{TLS: cfg} }
}

func TestTLS(t *testing.T) {
	TestTransport(t, secured(t))
	TestEndpoints(t, secured(t))
}

func TestFaultyTLS(t *testing.T) {
	TestTransport(t, delayed(secured(t)))
	TestEndpoints(t, delayed(secured(t)))
}

func TestMem(t *testing.T) {
	TestTransport(t, mem())
	TestEndpoints(t, mem())
}

func TestMemWithLatency(t *testing.T) {
	m := transport.NewMem()
	m.Latency = 100 * time.Microsecond
	TestTransport(t, func(testing.TB, int) transport.Transport { return m })
}

func TestFaultyTCP(t *testing.T) {
	TestTransport(t, delayed(tcp))
	TestEndpoints(t, delayed(tcp))
}

func TestFaultyMem(t *testing.T) {
	TestTransport(t, delayed(mem()))
	TestEndpoints(t, delayed(mem()))
}

// The messages and bytes of every operation are those of the cost model, and
// it takes as many latencies as the model has steps: with one millisecond on
// every way, in a bubble's time, that is exact.
func TestCosts(t *testing.T) {
	const segment = 512
	for _, n := range []int{2, 3, 4, 5, 6, 8} {
		for _, a := range []group.Algorithm{group.Direct, group.Ring, group.Pairwise, group.Halving} {
			for _, size := range []int{0, 16 * n, 2 * segment * n} { // even parts of whole segments, or less than one
				synctest.Test(t, func(t *testing.T) {
					m := transport.NewMem()
					m.Latency = time.Millisecond
					counter := NewCounter()
					// Room for everything at once, so that no message waits for credit.
					es, _ := Cluster(t, n, comm.Config{Segment: segment, Pool: 1 << 20, Eager: 64 << 10},
						counter.Network(func(testing.TB, int) transport.Transport { return m }))
					v := id.Version{Generation: 1, N: 1}
					gs := Groups(t, es, 1, v)
					call := group.Call{Version: v, Step: 1, Algorithm: a, Priority: comm.Bulk}
					ctx := context.Background()
					for _, c := range []struct {
						op  group.Op
						run func(rank int, g *group.Group) error
					}{
						{group.OpBarrier, func(_ int, g *group.Group) error { return g.Barrier(ctx, call) }},
						{group.OpBroadcast, func(_ int, g *group.Group) error { return g.Broadcast(ctx, call, 1, make([]byte, size)) }},
						{group.OpAllGather, func(_ int, g *group.Group) error {
							return g.AllGather(ctx, call, make([]byte, size), group.Parts(size, n))
						}},
						{group.OpReduceScatter, func(_ int, g *group.Group) error {
							return g.ReduceScatter(ctx, call, make([]float32, size/4), group.Parts(size/4, n))
						}},
						{group.OpAllReduce, func(_ int, g *group.Group) error { return g.AllReduce(ctx, call, make([]float32, size/4)) }},
					} {
						synctest.Wait()
						counter.Take()
						began := time.Now()
						Each(t, gs, c.run)
						steps := time.Since(began) / m.Latency
						synctest.Wait()
						if (a == group.Pairwise || a == group.Halving) && c.op != group.OpAllReduce {
							continue
						}
						got, want := counter.Take(), group.CostOf(c.op, a, n, int64(size), segment)
						if c.op == group.OpBarrier {
							want = group.CostOf(c.op, a, n, 0, segment)
						}
						if got.Messages != want.Messages || got.Bytes != want.Bytes || got.Busiest != want.Busiest || int(steps) != want.Steps {
							t.Errorf("%v, %v, %d members, %d bytes: %d steps and %+v, want %+v", a, c.op, n, size, steps, got, want)
						}
					}
				})
			}
		}
	}
}

// A tree reduction sends what its plans say and nothing else; for aligned
// routes that is what a reduce-scatter sends.
func TestTreeCosts(t *testing.T) {
	const n, m, width = 4, 16, 4096
	for i, route := range Routes(m, n, 1) {
		synctest.Test(t, func(t *testing.T) {
			counter := NewCounter()
			es, _ := Cluster(t, n, comm.Config{}, counter.Network(mem()))
			v := id.Version{Generation: 1, N: 1}
			gs := Groups(t, es, 1, v)
			tr := group.Tree{Micros: m}
			for rank := range n {
				tr.Nodes = append(tr.Nodes, Maximal(m, route, rank))
			}
			want := Count{}
			for rank := range n {
				tr.Shards = append(tr.Shards, group.TreeShard{Lo: rank * width, Hi: (rank + 1) * width, Owner: rank})
				plan, err := group.PlanTree(m, tr.Nodes, rank, rank%2)
				if err != nil {
					t.Fatal(err)
				}
				want.Messages += len(plan.Moves)
				want.Bytes += int64(len(plan.Moves)) * 4 * width
			}
			synctest.Wait()
			counter.Take()
			Each(t, gs, func(rank int, g *group.Group) error {
				out := make([]float32, width)
				return g.TreeReduce(t.Context(), group.Call{Version: v, Step: 1, Priority: comm.Bulk}, tr,
					func(int, tree.Node) []float32 { return make([]float32, width) }, func(int) []float32 { return out }, nil)
			})
			synctest.Wait()
			got := counter.Take()
			if got.Messages != want.Messages || got.Bytes != want.Bytes {
				t.Errorf("route %v: %+v, want %+v", route, got, want)
			}
			if i == 0 {
				if rs := group.CostOf(group.OpReduceScatter, group.Direct, n, 4*n*width, 1<<20); got.Bytes != rs.Bytes || got.Messages != rs.Messages {
					t.Errorf("aligned: %+v, a reduce-scatter %+v", got, rs)
				}
			}
		})
	}
}
