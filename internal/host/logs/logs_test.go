package logs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// site is run directories of hosts that reach each other.
type site struct {
	*testing.T
	dirs    map[string]string
	answer  map[string]func(control.ReadLog) control.Message // in place of what is right
	serving sync.WaitGroup
}

func newSite(t *testing.T, hosts ...string) *site {
	s := &site{T: t, dirs: make(map[string]string), answer: make(map[string]func(control.ReadLog) control.Message)}
	for _, h := range hosts {
		s.dirs[h] = t.TempDir()
		if err := os.Mkdir(filepath.Join(s.dirs[h], "log"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(s.serving.Wait)
	return s
}

func (s *site) write(host string, worker int, text string) {
	s.Helper()
	if err := os.WriteFile(filepath.Join(s.dirs[host], "log", fmt.Sprintf("worker-%d.0.log", worker)), []byte(text), 0o600); err != nil {
		s.Fatal(err)
	}
}

func (s *site) hosts() Hosts {
	return Hosts{Dial: func(_ context.Context, to string) (*control.Conn, error) {
		if s.dirs[to] == "" {
			return nil, errors.New("no route\nto host")
		}
		ours, theirs := net.Pipe()
		s.serving.Go(func() {
			conn := control.New(theirs)
			defer conn.Close()
			m, err := conn.Receive(context.Background())
			if err != nil {
				return
			}
			var said control.Message = Read(s.dirs[to], m.(control.ReadLog))
			if answer := s.answer[to]; answer != nil {
				said = answer(m.(control.ReadLog))
			}
			_ = conn.Send(said)
		})
		return control.New(ours), nil
	}}
}

// The leader gathers all logs: short ones whole, the ends of long ones, and says which are missing.
func TestGather(t *testing.T) {
	s := newSite(t, "a", "b", "c", "d")
	long := strings.Repeat("0123456789\n", rundir.MaxOthers/11+1)
	s.write("a", 0, "of a\n")
	s.write("b", 1, long)
	s.write("b", 2, "")
	s.write("c", 3, long)
	s.answer["d"] = func(control.ReadLog) control.Message {
		return control.Logged{Logs: []control.LogFile{{Worker: 4, Size: -1}}}
	}
	o := s.hosts().Gather(t.Context(), s.dirs["a"], "a", []string{"b", "c", "d", "e"}, []string{"f"})
	if err := rundir.WriteOthers(s.dirs["a"], o); err != nil {
		t.Fatal(err)
	}
	got, err := rundir.ReadOthers(s.dirs["a"])
	if err != nil {
		t.Fatal(err)
	}
	const room = rundir.MaxOthers - 5
	size := int64(len(long))
	want := []rundir.OtherLog{
		{Host: "a", Text: []byte("of a\n")}, {Host: "b", Worker: 1, From: size - room/2, Text: []byte(long[size-room/2:])}, {Host: "b", Worker: 2},
		{Host: "c", Worker: 3, From: size - (room - room/2), Text: []byte(long[size-(room-room/2):])},
	}
	if !slices.EqualFunc(got.Logs, want, func(a, b rundir.OtherLog) bool {
		return a.Host == b.Host && a.Worker == b.Worker && a.From == b.From && string(a.Text) == string(b.Text)
	}) {
		for _, l := range got.Logs {
			t.Errorf("%s, worker %d: %d bytes from %d", l.Host, l.Worker, len(l.Text), l.From)
		}
	}
	notes := []string{
		"f: its logs are in its own run directory: it was lost, or had left, when the run ended",
		"d: its logs cannot be read: worker 4 has a log of -1 bytes", "e: its logs cannot be read: no route to host",
	}
	if !slices.Equal(got.Notes, notes) {
		t.Errorf("%q", got.Notes)
	}
}

// A host that says more of a log than it has, or fails in the middle, leaves what came.
func TestGatherFromOddHosts(t *testing.T) {
	s := newSite(t, "a", "short", "failing")
	asked := 0
	for _, host := range []string{"short", "failing"} {
		s.answer[host] = func(m control.ReadLog) control.Message {
			switch {
			case m.Worker < 0:
				return control.Logged{Logs: []control.LogFile{{Worker: 1, Size: 10}, {Worker: 2, Size: 10}}}
			case m.At == 0:
				return control.Logged{Data: []byte("half\n")}
			case host == "failing":
				asked++
				return control.Logged{Err: "disk is gone"}
			}
			return control.Logged{}
		}
	}
	o := s.hosts().Gather(t.Context(), s.dirs["a"], "a", []string{"short", "failing"}, nil)
	if len(o.Logs) != 3 || slices.ContainsFunc(o.Logs, func(l rundir.OtherLog) bool { return string(l.Text) != "half\n" }) {
		t.Errorf("%+v", o.Logs)
	}
	if !slices.Equal(o.Notes, []string{"failing: its logs cannot be read: disk is gone"}) || asked != 1 {
		t.Errorf("%q after %d questions", o.Notes, asked)
	}
}
