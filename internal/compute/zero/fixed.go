package zero

import (
	"errors"
	"math"
	"math/bits"
)

// ErrNonFinite is the error for gradients that hold NaN or infinities, or are
// too large for their norm to be represented.
var ErrNonFinite = errors.New("not finite")

// Fixed is an unsigned fixed-point number: Hi + Lo·2⁻⁶⁴. Its sums do not
// depend on the order of the terms. The zero value is 0.
type Fixed struct{ Hi, Lo uint64 }

// ToFixed converts x, dropping what is below 2⁻⁶⁴. ok is false if x is
// negative, NaN, or at least 2⁶⁴.
func ToFixed(x float64) (f Fixed, ok bool) {
	if !(x >= 0 && x < 1<<64) {
		return Fixed{}, false
	}
	const fraction = 52
	b := math.Float64bits(x)
	exp := int(b >> fraction & 0x7ff)
	if exp == 0 {
		return Fixed{}, true // a subnormal number is far below 2⁻⁶⁴
	}
	mant := b&(1<<fraction-1) | 1<<fraction
	// x is mant·2^(exp-1075), and Lo counts units of 2⁻⁶⁴. Go's shifts by 64
	// and more give 0.
	shift := exp - 1023 - fraction + 64
	switch {
	case shift >= 64:
		return Fixed{Hi: mant << (shift - 64)}, true
	case shift >= 0:
		return Fixed{Hi: mant >> (64 - shift), Lo: mant << shift}, true
	default:
		return Fixed{Lo: mant >> -shift}, true
	}
}

// Add returns f + g. ok is false if the sum does not fit.
func (f Fixed) Add(g Fixed) (sum Fixed, ok bool) {
	lo, carry := bits.Add64(f.Lo, g.Lo, 0)
	hi, carry := bits.Add64(f.Hi, g.Hi, carry)
	return Fixed{hi, lo}, carry == 0
}

// Float64 returns the value, rounded.
func (f Fixed) Float64() float64 {
	return float64(f.Hi) + float64(float64(f.Lo)*(1.0/(1<<64)))
}

// NormScale returns the exponent e of the scale 2⁻ᵉ by which sums of squares
// are multiplied before their conversion to fixed point, for a job whose
// global batch has the given number of targets: gradients arrive as sums over
// the targets, so that 2⁻ᵉ is about 1/targets².
func NormScale(targets int64) int { return 2 * (bits.Len64(uint64(max(targets, 1))) - 1) }

// Norm returns the square root of a sum of squares that was scaled by 2⁻ᵉ
// with an even e.
func Norm(squares Fixed, e int) float64 {
	return math.Ldexp(math.Sqrt(squares.Float64()), e/2)
}
