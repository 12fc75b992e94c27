package devices

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/soliton-train/soliton/internal/dvfs"
	"github.com/soliton-train/soliton/internal/net/control"
)

// Describe returns the devices as another host is told of them, as many as a message takes.
func Describe(all []Device) (told []control.ClockDevice) {
	steps := 0
	for _, d := range all {
		if steps += len(d.Steps()); len(told) == control.MaxClocks || steps > control.MaxClockSteps {
			break
		}
		name := d.Name()
		x := control.ClockDevice{
			Name: name[:min(len(name), control.MaxClockText)], Kind: d.Kind, Steps: d.Steps(), Found: d.Found(), Workers: d.Workers, Joules: joules(d),
		}
		for _, mhz := range x.Steps {
			if d.Power != nil {
				x.Watts = append(x.Watts, d.Power.Busy(mhz))
			}
			if d.Speed != nil {
				x.Speed = append(x.Speed, d.Speed(mhz))
			}
		}
		if d.Power != nil {
			x.Idle = d.Power.Idle()
		}
		told = append(told, x)
	}
	return told
}

// now returns what devices do, as another host is told of it.
func now(all []Device) (told []control.ClockNow) {
	for _, d := range all {
		mhz, err := d.Current()
		if err != nil {
			mhz = 0
		}
		told = append(told, control.ClockNow{MHz: mhz, Joules: joules(d)})
	}
	return told
}

// joules returns what a device has drawn, -1 if it does not say.
func joules(d Device) float64 {
	j, err := d.Energy()
	if err != nil || math.IsNaN(j) {
		return -1
	}
	return j
}

// Far is a device of another host. What it does is what that host said last. Unlike other clocks it may be used by several goroutines.
type Far struct {
	told  control.ClockDevice
	power dvfs.Power
	set   func(mhz int) // never waits

	mu    sync.Mutex
	at    int // MHz as set
	now   control.ClockNow
	drawn float64 // joules of an emulated device, whose host has no counter for it
}

// FarDevices returns the devices that another host tells of. asked are the workers that it was asked about, and set is told of a
// clock that is to be set, MHz 0 to be restored. It never waits.
func FarDevices(told []control.ClockDevice, asked []int, set func(device, mhz int)) ([]Device, error) {
	if len(told) > control.MaxClocks {
		return nil, fmt.Errorf("%d devices", len(told))
	}
	var all []Device
	left, steps := slices.Clone(asked), 0
	for i, t := range told {
		if steps += len(t.Steps); steps > control.MaxClockSteps {
			return nil, fmt.Errorf("more than %d frequencies", control.MaxClockSteps)
		}
		if err := check(t); err != nil {
			return nil, fmt.Errorf("device %d: %w", i, err)
		}
		for _, w := range t.Workers {
			at := slices.Index(left, w)
			if at < 0 {
				return nil, fmt.Errorf("device %d: worker %d computes elsewhere", i, w)
			}
			left = slices.Delete(left, at, at+1)
		}
		f := &Far{told: t, set: func(mhz int) { set(i, mhz) }, at: t.Found, now: control.ClockNow{MHz: t.Found, Joules: t.Joules}}
		d := Device{Clock: f, Kind: t.Kind, Workers: t.Workers}
		if t.Watts != nil {
			f.power = table{t.Steps, t.Watts, t.Idle}
			d.Power = f.power
		}
		if t.Speed != nil {
			d.Speed = table{t.Steps, t.Speed, 0}.Busy
		}
		all = append(all, d)
	}
	return all, nil
}

// check checks the description of a device.
func check(t control.ClockDevice) error {
	if t.Name == "" || len(t.Name) > control.MaxClockText || t.Kind != "cpu" && t.Kind != "gpu" {
		return errors.New("its name or kind")
	}
	n := len(t.Steps)
	if n == 0 || n > dvfs.MaxSteps || t.Steps[0] < 1 || t.Steps[n-1] > maxMHz || !slices.IsSorted(t.Steps) || len(slices.Compact(slices.Clone(t.Steps))) < n {
		return errors.New("its frequencies")
	}
	if t.Found < t.Steps[0] || t.Found > t.Steps[n-1] {
		return fmt.Errorf("it was found at %d MHz", t.Found)
	}
	values := slices.Concat(t.Watts, t.Speed)
	for i := range values {
		if !(values[i] > 0 && values[i] < maxValue) {
			return errors.New("its watts or speeds")
		}
	}
	if t.Watts != nil && len(t.Watts) != n || t.Speed != nil && len(t.Speed) != n || !(t.Idle >= 0 && t.Idle < maxValue) || !(t.Joules > -maxValue && t.Joules < maxValue) {
		return errors.New("its watts, speeds or joules")
	}
	return nil
}

// What no device reaches.
const (
	maxMHz   = 1 << 20
	maxValue = 1e15
)

// Heard takes in what the host of the devices says of them.
func Heard(all []*Far, said []control.ClockNow) error {
	if len(said) != len(all) {
		return fmt.Errorf("it tells of %d devices, and has %d", len(said), len(all))
	}
	for i, s := range said {
		if s.MHz < 0 || s.MHz > maxMHz || !(s.Joules > -maxValue && s.Joules < maxValue) {
			return fmt.Errorf("device %d: %d MHz, %v J", i, s.MHz, s.Joules)
		}
		all[i].mu.Lock()
		all[i].now = s
		all[i].mu.Unlock()
	}
	return nil
}

// Name implements [dvfs.Clock].
func (f *Far) Name() string { return f.told.Name }

// Limits implements [dvfs.Clock].
func (f *Far) Limits() (lo, hi int) { return f.told.Steps[0], f.told.Steps[len(f.told.Steps)-1] }

// Steps implements [dvfs.Clock].
func (f *Far) Steps() []int { return f.told.Steps }

// Current implements [dvfs.Clock]: as its host said last.
func (f *Far) Current() (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.now.MHz == 0 {
		return 0, fmt.Errorf("%s: %w", f.told.Name, dvfs.ErrUnsupported)
	}
	return f.now.MHz, nil
}

// Found implements [dvfs.Clock].
func (f *Far) Found() int { return f.told.Found }

// Set implements [dvfs.Clock]. Whether it succeeds, the host says later.
func (f *Far) Set(mhz int) error {
	if err := dvfs.CheckLimits(f, mhz); err != nil {
		return err
	}
	f.change(mhz, mhz)
	return nil
}

// Restore implements [dvfs.Clock], as Set does.
func (f *Far) Restore() error {
	f.change(f.told.Found, 0)
	return nil
}

func (f *Far) change(at, mhz int) {
	f.mu.Lock()
	f.at = at
	f.mu.Unlock()
	f.set(mhz)
}

// Run lets an emulated device compute for busy seconds and wait for idle seconds, at the present frequency.
func (f *Far) Run(busy, idle float64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.power != nil {
		f.drawn += f.power.Busy(f.at)*busy + f.power.Idle()*idle
	}
}

// Energy implements [dvfs.Clock].
func (f *Far) Energy() (float64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.now.Joules < 0 {
		return 0, fmt.Errorf("%s: counter of energy: %w", f.told.Name, dvfs.ErrUnsupported)
	}
	return f.now.Joules + f.drawn, nil
}

// Saved implements [dvfs.Clock]: its own host has what it takes.
func (f *Far) Saved() (dvfs.Saved, bool) { return dvfs.Saved{}, false }

// table has values at frequencies. It is linear between them, and implements [dvfs.Power].
type table struct {
	steps  []int
	values []float64
	idle   float64
}

// Busy implements [dvfs.Power].
func (t table) Busy(mhz int) float64 {
	i, exact := slices.BinarySearch(t.steps, mhz)
	switch {
	case exact || i == 0:
		return t.values[i]
	case i == len(t.steps):
		return t.values[i-1]
	}
	part := float64(mhz-t.steps[i-1]) / float64(t.steps[i]-t.steps[i-1])
	return t.values[i-1] + part*(t.values[i]-t.values[i-1])
}

// Idle implements [dvfs.Power].
func (t table) Idle() float64 { return t.idle }
