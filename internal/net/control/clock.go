package control

// Clock sets the share of its speed at which a worker computes, because its emulated device runs at a lower clock. It is not sent for
// real devices. 0 < Share <= 1.
type Clock struct {
	Share float64
}

// MinShare is the least Clock.Share.
const MinShare = 0.05

// OpenClocks asks a host for the devices that its workers compute on, after it has restored the clocks that it has set before. Clocks
// answers it.
type OpenClocks struct {
	ID      uint64 // of what the leader knows of devices; in all messages about them
	Workers []int  // WorkerIDs
}

// Clocks says which devices there are.
type Clocks struct {
	ID      uint64
	Devices []ClockDevice // at most MaxClocks, with MaxClockSteps together
	Err     string        // why there are none; "" if they could be opened
}

// ClockDevice describes a device. Watts and Speed have a value for each step, or none where that is not known.
type ClockDevice struct {
	Name    string
	Kind    string    // cpu or gpu
	Steps   []int     // MHz, ascending
	Found   int       // MHz
	Workers []int     // WorkerIDs of those that compute on it
	Joules  float64   // drawn so far; negative without a counter
	Watts   []float64 // while it computes
	Idle    float64   // watts while it waits
	Speed   []float64 // of its work, relative to any one
}

// SetClock sets the clock of a device; MHz 0 restores it.
type SetClock struct {
	ID     uint64
	Device int // of Clocks.Devices
	MHz    int
}

// ClockState says every second what the devices do. With Err, a clock could not be set: all are restored, and none will be set.
type ClockState struct {
	ID      uint64
	Devices []ClockNow // as in Clocks.Devices
	Err     string
}

// ClockNow is what a device does now.
type ClockNow struct {
	MHz    int     // 0 if it does not say
	Joules float64 // as in ClockDevice
}

// Bounds of a Clocks.
const (
	MaxClocks     = 4096
	MaxClockSteps = 1 << 16
	MaxClockText  = 256 // bytes of a name or a kind
)

func (Clock) kind() string      { return "clock" }
func (OpenClocks) kind() string { return "open-clocks" }
func (Clocks) kind() string     { return "clocks" }
func (SetClock) kind() string   { return "set-clock" }
func (ClockState) kind() string { return "clock-state" }
