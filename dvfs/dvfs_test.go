package dvfs_test

import (
	"fmt"

	"github.com/soliton-train/soliton/dvfs"
)

// Two devices share a step: the first computes for a second, the second for 0.6 s, and then waits.
func ExampleGovernor() {
	governor, err := dvfs.NewGovernor(dvfs.Config{})
	if err != nil {
		panic(err)
	}
	work, mhz := []float64{1, 0.6}, []int{1000, 1000} // seconds at 1000 MHz, and what the clocks are set to
	for range 100 {
		var devices []dvfs.Device
		busy := make([]float64, len(work))
		for i := range work {
			devices = append(devices, dvfs.Device{Workers: []int{i}, Steps: []int{500, 600, 700, 800, 900, 1000}, Now: mhz[i]})
			busy[i] = work[i] * 1000 / float64(mhz[i])
		}
		step := func(speeds []float64) float64 { return max(busy[0]/speeds[0], busy[1]/speeds[1]) }
		d, err := governor.Step(dvfs.Observation{Plan: 1, Seconds: step([]float64{1, 1}), Devices: devices, Model: func() dvfs.Model {
			return dvfs.Model{Workers: len(work), Busy: busy, Step: step}
		}})
		if err != nil {
			panic(err)
		}
		for _, s := range d.Settings {
			mhz[s.Clock] = s.MHz
		}
	}
	fmt.Println(mhz)
	// Output: [1000 600]
}
