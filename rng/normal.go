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
	m, k := math.Frexp(x) // m in [1/2,1)
	if m < 1/math.Sqrt2 {
		m *= 2
		k--
	}
	return logOf(m, float64(k))
}

// logOf returns log(2^k * m), for m in [sqrt(1/2), sqrt(2)).
func logOf(m, k float64) float64 {
	const (
		// The logarithm of 2 in two parts. The first ends in 24 zero bits, so k times it is exact.
		ln2hi = 0x1.62e42fep-1
		ln2lo = math.Ln2 - ln2hi
	)
	f := (m - 1) / (m + 1)
	z := float64(f * f)
	p := 1.0 / 21
	p = float64(p*z) + 1.0/19
	p = float64(p*z) + 1.0/17
	p = float64(p*z) + 1.0/15
	p = float64(p*z) + 1.0/13
	p = float64(p*z) + 1.0/11
	p = float64(p*z) + 1.0/9
	p = float64(p*z) + 1.0/7
	p = float64(p*z) + 1.0/5
	p = float64(p*z) + 1.0/3
	f *= 2 // exact, like every product with a power of two
	tail := float64(f*float64(z*p)) + float64(k*ln2lo)
	return float64(k*ln2hi) + (f + tail) // small parts first
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

// lane is how many numbers [Stream.Normals] works on at a time: all at one operation, so that a processor has many under way at once.
const lane = 64

// normals sets x, the radii of [Stream.Normal], to what that returns for them and the turns. It does the operations of log and cosTurn, in
// their order, without branches that depend on the numbers.
func normals(x, turn *[lane]float64) {
	for i := range x { // x has radius, in (0,1]
		const least = 0x3FE6A09E667F3BCD // bits of sqrt(1/2)
		b := math.Float64bits(x[i])
		k := int64(b>>52) - 1022
		m := b&(1<<52-1) | 1022<<52 // in [1/2,1)
		low := int64(m-least) >> 63 // -1 below sqrt(1/2)
		k += low
		f := math.Float64frombits(m + uint64(low)&(1<<52))
		x[i] = math.Sqrt(-2 * logOf(f, float64(k)))
	}
	for i := range x {
		t := float64(4 * turn[i])
		quarters := math.Floor(t + 0.5)
		a := float64((t - quarters) * (math.Pi / 2))
		z := float64(a * a)
		q := uint64(int64(quarters))
		odd := q & 1
		c := &series[odd]
		p := c[0]
		p = float64(p*z) + c[1]
		p = float64(p*z) + c[2]
		p = float64(p*z) + c[3]
		p = float64(p*z) + c[4]
		p = float64(p*z) + c[5]
		p = float64(p*z) + c[6]
		p = float64(p*z) + c[7]
		p = float64(p*z) + c[8]
		first := [2]float64{1, a}[odd] // term of the series, and a factor of all
		cos := first + float64(first*float64(z*p))
		negative := (q + 1) << 62 & (1 << 63)
		x[i] = x[i] * math.Float64frombits(math.Float64bits(cos)^negative)
	}
}

// series are the coefficients of cosSeries and of sinSeries, which has one less.
var series = [2][9]float64{
	{
		-1.0 / 6402373705728000, 1.0 / 20922789888000, -1.0 / 87178291200, 1.0 / 479001600, -1.0 / 3628800, 1.0 / 40320, -1.0 / 720, 1.0 / 24, -1.0 / 2,
	},
	{
		0, 1.0 / 355687428096000, -1.0 / 1307674368000, 1.0 / 6227020800, -1.0 / 39916800, 1.0 / 362880, -1.0 / 5040, 1.0 / 120, -1.0 / 6,
	},
}
