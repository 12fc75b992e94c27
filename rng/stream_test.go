package rng

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

// A stream must be nothing but its blocks in order: vector kernels draw the blocks themselves.
func TestStreamIsItsBlocks(t *testing.T) {
	place := Place{Step: 9, Sample: 4, Layer: 1<<LayerBits - 1, Op: 1<<OpBits - 1}
	s := New(0x0123456789abcdef, place)
	if want := [2]uint32{0x89abcdef, 0x01234567}; s.Key() != want {
		t.Errorf("Key() = %x, want %x", s.Key(), want)
	}
	if want := [4]uint32{0, 0xffffffff, 4, 9}; s.Counter() != want {
		t.Errorf("Counter() = %x, want %x", s.Counter(), want)
	}
	start := s
	for b := range uint32(100) {
		ctr := start.Counter()
		ctr[0] = b
		for i, want := range Philox(ctr, start.Key()) {
			if got := s.Uint32(); got != want {
				t.Fatalf("draw %d = %#x, want word %d of block %d, %#x", 4*b+uint32(i), got, i, b, want)
			}
		}
	}
	if s.Counter() != start.Counter() {
		t.Errorf("Counter() after draws = %x, want %x as at the beginning", s.Counter(), start.Counter())
	}
}

// Cutting a stream anywhere and continuing from a copy gives the numbers of the uncut stream, whatever kinds of draws are mixed.
func TestCutAndResume(t *testing.T) {
	draw := func(s *Stream, kind int) uint64 {
		switch kind {
		case 0:
			return uint64(s.Uint32())
		case 1:
			return s.Uint64()
		case 2:
			return uint64(math.Float32bits(s.Float32()))
		case 3:
			return math.Float64bits(s.Float64())
		case 4:
			return math.Float64bits(s.Normal())
		default:
			return uint64(s.IntN(kind))
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		kinds := rapid.SliceOfN(rapid.IntRange(0, 1000), 1, 50).Draw(t, "kinds")
		cut := rapid.IntRange(0, len(kinds)-1).Draw(t, "cut")
		whole := New(rapid.Uint64().Draw(t, "seed"), Place{Step: rapid.Uint32().Draw(t, "step")})
		stopped := whole
		for _, k := range kinds[:cut] {
			draw(&whole, k)
			draw(&stopped, k)
		}
		resumed := stopped
		draw(&stopped, 4) // the original goes elsewhere; the copy must not notice
		for i, k := range kinds[cut:] {
			if got, want := draw(&resumed, k), draw(&whole, k); got != want {
				t.Fatalf("draw %d after the cut = %#x, want %#x", i, got, want)
			}
		}
	})
}

// Every part of the place and of the seed must select another stream.
func TestPlacesDiffer(t *testing.T) {
	first := map[uint64]string{}
	add := func(name string, s Stream) {
		v := s.Uint64()
		if other, ok := first[v]; ok {
			t.Errorf("streams %s and %s begin alike", name, other)
		}
		first[v] = name
	}
	add("zero", New(0, Place{}))
	add("seed", New(1, Place{}))
	add("high seed", New(1<<32, Place{}))
	add("step", New(0, Place{Step: 1}))
	add("sample", New(0, Place{Sample: 1}))
	add("layer", New(0, Place{Layer: 1}))
	add("op", New(0, Place{Op: 1}))
	if a, b := (Stream{}), New(0, Place{}); a != b {
		t.Errorf("zero Stream is %+v, want that of seed 0 and the zero Place, %+v", a, b)
	}
}

// The last block is handed out; then the stream panics and does not begin again.
func TestStreamEnds(t *testing.T) {
	s := New(5, Place{})
	s.ctr[0] = math.MaxUint32
	want := Philox(s.ctr, s.key)
	for i := range want {
		if got := s.Uint32(); got != want[i] {
			t.Errorf("last block's word %d = %#x, want %#x", i, got, want[i])
		}
	}
	mustPanic(t, "Uint32 after the last block", func() { s.Uint32() })
	mustPanic(t, "Uint32 once more", func() { s.Uint32() })
}

func TestPanics(t *testing.T) {
	mustPanic(t, "New with a large layer", func() { New(0, Place{Layer: 1 << LayerBits}) })
	mustPanic(t, "New with a large op", func() { New(0, Place{Op: 1 << OpBits}) })
	mustPanic(t, "IntN(0)", func() { s := New(0, Place{}); s.IntN(0) })
	mustPanic(t, "IntN(-1)", func() { s := New(0, Place{}); s.IntN(-1) })
	mustPanic(t, "NewPerm of 0", func() { NewPerm(0, 0, 0) })
	mustPanic(t, "At(n)", func() { NewPerm(0, 0, 3).At(3) })
}

func mustPanic(t *testing.T, what string, f func()) {
	t.Helper()
	defer func() {
		if recover() == nil {
			t.Errorf("%s did not panic", what)
		}
	}()
	f()
}

func TestUniformRange(t *testing.T) {
	s := New(6, Place{})
	for range 10000 {
		if f := s.Float32(); f < 0 || f >= 1 {
			t.Fatalf("Float32() = %v, want it in [0,1)", f)
		}
		if f := s.Float64(); f < 0 || f >= 1 {
			t.Fatalf("Float64() = %v, want it in [0,1)", f)
		}
	}
	// The extremes of the draws themselves.
	s = Stream{buf: [4]uint32{math.MaxUint32, math.MaxUint32, math.MaxUint32, 0}, left: 4}
	if f := s.Float64(); f != 1-0x1p-53 {
		t.Errorf("Float64() of ones = %v, want 1-2^-53", f)
	}
	if f := s.Float32(); f != 1-0x1p-24 {
		t.Errorf("Float32() of ones = %v, want 1-2^-24", f)
	}
	if f := s.Float32(); f != 0 {
		t.Errorf("Float32() of zeros = %v, want 0", f)
	}
}

// The method of IntN is exact when each result has equally many accepted draws. For a bound that does not divide 2^64, the
// draws at the borders between results are the ones that matter.
func TestIntNRejectsSurplus(t *testing.T) {
	for _, n := range []uint64{3, 5, 6, 7, 1000, 1<<63 - 1, 1<<62 + 1} {
		surplus := -n % n
		for _, v := range []uint64{0, 1, surplus - 1, surplus, math.MaxUint64, math.MaxUint64/n + 1, math.MaxUint64/n + 2} {
			s := New(7, Place{})
			got := s.below(n, v)
			if got >= n {
				t.Errorf("below(%d, %#x) = %d, want less than the bound", n, v, got)
			}
			redrawn := s != New(7, Place{})
			if want := v*n < surplus; redrawn != want {
				t.Errorf("below(%d, %#x) drew again: %v, want %v", n, v, redrawn, want)
			}
		}
	}
}

// Moments of fixed streams. The seeds are fixed, so this never fails by chance; the bounds are five standard errors.
func TestMoments(t *testing.T) {
	const n = 200000
	for _, c := range []struct {
		name           string
		draw           func(*Stream) float64
		mean, variance float64
		kurtosis       float64 // fourth central moment over the squared variance
	}{
		{"Float32", func(s *Stream) float64 { return float64(s.Float32()) }, 0.5, 1.0 / 12, 1.8},
		{"Float64", (*Stream).Float64, 0.5, 1.0 / 12, 1.8},
		{"Normal", (*Stream).Normal, 0, 1, 3},
		{"IntN(7)", func(s *Stream) float64 { return float64(s.IntN(7)) }, 3, 4, 1.75},
	} {
		s := New(8, Place{Op: 3})
		var m1, m2, m3, m4 float64
		for range n {
			d := c.draw(&s) - c.mean
			m1 += d / n
			m2 += d * d / n
			m3 += d * d * d / n
			m4 += d * d * d * d / n
		}
		sd := math.Sqrt(c.variance)
		if tol := 5 * sd / math.Sqrt(n); math.Abs(m1) > tol {
			t.Errorf("%s: mean is off by %v, want within %v", c.name, m1, tol)
		}
		if tol := 5 * c.variance * math.Sqrt((c.kurtosis-1)/n); math.Abs(m2-c.variance) > tol {
			t.Errorf("%s: variance is %v, want %v within %v", c.name, m2, c.variance, tol)
		}
		if skew := m3 / (sd * sd * sd); math.Abs(skew) > 0.03 {
			t.Errorf("%s: skewness is %v, want 0 within 0.03", c.name, skew)
		}
		if k := m4 / (c.variance * c.variance); math.Abs(k-c.kurtosis) > 0.06 {
			t.Errorf("%s: kurtosis is %v, want %v within 0.06", c.name, k, c.kurtosis)
		}
	}
}

// Normal's distribution function at a few points, against math.Erf.
func TestNormalDistribution(t *testing.T) {
	const n = 200000
	points := []float64{-3, -2, -1, -0.5, 0, 0.5, 1, 2, 3}
	below := make([]int, len(points))
	s := New(9, Place{})
	for range n {
		x := s.Normal()
		for i, p := range points {
			if x < p {
				below[i]++
			}
		}
	}
	for i, p := range points {
		want := (1 + math.Erf(p/math.Sqrt2)) / 2
		tol := 5 * math.Sqrt(want*(1-want)/n)
		if got := float64(below[i]) / n; math.Abs(got-want) > tol {
			t.Errorf("share of normals below %v is %v, want %v within %v", p, got, want, tol)
		}
	}
}

func BenchmarkUint32(b *testing.B) {
	s := New(1, Place{})
	for b.Loop() {
		s.Uint32()
	}
}

func BenchmarkNormal(b *testing.B) {
	s := New(1, Place{})
	for b.Loop() {
		s.Normal()
	}
}
