package control

// Clock sets the share of its speed at which a worker computes, because its emulated device runs at a lower clock. It is not sent for
// real devices. 0 < Share <= 1.
type Clock struct {
	Share float64
}

// MinShare is the least Clock.Share.
const MinShare = 0.05

func (Clock) kind() string { return "clock" }
