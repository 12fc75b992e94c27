// Package dvfs sets the clock frequency of the devices that workers compute on, so that devices that
// wait for others draw less power. (DVFS: dynamic voltage and frequency scaling.)
//
// A [Clock] is one frequency domain of this machine: a graphics card ([nvml] below this package), all
// processors together ([OpenCPU]), or one that exists in a program only ([Emulated]). What is set is
// the highest frequency that the hardware may choose; below it the hardware goes on choosing for itself.
// Frequencies are whole MHz everywhere.
//
// [Allocate] finds the clocks for a plan, and [Governor] decides when they are set, from the times of
// steps: both are functions of their arguments, without files, goroutines and time. [Keeper] carries it out:
//
//	k := dvfs.NewKeeper(clocks, func(r dvfs.Record) error { return write("clocks.json", r) })
//	defer k.Close()                          // puts every clock back that was set
//	g, err := dvfs.NewGovernor(dvfs.Config{})
//	...
//	d := g.Step(observation)                 // after each step
//	err = k.Apply(d.Settings)
//
// # Putting back
//
// A clock stays as it was set when the process that set it dies, and until the machine starts again. So the
// process that holds the clocks is the one that outlives the workers, and before the first of them is
// changed, Keeper hands out a [Record] of what was found. A process that finds a record after a
// death passes it to [RestoreCPU] and nvml.Restore.
//
// # What may fail
//
// A machine without such hardware, or a process that may not set it, is nothing unusual: the errors are
// [ErrUnsupported] and [ErrPermission], wrapped into a line that says what would be right.
// A record, and what sysfs says, come from outside; they are bounded, and checked before they are used.
//
// # Limits
//
// All workers of one machine that compute on its processors share one clock, so among them nothing can be
// won. The highest frequency that is tried is that of the hardware, even where a lower limit was set before.
// Speed is taken to be proportional to frequency where nothing better is known, which is too much for work that
// waits for memory; the governor takes back what made steps longer.
//
// [nvml]: https://pkg.go.dev/github.com/soliton-train/soliton/internal/dvfs/nvml
package dvfs
