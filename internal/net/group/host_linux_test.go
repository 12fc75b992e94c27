//go:build linux && !portable

package group_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/commtest"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/testkit/require"
)

// onHost is a network of one host, on which the workers named share no memory.
func onHost(t testing.TB, alone ...int) commtest.Network {
	folder := t.TempDir()
	return func(_ testing.TB, i int) transport.Transport {
		return transport.Host{Folder: folder, Name: fmt.Sprint(i), Sockets: slices.Contains(alone, i)}
	}
}

func drawn(n, seed int) []float32 {
	r := rand.New(rand.NewPCG(uint64(seed), 1))
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return x
}

// results are what all collectives leave in the buffers of all members.
func results(t *testing.T, gs []*group.Group, call group.Call, length int) [][]byte {
	t.Helper()
	n := len(gs)
	out := make([][]byte, n)
	parts := group.Parts(length, n)
	if n > 2 {
		parts[1] = 0 // an empty one
	}
	bytesOf := slices.Clone(parts)
	for i := range bytesOf {
		bytesOf[i] *= 4
	}
	commtest.Each(t, gs, func(rank int, g *group.Group) error {
		ctx := context.Background()
		sum, part, all, cast := drawn(length, rank), drawn(length, rank+100), drawn(length, rank+200), drawn(length, rank+300)
		err := errors.Join(g.Barrier(ctx, call), g.AllReduce(ctx, call, sum), g.ReduceScatter(ctx, call, part, parts),
			g.AllGather(ctx, call, comm.Bytes(all), bytesOf), g.Broadcast(ctx, call, n-1, comm.Bytes(cast)))
		out[rank] = slices.Concat(comm.Bytes(sum), comm.Bytes(part[parts[rank]:parts[rank+1]]), comm.Bytes(all), comm.Bytes(cast))
		return err
	})
	return out
}

// passed returns the bytes of all messages, and those on links, in memory that was read, and on lines.
func passed(es []*comm.Endpoint) (sent, received, wire int64) {
	for _, e := range es {
		for _, p := range e.Stats() {
			sent, received, wire = sent+p.BytesSent, received+p.BytesReceived, wire+p.WireSent
		}
	}
	return sent, received, wire
}

// Collectives have the same bits whether all members of a host share memory, some, or none, and what passed is counted the same.
func TestHostBits(t *testing.T) {
	require.Reads(t)
	for n := 2; n <= 5; n++ {
		var want [][]byte
		var sent, received int64
		lengths := []int{0, 1, 1000, 4096, 4097, 70_001, 300_000}
		for i, alone := range [][]int{{0, 1, 2, 3, 4}, {}, {1}, {0, n - 1}} {
			es, gs, v := team(t, n, onHost(t, alone...))
			var got [][]byte
			for step, length := range lengths {
				got = append(got, results(t, gs, group.Call{Version: v, Step: uint64(step), Tag: 3, Priority: comm.Bulk}, length)...)
			}
			s, r, wire := passed(es)
			if len(alone) == 0 && wire > s/100 {
				t.Errorf("%d members: %d of %d bytes did not pass on boards", n, wire, s)
			}
			if i == 0 {
				want, sent, received = got, s, r
			}
			for k := range got {
				if !bytes.Equal(got[k], want[k]) {
					t.Errorf("%d members, %v without boards, %d numbers: rank %d has other bits", n, alone, lengths[k/n], k%n)
				}
			}
			if s != sent || r != received || s == 0 {
				t.Errorf("%d members, %v without boards: %d bytes sent and %d received, want %d and %d", n, alone, s, r, sent, received)
			}
			for _, e := range es {
				e.Close()
			}
		}
	}
}

// Operations run side by side, whatever the order in which members begin them.
func TestHostSideBySide(t *testing.T) {
	require.Reads(t)
	sideBySide(t, onHost(t))
}

func sideBySide(t *testing.T, network commtest.Network) {
	const n, calls = 3, 60
	_, gs, v := team(t, n, network)
	commtest.Each(t, gs, func(rank int, g *group.Group) error {
		errs := make([]error, calls)
		var wg sync.WaitGroup
		for _, i := range rand.New(rand.NewPCG(uint64(rank), 2)).Perm(calls) {
			wg.Go(func() {
				length := []int{10, 5000, 100_000}[i%3]
				x := slices.Repeat([]float32{float32(rank + i)}, length)
				call := group.Call{Version: v, Step: uint64(i / 2), Tag: uint16(i % 2), Priority: comm.Bulk}
				if errs[i] = g.AllReduce(context.Background(), call, x); errs[i] == nil && (x[0] != float32(3*i+3) || x[length-1] != x[0]) {
					errs[i] = fmt.Errorf("call %d: %v", i, x[0])
				}
			})
		}
		wg.Wait()
		return errors.Join(errs...)
	})
}

// A root may run ahead until its board is full; then it waits.
func TestHostRootAhead(t *testing.T) {
	require.Reads(t)
	rootAhead(t, onHost(t))
}

func rootAhead(t *testing.T, network commtest.Network) {
	const casts = 600
	_, gs, v := team(t, 3, network)
	commtest.Each(t, gs, func(rank int, g *group.Group) error {
		for i := range casts {
			b := []byte{byte(i), byte(i >> 8)}
			if rank > 0 {
				b = make([]byte, 2)
			}
			if err := g.Broadcast(context.Background(), group.Call{Version: v, Step: uint64(i)}, 0, b); err != nil || int(b[0])+int(b[1])<<8 != i {
				return fmt.Errorf("cast %d: %v, %w", i, b, err)
			}
		}
		return nil
	})
}

// What a member has shown stays until all have taken it, also when that member begins the next version. What others do not take because they begin it, too, does
// not stay.
func TestHostNextVersion(t *testing.T) {
	require.Reads(t)
	nextVersion(t, onHost(t))
}

func nextVersion(t *testing.T, network commtest.Network) {
	es, gs, v := team(t, 2, network)
	commtest.Each(t, gs, func(_ int, g *group.Group) error { return g.Barrier(t.Context(), group.Call{Version: v}) })
	for step := range uint64(600) { // more than a board has slots
		call := group.Call{Version: v, Step: step}
		if err := gs[0].Broadcast(t.Context(), call, 0, []byte("hello")); err != nil {
			t.Fatal(err)
		}
		v.N++
		if _, err := gs[0].Edit(t.Context(), v, sessions(es)); err != nil {
			t.Fatal(err)
		}
		if got := make([]byte, 5); step%2 == 0 {
			if err := gs[1].Broadcast(t.Context(), call, 0, got); err != nil || string(got) != "hello" {
				t.Fatalf("%q, %v", got, err)
			}
		}
		if _, err := gs[1].Edit(t.Context(), v, sessions(es)); err != nil {
			t.Fatal(err)
		}
	}
}

// Waiting for a member on its board ends with the context, which ends the version for all; with an edit; and with Close. Nothing of the old version is left.
func TestHostEnds(t *testing.T) {
	require.Reads(t)
	waitsEnd(t, onHost(t))
}

func waitsEnd(t *testing.T, network commtest.Network) {
	es, gs, v := team(t, 3, network)
	commtest.Each(t, gs, func(_ int, g *group.Group) error { return g.Barrier(t.Context(), group.Call{Version: v}) })
	began := func(g *group.Group, ctx context.Context, length int) <-chan error {
		done, call := make(chan error, 1), group.Call{Version: v, Step: 1}
		go func() { done <- g.AllReduce(ctx, call, make([]float32, length)) }()
		return done
	}
	for _, length := range []int{100, 1 << 20} {
		ctx, cancel := context.WithCancel(t.Context())
		one, two := began(gs[0], ctx, length), began(gs[1], t.Context(), length)
		cancel()
		if err := <-one; !errors.Is(err, context.Canceled) && !errors.Is(err, comm.ErrAborted) {
			t.Errorf("%d numbers, with its context: %v", length, err)
		}
		if err := <-two; !errors.Is(err, comm.ErrAborted) && !errors.Is(err, comm.ErrVersion) {
			t.Errorf("%d numbers, with the other's: %v", length, err)
		}
		v.N++
		commtest.Edit(t, gs, v, es)
		one, two = began(gs[0], t.Context(), length), began(gs[1], t.Context(), length)
		v.N++
		commtest.Edit(t, gs, v, es)
		for _, done := range []<-chan error{one, two} {
			if err := <-done; !errors.Is(err, comm.ErrVersion) {
				t.Errorf("%d numbers, with an edit: %v", length, err)
			}
		}
		for step := range uint64(300) { // more than a board has slots
			commtest.Each(t, gs, func(rank int, g *group.Group) error {
				x := slices.Repeat([]float32{float32(rank)}, 10)
				err := g.AllReduce(t.Context(), group.Call{Version: v, Step: step}, x)
				if err == nil && x[9] != 3 {
					err = fmt.Errorf("the sum is %v", x[9])
				}
				return err
			})
		}
		v.N++
		commtest.Edit(t, gs, v, es)
	}
	one, two := began(gs[0], t.Context(), 10), began(gs[1], t.Context(), 10)
	_ = gs[0].Close()
	es[1].Close()
	for _, done := range []<-chan error{one, two} {
		if err := <-done; !errors.Is(err, comm.ErrClosed) {
			t.Errorf("with Close: %v", err)
		}
	}
}

// More operations at a time than a board has room for are refused.
func TestHostTooMany(t *testing.T) {
	require.Reads(t)
	_, gs, v := team(t, 2, onHost(t))
	commtest.Each(t, gs, func(_ int, g *group.Group) error { return g.Barrier(t.Context(), group.Call{Version: v}) })
	errs := make([]error, 70)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = gs[0].Barrier(t.Context(), group.Call{Version: v, Step: uint64(i + 1)}) })
	}
	wg.Wait() // one is refused, which ends the version
	if !slices.ContainsFunc(errs, func(err error) bool { return errors.Is(err, comm.ErrUsage) }) {
		t.Errorf("none was refused: %v", errs[0])
	}
}

// What is shown to a member waits as long as a limited link would take.
func TestHostShape(t *testing.T) {
	require.Reads(t)
	limited(t, onHost(t))
}

func limited(t *testing.T, network commtest.Network) {
	es, gs, v := team(t, 2, network)
	const size, rate = 100_000, 1e6
	es[0].Shape(es[1].Self().Worker, rate)
	began := time.Now()
	commtest.Each(t, gs, func(_ int, g *group.Group) error {
		return g.Broadcast(t.Context(), group.Call{Version: v, Step: 1}, 0, make([]byte, size))
	})
	if took := time.Since(began); took.Seconds() < size/rate {
		t.Errorf("%d bytes at %g bytes/s took %v", int(size), rate, took)
	}
}

const envHostPeer = "GROUP_TEST_HOST_PEER"

func init() { peers[envHostPeer] = hostPeer }

// hostPeer is worker 1: it reduces until it is killed. It is on a host, or, without a folder, linked by TCP.
func hostPeer(arg string) {
	folder, addr, _ := strings.Cut(arg, " ")
	var via transport.Transport = transport.Host{Folder: folder, Name: "1"}
	if folder == "" {
		via = transport.TCP{}
	}
	e, err := comm.Listen(comm.Config{Self: id.Session{Worker: 1, Incarnation: 1}, Transport: via, Key: commtest.Key})
	var g *group.Group
	other := id.Session{Worker: 0, Incarnation: 1}
	if err == nil {
		err = e.SetMembers([]comm.Peer{{Session: other, Addr: addr}})
	}
	if err == nil {
		g, err = group.New(e, 1)
	}
	v := id.Version{Generation: 1, N: 1}
	if err == nil {
		fmt.Println(e.Addr())
		_, err = g.Edit(context.Background(), v, []id.Session{other, e.Self()})
	}
	x := make([]float32, 100_000)
	for step := uint64(1); err == nil; step++ {
		err = g.AllReduce(context.Background(), group.Call{Version: v, Step: step, Priority: comm.Bulk}, x)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// The death of a process of the host ends operations that read its memory or sleep on its board, and leaves nothing behind; the next version goes on without it.
func TestHostDeath(t *testing.T) {
	require.Reads(t)
	death(t, func() (string, commtest.Network) {
		folder := t.TempDir()
		return folder, func(testing.TB, int) transport.Transport { return transport.Host{Folder: folder, Name: "0"} }
	})
}

// death kills worker 1 of networks, with their folder if they are a host.
func death(t *testing.T, next func() (folder string, network commtest.Network)) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for kill := range 5 {
		folder, network := next()
		es, _ := commtest.Cluster(t, 1, comm.Config{}, network)
		e := es[0]
		cmd := exec.Command(self)
		cmd.Env = append(os.Environ(), envHostPeer+"="+folder+" "+e.Addr())
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err := errors.Join(err, cmd.Start()); err != nil {
			t.Fatal(err)
		}
		defer func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}()
		addr, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		peer := comm.Peer{Session: id.Session{Worker: 1, Incarnation: 1}, Addr: strings.TrimSpace(addr)}
		g, err := group.New(e, 1)
		if err := errors.Join(err, e.SetMembers([]comm.Peer{peer})); err != nil {
			t.Fatal(err)
		}
		v := id.Version{Generation: 1, N: 1}
		if _, err := g.Edit(t.Context(), v, []id.Session{e.Self(), peer.Session}); err != nil {
			t.Fatal(err)
		}
		x := make([]float32, 100_000)
		for step := uint64(1); err == nil; step++ {
			if err = g.AllReduce(t.Context(), group.Call{Version: v, Step: step, Priority: comm.Bulk}, x); step == uint64(50+17*kill) {
				go func() { _ = cmd.Process.Kill() }()
			}
		}
		var ge *group.Error
		if !errors.As(err, &ge) || !errors.Is(err, comm.ErrLink) || ge.Rank != 1 || !ge.Remote {
			t.Errorf("after the kill: %v", err)
		}
		if err := e.SetMembers(nil); err != nil {
			t.Fatal(err)
		}
		if _, err := g.Edit(t.Context(), id.Version{Generation: 1, N: 2}, []id.Session{e.Self()}); err != nil {
			t.Error(err)
		}
		e.Close()
	}
}
