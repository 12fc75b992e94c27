package comm

import (
	"context"
	"fmt"
	"io"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/transport"
)

// benchEach runs a benchmark over TCP, and on one host with and without reads of memory.
func benchEach(b *testing.B, bench func(b *testing.B, network func(int) transport.Transport)) {
	b.Run("tcp", func(b *testing.B) { bench(b, inTCP) })
	b.Run("host", func(b *testing.B) { bench(b, inHost(b)) })
	b.Run("sockets", func(b *testing.B) { bench(b, inSockets(b)) })
}

// BenchmarkRaw is the bandwidth of a connection without links.
func BenchmarkRaw(b *testing.B) {
	benchEach(b, func(b *testing.B, network func(int) transport.Transport) {
		l, err := network(1).Listen("")
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
		c, err := network(0).Dial(b.Context(), l.Addr())
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
	})
}

// BenchmarkStream sends messages that are expected, several at a time.
func BenchmarkStream(b *testing.B) { benchEach(b, benchStream) }

func benchStream(b *testing.B, network func(int) transport.Transport) {
	for _, size := range []int{256, 32 << 10, 1 << 20, 4 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			es := cluster(b, 2, Config{}, network)
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
func BenchmarkRoundTrip(b *testing.B) { benchEach(b, benchRoundTrip) }

func benchRoundTrip(b *testing.B, network func(int) transport.Transport) {
	es := cluster(b, 2, Config{}, network)
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
func BenchmarkControlUnderBulk(b *testing.B) { benchEach(b, benchControlUnderBulk) }

func benchControlUnderBulk(b *testing.B, network func(int) transport.Transport) {
	es := cluster(b, 2, Config{}, network)
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

// BenchmarkLink makes a link from the call to the welcome.
func BenchmarkLink(b *testing.B) {
	for _, network := range []struct {
		name string
		of   func(int) transport.Transport
	}{{"mem", inMem()}, {"tcp", inTCP}, {"host", inHost(b)}, {"sockets", inSockets(b)}} {
		b.Run(network.name, func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				es := cluster(b, 2, Config{}, network.of)
				b.StartTimer()
				if _, err := es[0].Connect(b.Context(), es[1].Self()); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				for _, e := range es {
					e.Close()
				}
				b.StartTimer()
			}
		})
	}
}
