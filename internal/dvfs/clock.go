package dvfs

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"syscall"
)

// Errors of clocks, wrapped into a line that names the clock or the file and what would be right.
var (
	ErrUnsupported = errors.New("not supported") // by the hardware, its driver or this system
	ErrPermission  = errors.New("no permission") // for this process
	ErrRecord      = errors.New("not a record of clocks")
)

// Clock is one frequency domain. Its methods are not safe for several goroutines at a time.
type Clock interface {
	// Name says which one it is, to people.
	Name() string

	// Limits returns the lowest and the highest frequency that Set takes, in MHz.
	Limits() (lo, hi int)

	// Steps returns the frequencies that the hardware distinguishes, in MHz, ascending, from lo to hi. There
	// is at least one, and at most [MaxSteps].
	Steps() []int

	// Current returns the frequency at which it runs at the moment, in MHz.
	Current() (mhz int, err error)

	// Found returns the frequency at which it might run at most when it was opened, in MHz, as far as the hardware
	// tells how that was: otherwise the highest.
	Found() int

	// Set lets the clock run at mhz at most. Beyond Limits it is an error.
	Set(mhz int) error

	// Restore undoes what Set did: the clock is as it was when it was opened, as far as the hardware
	// tells how that was. It may be called at any time, again and again.
	Restore() error

	// Energy returns what was drawn since some moment in the past, in joules. The difference of two calls
	// is what was drawn between them.
	Energy() (joules float64, err error)

	// Saved returns what another process needs to restore the clock. ok is false for a clock that ends
	// with this process.
	Saved() (s Saved, ok bool)
}

// MaxSteps bounds the steps of a clock.
const MaxSteps = 1024

// Grid returns frequencies from lo to hi in MHz, ascending, by MHz apart from the highest down, for a clock whose
// driver does not list them. Both ends are included; the distance grows where there would be more than [MaxSteps].
func Grid(lo, hi, by int) []int {
	by = max(by, 1, (hi-lo)/(MaxSteps-2)+1)
	var steps []int
	for f := hi; f > lo; f -= by {
		steps = append(steps, f)
	}
	steps = append(steps, lo)
	slices.Reverse(steps)
	return steps
}

// CheckLimits returns the error of Set for a frequency beyond the clock's limits.
func CheckLimits(c Clock, mhz int) error {
	if lo, hi := c.Limits(); mhz < lo || mhz > hi {
		return fmt.Errorf("%s: %d MHz: %w; give %d to %d MHz", c.Name(), mhz, ErrUnsupported, lo, hi)
	}
	return nil
}

// typed puts an error of the file system into one of this package's classes.
func typed(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return fmt.Errorf("%w: %w", ErrPermission, err)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENODEV), errors.Is(err, syscall.EOPNOTSUPP):
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	return err
}
