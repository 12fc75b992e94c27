package kernel

import "math"

// fma32 returns a*b+c rounded once, the same bits as the FMA instructions.
//
// The product of two float32 is exact in float64. The sum is not; rounding it
// to odd in float64 and then to nearest in float32 gives the correctly
// rounded result, because 53 >= 2*24+2 (S. Boldo and G. Melquiond, "Emulation
// of a FMA and correctly rounded sums: proved algorithms using rounding to
// odd", 2008).
func fma32(a, b, c float32) float32 {
	p := float64(a) * float64(b)
	z := float64(c)
	s := p + z
	// Only a sum that lies close to the middle of two float32, or whose
	// result is subnormal, is rounded differently by two roundings.
	bits := math.Float64bits(s)
	if low := bits & (1<<29 - 1); low != 1<<28 && s*s > 1e-70 {
		return float32(s)
	}
	// Knuth's TwoSum: s + e is the exact sum.
	t := s - p
	e := (p - (s - t)) + (z - t)
	if e != 0 && !math.IsInf(s, 0) && bits&1 == 0 {
		if (e > 0) == (s > 0) {
			bits++
		} else {
			bits--
		}
		s = math.Float64frombits(bits)
	}
	return float32(s)
}

// Constants of exp: the range of results that are neither zero nor infinite,
// 1/ln 2, ln 2 in two parts, and the coefficients of (e^r - 1 - r) / r^2 on
// [-ln 2/2, ln 2/2], a minimax fit (the classic one of the Cephes library).
const (
	expLow  float32 = -87.3365478515625
	expHigh float32 = 88.37626266479492
	log2e   float32 = 1.44269504088896341
	ln2Hi   float32 = 0.693359375
	ln2Lo   float32 = -2.12194440e-4
	expC0   float32 = 5.0000001201e-1
	expC1   float32 = 1.6666665459e-1
	expC2   float32 = 4.1665795894e-2
	expC3   float32 = 8.3334519073e-3
	expC4   float32 = 1.3981999507e-3
	expC5   float32 = 1.9875691500e-4
)

// Exp returns e^x with an error below 2 ulp. Below -87.34 it is 0, above
// 88.37 it is +Inf; NaN stays NaN.
func Exp(x float32) float32 {
	// max and min return the second operand when one is NaN, as the vector
	// instructions do.
	t := x
	if expLow > x {
		t = expLow
	}
	if expHigh < t {
		t = expHigh
	}
	n := float32(math.RoundToEven(float64(t * log2e)))
	r := fma32(n, -ln2Hi, t)
	r = fma32(n, -ln2Lo, r)
	y := fma32(expC5, r, expC4)
	y = fma32(y, r, expC3)
	y = fma32(y, r, expC2)
	y = fma32(y, r, expC1)
	y = fma32(y, r, expC0)
	y = fma32(y, r*r, r)
	y += 1
	if n == n {
		y *= math.Float32frombits(uint32(int32(n)+127) << 23)
	}
	switch {
	case x < expLow:
		return 0
	case x > expHigh:
		return float32(math.Inf(1))
	}
	return y
}

// Log returns the natural logarithm of x with an error of a few ulp: -Inf for
// 0, NaN for negative x. The mantissa m, within [√½, √2), gives
// log m = 2 atanh((m-1)/(m+1)) by its power series.
func Log(x float64) float64 {
	switch {
	case x == 0:
		return math.Inf(-1)
	case x < 0 || x != x:
		return math.NaN()
	case x > math.MaxFloat64:
		return x
	}
	m, exp := math.Frexp(x)
	if m < math.Sqrt2/2 {
		m *= 2
		exp--
	}
	s := (m - 1) / (m + 1)
	s2 := s * s
	y := 1.0 / 23
	for k := 21; k >= 1; k -= 2 {
		y = float64(y*s2) + 1/float64(k)
	}
	// 2 s y is small against exp ln 2, which is added in two parts.
	const ln2High, ln2Low = 0x1.62e42fee00000p-1, 0x1.a39ef35793c76p-33
	return float64(float64(exp)*ln2High) + (float64(float64(exp)*ln2Low) + float64(2*float64(s*y)))
}

// Cos returns the cosine of x, for x in [0, π], with an absolute error below
// 1e-15, by its power series.
func Cos(x float64) float64 {
	sign := 1.0
	if x > math.Pi/2 {
		x, sign = math.Pi-x, -1
	}
	x2 := x * x
	y := 1.0
	for k := 22.0; k >= 2; k -= 2 {
		y = 1 - float64(float64(y*x2)/float64(k*(k-1)))
	}
	return sign * y
}
