// Package dvfs sets the clock frequency of the devices that workers compute on, so that devices that wait for others run slower
// and draw less power. (DVFS: dynamic voltage and frequency scaling.) Frequencies are whole MHz everywhere.
//
// A [Clock] is one frequency domain of a machine. A [Governor] decides from the times of steps which clocks to set; it is a
// state machine without files, goroutines or time. With clocks of your own:
//
//	g, err := dvfs.NewGovernor(dvfs.Config{})
//	...
//	d, err := g.Step(observation) // after each step
//	for _, s := range d.Settings {
//		err = clocks[s.Clock].Set(s.MHz) // or Restore, where MHz is 0
//	}
//
// The launcher does this for a run, see its flag --clocks.
package dvfs

import "github.com/soliton-train/soliton/internal/dvfs"

// Clock is one frequency domain, such as a graphics card. Its methods are not safe for concurrent use.
type Clock = dvfs.Clock

// Saved is what another process needs to restore a clock.
type Saved = dvfs.Saved

// ErrUnsupported and ErrPermission are wrapped by errors of clocks: the hardware, its driver or the system cannot do it, or this
// process may not.
var (
	ErrUnsupported = dvfs.ErrUnsupported
	ErrPermission  = dvfs.ErrPermission
)

// Governor decides when to set which clock. It raises clocks as soon as steps are longer than need be, lowers them where that
// saves enough, and takes back what made steps longer. One goroutine at a time uses it.
type Governor = dvfs.Governor

// Config says when a [Governor] acts. The zero value is documented with each field.
type Config = dvfs.Config

// NewGovernor returns a governor. The error lists all faults of the configuration.
func NewGovernor(c Config) (*Governor, error) { return dvfs.NewGovernor(c) }

// Observation is what a governor sees after a step.
type Observation = dvfs.Observation

// Device is a clock, and the workers that compute under it, as a governor sees them.
type Device = dvfs.Device

// Power is what a device draws: only ratios count.
type Power = dvfs.Power

// Model predicts the time of a step from the speeds of the workers.
type Model = dvfs.Model

// Decision is what a governor wants done, and why.
type Decision = dvfs.Decision

// Setting is a frequency to set. MHz 0 restores the clock.
type Setting = dvfs.Setting
