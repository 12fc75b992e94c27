package chaos

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

type signalled []os.Signal

func (s *signalled) Signal(sig os.Signal) error {
	*s = append(*s, sig)
	return nil
}

func TestSlow(t *testing.T) {
	dir := t.TempDir()
	file := SlowFile(dir, 3, 1)
	var p signalled
	for _, factor := range []float64{0.5, MinFactor, 1} {
		if err := Slow(&p, file, factor); err != nil {
			t.Fatal(err)
		}
		if got, err := ReadSlow(file); err != nil || got != factor {
			t.Errorf("read %v, %v, want %v", got, err, factor)
		}
	}
	if len(p) != 3 || p[0] != SlowSignal {
		t.Errorf("signals %v", p)
	}
	if other := SlowFile(dir, 3, 2); other == file {
		t.Error("two lives of a worker have one file")
	}
	all, err := os.ReadDir(filepath.Dir(file))
	if err != nil || len(all) != 1 {
		t.Errorf("left behind: %v, %v", all, err)
	}
	for _, text := range []string{"", "0", "1.5", "-1", "half", strings.Repeat("1", 1000)} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if v, err := ReadSlow(file); err == nil {
			t.Errorf("%q was read as %v", text, v)
		}
	}
	for _, fifo := range []string{file, file + ".new"} { // without a writer, and without a reader
		_ = os.Remove(fifo)
		if err := syscall.Mkfifo(fifo, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if v, err := ReadSlow(file); err == nil {
		t.Errorf("a FIFO was read as %v", v)
	}
	if err := Slow(&p, file, 0.5); err != nil {
		t.Error(err)
	}
}
