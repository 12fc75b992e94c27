package dvfs

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

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

// Point is a measurement of a device under load.
type Point struct {
	MHz   int
	Watts float64
	Speed float64 // of the work, relative to any one frequency
}

// Table is a device that was measured; between two points it is linear, and beyond the ends as at the ends.
type Table struct {
	points []Point
	idle   float64
}

// NewTable returns the device that was measured at points, in ascending order of MHz, and draws idle watts while it
// waits. Watts and speeds are positive, or the error names the point.
func NewTable(points []Point, idle float64) (*Table, error) {
	if len(points) == 0 || len(points) > MaxSteps {
		return nil, fmt.Errorf("%d points: give 1 to %d", len(points), MaxSteps)
	}
	for i, p := range points {
		if p.MHz < 1 || !(p.Watts > 0) || !(p.Speed > 0) || i > 0 && p.MHz <= points[i-1].MHz {
			return nil, fmt.Errorf("point %d %+v: give positive numbers, in ascending order of MHz", i, p)
		}
	}
	if !(idle >= 0) {
		return nil, errors.New("idle power: give 0 or more")
	}
	return &Table{slices.Clone(points), idle}, nil
}

// Busy implements [Power].
func (t *Table) Busy(mhz int) float64 { return t.at(mhz, func(p Point) float64 { return p.Watts }) }

// Idle implements [Power].
func (t *Table) Idle() float64 { return t.idle }

// Speed returns the speed of the work at a frequency.
func (t *Table) Speed(mhz int) float64 { return t.at(mhz, func(p Point) float64 { return p.Speed }) }

func (t *Table) at(mhz int, of func(Point) float64) float64 {
	i, found := slices.BinarySearchFunc(t.points, mhz, func(p Point, mhz int) int { return cmp.Compare(p.MHz, mhz) })
	switch {
	case found || i == 0:
		return of(t.points[i])
	case i == len(t.points):
		return of(t.points[i-1])
	}
	a, b := t.points[i-1], t.points[i]
	x := float64(mhz-a.MHz) / float64(b.MHz-a.MHz)
	return of(a) + x*(of(b)-of(a))
}
