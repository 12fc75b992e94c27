package rng

import (
	"math"
	"testing"
)

// ulps returns the distance of two numbers in units of the last place of the wanted one.
func ulps(got, want float64) float64 {
	return math.Abs(got-want) / (math.Nextafter(math.Abs(want), math.Inf(1)) - math.Abs(want))
}

func TestLogAgainstMath(t *testing.T) {
	s := New(1, Place{})
	for range 20000 {
		x := math.Ldexp(0.5+s.Float64()/2, -s.IntN(60))
		if d := ulps(log(x), math.Log(x)); d > 3 {
			t.Fatalf("log(%v) = %v, want %v: %v units of the last place apart", x, log(x), math.Log(x), d)
		}
	}
	if got := log(1); got != 0 {
		t.Errorf("log(1) = %v, want 0", got)
	}
}

func TestCosTurnAgainstMath(t *testing.T) {
	s := New(2, Place{})
	for range 20000 {
		u := s.Float64()
		if d := math.Abs(cosTurn(u) - math.Cos(2*math.Pi*u)); d > 1e-15 {
			t.Fatalf("cosTurn(%v) = %v, want %v: %v apart", u, cosTurn(u), math.Cos(2*math.Pi*u), d)
		}
	}
	for u, want := range map[float64]float64{0: 1, 0.25: 0, 0.5: -1, 0.75: 0, 1: 1} {
		if got := cosTurn(u); got != want {
			t.Errorf("cosTurn(%v) = %v, want %v", u, got, want)
		}
	}
}
