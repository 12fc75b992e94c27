package raftlog

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/soliton-train/soliton/internal/host/agree"
)

// A host without its log is refused under its old ID. As a new server it is a non-voter, catches up, and votes when it is
// promoted.
func TestLostLog(t *testing.T) {
	c := newCluster(t)
	ids := c.start(3)
	c.commit(agree.Generation{N: 1})
	c.plans(1, 5)
	c.agreed(5, ids...)
	c.close("c")

	config := c.config("c")
	if err := os.Remove(filepath.Join(config.Dir, logFile)); err != nil {
		t.Fatal(err)
	}
	var none *agree.NoLogError
	if _, err := Open(config); !errors.As(err, &none) || none.Dir != config.Dir {
		t.Errorf("without log.db: %v, want a NoLogError", err)
	}
	if _, err := Create(config, []agree.Server{{ID: "c", Voter: true}}); !errors.Is(err, fs.ErrExist) {
		t.Errorf("created over what is left: %v, want %v", err, fs.ErrExist)
	}
	config.Join = true
	if _, err := Open(config); !errors.Is(err, fs.ErrExist) {
		t.Errorf("joins over what is left: %v, want %v", err, fs.ErrExist)
	}
	if err := os.RemoveAll(config.Dir); err != nil {
		t.Fatal(err)
	}
	config.Join = false
	if _, err := Open(config); !errors.As(err, &none) {
		t.Errorf("without its directory: %v, want a NoLogError", err)
	}

	n := c.join("c")
	if n.id == "c" || agree.HostOf(n.id) != "c" {
		t.Fatalf("the host joins as %q, want another server of it", n.id)
	}
	server := agree.Server{ID: n.id, Addr: n.id}
	c.change("add it", func(lead *Node) error { return lead.AddNonVoter(t.Context(), server) })
	c.agreed(5, n.id)
	if s, _ := c.leader().State().Server(n.id); s.Voter {
		t.Error("it votes as soon as it is there")
	}
	c.change("promote it", func(lead *Node) error { return lead.Promote(t.Context(), n.id) })
	c.change("remove c", func(lead *Node) error { return lead.Remove(t.Context(), "c") })
	c.close("a")
	c.plans(6, 8) // with its vote: two of three are left
	c.agreed(8, "b", n.id)

	c.close(n.id)
	config = c.config("c")
	config.Dir = c.dirs[n.id]
	if again := c.open(config); again.id != n.id {
		t.Errorf("opened again it is %q, want %q", again.id, n.id)
	}
	c.agreed(8, n.id)
	wrong := config
	wrong.Host = "b"
	c.close(n.id)
	if _, err := Open(wrong); err == nil || !strings.Contains(err.Error(), "log of c, not of b") {
		t.Errorf("another host opens the log: %v", err)
	}
}

// A server that has taken the address of one that lost its log does not answer in its name.
func TestLostServerIsSilent(t *testing.T) {
	c := newCluster(t)
	addrs := make(map[string]string)
	config := func(host string, l net.Listener) Config {
		f := c.config(host)
		f.memory, f.Listener, f.TLS = nil, l, secretTLS(t, "s")
		f.Resolve = func(id string) string { return addrs[agree.HostOf(id)] }
		return f
	}
	var all []agree.Server
	listeners := make(map[string]net.Listener)
	for _, id := range []string{"a", "b", "c"} {
		listeners[id] = listen(t)
		addrs[id] = listeners[id].Addr().String()
		all = append(all, agree.Server{ID: id, Addr: addrs[id], Voter: true})
	}
	for _, s := range all {
		c.create(config(s.ID, listeners[s.ID]), all...)
	}
	c.commit(agree.Generation{N: 1})
	c.close("c")
	if err := os.RemoveAll(c.dirs["c"]); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", addrs["c"])
	if err != nil {
		t.Fatal(err)
	}
	f := config("c", l)
	f.Join = true
	n := c.open(f)
	b := c.nodes["b"]
	for id, answers := range map[string]bool{"c": false, n.id: true} {
		request := &raft.RequestVoteRequest{
			RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: []byte("b"), Addr: []byte(b.net.LocalAddr())},
			Term:      1,
		}
		err := b.net.RequestVote(raft.ServerID(id), "", request, new(raft.RequestVoteResponse))
		if (err == nil) != answers {
			t.Errorf("asked for the vote of %s, it answers: %v", id, err)
		}
	}
	c.change("add it", func(lead *Node) error { return lead.AddNonVoter(t.Context(), agree.Server{ID: n.id, Addr: addrs["c"]}) })
	c.eventually("it knows the servers", func() bool { return len(n.State().Servers) == 4 })
	if s, _ := n.State().Server(n.id); s != (agree.Server{ID: n.id, Addr: addrs["c"]}) {
		t.Errorf("it is %+v", s)
	}
}

// logOf makes a log with small and large plans and returns its file.
func logOf(t testing.TB, plans int) []byte {
	t.Helper()
	dir := t.TempDir()
	n, err := Create(Config{Dir: dir, Host: "a", memory: NewMemory(), Timeout: time.Second}, alone)
	if err != nil {
		t.Fatal(err)
	}
	for l := range n.Changes() {
		if l.Ready {
			break
		}
	}
	entries := []agree.Entry{agree.Generation{N: 1}}
	for i := range plans {
		entries = append(entries, agree.Plan{Version: version(1, i+1), Data: make([]byte, 1+i%4*3000)})
	}
	for _, e := range entries {
		if _, err := n.Propose(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, logFile))
	if err != nil {
		t.Fatal(err)
	}
	newest, err := readMeta(bytes.NewReader(text), 0)
	if other, _ := readMeta(bytes.NewReader(text), int64(newest.PageSize)); other.Commit > newest.Commit {
		newest = other
	}
	if err != nil || newest.End*uint64(newest.PageSize) > uint64(len(text)) {
		t.Fatalf("%+v, %v", newest, err)
	}
	return text[:newest.End*uint64(newest.PageSize)]
}

// opens opens a file as a log. It fails the test unless an error names the file.
func opens(t testing.TB, text []byte, what string) bool {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, logFile)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	n, err := Open(Config{Dir: dir, Host: "a", memory: NewMemory(), Timeout: time.Second})
	if err == nil {
		err := n.Close()
		if err != nil {
			t.Errorf("%s: close: %v", what, err)
		}
		return true
	}
	var damaged *agree.DamagedError
	if !errors.As(err, &damaged) || damaged.File != path || !strings.Contains(err.Error(), path) || strings.Contains(err.Error(), "\n") {
		t.Errorf("%s: %v, want a DamagedError that names the file, in one line", what, err)
	}
	return false
}

// Whatever the bytes of a log are, Open returns an error that names the file, or a log.
func TestDamagedLog(t *testing.T) {
	whole := logOf(t, 40)
	if !opens(t, whole, "whole") {
		t.Fatal("a whole log is refused")
	}
	r := rand.New(rand.NewPCG(1, 2))
	garbage := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		return b
	}
	page := os.Getpagesize()
	used := 0 // pages whose loss is noticed
	for at := 0; at < len(whole); at += page {
		text := append([]byte(nil), whole...)
		copy(text[at:], garbage(page))
		if !opens(t, text, fmt.Sprintf("random bytes at %d", at)) {
			used++
		}
	}
	if used < 5 {
		t.Errorf("of %d pages only %d are missed", len(whole)/page, used)
	}
	for _, size := range []int{0, 1, 100, page, 2 * page, 3 * page, len(whole) / 2, len(whole) - page} {
		if opens(t, whole[:size], fmt.Sprintf("%d bytes", size)) {
			t.Errorf("cut off after %d bytes it opens", size)
		}
	}
	for _, size := range []int{1, 100, 1 << 16} {
		if opens(t, garbage(size), "random bytes") {
			t.Errorf("%d random bytes are a log", size)
		}
	}
	for at := range 2 * page { // the newest commits are in the first two pages: none is undone
		if at%page < headerBytes || at%page >= headerBytes+64 {
			continue
		}
		text := append([]byte(nil), whole...)
		text[at] ^= 1
		if opens(t, text, fmt.Sprintf("a flipped bit at %d", at)) {
			t.Errorf("with a flipped bit at %d it opens", at)
		}
	}
	for range 200 {
		text := append([]byte(nil), whole...)
		text[r.IntN(len(text))] ^= byte(1 << r.IntN(8))
		opens(t, text, "a flipped bit")
	}
}

// Edits of a log: five bytes each, four for where and one that is added. The checksums of the commits are right again afterwards.
func FuzzLogFile(f *testing.F) {
	whole := logOf(f, 6)
	f.Add(uint32(0), []byte{})
	f.Add(uint32(1), []byte{0, 0, 0, 16 + 48, 1})
	path := filepath.Join(f.TempDir(), logFile)
	settings := Config{Timeout: time.Second}.raft()
	f.Fuzz(func(t *testing.T, cut uint32, edits []byte) {
		text := bytes.Clone(whole[:len(whole)-int(cut%uint32(len(whole)))])
		for ; len(edits) >= 5; edits = edits[5:] {
			text[binary.BigEndian.Uint32(edits)%uint32(len(text))] += edits[4]
		}
		for page := 0; page < 2*os.Getpagesize() && page+headerBytes+64 <= len(text); page += os.Getpagesize() {
			sum := fnv.New64a()
			_, _ = sum.Write(text[page+headerBytes:][:56])
			binary.NativeEndian.PutUint64(text[page+headerBytes+56:], sum.Sum64())
		}
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		files, err := openFiles(filepath.Dir(path), settings)
		if err == nil {
			err = files.close()
		}
		if damaged := (*agree.DamagedError)(nil); err != nil && !errors.As(err, &damaged) {
			t.Error(err)
		}
	})
}
