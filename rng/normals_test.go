package rng

import (
	"math"
	"testing"
)

// Many normal numbers are those that one after the other gives, wherever the stream stands.
func TestNormals(t *testing.T) {
	for _, before := range []int{0, 1, 4} {
		for _, n := range []int{0, 1, lane - 1, lane, 3*lane + 5, 1 << 16} {
			one, many := New(7, Place{Sample: uint32(n)}), New(7, Place{Sample: uint32(n)})
			for range before {
				one.Uint32()
				many.Uint32()
			}
			x := make([]float64, n)
			many.Normals(x)
			for i, v := range x {
				if want := one.Normal(); math.Float64bits(v) != math.Float64bits(want) {
					t.Fatalf("%d draws before, number %d of %d is %v, not %v", before, i, n, v, want)
				}
			}
			if one.Uint64() != many.Uint64() {
				t.Fatalf("%d draws before, after %d numbers the streams differ", before, n)
			}
		}
	}
}

// The branches that normals leaves out are taken at the borders.
func TestNormalsBorders(t *testing.T) {
	var radius, turn, want [lane]float64
	around := func(x float64) []float64 { return []float64{math.Nextafter(x, 0), x, math.Nextafter(x, 2)} }
	var radii, turns []float64
	radii = append(radii, 1, 0.5, 0x1p-53, math.Nextafter(1, 0))
	radii = append(append(append(radii, around(math.Sqrt2/2)...), around(math.Sqrt2/4)...), around(0.25)...)
	turns = append(turns, 0, 0x1p-53, math.Nextafter(1, 0))
	for eighth := 1.0; eighth < 8; eighth++ {
		turns = append(turns, around(eighth/8)...)
	}
	for i := 0; i < len(radii)*len(turns); i += lane {
		for j := range lane {
			k := (i + j) % (len(radii) * len(turns))
			radius[j], turn[j] = radii[k%len(radii)], turns[k/len(radii)]
			want[j] = math.Sqrt(-2*log(radius[j])) * cosTurn(turn[j])
		}
		got := radius
		normals(&got, &turn)
		for j := range lane {
			if math.Float64bits(got[j]) != math.Float64bits(want[j]) {
				t.Errorf("radius %v, turn %v: %v, not %v", radius[j], turn[j], got[j], want[j])
			}
		}
	}
}
