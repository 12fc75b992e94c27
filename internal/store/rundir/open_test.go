package rundir

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Whatever stands in the place of a run's file, no command waits for it: each refuses it and names it.
func TestFilesThatAreNone(t *testing.T) {
	kinds := map[string]func(path string) error{
		"a FIFO":      func(path string) error { return unix.Mkfifo(path, 0o600) },
		"a directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"a device":    func(path string) error { return os.Symlink("/dev/zero", path) },
		"a socket": func(path string) error {
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
			if err == nil {
				l.SetUnlinkOnClose(false)
				err = l.Close()
			}
			return err
		},
	}
	for kind, place := range kinds {
		for _, name := range []string{"lock", "job.json", metrics, events, plans, "traces.jsonl", "log/worker-0.0.log"} {
			path := ended(t, metrics, "")
			at := filepath.Join(path, name)
			if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
				t.Fatal(err)
			}
			_ = os.Remove(at)
			_ = os.RemoveAll(at)
			if err := place(at); err != nil {
				t.Fatal(err)
			}
			if name == "lock" && Running(path) {
				t.Errorf("%s as lock: the run is under way", kind)
			}
			_, _ = Read(path)
			dir, _, err := Resume(path)
			if err == nil {
				if err = dir.WriteJob(Job{}, nil); err == nil {
					_, err = dir.LogFile(0, 0)
				}
			}
			if err == nil || !strings.Contains(err.Error(), name) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%s as %s: resume returns %v", kind, name, err)
			}
			if f, err := Open(at); err == nil {
				t.Errorf("%s as %s is opened", kind, name)
				_ = f.Close()
			}
		}
		path := t.TempDir()
		if err := place(filepath.Join(path, "lock")); err != nil {
			t.Fatal(err)
		}
		if _, err := Create(path, "mlp", time.Now()); err == nil {
			t.Errorf("%s as lock: a run begins", kind)
		}
	}
}

// A FIFO in place of a directory is an error, and its writer is not waited for.
func TestFIFOInPlaceOfDirectory(t *testing.T) {
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := unix.Mkfifo(filepath.Join(dir, "checkpoints"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, outer := OpenRoot(filepath.Join(dir, "checkpoints"))
	_, inner := EnterRoot(root, "checkpoints")
	_, list := ReadRoot(root, "checkpoints")
	_, names := readDir(filepath.Join(dir, "checkpoints"))
	for _, err := range []error{outer, inner, list, names} {
		if !errors.Is(err, unix.ENOTDIR) {
			t.Error(err)
		}
	}
	if _, err := OpenRoot(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "d"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, open := range map[string]func() error{
		"outer": func() error { r, err := OpenRoot(filepath.Join(dir, "d")); r.Close(); return err },
		"inner": func() error { r, err := EnterRoot(root, "d"); r.Close(); return err },
		"list":  func() error { _, err := ReadRoot(root, "d"); return err },
	} {
		if err := open(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A process that looks whether a run is under way keeps no run from beginning or going on.
func TestLookersKeepNoRunOut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run")
	done, looked := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(looked)
		for {
			select {
			case <-done:
				return
			default:
				Running(path)
			}
		}
	}()
	defer func() { close(done); <-looked }()
	for i := range 100 {
		d, err := Create(path, "gpt", time.Now())
		if err != nil {
			t.Fatalf("run %d begins: %v", i, err)
		}
		err = errors.Join(d.WriteJob(Job{}, nil), d.AddMetrics(Metrics{Step: 1}), d.Close())
		if err != nil {
			t.Fatal(err)
		}
		if d, _, err = Resume(path); err != nil {
			t.Fatalf("run %d goes on: %v", i, err)
		}
		if _, _, err := Resume(path); !errors.Is(err, ErrInUse) {
			t.Fatalf("run %d under way: %v", i, err)
		}
		if err := errors.Join(d.Close(), os.RemoveAll(path)); err != nil {
			t.Fatal(err)
		}
	}
}
