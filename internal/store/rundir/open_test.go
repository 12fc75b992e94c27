package rundir

import (
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
