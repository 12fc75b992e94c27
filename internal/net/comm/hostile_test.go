package comm

import (
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/timing"
)

// A peer that keeps to no protocol loses its link with ErrProtocol, and
// others' links are as before.
func TestHostilePeer(t *testing.T) {
	open := func(f Frame) Frame {
		f.Type = FrameOpen
		if f.Key == (Key{}) {
			f.Key = user(1, int(f.ID))
		}
		return f
	}
	for name, frames := range map[string][]Frame{
		"data of nothing":                  {{Type: FrameData, ID: 1}},
		"data without credit":              {open(Frame{ID: 1, Size: 100}), {Type: FrameData, ID: 1, Len: 50}},
		"more data than promised":          {open(Frame{ID: 1, Size: 10, Eager: true}), {Type: FrameData, ID: 1, Len: 11}},
		"empty chunk":                      {open(Frame{ID: 1, Size: 10, Eager: true}), {Type: FrameData, ID: 1}},
		"an early message beyond the pool": {open(Frame{ID: 1, Size: 1 << 30, Eager: true})},
		"a message number twice":           {open(Frame{ID: 1, Size: 10}), open(Frame{ID: 1, Size: 10})},
		"credit for nothing":               {{Type: FrameCredit, ID: 7}},
		"room that never was":              {{Type: FrameReturn, Pool: 1}},
		"an answer to no sync":             {{Type: FrameSynced, ID: 1}},
		"a second hello":                   {{Type: FrameHello}},
		"memory of another host":           {{Type: FrameOffer, ID: 1, Key: user(1, 1), Size: 100, Addr: 4096}},
		"reach without a probe":            {{Type: FrameReach}},
		"a second probe":                   {{Type: FrameProbe, Addr: 8}, {Type: FrameProbe, Addr: 8}},
		"a read of nothing":                {{Type: FrameTaken, ID: 7}},
		"an unknown kind":                  {open(Frame{ID: 1, Key: Key{Kind: kindEnd}})},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				var down error
				m := transport.NewMem()
				es := cluster(t, 2, Config{OnLink: func(ev LinkEvent) {
					mu.Lock()
					defer mu.Unlock()
					if ev.Peer.Worker == 9 && ev.Link > 0 && down == nil {
						down = ev.Err
					}
				}}, func(int) transport.Transport { return m })
				es[0].SetMembers([]Peer{{es[1].Self(), es[1].Addr()}, {id.Session{Worker: 9, Incarnation: 1}, "nowhere"}})
				c := call(t, m, es[0], id.Session{Worker: 9, Incarnation: 1})
				for _, f := range frames {
					c.Write(append(f.Append(nil), make([]byte, min(f.Len, 1000))...))
				}
				synctest.Wait()
				mu.Lock()
				if !errors.Is(down, ErrProtocol) || !errors.Is(down, ErrLink) {
					t.Errorf("the link ended with %v", down)
				}
				mu.Unlock()
				if err := es[0].Send(t.Context(), es[1].Self(), user(1, 1), []byte("x"), Bulk); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// A message that its peer says to have read, and that was never offered, ends with the link.
func TestHostileTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := transport.NewMem()
		es := cluster(t, 1, Config{}, func(int) transport.Transport { return m })
		peer := id.Session{Worker: 9, Incarnation: 1}
		es[0].SetMembers([]Peer{{peer, "nowhere"}})
		c := call(t, m, es[0], peer)
		s := es[0].Post(peer, user(1, 1), make([]byte, 1<<20), Bulk)
		f, err := NewFrameReader(c).Next()
		if err != nil || f.Type != FrameOpen {
			t.Fatalf("%v, %v", f, err)
		}
		c.Write(Frame{Type: FrameTaken, ID: f.ID}.Append(nil))
		if err := s.Wait(t.Context()); !errors.Is(err, ErrLink) {
			t.Errorf("the message ended with %v", err)
		}
	})
}

// call shakes hands with an endpoint as a session.
func call(t *testing.T, m *transport.Mem, e *Endpoint, as id.Session) net.Conn {
	t.Helper()
	c, err := m.Dial(t.Context(), e.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	greet(t, c, Frame{Type: FrameHello, From: as, To: e.Self(), Pool: 1 << 20})
	if f, err := NewFrameReader(c).Next(); err != nil || f.Type != FrameWelcome {
		t.Fatalf("answer: %v, %v", f, err)
	}
	return c
}

// greet proves to an endpoint of cluster what it wants to know, for the
// sessions of a hello, and says hello.
func greet(t *testing.T, c net.Conn, hello Frame) {
	t.Helper()
	greetWith(t, c, hello, hello.Append(nil))
}

func greetWith(t *testing.T, c net.Conn, hello Frame, first []byte) {
	t.Helper()
	if err := auth.Call(c, runKey, auth.Ends{From: hello.From, To: hello.To}, first); err != nil {
		t.Fatal(err)
	}
}

// Random bytes after a good handshake never do more than end the link, and
// memory stays within the pool.
func TestNoise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := transport.NewMem()
		es := cluster(t, 1, Config{Pool: 64 << 10, Eager: 4 << 10}, func(int) transport.Transport { return m })
		es[0].SetMembers([]Peer{{id.Session{Worker: 9, Incarnation: 1}, "nowhere"}})
		r := rand.New(rand.NewPCG(7, 7))
		known := uint64(0)
		for range 300 {
			c, err := m.Dial(t.Context(), es[0].Addr())
			if err != nil {
				t.Fatal(err)
			}
			greet(t, c, Frame{Type: FrameHello, From: id.Session{Worker: 9, Incarnation: 1}, To: es[0].Self(), Link: known, Pool: 1})
			known += 1 << 20
			var b []byte
			for id := range uint64(20) {
				f := Frame{Type: FrameType(3 + r.IntN(7)), ID: id + 1, Key: user(1, r.IntN(4)), Size: int64(r.IntN(9000)), Eager: r.IntN(2) == 0, Len: r.IntN(3000), Reason: 1}
				b = f.Append(b)
				if f.Type == FrameData {
					b = append(b, make([]byte, f.Len)...)
				}
			}
			for range r.IntN(3) {
				b[r.IntN(len(b))] ^= byte(1 << r.IntN(8))
			}
			c.Write(b)
			synctest.Wait()
			es[0].lock()
			pooled := 0
			for _, en := range es[0].in.keys {
				for _, in := range en.early {
					pooled += len(in.pool)
				}
			}
			if pooled > 64<<10 {
				t.Errorf("%d bytes are in the pool", pooled)
			}
			es[0].unlock()
			es[0].Advance(2)
			c.Close()
		}
	})
}

func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := transport.NewMem()
		es := cluster(t, 2, Config{}, func(int) transport.Transport { return m })
		if _, err := es[0].Connect(t.Context(), es[1].Self()); err != nil {
			t.Fatal(err)
		}
		hello := Frame{Type: FrameHello, From: es[1].Self(), To: es[0].Self(), Pool: 1}
		other := func(change func(*Frame)) Frame {
			f := hello
			change(&f)
			return f
		}
		version := hello.Append(nil)
		binary.LittleEndian.PutUint16(version[headerSize+4:], wireVersion+1)
		shorter := slices.Clone(version[:headerSize+40]) // as those of versions 3 to 5 were
		binary.LittleEndian.PutUint32(shorter[4:], 40)
		binary.LittleEndian.PutUint16(shorter[headerSize+4:], 5)
		for _, c := range []struct {
			hello Frame
			first []byte
			want  Refusal
		}{
			{other(func(f *Frame) { f.From.Worker = 7 }), nil, RefusedNotMember},
			{other(func(f *Frame) { f.From.Incarnation = 0 }), nil, RefusedNotMember},
			{other(func(f *Frame) { f.From.Incarnation = 2 }), nil, RefusedNotMember},
			{other(func(f *Frame) { f.To.Incarnation = 2 }), nil, RefusedWrongPeer},
			{hello, nil, RefusedLinked},
			{hello, version, RefusedVersion},
			{hello, shorter, RefusedVersion},
		} {
			conn, err := m.Dial(t.Context(), es[0].Addr())
			if err != nil {
				t.Fatal(err)
			}
			if c.first == nil {
				c.first = c.hello.Append(nil)
			}
			greetWith(t, conn, c.hello, c.first)
			if f, err := NewFrameReader(conn).Next(); err != nil || f.Type != FrameRefuse || f.Reason != c.want {
				t.Errorf("answer %v, %v, want %v", f, err, c.want)
			}
			conn.Close()
		}
		// One who says nothing is sent away in time.
		conn, err := m.Dial(t.Context(), es[0].Addr())
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if _, err := io.Copy(io.Discard, conn); err != nil || time.Since(began) != timing.Handshake {
			t.Errorf("a silent caller: %v after %v", err, time.Since(began))
		}
	})
}

func TestConfigFaults(t *testing.T) {
	err := Config{Key: auth.Key("short"), Chunk: -1, Pool: 100, Incast: -1, Ahead: -1, Segment: 6}.Validate()
	if err == nil {
		t.Fatal("no fault found")
	}
	for _, field := range []string{"Transport", "Key", "Chunk", "Pool", "Incast", "Ahead", "Segment"} {
		if !strings.Contains(err.Error(), "comm.Config."+field+" ") {
			t.Errorf("%s is not named in:\n%v", field, err)
		}
	}
	if n := strings.Count(err.Error(), "\n"); n != 6 {
		t.Errorf("%d lines:\n%v", n+1, err)
	}
	if err := (Config{Transport: transport.TCP{}}).Validate(); err != nil {
		t.Error(err)
	}
}
