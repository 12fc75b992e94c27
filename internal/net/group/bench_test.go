package group_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/commtest"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/net/transport"
)

// BenchmarkReduce compares the reductions of 16 MiB over members of one
// process; MB/s is of the buffer.
func BenchmarkReduce(b *testing.B) {
	const length = 4 << 20
	for _, n := range []int{2, 4} {
		es, _ := commtest.Cluster(b, n, comm.Config{}, inTCP)
		v := id.Version{Generation: 1, N: 1}
		gs := make([]*group.Group, n)
		var wg sync.WaitGroup
		for i, e := range es {
			gs[i], _ = group.New(e, 1)
			wg.Go(func() { gs[i].Edit(context.Background(), v, sessions(es)) })
		}
		wg.Wait()
		bufs := make([][]float32, n)
		t := group.Tree{Micros: n}
		for i := range n {
			bufs[i] = make([]float32, length)
			t.Nodes = append(t.Nodes, []tree.Node{tree.Leaf(i)})
		}
		parts := group.Parts(length, n)
		for i := range n {
			t.Shards = append(t.Shards, group.TreeShard{Lo: parts[i], Hi: parts[i+1], Owner: i})
		}
		step := uint64(0)
		run := func(name string, f func(rank int, g *group.Group, call group.Call) error) {
			b.Run(fmt.Sprintf("%d/%s", n, name), func(b *testing.B) {
				b.SetBytes(4 * length)
				for b.Loop() {
					step++
					var wg sync.WaitGroup
					for i, g := range gs {
						wg.Go(func() {
							if err := f(i, g, group.Call{Version: v, Step: step, Priority: comm.Bulk}); err != nil {
								b.Error(err)
							}
						})
					}
					wg.Wait()
				}
			})
		}
		for _, a := range []group.Algorithm{group.Ring, group.Direct} {
			run("reduce-scatter/"+a.String(), func(i int, g *group.Group, call group.Call) error {
				call.Algorithm = a
				return g.ReduceScatter(context.Background(), call, bufs[i], parts)
			})
		}
		out := make([]float32, length)
		run("tree", func(i int, g *group.Group, call group.Call) error {
			return g.TreeReduce(context.Background(), call, t,
				func(s int, _ tree.Node) []float32 { return bufs[i][parts[s]:parts[s+1]] },
				func(s int) []float32 { return out[parts[s]:parts[s+1]] }, nil)
		})
		for _, e := range es {
			e.Close()
		}
	}
}

// BenchmarkEvict is what a member's death costs the seven others of a group:
// SetMembers and Edit on each, side by side, and a barrier under the new version.
func BenchmarkEvict(b *testing.B) {
	const n = 8
	var change, barrier []time.Duration
	for range b.N {
		es, _ := commtest.Cluster(b, n, comm.Config{}, inTCP)
		gs := make([]*group.Group, n)
		for i, e := range es {
			gs[i], _ = group.New(e, 1)
		}
		editAll(b.Context(), gs, id.Version{Generation: 1, N: 1}, sessions(es))
		var members []comm.Peer
		for _, e := range es[:n-1] {
			members = append(members, comm.Peer{Session: e.Self(), Addr: e.Addr()})
		}
		es[n-1].Close()
		endpoints := make(map[*group.Group]*comm.Endpoint, n)
		for i, g := range gs {
			endpoints[g] = es[i]
		}
		began := time.Now()
		errs := each(gs[:n-1], func(g *group.Group) error {
			if err := endpoints[g].SetMembers(members); err != nil {
				return err
			}
			opened, err := g.Edit(b.Context(), id.Version{Generation: 1, N: 2}, sessions(es[:n-1]))
			if err == nil && opened != 0 {
				err = fmt.Errorf("%d links opened", opened)
			}
			return err
		})
		change = append(change, time.Since(began))
		began = time.Now()
		errs = append(errs, each(gs[:n-1], func(g *group.Group) error {
			return g.Barrier(b.Context(), group.Call{Version: id.Version{Generation: 1, N: 2}})
		})...)
		barrier = append(barrier, time.Since(began))
		for _, err := range errs {
			if err != nil {
				b.Fatal(err)
			}
		}
		for _, e := range es {
			e.Close()
		}
	}
	slices.Sort(change)
	slices.Sort(barrier)
	b.ReportMetric(float64(change[len(change)/2].Microseconds()), "edit-µs")
	b.ReportMetric(float64(change[len(change)*99/100].Microseconds()), "edit-p99-µs")
	b.ReportMetric(float64(barrier[len(barrier)/2].Microseconds()), "barrier-µs")
}

// BenchmarkHost is an all-reduce of two members of one host, which share memory.
func BenchmarkHost(b *testing.B) {
	for _, size := range []int{1 << 10, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			folder := b.TempDir()
			es, _ := commtest.Cluster(b, 2, comm.Config{}, func(_ testing.TB, i int) transport.Transport {
				return transport.Host{Folder: folder, Name: fmt.Sprint(i)}
			})
			v := id.Version{Generation: 1, N: 1}
			gs := commtest.Groups(b, es, 1, v)
			b.ReportAllocs()
			b.SetBytes(int64(size))
			var wg sync.WaitGroup
			for _, g := range gs {
				wg.Go(func() {
					buf := make([]float32, size/4)
					for i := range b.N {
						if err := g.AllReduce(context.Background(), group.Call{Version: v, Step: uint64(i), Priority: comm.Bulk}, buf); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			for _, e := range es {
				e.Close()
			}
		})
	}
}
