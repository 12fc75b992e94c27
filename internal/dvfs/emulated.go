package dvfs

import (
	"cmp"
	"fmt"
	"sync"
)

// Emulated is a clock of a device that does not exist, for tests, benchmarks and demonstrations. Its energy
// is that of a power curve. Unlike other clocks it may be used by several goroutines.
type Emulated struct {
	cfg EmulatedConfig

	mu     sync.Mutex
	mhz    int
	joules float64
}

// EmulatedConfig describes an emulated clock.
type EmulatedConfig struct {
	Name  string // "" means "emulated"
	Steps []int  // MHz, ascending; at least one
	Start int    // frequency at which it begins; 0 means the highest
	Power Power  // nil: the clock has no counter of energy
}

// NewEmulated returns an emulated clock.
func NewEmulated(cfg EmulatedConfig) (*Emulated, error) {
	if err := checkSteps(cfg.Steps); err != nil {
		return nil, fmt.Errorf("Steps: %w", err)
	}
	hi := cfg.Steps[len(cfg.Steps)-1]
	cfg.Start = cmp.Or(cfg.Start, hi)
	if cfg.Start < cfg.Steps[0] || cfg.Start > hi {
		return nil, fmt.Errorf("Start is %d MHz: give %d to %d, or 0 for the highest", cfg.Start, cfg.Steps[0], hi)
	}
	cfg.Name = cmp.Or(cfg.Name, "emulated")
	return &Emulated{cfg: cfg, mhz: cfg.Start}, nil
}

// Name implements [Clock].
func (e *Emulated) Name() string { return e.cfg.Name }

// Limits implements [Clock].
func (e *Emulated) Limits() (lo, hi int) { return e.cfg.Steps[0], e.cfg.Steps[len(e.cfg.Steps)-1] }

// Steps implements [Clock].
func (e *Emulated) Steps() []int { return e.cfg.Steps }

// Current implements [Clock].
func (e *Emulated) Current() (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.mhz, nil
}

// Found implements [Clock].
func (e *Emulated) Found() int { return e.cfg.Start }

// Set implements [Clock].
func (e *Emulated) Set(mhz int) error {
	if err := CheckLimits(e, mhz); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mhz = mhz
	return nil
}

// Restore implements [Clock].
func (e *Emulated) Restore() error { return e.Set(e.cfg.Start) }

// Saved implements [Clock]: nothing of an emulated clock outlives its process.
func (e *Emulated) Saved() (Saved, bool) { return Saved{}, false }

// Run lets the device compute for busy seconds and wait for idle seconds, at the present frequency.
func (e *Emulated) Run(busy, idle float64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if p := e.cfg.Power; p != nil {
		e.joules += p.Busy(e.mhz)*busy + p.Idle()*idle
	}
}

// Energy implements [Clock].
func (e *Emulated) Energy() (float64, error) {
	if e.cfg.Power == nil {
		return 0, fmt.Errorf("%s: counter of energy: %w", e.cfg.Name, ErrUnsupported)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.joules, nil
}

// checkSteps checks that there are ascending, positive frequencies.
func checkSteps(steps []int) error {
	if len(steps) == 0 || len(steps) > MaxSteps {
		return fmt.Errorf("%d frequencies: give 1 to %d", len(steps), MaxSteps)
	}
	for i, f := range steps {
		if f < 1 || i > 0 && f <= steps[i-1] {
			return fmt.Errorf("frequency %d is %d MHz: give positive ones, ascending", i, f)
		}
	}
	return nil
}
