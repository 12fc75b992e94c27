package dvfs_test

import (
	"fmt"

	"github.com/soliton-train/soliton/internal/dvfs"
)

// Two devices share a step: the first computes for a second, the second for 0.6 s, and then waits.
func Example() {
	work := []float64{1, 0.6} // seconds at 1000 MHz
	var clocks []dvfs.Clock
	var emulated []*dvfs.Emulated
	for i := range work {
		e, err := dvfs.NewEmulated(dvfs.EmulatedConfig{Name: fmt.Sprint("device ", i), Steps: dvfs.Grid(500, 1000, 50), Power: dvfs.DefaultPower(1000)})
		if err != nil {
			panic(err)
		}
		clocks, emulated = append(clocks, e), append(emulated, e)
	}
	keeper := dvfs.NewKeeper(clocks, nil) // a clock that outlives the process needs a record
	governor, err := dvfs.NewGovernor(dvfs.Config{})
	if err != nil {
		panic(err)
	}

	for range 100 {
		// What is measured at the present clocks: how long each computes, and the step.
		var devices []dvfs.Device
		busy, step := make([]float64, len(work)), 0.0
		for i, c := range clocks {
			mhz, err := c.Current()
			if err != nil {
				panic(err)
			}
			devices = append(devices, dvfs.Device{Workers: []int{i}, Steps: c.Steps(), Now: mhz})
			busy[i] = work[i] * 1000 / float64(mhz)
			step = max(step, busy[i])
		}
		for i, e := range emulated {
			e.Run(busy[i], step-busy[i])
		}
		d, err := governor.Step(dvfs.Observation{Plan: 1, Seconds: step, Devices: devices, Model: func() dvfs.Model {
			return dvfs.Model{Workers: len(work), Busy: busy, Step: func(speeds []float64) float64 {
				return max(busy[0]/speeds[0], busy[1]/speeds[1])
			}}
		}})
		if err != nil {
			panic(err)
		}
		if d.Reason != "" {
			fmt.Println(d.Reason)
		}
		if err := keeper.Apply(d.Settings); err != nil {
			panic(err)
		}
	}
	for _, c := range clocks {
		mhz, _ := c.Current()
		joules, _ := c.Energy()
		fmt.Printf("%s: %d MHz, %.1f J\n", c.Name(), mhz, joules)
	}
	if err := keeper.Close(); err != nil {
		panic(err)
	}
	mhz, _ := clocks[1].Current()
	fmt.Println("put back:", mhz, "MHz")
	// Output:
	// clocks: 1 lowered; predicted +0.0 % step time and -13.1 % energy
	// device 0: 1000 MHz, 100.0 J
	// device 1: 600 MHz, 55.0 J
	// put back: 1000 MHz
}
