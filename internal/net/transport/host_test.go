package transport

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// folder returns a folder whose path is short enough on all systems.
func folder(t *testing.T) string {
	dir, err := os.MkdirTemp("/tmp", "") //nolint:usetesting // its path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func listen(t *testing.T, h Host) Listener {
	t.Helper()
	l, err := h.Listen("")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// network returns how a worker dials an address: the network on which the answerer sees it. "" means that it cannot.
func network(t *testing.T, from Host, l Listener) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	near, err := from.Dial(ctx, l.Addr())
	if err != nil {
		return ""
	}
	defer near.Close()
	far, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	if _, err := near.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(far, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	return far.LocalAddr().Network()
}

// Workers of one host meet over unix sockets and nowhere else, those of different hosts over TCP.
func TestHost(t *testing.T) {
	here, there := folder(t), folder(t)
	one, other := Host{Folder: here, Name: "0.0"}, Host{Folder: here, Name: "1.0"}
	l := listen(t, one)
	if addr := "unix:" + filepath.Join(here, "0.0"); l.Addr() != addr || Far(l.Addr()) != "" {
		t.Errorf("a lone host listens at %s", l.Addr())
	}
	if n := network(t, other, l); n != "unix" {
		t.Errorf("a worker of the same host comes over %q", n)
	}
	if n := network(t, Host{Folder: there, Far: TCP{}}, l); n != "" {
		t.Errorf("a worker of another host comes over %q", n)
	}

	one.Name, one.Far, other.Far = "0.1", TCP{}, TCP{}
	l = listen(t, one)
	near, far, _ := strings.Cut(l.Addr(), ",")
	if near != "unix:"+filepath.Join(here, "0.1") || Far(l.Addr()) != far || far == "" {
		t.Errorf("a host with others listens at %s", l.Addr())
	}
	if n := network(t, other, l); n != "unix" {
		t.Errorf("a worker of the same host comes over %q", n)
	}
	if n := network(t, Host{Folder: there, Far: TCP{}}, l); n != "tcp" {
		t.Errorf("a worker of another host comes over %q", n)
	}
	// Without its socket, a worker of the same host is not there.
	if err := os.Remove(filepath.Join(here, "0.1")); err != nil {
		t.Fatal(err)
	}
	if n := network(t, other, l); n != "" {
		t.Errorf("a worker of the same host comes over %q", n)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if c, err := l.Accept(); err == nil {
		c.Close()
		t.Error("a closed listener accepts")
	}
}

// A closed listener leaves no socket behind, and an address or a folder that cannot be is an error at once.
func TestHostSockets(t *testing.T) {
	dir := folder(t)
	l := listen(t, Host{Folder: dir, Name: "0.0", Far: TCP{}})
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	room := MaxPath - len(dir) - 1
	if err := listen(t, Host{Folder: dir, Name: strings.Repeat("n", room)}).Close(); err != nil {
		t.Errorf("a path of %d bytes: %v", MaxPath, err)
	}
	if l, err := (Host{Folder: dir, Name: strings.Repeat("n", room+1)}).Listen(""); err == nil || !strings.Contains(err.Error(), "TMPDIR") {
		t.Errorf("a path of %d bytes: %v, %v", MaxPath+1, l, err)
	}
	for _, folder := range []string{"", "relative", filepath.Join(dir, "absent")} {
		if l, err := (Host{Folder: folder, Name: "0.0"}).Listen(""); err == nil {
			l.Close()
			t.Errorf("listens in the folder %q", folder)
		}
	}
	for _, addr := range []string{"", "unix:", "unix:0.0", "unix:" + dir, "unix:" + dir + "/../0.0", "unix:" + dir + "/x/0.0,", ",", "127.0.0.1:1"} {
		if c, err := (Host{Folder: dir}).Dial(t.Context(), addr); err == nil {
			c.Close()
			t.Errorf("dials %q", addr)
		}
	}
}
