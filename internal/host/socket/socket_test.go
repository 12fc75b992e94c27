package socket

import (
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// What a child that was killed has left is removed at once, and nothing of a process that lives.
func TestForgetProcess(t *testing.T) {
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	mine, err := Listen()
	if err != nil {
		t.Fatal(err)
	}
	defer mine.Remove()
	defer mine.Close()
	const dead = 1 << 22 // above all process IDs
	for _, dir := range []string{prefix(dead) + "7", prefix(dead) + "8", prefix(dead+1) + "7"} {
		if err := os.Mkdir(filepath.Join(temp, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	ForgetProcess(dead)
	ForgetProcess(os.Getpid())
	entries, err := os.ReadDir(temp)
	if err != nil || len(entries) != 2 {
		t.Errorf("left: %v, %v", entries, err)
	}
	Forget(mine.Path())
	Forget(filepath.Join(temp, prefix(dead+1)+"7", name))
	if entries, err = os.ReadDir(temp); err != nil || len(entries) != 1 {
		t.Errorf("left: %v, %v", entries, err)
	}
}

// Folders lie in TMPDIR where sockets may, else in /tmp.
func TestFolder(t *testing.T) {
	temp, err := os.MkdirTemp("/tmp", "") //nolint:usetesting // its path is short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(temp)
	t.Chdir(temp)
	for given, want := range map[string]string{
		temp: temp, ".": temp, filepath.Join(temp, "a b"): "/tmp", filepath.Join(temp, "é"): "/tmp", filepath.Join(temp, "a,b"): "/tmp",
		filepath.Join(temp, strings.Repeat("x", 120)): "/tmp",
	} {
		if err := os.MkdirAll(given, 0o777); err != nil {
			t.Fatal(err)
		}
		t.Setenv("TMPDIR", given)
		f, err := NewFolder()
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(f.Path())
		if err != nil || info.Mode().Perm() != 0o700 || filepath.Dir(f.Path()) != want {
			t.Errorf("TMPDIR %s: folder %s with mode %v, %v", given, f.Path(), info.Mode(), err)
		}
		f.Remove()
		if _, err := os.Stat(f.Path()); err == nil {
			t.Errorf("%s is left", f.Path())
		}
	}
}

// What a process that was killed has left is removed, and nothing that is in use or of another user.
func TestSweep(t *testing.T) {
	parent := t.TempDir()
	mine, err := Listen()
	if err != nil {
		t.Fatal(err)
	}
	defer mine.Remove()
	defer mine.Close()
	used := filepath.Join(parent, "soliton-agent-1")
	left := filepath.Join(parent, "soliton-agent-2")
	for _, dir := range []string{used, left, filepath.Join(parent, "soliton-agent-3"), filepath.Join(parent, "soliton-agent-x")} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, socket := range []string{name, "0.0", "4095.12"} { // of the agent and of workers
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(left, socket), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		_ = l.Close()
	}
	if err := os.WriteFile(filepath.Join(parent, "soliton-agent-3", "letter"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	locked := lock(used)
	if locked == nil {
		t.Fatal("a folder that is not in use cannot be locked")
	}
	defer locked.Close()
	sweep(parent, time.Now().Add(-time.Hour)) // all are younger
	entries, err := os.ReadDir(parent)
	if err != nil || len(entries) != 4 {
		t.Errorf("left: %v, %v", entries, err)
	}
	sweep(parent, time.Now().Add(time.Hour))
	if entries, err = os.ReadDir(parent); err != nil || len(entries) != 3 {
		t.Errorf("left: %v, %v", entries, err)
	}
	if _, err := os.Stat(left); err == nil {
		t.Error("what a dead process has left is still there")
	}
	if lock(mine.folder.dir) != nil {
		t.Error("a folder in use has no lock")
	}
}

// A key that cannot be one is an error at once.
func TestBrokenKey(t *testing.T) {
	l, err := Listen()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Remove()
	defer l.Close()
	path := filepath.Join(filepath.Dir(l.Path()), keyName)
	for name, make := range map[string]func() error{
		"none":       func() error { return nil },
		"short":      func() error { return os.WriteFile(path, []byte("short"), 0o600) },
		"named pipe": func() error { return unix.Mkfifo(path, 0o600) },
	} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		if err := make(); err != nil {
			t.Fatal(err)
		}
		if c, err := Dial(t.Context(), l.Path()); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v, %v", name, c, err)
		}
	}
}

// A process of the same user that has not read the key is not admitted; one that has is.
func TestCallersNeedTheKey(t *testing.T) {
	l, err := Listen()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Remove()
	defer l.Close()
	admitted := make(chan error)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				close(admitted)
				return
			}
			err = l.Admit(c)
			_ = c.Close()
			admitted <- err
		}
	}()
	for name, first := range map[string]string{
		"a command": "\x00\x00\x00\x0f\x92\xa4stop\x81\xa6Reason\xa0",
		"zeros":     string(make([]byte, 200)),
	} {
		c, err := net.Dial("unix", l.Path())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write([]byte(first))
		_ = c.(*net.UnixConn).CloseWrite()
		if n, _ := io.Copy(io.Discard, c); n > 16+40 {
			t.Errorf("%s: an answer of %d bytes", name, n)
		}
		if <-admitted == nil {
			t.Errorf("%s: admitted", name)
		}
		_ = c.Close()
	}
	c, err := Dial(t.Context(), l.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := <-admitted; err != nil {
		t.Error(err)
	}
	_ = l.Close()
	<-admitted
}
