package process

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// A process continues a file where the record ends, and what another one wrote behind that is gone.
func TestLines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.csv")
	content := func(want string) {
		t.Helper()
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("the file holds %q, %v; want %q", got, err, want)
		}
	}
	if err := os.WriteFile(path, []byte("an older run, with a longer file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var a, b Lines
	defer a.close()
	defer b.close()
	for _, text := range []string{"1\n", "2\n"} {
		if err := a.Write(path, "step\n", text); err != nil {
			t.Fatal(err)
		}
	}
	content("step\n1\n2\n")
	ends := a.files()
	if want := []rundir.LineFile{{Path: path, Size: 9}}; !reflect.DeepEqual(ends, want) {
		t.Fatalf("%+v, want %+v", ends, want)
	}
	if err := a.Write(path, "step\n", "3, of a call that does not return\n"); err != nil {
		t.Fatal(err)
	}
	b.resume(ends)
	if err := b.Write(path, "step\n", "3\n"); err != nil {
		t.Fatal(err)
	}
	content("step\n1\n2\n3\n")
	if ends[0].Size != 9 {
		t.Error("the record of others has changed")
	}

	for what, c := range map[string]struct {
		make func() error
		want string
	}{
		"short":  {func() error { return os.Truncate(path, 3) }, "has 3 bytes, and the run has written 9"},
		"FIFO":   {func() error { return errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600)) }, "not a regular file"},
		"folder": {func() error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o700)) }, "not a regular file"},
	} {
		if err := c.make(); err != nil {
			t.Fatal(err)
		}
		var l Lines
		l.resume(ends)
		if err := l.Write(path, "", "4\n"); err == nil || !strings.Contains(err.Error(), c.want) || l.err == nil {
			t.Errorf("%s: error %v, and of the call %v", what, err, l.err)
		}
		if what == "short" {
			continue
		}
		if err := errors.Join(os.RemoveAll(path), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
}
