package rng

import "math"

// The functions below stand in for math.Log and math.Cos, whose bits differ between processors. They are sums of power series
// in Horner's form. Every product is converted to float64 before it is added to something: the conversion forbids the compiler
// to fuse the two into one operation with another rounding (Go specification, "Floating-point operators").

// log returns the natural logarithm of x, for normal x > 0, within a few units of the last place.
//
// With x = 2^k * m and m in [sqrt(1/2), sqrt(2)), log x = k*log 2 + 2*artanh(f) where f = (m-1)/(m+1), and
// artanh f = f + f^3/3 + f^5/5 + ... Here |f| < 0.172, so the first term left out, f^23/23, is below 1e-19.
func log(x float64) float64 {
	const (
		// The logarithm of 2 in two parts. The first ends in 24 zero bits, so k times it is exact.
		ln2hi = 0x1.62e42fep-1
		ln2lo = math.Ln2 - ln2hi
	)
	m, k := math.Frexp(x) // m in [1/2,1)
	if m < 1/math.Sqrt2 {
		m *= 2
		k--
	}
	f := (m - 1) / (m + 1)
	z := float64(f * f)
	p := 1.0 / 21
	for _, c := range [...]float64{1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3} {
		p = float64(p*z) + c
	}
	f *= 2 // exact, like every product with a power of two
	tail := float64(f*float64(z*p)) + float64(float64(k)*ln2lo)
	return float64(float64(k)*ln2hi) + (f + tail) // small parts first
}

// cosTurn returns the cosine of t full turns, for t in [0,1].
//
// The turn is cut into quarters, which is exact, and the rest r, at most half a quarter, goes into the series of sine or
// cosine at r*pi/2. The first terms left out, a^19/19! and a^20/20! at a = pi/4, are below 1e-19.
func cosTurn(t float64) float64 {
	t = float64(4 * t)
	quarters := math.Floor(t + 0.5)
	a := float64((t - quarters) * (math.Pi / 2))
	z := float64(a * a)
	switch int(quarters) & 3 {
	case 0:
		return cosSeries(z)
	case 1:
		return -sinSeries(a, z)
	case 2:
		return -cosSeries(z)
	default:
		return sinSeries(a, z)
	}
}

// sinSeries returns sin a, where z = a*a and |a| <= pi/4.
func sinSeries(a, z float64) float64 {
	p := 1.0 / 355687428096000 // 1/17!
	for _, c := range [...]float64{
		-1.0 / 1307674368000, 1.0 / 6227020800, -1.0 / 39916800, 1.0 / 362880, -1.0 / 5040, 1.0 / 120, -1.0 / 6,
	} {
		p = float64(p*z) + c
	}
	return a + float64(a*float64(z*p))
}

// cosSeries returns cos a, where z = a*a and |a| <= pi/4.
func cosSeries(z float64) float64 {
	p := -1.0 / 6402373705728000 // 1/18!
	for _, c := range [...]float64{
		1.0 / 20922789888000, -1.0 / 87178291200, 1.0 / 479001600, -1.0 / 3628800, 1.0 / 40320, -1.0 / 720, 1.0 / 24, -1.0 / 2,
	} {
		p = float64(p*z) + c
	}
	return 1 + float64(p*z)
}
