package ssh

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// fakeSSH runs scripts here, with a home of their own.
const fakeSSH = `#!/bin/sh
while [ "$1" != -- ]; do shift; done
echo "$3" >>"$FAKE_SSH/asked"
unset XDG_CACHE_HOME
HOME=$FAKE_SSH exec sh -c "$3"
`

const fakeLauncher = `#!/bin/sh
[ "$1" != fail ] || { echo "launcher: it failed" >&2; exit 1; }
echo "ran $*"; cat
`

// host puts fakeSSH into PATH, and returns the home there, the launcher, and how often ssh was called since the last time.
func host(t *testing.T) (home string, l Launcher, asked func() int) {
	t.Helper()
	home = t.TempDir()
	bin := t.TempDir()
	own := filepath.Join(bin, "own")
	for path, text := range map[string]string{filepath.Join(bin, "ssh"): fakeSSH, own: fakeLauncher} {
		if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("FAKE_SSH", home)
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	sum, err := rundir.FileSHA256(own)
	if err != nil {
		t.Fatal(err)
	}
	return home, Launcher{file: own, sha256: sum}, func() int {
		text, _ := os.ReadFile(filepath.Join(home, "asked"))
		_ = os.Remove(filepath.Join(home, "asked"))
		return strings.Count(string(text), "\n")
	}
}

// The launcher is copied once, and again if the copy there has changed.
func TestRun(t *testing.T) {
	home, l, asked := host(t)
	there := filepath.Join(home, ".cache", "soliton", "launchers", l.sha256, "launcher")
	for _, c := range []struct {
		name   string
		before func() error
		calls  int
	}{
		{"nothing is there", func() error { return nil }, 3},
		{"it is there", func() error { return nil }, 1},
		{"it has changed", func() error { return os.WriteFile(there, []byte("#!/bin/sh\necho other\n"), 0o700) }, 3},
		{"it cannot be executed", func() error { return os.Chmod(there, 0o600) }, 3},
	} {
		if err := c.before(); err != nil {
			t.Fatal(err)
		}
		var said []string
		err := l.Run(t.Context(), Host{Name: "b"}, []string{"join", "-"}, func() io.Reader { return strings.NewReader("the ticket\n") }, func(line string) { said = append(said, line) })
		if err != nil || !slices.Equal(said, []string{"ran join -", "the ticket"}) {
			t.Errorf("%s: %q, %v", c.name, said, err)
		}
		if n := asked(); n != c.calls {
			t.Errorf("%s: ssh was called %d times", c.name, n)
		}
		if files, _ := os.ReadDir(filepath.Dir(there)); len(files) != 1 {
			t.Errorf("%s: %v", c.name, files)
		}
	}
	none := func() io.Reader { return nil }
	var said *Error
	if err := l.Run(t.Context(), Host{Name: "b"}, []string{"fail"}, none, func(string) {}); !errors.As(err, &said) || said.Words != "it failed" {
		t.Errorf("a launcher that fails: %v", err)
	}
	if err := l.Run(t.Context(), Host{Name: "b"}, []string{"a'; rm b"}, none, func(string) {}); err == nil || asked() != 1 {
		t.Errorf("an argument to be quoted: %v", err)
	}
}

// What comes damaged is not kept, and a machine of another system gets nothing.
func TestRunRefuses(t *testing.T) {
	home, l, _ := host(t)
	run := func() error {
		return l.Run(t.Context(), Host{Name: "b"}, []string{"version"}, func() io.Reader { return nil }, func(string) {})
	}
	folder := filepath.Join(home, ".cache", "soliton", "launchers", l.sha256)
	if err := os.WriteFile(l.file, []byte("something else"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := run(); err == nil || !strings.Contains(err.Error(), "b: what came has another SHA-256") {
		t.Errorf("%v", err)
	}
	if files, err := os.ReadDir(folder); err != nil || len(files) > 0 {
		t.Errorf("%v, %v", files, err)
	}
	uname := filepath.Join(filepath.Dir(l.file), "uname")
	if err := os.WriteFile(uname, []byte("#!/bin/sh\necho Plan9 mips\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := run(); err == nil || !strings.Contains(err.Error(), "b: it is Plan9 mips, and this launcher is for ") {
		t.Errorf("%v", err)
	}
}
