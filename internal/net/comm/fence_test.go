package comm

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/transport"
)

// A session that is evicted anywhere in its stream of messages delivers
// nothing more, neither what waits here nor what it sends when it wakes; its
// link is closed and its call refused. The worker's next session is admitted,
// with a link of its own, and delivers all that was missing.
func TestFence(t *testing.T) {
	for seed := range uint64(200) {
		synctest.Test(t, func(t *testing.T) { fence(t, seed) })
		if t.Failed() {
			t.Fatalf("with seed %d", seed)
		}
	}
}

func fence(t *testing.T, seed uint64) {
	const messages = 12
	r := rand.New(rand.NewPCG(seed, 3))
	m := transport.NewMem()
	es := cluster(t, 2, Config{}, func(int) transport.Transport { return m })
	e := es[0]
	if _, err := e.Connect(t.Context(), es[1].Self()); err != nil {
		t.Fatal(err)
	}
	old, next := id.Session{Worker: 9, Incarnation: 1}, id.Session{Worker: 9, Incarnation: 2}
	if err := e.SetMembers([]Peer{{es[1].Self(), es[1].Addr()}, {old, "nowhere"}}); err != nil {
		t.Fatal(err)
	}
	c := call(t, m, e, old)

	// What it announces, some of it received already, and what it sends then.
	// Messages of the two sessions differ, which no honest ones would.
	var sizes [messages]int
	var receives [messages]*Receiving
	var opens []byte
	var data [][]byte // frames
	for i := range messages {
		sizes[i] = []int{0, 1, 500, 20_000}[r.IntN(4)]
		if r.IntN(3) > 0 {
			receives[i] = e.Expect(user(1, i), make([]byte, sizes[i]))
		}
		eager := receives[i] == nil || r.IntN(2) == 0
		open := Frame{Type: FrameOpen, ID: uint64(i + 1), Key: user(1, i), Size: int64(sizes[i]), Eager: eager}
		opens = open.Append(opens)
		if r.IntN(4) == 0 {
			continue // the data never come
		}
		for from, first := 0, true; first || from < sizes[i]; first = false {
			n := min(sizes[i]-from, 1+r.IntN(8000))
			chunk := Frame{Type: FrameData, ID: uint64(i + 1), Len: n}.Append(nil)
			data = append(data, append(chunk, bytes.Repeat([]byte{1}, n)...))
			from += n
		}
	}
	c.Write(opens)
	synctest.Wait() // it has credit for what is received
	stream := slices.Concat(data...)
	at := 0
	if len(stream) > 0 {
		at = r.IntN(len(stream) + 1)
	}
	var tasks sync.WaitGroup
	if r.IntN(2) == 0 {
		c.Write(stream[:at])
		synctest.Wait()
	} else { // while it is evicted
		tasks.Go(func() { c.Write(stream[:at]) })
	}

	again, err := Listen(Config{Self: next, Transport: m, Key: runKey})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if err := e.SetMembers([]Peer{{es[1].Self(), es[1].Addr()}, {next, again.Addr()}}); err != nil {
		t.Fatal(err)
	}
	var before [messages]bool
	for i, r := range receives {
		before[i] = r != nil && Closed(r.done)
	}

	// The evicted session wakes.
	tasks.Wait()
	if n, err := c.Write(stream[at:]); err == nil && n > 0 {
		t.Errorf("its link still takes %d bytes", n)
	}
	if _, err := io.Copy(io.Discard, c); err != nil {
		t.Errorf("the end of its link: %v", err)
	}
	back, err := m.Dial(t.Context(), e.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer back.Close()
	hello := Frame{Type: FrameHello, From: old, To: e.Self(), Link: 1, Pool: 1}
	greet(t, back, hello)
	back.Write(stream)
	if f, err := NewFrameReader(back).Next(); err != nil || f.Reason != RefusedNotMember {
		t.Errorf("its next call: %v, %v", f, err)
	}
	synctest.Wait()

	for i := range messages {
		if receives[i] == nil {
			receives[i] = e.Expect(user(1, i), make([]byte, sizes[i]))
		}
	}
	synctest.Wait()
	for i, r := range receives {
		if !before[i] && Closed(r.done) {
			t.Errorf("message %d of %d bytes arrived from %v after the eviction: %v", i, sizes[i], r.from, r.err)
		}
	}
	if err := again.SetMembers([]Peer{{e.Self(), e.Addr()}}); err != nil {
		t.Fatal(err)
	}
	for i, size := range sizes {
		again.Post(e.Self(), user(1, i), bytes.Repeat([]byte{2}, size), Bulk)
	}
	for i, r := range receives {
		n, from, err := r.Wait(t.Context())
		want, content := next, byte(2)
		if before[i] {
			want, content = old, 1
		}
		if err != nil || n != sizes[i] || from != want || !bytes.Equal(r.buf, bytes.Repeat([]byte{content}, sizes[i])) {
			t.Errorf("message %d: %d of %d bytes from %v, %v", i, n, sizes[i], from, err)
		}
	}
	for _, s := range e.Stats() {
		if s.Links != 1 {
			t.Errorf("%d links with %v", s.Links, s.Peer)
		}
	}
	if err := e.Send(t.Context(), old, user(1, 99), nil, Bulk); !errors.Is(err, ErrNotMember) {
		t.Errorf("a message to it: %v", err)
	}
}
