package dvfs

// Power says what a device draws, in watts or in shares of its maximum: only ratios count in decisions.
type Power interface {
	Busy(mhz int) float64 // while it computes at this frequency
	Idle() float64        // while it waits for others
}

// Cubic is a device of which one part draws the same at all times and the other grows with the third power of
// the frequency, as the supply voltage follows the frequency.
type Cubic struct {
	Static, Dynamic float64 // the part that is always drawn, and the other at frequency Max
	Max             int     // MHz
}

// DefaultPower is taken for a device whose power is not known: 0.4 static, 0.6 at the highest frequency.
func DefaultPower(highest int) Cubic { return Cubic{0.4, 0.6, highest} }

// Busy implements [Power].
func (c Cubic) Busy(mhz int) float64 {
	x := float64(mhz) / float64(c.Max)
	return c.Static + c.Dynamic*x*x*x
}

// Idle implements [Power].
func (c Cubic) Idle() float64 { return c.Static }
