package comm

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
)

// BenchmarkRaw is the bandwidth of a bare loopback socket.
func BenchmarkRaw(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	const size = 4 << 20
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		buf := make([]byte, size)
		for {
			if _, err := io.ReadFull(c, buf); err != nil {
				return
			}
		}
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	data := make([]byte, size)
	b.SetBytes(size)
	for b.Loop() {
		if _, err := c.Write(data); err != nil {
			b.Fatal(err)
		}
	}
	c.Close()
	<-done
}

// BenchmarkStream sends messages that are expected, several at a time.
func BenchmarkStream(b *testing.B) {
	for _, size := range []int{256, 32 << 10, 1 << 20, 4 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			es := cluster(b, 2, Config{}, inTCP)
			ctx := context.Background()
			const depth = 4
			var sends [depth]*Sending
			var receives [depth]*Receiving
			var bufs [depth][]byte
			data := make([]byte, size)
			for i := range depth {
				bufs[i] = make([]byte, size)
			}
			b.SetBytes(int64(size))
			i := 0
			for b.Loop() {
				k := i % depth
				if receives[k] != nil {
					if _, _, err := receives[k].Wait(ctx); err != nil {
						b.Fatal(err)
					}
					if err := sends[k].Wait(ctx); err != nil {
						b.Fatal(err)
					}
				}
				if i%1000 == 0 && i > depth {
					es[1].Advance(uint64(i) - depth)
				}
				key := user(uint64(i), i)
				receives[k] = es[1].Expect(key, bufs[k])
				sends[k] = es[0].Post(es[1].Self(), key, data, Bulk)
				i++
			}
			for k := range depth {
				if receives[k] != nil {
					receives[k].Wait(ctx)
				}
			}
		})
	}
}

// BenchmarkRoundTrip is a small message and its answer.
func BenchmarkRoundTrip(b *testing.B) {
	es := cluster(b, 2, Config{}, inTCP)
	ctx := context.Background()
	buf := make([][]byte, 2)
	for i := range buf {
		buf[i] = make([]byte, 64)
	}
	step := uint64(0)
	for b.Loop() {
		step++
		for i, e := range es {
			r := es[1-i].Expect(user(step, i), buf[1-i])
			e.Post(es[1-i].Self(), user(step, i), buf[i], Control)
			if _, _, err := r.Wait(ctx); err != nil {
				b.Fatal(err)
			}
		}
		if step%1000 == 0 {
			es[0].Advance(step)
			es[1].Advance(step)
		}
	}
}

// BenchmarkControlUnderBulk is a round trip of a small message on a link that
// carries bulk both ways all the time; ns/op and the 99th percentile.
func BenchmarkControlUnderBulk(b *testing.B) {
	es := cluster(b, 2, Config{}, inTCP)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	const size = 4 << 20
	for i, e := range es {
		// Two messages are always under way in each direction.
		for lane := range 2 {
			wg.Go(func() {
				data := make([]byte, size)
				for k := 0; ctx.Err() == nil; k++ {
					e.Send(ctx, es[1-i].Self(), Key{Kind: KindUser, Step: 1, Layer: int32(lane), Lo: int64(k)}, data, Bulk)
				}
			})
			wg.Go(func() {
				buf := make([]byte, size)
				for k := 0; ctx.Err() == nil; k++ {
					e.Receive(ctx, Key{Kind: KindUser, Step: 1, Layer: int32(lane), Lo: int64(k)}, buf)
				}
			})
		}
	}
	var times []time.Duration
	buf := make([]byte, 64)
	step := int64(0)
	for b.Loop() {
		step++
		began := time.Now()
		for i, e := range es {
			key := Key{Kind: KindUser, Step: 1, Micro: 1, Lo: step, Hi: int64(i)}
			r := es[1-i].Expect(key, buf)
			e.Post(es[1-i].Self(), key, buf[:8], Control)
			if _, _, err := r.Wait(ctx); err != nil {
				b.Fatal(err)
			}
		}
		times = append(times, time.Since(began))
	}
	slices.Sort(times)
	b.ReportMetric(float64(times[len(times)*99/100].Microseconds()), "p99-µs")
}

// BenchmarkReduce compares the reductions of 16 MiB over members of one
// process; MB/s is of the buffer.
func BenchmarkReduce(b *testing.B) {
	const length = 4 << 20
	for _, n := range []int{2, 4} {
		es := cluster(b, n, Config{}, inTCP)
		v := id.Version{Generation: 1, N: 1}
		gs := make([]*Group, n)
		var wg sync.WaitGroup
		for i, e := range es {
			gs[i], _ = e.NewGroup(1)
			wg.Go(func() { gs[i].Edit(context.Background(), v, sessions(es)) })
		}
		wg.Wait()
		bufs := make([][]float32, n)
		t := Tree{Micros: n}
		for i := range n {
			bufs[i] = make([]float32, length)
			t.Nodes = append(t.Nodes, []tree.Node{tree.Leaf(i)})
		}
		parts := Parts(length, n)
		for i := range n {
			t.Shards = append(t.Shards, TreeShard{Lo: parts[i], Hi: parts[i+1], Owner: i})
		}
		step := uint64(0)
		run := func(name string, f func(rank int, g *Group, call Call) error) {
			b.Run(fmt.Sprintf("%d/%s", n, name), func(b *testing.B) {
				b.SetBytes(4 * length)
				for b.Loop() {
					step++
					var wg sync.WaitGroup
					for i, g := range gs {
						wg.Go(func() {
							if err := f(i, g, Call{Version: v, Step: step, Priority: Bulk}); err != nil {
								b.Error(err)
							}
						})
					}
					wg.Wait()
				}
			})
		}
		for _, a := range []Algorithm{Ring, Direct} {
			run("reduce-scatter/"+a.String(), func(i int, g *Group, call Call) error {
				call.Algorithm = a
				return g.ReduceScatter(context.Background(), call, bufs[i], parts)
			})
		}
		out := make([]float32, length)
		run("tree", func(i int, g *Group, call Call) error {
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
		es := cluster(b, n, Config{}, inTCP)
		gs := make([]*Group, n)
		for i, e := range es {
			gs[i], _ = e.NewGroup(1)
		}
		editAll(b.Context(), gs, id.Version{Generation: 1, N: 1}, sessions(es))
		var members []Peer
		for _, e := range es[:n-1] {
			members = append(members, Peer{e.Self(), e.Addr()})
		}
		es[n-1].Close()
		began := time.Now()
		errs := each(gs[:n-1], func(g *Group) error {
			if err := g.e.SetMembers(members); err != nil {
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
		errs = append(errs, each(gs[:n-1], func(g *Group) error {
			return g.Barrier(b.Context(), Call{Version: id.Version{Generation: 1, N: 2}})
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
