package dvfs

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Saved is what it takes to restore one clock from another process.
type Saved struct {
	Kind string `json:"kind"` // "cpufreq" or "nvml"
	ID   string `json:"id"`   // UUID of a card; "" of processors

	// Policies are the limits of cpufreq as they were found.
	Policies []Policy `json:"policies,omitempty"`
}

// Policy is a group of processors with one clock.
type Policy struct {
	Name string `json:"name"` // policy0
	Min  int    `json:"min"`  // scaling_min_freq, kHz
	Max  int    `json:"max"`  // scaling_max_freq, kHz
}

// Record is what a [Keeper] found before it set the first clock.
type Record struct {
	Clocks []Saved `json:"clocks"`
}

// MaxRecord bounds the bytes of a record.
const MaxRecord = 1 << 20

// Bounds of a record.
const (
	maxSaved    = 1024
	maxPolicies = 8192
)

// ParseRecord reads a record that was written as JSON. The error is [ErrRecord], wrapped.
func ParseRecord(text []byte) (Record, error) {
	bad := func(format string, args ...any) (Record, error) {
		return Record{}, fmt.Errorf("%w: "+format, append([]any{ErrRecord}, args...)...)
	}
	if len(text) > MaxRecord {
		return bad("more than %d bytes", MaxRecord)
	}
	var r Record
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&r); err != nil {
		return bad("%w", err)
	}
	if len(r.Clocks) > maxSaved {
		return bad("%d clocks", len(r.Clocks))
	}
	for _, s := range r.Clocks {
		switch s.Kind {
		case kindCPU:
			if len(s.Policies) == 0 || len(s.Policies) > maxPolicies {
				return bad("%d policies", len(s.Policies))
			}
			for _, p := range s.Policies {
				if !isPolicy(p.Name) || p.Min < 1 || p.Max < p.Min || p.Max > maxKHz {
					return bad("policy %q from %d to %d kHz", p.Name, p.Min, p.Max)
				}
			}
		case KindNVML:
			if s.ID == "" || len(s.ID) > 256 || strings.ContainsFunc(s.ID, func(r rune) bool { return r <= ' ' || r > '~' }) {
				return bad("card %q", s.ID)
			}
		default:
			return bad("kind %q", s.Kind)
		}
	}
	return r, nil
}

// Kinds of [Saved].
const (
	kindCPU  = "cpufreq"
	KindNVML = "nvml" // of package nvml
)

// Setting is a frequency to set. MHz 0 restores the clock.
type Setting struct {
	Clock int // its index
	MHz   int
}

// Keeper holds clocks, and puts those back that it has set. It is used by one goroutine at a time.
type Keeper struct {
	clocks []Clock
	touch  []bool
	save   func(Record) error
	saved  bool
}

// NewKeeper returns a keeper of clocks. save, if it is not nil, is called once before the first clock is set that
// would stay so after the death of this process; when it returns, the record must be on disk.
func NewKeeper(clocks []Clock, save func(Record) error) *Keeper {
	return &Keeper{clocks: clocks, touch: make([]bool, len(clocks)), save: save}
}

// Touched reports whether a clock was set and not put back.
func (k *Keeper) Touched() bool { return slices.Contains(k.touch, true) }

// Apply sets clocks, in the order of settings, up to the first error.
func (k *Keeper) Apply(settings []Setting) error {
	for _, s := range settings {
		c := k.clocks[s.Clock]
		if s.MHz == 0 {
			if err := c.Restore(); err != nil {
				return err
			}
			k.touch[s.Clock] = false
			continue
		}
		if err := k.record(); err != nil {
			return err
		}
		k.touch[s.Clock] = true // also if it fails half way
		if err := c.Set(s.MHz); err != nil {
			return err
		}
	}
	return nil
}

func (k *Keeper) record() error {
	if k.saved || k.save == nil {
		return nil
	}
	r := Record{Clocks: []Saved{}}
	for _, c := range k.clocks {
		if s, ok := c.Saved(); ok {
			r.Clocks = append(r.Clocks, s)
		}
	}
	if len(r.Clocks) > 0 {
		if err := k.save(r); err != nil {
			return fmt.Errorf("record of the clocks: %w", err)
		}
	}
	k.saved = true
	return nil
}

// Close restores every clock that was set. It tries all, and may be called again after an error.
func (k *Keeper) Close() error {
	var errs []error
	for i, c := range k.clocks {
		if !k.touch[i] {
			continue
		}
		if err := c.Restore(); err != nil {
			errs = append(errs, err)
			continue
		}
		k.touch[i] = false
	}
	return errors.Join(errs...)
}
