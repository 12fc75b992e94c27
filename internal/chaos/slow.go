package chaos

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// SlowSignal makes a worker read its [SlowFile].
const SlowSignal = syscall.SIGUSR2

// SlowFile returns the file that says how slow a worker of a run is to be, in one of its lives.
func SlowFile(runDir string, worker, incarnation int) string {
	return filepath.Join(runDir, "slow", fmt.Sprintf("%d.%d", worker, incarnation))
}

// ParseFactor reads a share of the full speed.
func ParseFactor(text string) (float64, error) {
	p := part{}
	v := p.decimal("factor", text, MinFactor, 1, wantFactor)
	if len(p.problems) > 0 {
		return 0, errors.New(p.problems[0])
	}
	return v, nil
}

// Slow makes a worker compute at a share of its speed, 0 < factor <= 1; 1 restores it.
func Slow(p Process, file string, factor float64) error {
	fresh := file + ".new"
	err := os.MkdirAll(filepath.Dir(file), 0o755)
	if err == nil {
		_ = os.Remove(fresh) // a FIFO of that name would block
		err = os.WriteFile(fresh, []byte(decimal(factor)+"\n"), 0o644)
	}
	if err == nil {
		err = os.Rename(fresh, file)
	}
	if err != nil {
		return fmt.Errorf("chaos: slow: %w", err)
	}
	return send(p, "slow", SlowSignal)
}

// ReadSlow reads a file that [Slow] has written.
func ReadSlow(file string) (factor float64, err error) {
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return 0, fmt.Errorf("chaos: slow: %w", err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return 0, errors.Join(fmt.Errorf("chaos: %s is not a regular file", strconv.Quote(file)), err)
	}
	text, err := io.ReadAll(io.LimitReader(f, 64))
	if err != nil {
		return 0, fmt.Errorf("chaos: slow: %w", err)
	}
	if factor, err = ParseFactor(strings.TrimSpace(string(text))); err != nil {
		return 0, fmt.Errorf("chaos: %s: %w", strconv.Quote(file), err)
	}
	return factor, nil
}
