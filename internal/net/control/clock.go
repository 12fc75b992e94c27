package control

// Clock tells a worker at which share of its speed it is to compute, because its emulated device runs at a lower clock. With
// devices that exist nobody says it. 0 < Share <= 1.
type Clock struct {
	Share float64
}

// MinShare is the least Clock.Share.
const MinShare = 0.05

func (Clock) kind() string { return "clock" }
