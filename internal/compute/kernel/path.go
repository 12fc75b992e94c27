package kernel

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// Path names an implementation of the kernels. All give the same bits.
type Path int32

// The paths, slowest first.
const (
	Generic Path = iota // plain Go
	AVX2                // AVX2 with FMA
	AVX512              // AVX-512 F, BW, DQ and VL
)

// EnvPath is the environment variable that overrides the choice of path.
const EnvPath = "SOLITON_KERNEL"

// String returns the name that EnvPath uses.
func (p Path) String() string {
	switch p {
	case AVX2:
		return "avx2"
	case AVX512:
		return "avx512"
	default:
		return "generic"
	}
}

// active is written before main runs, and by Use in tests.
var active, errStart = choose(os.Getenv(EnvPath), available())

// Active returns the path in use.
func Active() Path { return active }

// Available returns the paths this CPU can run, slowest first.
func Available() []Path { return available() }

// Err reports a value of SOLITON_KERNEL that could not be honoured. The
// fastest path is active then; programs should refuse to start.
func Err() error { return errStart }

// Use switches to another path and returns a function that switches back. It
// is for tests and must not run beside kernel calls.
func Use(p Path) (restore func(), err error) {
	if !slices.Contains(available(), p) {
		return nil, fmt.Errorf("kernel: this CPU cannot run %v", p)
	}
	old := active
	active = p
	return func() { active = old }, nil
}

// choose picks the path named want, or the fastest.
func choose(want string, have []Path) (Path, error) {
	best := have[len(have)-1]
	if want == "" {
		return best, nil
	}
	names := make([]string, len(have))
	for i, p := range have {
		if p.String() == want {
			return p, nil
		}
		names[i] = p.String()
	}
	return best, fmt.Errorf("%s=%s: this CPU runs %s", EnvPath, want, strings.Join(names, ", "))
}
