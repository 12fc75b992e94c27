//go:build linux && !portable

package line

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/soliton-train/soliton/internal/id"
)

var v1 = id.Version{Generation: 1, N: 1}

// end is one end of a line.
type end struct {
	h    *Hub
	l    *Line
	lost atomic.Int32
}

// conns returns the two ends of a TCP connection.
func conns(t testing.TB) (a, b net.Conn) {
	t.Helper()
	s, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if a, err = net.Dial("tcp", s.Addr().String()); err == nil {
		b, err = s.Accept()
	}
	if err != nil {
		t.Fatal(err)
	}
	return a, b
}

func newEnd(t testing.TB, c net.Conn) *end {
	t.Helper()
	h, err := New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	e := &end{h: h}
	if e.l, err = h.Add(c, nil, func(error) { e.lost.Add(1) }); err != nil {
		t.Fatal(err)
	}
	return e
}

// pair returns the two ends of a line.
func pair(t testing.TB) (a, b *end) {
	t.Helper()
	x, y := conns(t)
	return newEnd(t, x), newEnd(t, y)
}

func name(part int) Name { return Name{Group: 3, Op: 4, Part: uint32(part), Version: v1} }

func never() error { return nil }

// content is what a message of a size holds.
func content(size, seed int) []byte {
	b := make([]byte, size)
	x := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(size)})
	_, _ = x.Read(b)
	return b
}

// send posts messages of these sizes and waits for all.
func (e *end) send(t testing.TB, sizes ...int) {
	ms := make([]Message, len(sizes))
	for i, size := range sizes {
		e.l.Post(&ms[i], name(i), content(size, i))
	}
	for i := range ms {
		if err := e.h.Wait(&ms[i], never); err != nil {
			t.Errorf("sending %d bytes: %v", sizes[i], err)
		}
	}
}

// receive takes one message and checks it.
func (e *end) receive(t testing.TB, size, i int) {
	var m Message
	buf := make([]byte, size)
	e.l.Expect(&m, name(i), buf)
	if err := e.h.Wait(&m, never); err != nil || !bytes.Equal(buf, content(size, i)) {
		t.Errorf("receiving message %d of %d bytes: %v, or other bytes", i, size, err)
	}
}

var sizes = []int{0, 1, 100, 8 << 10, MaxEager - 1, MaxEager, MaxEager + 1, maxChunk, maxChunk + 1, 3<<20 + 7}

// Messages of all sizes come, whatever the order in which they are expected, and however many goroutines wait.
func TestMessages(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for round := range 20 {
		a, b := pair(t)
		var many []int
		for range 1 + round {
			many = append(many, sizes[r.IntN(len(sizes))])
		}
		var wg sync.WaitGroup
		for _, way := range [][2]*end{{a, b}, {b, a}} {
			wg.Go(func() { way[0].send(t, many...) })
			for _, i := range r.Perm(len(many)) {
				wg.Go(func() { way[1].receive(t, many[i], i) })
			}
		}
		wg.Wait()
		for _, e := range []*end{a, b} {
			e.h.mu.Lock()
			l := e.l
			if left := len(l.posts) + len(l.wants) + len(l.ready) + len(l.expects) + len(l.early); left != 0 || l.err != nil {
				t.Errorf("%d posts, wants, ready, expected and early messages are left, error %v", left, l.err)
			}
			if len(l.eagers) >= company {
				t.Errorf("%d eager messages have no want", len(l.eagers))
			}
			e.h.mu.Unlock()
		}
		if t.Failed() {
			return
		}
	}
}

// Of small messages that nothing waits for yet, 64 are on their way at most, and the others follow as those are expected. The sender has them all taken in the end.
func TestEagerBudget(t *testing.T) {
	a, b := pair(t)
	many := make([]int, 300)
	for i := range many {
		many[i] = i
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.send(t, many...)
	}()
	b.receive(t, 299, 299) // so that the first 64 come, too
	b.h.mu.Lock()
	if n := len(b.l.early); n > maxEagers {
		t.Errorf("%d early messages", n)
	}
	b.h.mu.Unlock()
	for i := range 299 {
		b.receive(t, i, i)
	}
	<-done
}

// A message that is cancelled while it is sent or received takes nothing else along, and its memory is free.
func TestCancel(t *testing.T) {
	a, b := pair(t)
	var out, in Message
	big := content(64<<20, 0)
	buf := make([]byte, len(big))
	b.l.Expect(&in, name(100), buf)
	a.l.Post(&out, name(100), big)
	cancelled := errors.New("cancelled")
	stop := func() error {
		if out.at > 0 { // under the lock
			return cancelled
		}
		return nil
	}
	if err := a.h.Wait(&out, stop); !errors.Is(err, cancelled) {
		t.Fatal(err)
	}
	out.Cancel(cancelled)
	clear(big)
	in.Cancel(cancelled)
	clear(buf)
	if err := a.h.Wait(&out, never); !errors.Is(err, cancelled) {
		t.Error(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() { a.send(t, 0, 100, 1<<20) })
	for i, size := range []int{0, 100, 1 << 20} {
		wg.Go(func() { b.receive(t, size, i) })
	}
	wg.Wait()
	for _, x := range buf {
		if x != 0 {
			t.Fatal("a cancelled receive was written to")
		}
	}
}

// A version that begins drops what was sent under earlier ones.
func TestBegin(t *testing.T) {
	a, b := pair(t)
	a.send(t, 10, 20)
	var want Message
	b.l.Expect(&want, name(9), make([]byte, 1<<20)) // a want
	b.receive(t, 20, 1)                             // both have come
	v2 := id.Version{Generation: 1, N: 2}
	a.h.Begin(3, v2)
	b.h.Begin(3, v2)
	want.Cancel(ErrClosed)
	b.h.mu.Lock()
	if len(b.l.early) != 0 {
		t.Errorf("%d early messages are left", len(b.l.early))
	}
	b.h.mu.Unlock()
	// What comes late is dropped, too: it is sent by hand, as a would send it no more.
	late := frame{kind: kindEager, name: name(5), length: 3, size: 3}.append(nil)
	a.h.mu.Lock()
	a.l.small, a.l.now = append(append(a.l.small, late...), 1, 2, 3), true
	a.h.write(a.l)
	a.h.mu.Unlock()
	n := name(7)
	n.Version = v2
	var out, in Message
	a.l.Post(&out, n, []byte("new"))
	buf := make([]byte, 3)
	b.l.Expect(&in, n, buf)
	if err := errors.Join(a.h.Wait(&out, never), b.h.Wait(&in, never)); err != nil || string(buf) != "new" {
		t.Fatal(err, buf)
	}
	a.h.mu.Lock()
	b.h.mu.Lock()
	if len(a.l.wants)+len(a.l.eagers)-1 != 0 || len(b.l.early) != 0 {
		t.Errorf("%d wants, %d eager messages, %d early ones are left", len(a.l.wants), len(a.l.eagers)-1, len(b.l.early))
	}
	b.h.mu.Unlock()
	a.h.mu.Unlock()
}

// Sizes that differ are errors on both sides, as is a name in use; the line stays.
func TestMistakes(t *testing.T) {
	a, b := pair(t)
	for i, size := range []int{10, MaxEager + 10} {
		var out, in Message
		b.l.Expect(&in, name(i), make([]byte, size-1))
		a.l.Post(&out, name(i), make([]byte, size))
		outErr := make(chan error, 1)
		go func() { outErr <- a.h.Wait(&out, never) }()
		if size > MaxEager {
			if err := <-outErr; !errors.Is(err, ErrSize) {
				t.Error(err)
			}
			in.Cancel(ErrClosed)
			continue
		}
		if err := b.h.Wait(&in, never); !errors.Is(err, ErrSize) {
			t.Error(err)
		}
		<-outErr
	}
	var first, second Message
	b.l.Expect(&first, name(8), nil)
	b.l.Expect(&second, name(8), nil)
	if err := b.h.Wait(&second, never); !errors.Is(err, ErrUsed) {
		t.Error(err)
	}
	a.l.Post(&second, name(9), make([]byte, 1<<20))
	var third Message
	a.l.Post(&third, name(9), nil)
	if err := a.h.Wait(&third, never); !errors.Is(err, ErrUsed) {
		t.Error(err)
	}
	second.Cancel(ErrClosed)
	first.Cancel(ErrClosed)
	a.l.Post(&first, name(10), []byte{7})
	buf := []byte{0}
	b.l.Expect(&second, name(10), buf)
	if err := errors.Join(a.h.Wait(&first, never), b.h.Wait(&second, never)); err != nil || buf[0] != 7 {
		t.Error(err, buf)
	}
	if a.lost.Load()+b.lost.Load() != 0 {
		t.Error("the line was lost")
	}
}

// waiting has n goroutines wait for messages that do not come, and returns what ends them.
func (e *end) waiting(n int, stopped func() error) <-chan error {
	errs := make(chan error, n)
	for i := range n {
		m := new(Message)
		e.l.Expect(m, name(1000+i), make([]byte, 1<<20))
		go func() { errs <- e.h.Wait(m, stopped) }()
	}
	return errs
}

// until waits for a condition, which is asked under the lock.
func (e *end) until(done func() bool) {
	for ok := false; !ok; runtime.Gosched() {
		e.h.mu.Lock()
		ok = done()
		e.h.mu.Unlock()
	}
}

// asleep waits until one goroutine sleeps on the sockets and the others on it.
func (e *end) asleep(others int) {
	e.until(func() bool { return e.h.asleep && e.h.others == others })
}

// All waits end when the other end closes, when ours is closed, and when they are told to stop.
func TestEnds(t *testing.T) {
	stop := errors.New("stop")
	for what, do := range map[string]struct {
		f    func(a, b *end, stopped *atomic.Bool)
		want error
		lost int32
	}{
		"the peer closes": {func(a, b *end, _ *atomic.Bool) { b.l.Close(ErrClosed) }, io.EOF, 1},
		"we close":        {func(a, b *end, _ *atomic.Bool) { a.l.Close(ErrClosed) }, ErrClosed, 0},
		"our hub closes":  {func(a, b *end, _ *atomic.Bool) { a.h.Close() }, ErrClosed, 1},
		"the peer's end":  {func(a, b *end, _ *atomic.Bool) { b.h.Close() }, io.EOF, 1},
		"stopped by a ring": {func(a, b *end, stopped *atomic.Bool) {
			stopped.Store(true)
			a.h.Ring()
		}, stop, 0},
	} {
		t.Run(what, func(t *testing.T) {
			a, b := pair(t)
			var stopped atomic.Bool
			errs := a.waiting(3, func() error {
				if stopped.Load() {
					return stop
				}
				return nil
			})
			a.asleep(2)
			do.f(a, b, &stopped)
			for range 3 {
				if err := <-errs; !errors.Is(err, do.want) {
					t.Error(err)
				}
			}
			if n := a.lost.Load(); n != do.lost {
				t.Errorf("told %d times that the line is lost", n)
			}
			var late Message
			if do.lost > 0 || what == "we close" {
				if a.l.Post(&late, name(1), nil); a.h.Wait(&late, never) == nil {
					t.Error("a line that has ended takes a message")
				}
			}
		})
	}
}

// A goroutine that begins to wait while another sleeps is carried by that one, also where it has something to send that the socket does not take at once, and whether or not its want was there.
func TestSleepers(t *testing.T) {
	for _, wanted := range []bool{false, true} {
		a, b := pair(t)
		var stopped atomic.Bool
		stop := errors.New("stop")
		errs := a.waiting(1, func() error {
			if stopped.Load() {
				return stop
			}
			return nil
		})
		a.asleep(0)
		received := make(chan struct{})
		receive := func() {
			defer close(received)
			b.receive(t, 32<<20, 0)
		}
		if wanted {
			go receive()
			a.until(func() bool { return len(a.l.wants) == 1 })
			a.asleep(0)
		}
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			a.send(t, 32<<20)
		}()
		if !wanted {
			go receive()
		}
		<-sent
		<-received
		stopped.Store(true)
		a.h.Ring()
		if err := <-errs; !errors.Is(err, stop) {
			t.Error(err)
		}
	}
}

// What comes is read though nothing waits for it.
func TestTend(t *testing.T) {
	a, b := pair(t)
	many := make([]int, maxEagers)
	for i := range many {
		many[i] = MaxEager
	}
	a.send(t, many...) // more than sockets keep, or not
	b.until(func() bool { return len(b.l.early) == maxEagers })
	for i := range many {
		b.receive(t, MaxEager, i)
	}
	a.until(func() bool { return len(a.l.eagers) == 0 }) // the wants go out and are read
}

// Whatever a peer sends, the line continues or ends, and keeps little.
func TestHostile(t *testing.T) {
	early := func(n int) []byte {
		var b []byte
		for i := range n {
			b = frame{kind: kindEager, name: name(i), length: MaxEager, size: MaxEager}.append(b)
			b = append(b, make([]byte, MaxEager)...)
		}
		return b
	}
	wants := func(n int) (b []byte) {
		for i := range n {
			b = frame{kind: kindWant, name: name(i), size: 1 << 40}.append(b)
		}
		return b
	}
	twice := frame{kind: kindEager, name: name(1)}.append(nil)
	for what, b := range map[string][]byte{
		"no frame":                {0: 9, 99: 0},
		"a zero that is none":     {0: 1, 6: 1, 55: 0},
		"a want with data":        frame{kind: kindWant, name: name(1), length: 1}.append(nil),
		"an eager one too long":   frame{kind: kindEager, name: name(1), length: MaxEager + 1, size: MaxEager + 1}.append(nil),
		"a chunk too long":        frame{kind: kindData, name: name(1), length: maxChunk + 1, size: 1 << 30}.append(nil),
		"a chunk beyond the end":  frame{kind: kindData, name: name(1), length: 10, size: 9}.append(nil),
		"an empty chunk":          frame{kind: kindData, name: name(1), length: 0, size: 9}.append(nil),
		"a name twice":            append(twice, twice...),
		"too many early messages": early(maxEarly + 1),
		"too many wants":          wants(2*maxWants + 1),
		"data of another size":    append(frame{kind: kindData, name: name(1000), length: 1, size: 1 << 20}.append(nil), frame{kind: kindData, name: name(1000), length: 1, size: 9}.append([]byte{1})...),
	} {
		t.Run(what, func(t *testing.T) {
			x, y := conns(t)
			defer x.Close()
			e := newEnd(t, y)
			errs := e.waiting(1, never)
			go func() { _, _ = x.Write(b) }()
			if err := <-errs; !errors.Is(err, ErrProtocol) {
				t.Error(err)
			}
			if e.lost.Load() != 1 {
				t.Error("not told that the line is lost")
			}
		})
	}
}

// Random bytes, cut anywhere, do no more than end the line.
func FuzzLine(f *testing.F) {
	f.Add(frame{kind: kindWant, name: name(1), size: 5}.append(nil))
	f.Add(append(frame{kind: kindEager, name: name(1), length: 2, size: 2}.append(nil), 1, 2))
	f.Add(append(frame{kind: kindData, name: name(2), length: 2, size: 4}.append(nil), 1, 2))
	f.Fuzz(func(t *testing.T, b []byte) {
		l := &Line{
			hub: &Hub{}, buf: make([]byte, 200),
			posts: make(map[Name]*Message), wants: make(map[Name]int), eagers: make(map[Name]struct{}), expects: make(map[Name]*Message), early: make(map[Name][]byte),
		}
		out, in := &Message{line: l, name: name(1), data: make([]byte, 5)}, &Message{line: l, name: name(2), data: make([]byte, 4), in: true}
		l.posts[out.name] = out
		l.expect(in)
		for len(b) > 0 {
			direct, buf := l.input()
			n := copy(direct, b)
			n += copy(buf, b[n:])
			if n == 0 {
				t.Fatal("no room")
			}
			if err := l.came(n, direct); err != nil {
				if !errors.Is(err, ErrProtocol) {
					t.Fatal(err)
				}
				return
			}
			b = b[n:]
		}
	})
}

// In steady state, messages allocate nothing.
func TestAllocatesNothing(t *testing.T) {
	a, b := pair(t)
	for _, size := range []int{100, MaxEager, 1 << 20} {
		const runs = 200
		echo := func(e *end, way int, x []byte, step uint64) error {
			var out, in Message
			n := Name{Step: step, Part: uint32(size), Version: v1}
			n.From = uint32(way)
			e.l.Post(&out, n, x[:size])
			n.From = uint32(1 - way)
			e.l.Expect(&in, n, x[size:])
			return errors.Join(e.h.Wait(&out, never), e.h.Wait(&in, never))
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			x := make([]byte, 2*size)
			for step := range uint64(2*runs + 1) {
				if err := echo(b, 1, x, step); err != nil {
					t.Error(err)
				}
			}
		})
		x, step := make([]byte, 2*size), uint64(0)
		one := func() {
			if err := echo(a, 0, x, step); err != nil {
				t.Error(err)
			}
			step++
		}
		for range runs {
			one()
		}
		n := testing.AllocsPerRun(runs, one)
		wg.Wait()
		if n > 5 { // two messages on each side, and what the test does
			t.Errorf("%d bytes: %v allocations for each exchange", size, n)
		}
	}
}

func TestHeader(t *testing.T) {
	f := frame{kind: kindData, length: 7, size: 9, name: Name{1, 2, 3, 4, 5, 6, 7, id.Version{Generation: 8, N: 9}}}
	b := f.append(nil)
	if len(b) != header || binary.LittleEndian.Uint64(b[24:]) != 9 {
		t.Fatalf("% x", b)
	}
	if got, err := decode(b); err != nil || got != f {
		t.Fatal(fmt.Sprintf("%+v", got), err)
	}
}
