//go:build linux && !portable

package comm

import (
	"bytes"
	"context"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/testkit/require"
)

// large is above Config.Eager.
const large = 300 << 10

// until waits for a condition on an endpoint.
func until(t *testing.T, e *Endpoint, what string, holds func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		e.lock()
		ok := holds()
		e.unlock()
		if ok {
			return
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			t.Fatalf("%s: it never came", what)
		}
	}
}

// inReach returns two endpoints of a host that read each other's memory.
func inReach(t *testing.T) (from, to *Endpoint) {
	require.Reads(t)
	es := cluster(t, 2, Config{}, inHost(t))
	if _, err := es[0].Connect(t.Context(), es[1].Self()); err != nil {
		t.Fatal(err)
	}
	for i, e := range es {
		until(t, e, "reach", func() bool {
			l := e.peers[id.WorkerID(1-i)].link
			return l != nil && l.readable
		})
	}
	return es[0], es[1]
}

// offered waits until a message has been announced with its place.
func offered(t *testing.T, from *Endpoint, s *Sending) {
	t.Helper()
	until(t, from, "offer", func() bool { return s.offered })
}

// announced waits until the receiver knows of a message.
func announced(t *testing.T, to *Endpoint, key Key) {
	t.Helper()
	until(t, to, "announcement", func() bool { return to.in.keys[key] != nil && len(to.in.keys[key].early) > 0 })
}

// A large message is read from where it lies, and its memory is the sender's again afterwards.
func TestFetch(t *testing.T) {
	from, to := inReach(t)
	want, got := pattern(large, 1), make([]byte, large)
	s := from.Post(to.Self(), user(1, 1), want, Bulk)
	offered(t, from, s)
	r := to.Expect(user(1, 1), got)
	if n, who, err := r.Wait(t.Context()); err != nil || n != large || who != from.Self() || !bytes.Equal(got, want) {
		t.Errorf("%d bytes from %v: %v, equal %v", n, who, err, bytes.Equal(got, want))
	}
	if err := s.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	from.lock()
	defer from.unlock()
	if st := from.peers[1].stats; st.BytesSent != large || st.MessagesSent != 1 || st.WireSent < large || st.Busy <= 0 {
		t.Errorf("the sender counts %+v", st)
	}
}

// Memory that its sender has taken back is not received, even by a receiver that has not heard of it. Another copy is.
func TestFetchTakenBack(t *testing.T) {
	from, to := inReach(t)
	data, got := pattern(large, 1), make([]byte, large)
	s := from.Post(to.Self(), user(1, 1), data, Bulk)
	offered(t, from, s)
	announced(t, to, user(1, 1))

	to.lock() // it hears of nothing
	s.Cancel(errors.New("given up"))
	copy(data, pattern(large, 9))
	r := &Receiving{ending: newEnding(to), key: user(1, 1), buf: got}
	if err := to.in.post(r); err != nil {
		t.Error(err)
	}
	to.unlock()
	until(t, to, "the word of the sender", func() bool { return to.in.keys[user(1, 1)] != nil && r.filling == nil })
	if Closed(r.Done()) {
		t.Fatal("received what was taken back")
	}
	want := pattern(large, 2)
	if err := from.Send(t.Context(), to.Self(), user(1, 1), want, Bulk); err != nil {
		t.Error(err)
	}
	if _, _, err := r.Wait(t.Context()); err != nil || !bytes.Equal(got, want) {
		t.Errorf("received %v, equal %v", err, bytes.Equal(got, want))
	}
}

// A message that the receiver has read is counted once, even if its sender takes it back before it hears of that.
func TestFetchCounts(t *testing.T) {
	from, to := inReach(t)
	data, got := pattern(large, 1), make([]byte, large)
	s := from.Post(to.Self(), user(1, 1), data, Bulk)
	offered(t, from, s)
	announced(t, to, user(1, 1))
	from.lock() // it hears of nothing
	_, _, err := to.Receive(t.Context(), user(1, 1), got)
	s.withdraw(errors.New("no worker waits for it"))
	from.unlock()
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("received %v, equal %v", err, bytes.Equal(got, data))
	}
	to.Post(from.Self(), user(1, 2), nil, Bulk) // after its word that it has read the message
	if _, _, err := from.Receive(t.Context(), user(1, 2), nil); err != nil {
		t.Fatal(err)
	}
	if st := from.Stats()[0]; st.MessagesSent != 1 || st.BytesSent != large {
		t.Errorf("%d messages of %d bytes sent", st.MessagesSent, st.BytesSent)
	}
}

// An offer whose fence has changed for the sake of another message goes through the link.
func TestFetchThroughLink(t *testing.T) {
	from, to := inReach(t)
	want, got := pattern(large, 1), make([]byte, large)
	s, other := from.Post(to.Self(), user(1, 1), want, Bulk), from.Post(to.Self(), user(1, 2), want, Bulk)
	offered(t, from, s)
	offered(t, from, other)
	other.Cancel(errors.New("given up"))
	if _, _, err := to.Receive(t.Context(), user(1, 1), got); err != nil || !bytes.Equal(got, want) {
		t.Errorf("received %v, equal %v", err, bytes.Equal(got, want))
	}
	if err := s.Wait(t.Context()); err != nil {
		t.Error(err)
	}
}

// A receive that is given up while its message is granted leaves its buffer alone, and the sender gets its memory back.
func TestFetchNotWanted(t *testing.T) {
	from, to := inReach(t)
	for i := range 200 {
		data, got := pattern(large, 1), make([]byte, large)
		key := user(1, i)
		s := from.Post(to.Self(), key, data, Bulk)
		r := to.Expect(key, got)
		r.Cancel(errors.New("given up")) // at any moment of the read
		clear(got)
		to.Advance(2)
		if err := s.Wait(t.Context()); err != nil && !errors.Is(err, ErrStale) {
			t.Fatal(err)
		}
		if !bytes.Equal(got, make([]byte, large)) {
			t.Fatal("written after the receive had ended")
		}
		to.lock()
		to.in.step = 1
		to.unlock()
	}
}

// Where one end may not be read, or does not read, messages pass through the link.
func TestFetchRefused(t *testing.T) {
	folder := t.TempDir()
	es := cluster(t, 2, Config{}, func(i int) transport.Transport {
		return transport.Host{Folder: folder, Name: string(rune('a' + i)), Sockets: i == 1}
	})
	for i := range 2 {
		want, got := pattern(large, byte(i)), make([]byte, large)
		r := es[1-i].Expect(user(1, i), got)
		if err := es[i].Send(t.Context(), es[1-i].Self(), user(1, i), want, Bulk); err != nil {
			t.Fatal(err)
		}
		if _, _, err := r.Wait(t.Context()); err != nil || !bytes.Equal(got, want) {
			t.Errorf("received %v, equal %v", err, bytes.Equal(got, want))
		}
	}
}

// A peer whose fence cannot be read keeps its link, and the owner of the endpoint learns why it copies.
func TestFetchUnreadable(t *testing.T) {
	require.Reads(t)
	events := make(chan LinkEvent, 10)
	es := cluster(t, 1, Config{OnLink: func(ev LinkEvent) { events <- ev }}, inHost(t))
	caller := id.Session{Worker: 9, Incarnation: 1}
	if err := es[0].SetMembers([]Peer{{caller, "nowhere"}}); err != nil {
		t.Fatal(err)
	}
	c, err := transport.Host{Folder: filepath.Dir(strings.TrimPrefix(es[0].Addr(), "unix:"))}.Dial(t.Context(), es[0].Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	greet(t, c, Frame{Type: FrameHello, From: caller, To: es[0].Self(), Pool: 1 << 20})
	fr := NewFrameReader(c)
	for _, want := range []FrameType{FrameWelcome, FrameProbe} {
		if f, err := fr.Next(); err != nil || f.Type != want {
			t.Fatalf("%v, %v", f, err)
		}
	}
	if ev := <-events; !ev.Up || ev.Copies != nil {
		t.Errorf("the link: %+v", ev)
	}
	_, _ = c.Write(Frame{Type: FrameProbe, Addr: 8, Fence: 1}.Append(nil)) // no memory is there
	if f, err := fr.Next(); err != nil || f.Type != FrameReach || f.Read || f.Open {
		t.Fatalf("the answer to the probe: %+v, %v", f, err)
	}
	if ev := <-events; !ev.Up || !errors.Is(ev.Copies, unix.EFAULT) {
		t.Errorf("the probe: %+v", ev)
	}
	// The message goes through the link, and one that lies in memory is a breach.
	key, want, got := user(1, 1), pattern(large, 1), make([]byte, large)
	r := es[0].Expect(key, got)
	_, _ = c.Write(Frame{Type: FrameOpen, ID: 1, Key: key, Size: large}.Append(nil))
	if f, err := fr.Next(); err != nil || f.Type != FrameCredit {
		t.Fatalf("%v, %v", f, err)
	}
	_, _ = c.Write(append(Frame{Type: FrameData, ID: 1, Len: large}.Append(nil), want...))
	if _, _, err := r.Wait(t.Context()); err != nil || !bytes.Equal(got, want) {
		t.Errorf("received %v, equal %v", err, bytes.Equal(got, want))
	}
	_, _ = c.Write(Frame{Type: FrameOffer, ID: 2, Key: user(1, 2), Size: large, Addr: 4096}.Append(nil))
	if _, err := fr.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("after a breach: %v", err)
	}
}
