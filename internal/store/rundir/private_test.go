package rundir

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Other users can neither enter a run directory nor read its files, whatever the umask, and a directory that was open is not any
// more when a run begins or resumes in it.
func TestRunDirectoryIsPrivate(t *testing.T) {
	defer unix.Umask(unix.Umask(0))
	t.Chdir(t.TempDir())
	if err := os.Mkdir("there", 0o777); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"", "there", "made/below"} {
		d, err := Create(path, "gpt", time.Now())
		if err != nil {
			t.Fatal(err)
		}
		log, err := d.LogFile(0, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer log.Close()
		for _, mk := range []func() (string, error){d.MakeBin, d.MakeStore} {
			if _, err := mk(); err != nil {
				t.Fatal(err)
			}
		}
		if err := d.WriteJob(Job{}, nil); err != nil {
			t.Fatal(err)
		}
		if err := d.WriteWorkers(Workers{}); err != nil {
			t.Fatal(err)
		}
		if err := d.WriteSummary(Summary{}); err != nil {
			t.Fatal(err)
		}
		private(t, d.Path())
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(d.Path(), 0o755); err != nil {
			t.Fatal(err)
		}
		d, _, err = Resume(d.Path())
		if err != nil {
			t.Fatal(err)
		}
		private(t, d.Path())
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func private(t *testing.T, dir string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s: mode %v", path, info.Mode())
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
