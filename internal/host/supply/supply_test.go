package supply

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/find"
	"github.com/soliton-train/soliton/internal/timing"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// hosts are stores that reach each other, each with a folder for data and one for its cache.
type hosts struct {
	*testing.T
	stores map[string]*Store
	opened map[string]bool
	gone   map[string]bool
	folder map[string]string
	fetch  func(from string, m control.Fetch) error // nil for nothing

	mu      sync.Mutex
	fetches int
	serving sync.WaitGroup
}

func newHosts(t *testing.T, names ...string) *hosts {
	h := &hosts{T: t, stores: make(map[string]*Store), opened: make(map[string]bool), gone: make(map[string]bool), folder: make(map[string]string)}
	for _, name := range names {
		h.folder[name] = t.TempDir()
		h.stores[name] = New(Config{
			Self: name, Hosts: func() []string { return names }, Folder: t.TempDir(), Limit: 1 << 20,
			Opened: func() bool {
				h.mu.Lock()
				defer h.mu.Unlock()
				return h.opened[name]
			},
			Dial: func(_ context.Context, to string) (*control.Conn, error) { return h.dial(to) },
		})
	}
	return h
}

func (h *hosts) close() {
	for _, s := range h.stores {
		s.Close()
	}
	h.serving.Wait()
}

func (h *hosts) dial(to string) (*control.Conn, error) {
	if h.gone[to] {
		return nil, errors.New("no route to host")
	}
	ours, theirs := net.Pipe()
	h.serving.Go(func() {
		conn := control.New(theirs)
		defer conn.Close()
		m, err := conn.Receive(context.Background())
		if err != nil {
			return
		}
		if f, ok := m.(control.Fetch); ok {
			h.mu.Lock()
			h.fetches++
			h.mu.Unlock()
			if h.fetch != nil && h.fetch(to, f) != nil {
				return
			}
		}
		h.stores[to].Serve(context.Background(), conn, m)
	})
	return control.New(ours), nil
}

func (h *hosts) write(host, name string, content []byte) {
	h.Helper()
	path := filepath.Join(h.folder[host], name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, content, 0o600)); err != nil {
		h.Fatal(err)
	}
}

// get returns what a worker of a host gets for a pattern.
func (h *hosts) get(host, pattern string) (files []find.File, last control.Got) {
	h.stores[host].Answer(control.Lacks{ID: 7, Pattern: pattern}, func(m control.Message) {
		last = m.(control.Got)
		for _, f := range last.Files {
			files = append(files, find.File(f))
		}
	})
	if last.ID != 7 || last.More {
		h.Errorf("the last answer is %+v", last)
	}
	return files, last
}

func content(n int, seed byte) []byte { return bytes.Repeat([]byte{seed, seed + 1, 7}, n/3+1)[:n] }

func (h *hosts) check(files []find.File, want map[string][]byte) {
	h.Helper()
	if len(files) != len(want) {
		h.Fatalf("%d files: %v", len(files), files)
	}
	for _, f := range files {
		text, err := os.ReadFile(f.At())
		if err != nil || !bytes.Equal(text, want[f.Path]) || f.Size != int64(len(text)) || filepath.Base(f.Copy) != filepath.Base(f.Path) {
			h.Errorf("%+v: %d bytes, %v", f, len(text), err)
		}
	}
}

// A host gets the files of a pattern that another one has, once, checked, and has them for a third one and for the next run.
func TestGet(t *testing.T) {
	h := newHosts(t, "a", "b", "c")
	defer h.close()
	want := map[string][]byte{"data/1.bin": content(300_000, 1), "data/2.bin": content(10, 2), "data/3.bin": {}, "data/x/1.bin": content(300_000, 1)}
	for name, text := range want {
		h.write("a", name, text)
	}
	h.write("a", "secret", content(10, 9))
	h.stores["a"].Named(h.folder["a"], []string{"data"})
	h.opened["a"], h.opened["b"], h.opened["c"] = true, true, true
	files, _ := h.get("b", "data")
	h.check(files, want)
	if h.fetches != 2 {
		t.Errorf("%d fetches of 2 contents", h.fetches)
	}
	h.gone["a"] = true
	files, _ = h.get("c", "data")
	h.check(files, want)
	// Another run on the same machine.
	n := h.fetches
	again := New(Config{Self: "b", Hosts: h.stores["b"].c.Hosts, Dial: h.stores["b"].c.Dial, Opened: func() bool { return true }, Folder: h.stores["c"].cache.folder})
	h.stores["c2"] = again
	files, _ = h.get("c2", "data")
	h.check(files, want)
	if h.fetches != n {
		t.Errorf("%d fetches of what is there", h.fetches-n)
	}
}

// Nothing can be had that no worker has named as data, by pattern or by hash.
func TestOnlyData(t *testing.T) {
	h := newHosts(t, "a", "b")
	defer h.close()
	h.write("a", "secret", content(10, 9))
	h.write("a", "data.bin", content(10, 1))
	h.stores["a"].Named(h.folder["a"], []string{"data.bin"})
	h.opened["a"] = true
	for _, pattern := range []string{"secret", filepath.Join(h.folder["a"], "secret"), "./data.bin", "*", "data.bin/../secret", "/etc/passwd", strings.Repeat("x", 5000)} {
		if files, got := h.get("b", pattern); len(files) > 0 || !got.None {
			t.Errorf("%.40s: %+v", pattern, got)
		}
	}
	sum, err := sumOf(t.Context(), filepath.Join(h.folder["a"], "secret"), 10)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{sum, "../secret", filepath.Join(h.folder["a"], "secret")} {
		if n, err := h.stores["b"].fetchFrom("a", control.DataFile{SHA256: name, Size: 10}, 0, new(bytes.Buffer)); n > 0 || err == nil {
			t.Errorf("%s: %d bytes", name, n)
		}
	}
}

// A host that breaks off is replaced by another one, in the middle of a file; one that sends something else is found out.
func TestFetchFails(t *testing.T) { synctest.Test(t, testFetchFails) }

func testFetchFails(t *testing.T) {
	h := newHosts(t, "a", "b", "c")
	defer h.close()
	h.opened["a"], h.opened["b"], h.opened["c"] = true, true, true
	big := content(900_000, 1)
	for _, name := range []string{"a", "b"} {
		h.write(name, "big.bin", big)
		h.stores[name].Named(h.folder[name], []string{"big.bin"})
	}
	broken := errors.New("broken")
	first := true
	h.fetch = func(string, control.Fetch) error {
		h.mu.Lock()
		defer h.mu.Unlock()
		if first {
			first = false
			return broken
		}
		return nil
	}
	files, _ := h.get("c", "big.bin")
	h.check(files, map[string][]byte{"big.bin": big})

	liar := newHosts(t, "a", "b")
	defer liar.close()
	liar.opened["a"] = true
	liar.write("a", "x", content(1000, 1))
	liar.stores["a"].Named(liar.folder["a"], []string{"x"})
	liar.fetch = func(string, control.Fetch) error { liar.write("a", "x", content(1000, 2)); return nil }
	if _, got := liar.get("b", "x"); !strings.Contains(got.Err, "what came has another SHA-256") {
		t.Errorf("%+v", got)
	}
	if left, _ := filepath.Glob(filepath.Join(liar.stores["b"].cache.folder, "*", "*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A host waits for others that still open their data, and says who has nothing when none has.
func TestNowhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHosts(t, "a", "b", "c")
		defer h.close()
		h.opened["b"] = true
		var got control.Got
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, got = h.get("c", "x")
		}()
		synctest.Wait()
		select {
		case <-done:
			t.Fatalf("%+v", got)
		default:
		}
		h.mu.Lock()
		h.opened["a"] = true
		h.mu.Unlock()
		<-done
		if !got.None || got.Err != "nor on a, b" {
			t.Errorf("%+v", got)
		}
	})
	synctest.Test(t, func(t *testing.T) { // each of two waits for the other, and a third one cannot be asked
		h := newHosts(t, "a", "b", "c")
		defer h.close()
		h.gone["c"] = true
		h.write("a", "y", nil) // which a's workers would name after x, and b's name x after y
		var others sync.WaitGroup
		said := make(chan string, 2)
		ask := func(host, pattern string) {
			_, got := h.get(host, pattern)
			said <- got.Err
			h.mu.Lock()
			defer h.mu.Unlock()
			h.opened[host] = true // its worker ends
		}
		others.Go(func() { ask("a", "x") })
		others.Go(func() { ask("b", "y") })
		others.Wait()
		if text := <-said; !strings.HasSuffix(text, " itself waits for other data; c cannot be asked: no route to host") {
			t.Error(text)
		}
	})
}

// Hosts that look for two names, one after the other, do not wait for each other where no host has them.
func TestNowhereInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHosts(t, "a", "b", "c")
		defer h.close()
		var asking sync.WaitGroup
		began := time.Now()
		for i, host := range []string{"a", "b", "c"} {
			asking.Go(func() {
				time.Sleep(time.Duration(i) * timing.Heartbeat / 2)
				for _, pattern := range []string{"x", "y"} {
					if _, got := h.get(host, pattern); !got.None || !strings.HasPrefix(got.Err, "nor on ") {
						t.Errorf("%s: %s: %+v", host, pattern, got)
					}
				}
			})
		}
		asking.Wait()
		if took := time.Since(began); took >= settle {
			t.Errorf("that took %v", took)
		}
	})
}

// The cache keeps what a process uses, removes what was unused for longest, and refuses what does not fit.
func TestCache(t *testing.T) { synctest.Test(t, testCache) }

func testCache(t *testing.T) {
	h := newHosts(t, "a", "b")
	defer h.close()
	h.opened["a"] = true
	size := 400_000 // of 1 MiB
	for i := range 4 {
		name := fmt.Sprint(i)
		h.write("a", name, content(size, byte(10*i)))
		h.stores["a"].Named(h.folder["a"], []string{name})
	}
	for i := range 2 {
		if _, got := h.get("b", fmt.Sprint(i)); got.Err != "" {
			t.Fatal(got.Err)
		}
	}
	_, got := h.get("b", "2")
	if !strings.Contains(got.Err, "has room for 0.0 GB of data of other machines") {
		t.Errorf("%+v", got)
	}
	h.stores["b"].Close() // now they are unused
	folder := h.stores["b"].cache.folder
	next := New(Config{Self: "b", Hosts: h.stores["b"].c.Hosts, Dial: h.stores["b"].c.Dial, Opened: func() bool { return true }, Folder: folder, Limit: 1 << 20})
	h.stores["b"] = next
	for _, name := range []string{"1", "3"} {
		if _, got := h.get("b", name); got.Err != "" {
			t.Fatal(got.Err)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(folder, "*", "*")); len(left) != 2 {
		t.Errorf("%v", left)
	}
}

// Patterns count in the folder of the worker that named them, whatever that is called.
func TestFolders(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "odd [name]*", "run")
	if err := errors.Join(os.MkdirAll(filepath.Join(folder, "../data"), 0o700), os.WriteFile(filepath.Join(folder, "../data/1.bin"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, pattern := range []string{"../data/1.bin", "../data", "../data/*.bin", "./../data/?.bin"} {
		files, err := filesOf(pattern, folder)
		if err != nil || len(files) != 1 || files[0].Path != "../data/1.bin" || files[0].Copy != filepath.Join(filepath.Dir(folder), "data/1.bin") {
			t.Errorf("%s: %+v %v", pattern, files, err)
		}
	}
}
