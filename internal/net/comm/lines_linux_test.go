//go:build linux && !portable

package comm

import (
	"errors"
	"io"
	"net"
	"testing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/line"
)

// A caller that says to be a line is refused, unless its link has none yet and can have one.
func TestLineRefusals(t *testing.T) {
	es := cluster(t, 2, Config{}, inTCP)
	for _, i := range []int{1, 0} { // the first makes the link
		if _, err := es[i].Connect(t.Context(), es[1-i].Self()); err != nil {
			t.Fatal(err)
		}
	}
	call := func(f Frame) (net.Conn, Frame) {
		c, err := net.Dial("tcp", es[0].Addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		greetWith(t, c, f, f.Append(nil))
		answer, err := NewFrameReader(c).Next()
		if err != nil {
			t.Fatal(err)
		}
		return c, answer
	}
	ask := func(from id.Session, link uint64) Frame {
		return Frame{Type: FrameLine, From: from, To: es[0].Self(), Link: link}
	}
	for what, f := range map[string]Frame{
		"no member":     ask(id.Session{Worker: 7, Incarnation: 1}, 1),
		"another link":  ask(es[1].Self(), 2),
		"an older self": ask(id.Session{Worker: 1, Incarnation: 0}, 1),
	} {
		if _, answer := call(f); answer.Type != FrameRefuse {
			t.Errorf("%s: %v", what, answer)
		}
	}
	c, answer := call(ask(es[1].Self(), 1))
	if answer.Type != FrameWelcome || answer.Link != 1 {
		t.Fatalf("the line: %v", answer)
	}
	if _, answer := call(ask(es[1].Self(), 1)); answer.Type != FrameRefuse || answer.Reason != RefusedLine {
		t.Errorf("a second line: %v", answer)
	}
	// Where the line is lost, the link is made again.
	c.Close()
	s, err := NewScope(es[0], 1, func(id.Session, error) {})
	if err != nil {
		t.Fatal(err)
	}
	s.Lock()
	all, hub, _ := s.Lines([]id.Session{es[0].Self(), es[1].Self()})
	s.Unlock()
	if hub == nil || all[1] == nil {
		t.Fatal("the line is not there")
	}
	m := new(line.Message)
	all[1].Expect(m, line.Name{}, make([]byte, 1))
	if err := hub.Wait(m, func() error { return nil }); !errors.Is(err, io.EOF) {
		t.Errorf("a line whose other end is closed: %v", err)
	}
	for down := false; !down; {
		es[0].lock()
		p := es[0].peers[1]
		changed := es[0].changed
		down = p.link == nil || p.link.number > 1
		es[0].unlock()
		if !down {
			select {
			case <-changed:
			case <-t.Context().Done():
			}
		}
	}
}
