package socket

import (
	"errors"
	"io/fs"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// A process that may open no more files removes its folder all the same.
func TestRemoveWithoutDescriptors(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	l, err := Listen()
	if err != nil {
		t.Fatal(err)
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	_, opened := os.Open(l.Path())
	l.Remove()
	if err := errors.Join(unix.Setrlimit(unix.RLIMIT_NOFILE, &limit), l.Close()); err != nil {
		t.Fatal(err)
	}
	if opened == nil || !errors.Is(opened, unix.EMFILE) {
		t.Errorf("the limit does not hold: %v", opened)
	}
	if _, err := os.Lstat(l.folder.dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder is there: %v", err)
	}
}
