// Package clocks opens the clocks that launcher run --clocks sets, and puts them back after a launcher was killed.
package clocks

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/soliton-train/soliton/internal/dvfs"
	"github.com/soliton-train/soliton/internal/dvfs/nvml"
	"github.com/soliton-train/soliton/internal/host/devices"
	"github.com/soliton-train/soliton/internal/platform"
)

// Values of --clocks.
const (
	Off      = "off"
	Auto     = "auto"
	Emulated = "emulated"
)

// Open returns the clocks that --clocks asks for; nil leaves all as it is.
func Open(mode, sysfs string) devices.Clocks {
	switch mode {
	case Auto:
		return &machineClocks{sysfs: sysfs}
	case Emulated:
		return make(emulatedClocks)
	}
	return nil
}

// emulatedClocks are clocks of devices that do not exist, one for each worker, which pauses as its clock says.
type emulatedClocks map[int]devices.Device

// The range of an emulated clock is that of a card: half of its frequency is the least that is worth trying.
const (
	emulatedLow  = 700 // MHz
	emulatedHigh = 1400
	emulatedGrid = 50
)

// Devices implements [devices.Clocks].
func (e emulatedClocks) Devices(processes map[int]int) ([]devices.Device, error) {
	for id := range processes {
		if _, ok := e[id]; ok {
			continue
		}
		power := dvfs.DefaultPower(emulatedHigh)
		c, err := dvfs.NewEmulated(dvfs.EmulatedConfig{
			Name: fmt.Sprintf("emulated device of worker %d", id), Steps: dvfs.Grid(emulatedLow, emulatedHigh, emulatedGrid), Power: power,
		})
		if err != nil {
			return nil, err
		}
		e[id] = devices.Device{Clock: c, Kind: "gpu", Workers: []int{id}, Power: power}
	}
	return slices.SortedFunc(maps.Values(e), func(a, b devices.Device) int { return a.Workers[0] - b.Workers[0] }), nil
}

// Save implements [devices.Clocks].
func (emulatedClocks) Save(dvfs.Record) error { return nil }

// Close implements [devices.Clocks].
func (emulatedClocks) Close(bool) error { return nil }

// Emulated implements [devices.Clocks].
func (emulatedClocks) Emulated() bool { return true }

// machineClocks are the clocks of this machine.
type machineClocks struct {
	sysfs string
	lib   *nvml.Library
	kept  *keptRecord // nil before the first clock is set
}

// Devices implements [devices.Clocks]: cards on which workers' processes compute, and the processors for those
// that compute on no card.
func (m *machineClocks) Devices(processes map[int]int) ([]devices.Device, error) {
	if m.lib == nil {
		lib, err := nvml.Open()
		if err != nil && !errors.Is(err, dvfs.ErrUnsupported) {
			return nil, err
		}
		m.lib = lib
	}
	var cards []card
	if m.lib != nil {
		for _, c := range m.lib.Cards() {
			pids, err := c.Processes()
			if err != nil {
				return nil, err
			}
			cards = append(cards, card{c, pids})
		}
	}
	computing := make(map[int][]int, len(processes))
	for id, pid := range processes {
		if computing[id] = []int{pid}; len(cards) > 0 {
			computing[id] = family(pid)
		}
	}
	on, rest := whose(computing, cards)
	if len(rest) == 0 {
		return on, nil
	}
	c, err := dvfs.OpenCPU(m.sysfs)
	switch {
	case err == nil:
		return append(on, devices.Device{Clock: c, Kind: "cpu", Workers: rest}), nil
	case len(on) == 0:
		return nil, err
	}
	return on, nil
}

// card is a card and the processes that compute on it.
type card struct {
	dvfs.Clock
	pids []int
}

// family returns a process and those that it has started, such as the Python process of a PyTorch model, and so on, at most maxFamily.
func family(pid int) []int {
	all := []int{pid}
	for i := 0; i < len(all) && len(all) < maxFamily; i++ {
		all = append(all, platform.Children(all[i])...)
	}
	return all
}

const maxFamily = 1000

// whose tells the cards on which a process of a worker computes, and the workers of which none does.
func whose(processes map[int][]int, cards []card) (on []devices.Device, rest []int) {
	rest = slices.Sorted(maps.Keys(processes))
	for _, c := range cards {
		d := devices.Device{Clock: c.Clock, Kind: "gpu"}
		rest = slices.DeleteFunc(rest, func(id int) bool {
			computes := slices.ContainsFunc(processes[id], func(pid int) bool { return slices.Contains(c.pids, pid) })
			if computes {
				d.Workers = append(d.Workers, id)
			}
			return computes
		})
		if len(d.Workers) > 0 {
			on = append(on, d)
		}
	}
	return on, rest
}

// Save implements [devices.Clocks].
func (m *machineClocks) Save(r dvfs.Record) (err error) {
	if m.kept != nil {
		return m.kept.write(r)
	}
	m.kept, err = keepRecord(r, m.sysfs)
	return err
}

// Close implements [devices.Clocks].
func (m *machineClocks) Close(restored bool) (err error) {
	if m.kept != nil {
		err = m.kept.close(restored)
	}
	if m.lib != nil {
		m.lib.Close()
	}
	m.kept, m.lib = nil, nil // another leader may open them again
	return err
}

// Emulated implements [devices.Clocks].
func (*machineClocks) Emulated() bool { return false }
