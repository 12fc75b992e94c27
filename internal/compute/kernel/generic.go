package kernel

import (
	"math"
	"math/bits"

	"github.com/soliton-train/soliton/rng"
)

// The plain Go kernels: the definition of every bit. Vector operands have
// lengths that are multiples of 16, and all operands of a call the length of
// the first.

// lanes is the number of virtual lanes of a reduction.
const lanes = 16

func addGeneric(dst, a, b []float32) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = a[i] + b[i]
	}
}

func scaleGeneric(dst, a []float32, s float32) {
	a = a[:len(dst)]
	for i := range dst {
		dst[i] = a[i] * s
	}
}

// sigmoid2u returns σ(2u) and the square of x, where u = √(2/π)(x + 0.044715 x³).
func sigmoid2u(x float32) (s, x2 float32) {
	x2 = x * x
	t := x * fma32(x2, geluC1, geluC0)
	return 1 / (1 + Exp(t)), x2
}

// −2√(2/π) and −2√(2/π)·0.044715: the coefficients of −2u, and of the
// derivative of 2u.
const (
	geluC0 float32 = -1.5957691216057308
	geluC1 float32 = -0.07135481627260025
	geluD0 float32 = 1.5957691216057308
	geluD1 float32 = 0.21406444881780074
)

func geluGeneric(dst, x []float32) {
	for i := range dst {
		s, _ := sigmoid2u(x[i])
		dst[i] = x[i] * s
	}
}

func geluBackwardGeneric(dx, x, dout []float32) {
	for i := range dx {
		s, x2 := sigmoid2u(x[i])
		q := fma32(x2, geluD1, geluD0)
		w := float32(float32(x[i]*s) * (1 - s))
		dx[i] = dout[i] * fma32(w, q, s)
	}
}

func sumLanesGeneric(acc *[lanes]float32, x []float32) {
	for i := range x {
		acc[i%lanes] += x[i]
	}
}

func dotLanesGeneric(acc *[lanes]float32, a, b []float32) {
	for i := range a {
		acc[i%lanes] = fma32(a[i], b[i], acc[i%lanes])
	}
}

func sqDevLanesGeneric(acc *[lanes]float32, x []float32, mean float32) {
	for i := range x {
		d := x[i] - mean
		acc[i%lanes] = fma32(d, d, acc[i%lanes])
	}
}

func maxLanesGeneric(acc *[lanes]float32, x []float32) {
	for i := range x {
		// The order of the comparison keeps a NaN of x.
		if !(acc[i%lanes] > x[i]) {
			acc[i%lanes] = x[i]
		}
	}
}

func expLanesGeneric(acc *[lanes]float32, dst, x []float32, peak, scale float32) {
	for i := range dst {
		e := Exp(float32((x[i] - peak) * scale))
		dst[i] = e
		acc[i%lanes] += e
	}
}

func softmaxApplyGeneric(dx, y, dy []float32, dot, scale float32) {
	for i := range dx {
		dx[i] = float32(float32((dy[i]-dot)*y[i]) * scale)
	}
}

func normApplyGeneric(out, x, gain, bias []float32, mean, rstd float32) {
	for i := range out {
		h := float32((x[i] - mean) * rstd)
		out[i] = fma32(h, gain[i], bias[i])
	}
}

func normBackLanesGeneric(acc1, acc2 *[lanes]float32, dout, x, gain []float32, mean, rstd float32) {
	for i := range dout {
		h := float32((x[i] - mean) * rstd)
		g := float32(dout[i] * gain[i])
		acc1[i%lanes] += g
		acc2[i%lanes] = fma32(g, h, acc2[i%lanes])
	}
}

// normBackApplyGeneric sets dx = ((dout·gain − m1) − h·m2)·rstd.
func normBackApplyGeneric(dx, dout, x, gain []float32, mean, rstd, m1, m2 float32) {
	for i := range dx {
		h := float32((x[i] - mean) * rstd)
		g := float32(dout[i] * gain[i])
		dx[i] = fma32(-h, m2, g-m1) * rstd
	}
}

func normGradGeneric(dgain, dbias, dout, x []float32, mean, rstd float32) {
	for i := range dgain {
		h := float32((x[i] - mean) * rstd)
		dgain[i] = fma32(dout[i], h, dgain[i])
		dbias[i] += dout[i]
	}
}

// foldSumGeneric adds up the lanes of a reduction.
func foldSumGeneric(acc *[lanes]float32) float32 {
	for w := lanes / 2; w > 0; w /= 2 {
		for i := range w {
			acc[i] += acc[i+w]
		}
	}
	return acc[0]
}

// foldMaxGeneric returns the greatest of the lanes; where neither of two is greater, as with NaN or zeros of two signs, the one
// that is further behind.
func foldMaxGeneric(acc *[lanes]float32) float32 {
	for w := lanes / 2; w > 0; w /= 2 {
		for i := range w {
			if a := acc[i+w]; !(acc[i] > a) {
				acc[i] = a
			}
		}
	}
	return acc[0]
}

// dropGroup is the number of elements that one round of dropout covers: the
// words of 16 Philox blocks.
const dropGroup = 64

// dropoutGeneric covers whole groups. Element 64c+16j+l takes word j of block
// 16c+l, so that a vector of a word of 16 blocks serves 16 neighbours.
func dropoutGeneric(dst, x []float32, threshold uint32, scale float32, ctr [4]uint32, key [2]uint32) {
	for c := 0; c < len(dst); c += dropGroup {
		for l := range lanes {
			w := rng.Philox(ctr, key)
			ctr[0]++
			for j, u := range w {
				i := c + lanes*j + l
				if u < threshold {
					dst[i] = 0
				} else {
					dst[i] = x[i] * scale
				}
			}
		}
	}
}

// adamWCoef holds what one update of AdamW multiplies with.
type adamWCoef struct {
	grad, b1, c1, b2, c2, root, eps, step, decay float32
}

func adamWGeneric(params, m, v, grad []float32, h *adamWCoef) {
	for i := range params {
		g := float32(grad[i] * h.grad)
		m[i] = fma32(h.b1, m[i], float32(h.c1*g))
		v[i] = fma32(h.b2, v[i], float32(float32(h.c2*g)*g))
		d := fma32(float32(math.Sqrt(float64(v[i]))), h.root, h.eps)
		params[i] = fma32(-h.step, m[i]/d, float32(params[i]*h.decay))
	}
}

// sgdCoef holds what one update of SGD multiplies with.
type sgdCoef struct {
	grad, momentum, decay, step float32
}

func sgdGeneric(params, m, grad []float32, h *sgdCoef) {
	for i := range params {
		g := fma32(params[i], h.decay, float32(grad[i]*h.grad))
		m[i] = fma32(h.momentum, m[i], g)
		params[i] = fma32(-h.step, m[i], params[i])
	}
}

func sumSquaresGeneric(acc *[lanes]float64, x []float32) {
	for i := range x {
		d := float64(x[i])
		acc[i%lanes] += float64(d * d)
	}
}

// digestPrime is odd, so that multiplying with it loses nothing, and mixes well.
const digestPrime = 0x9E3779B1

func digestGeneric(acc *[digestLanes]uint32, x []float32) {
	for ; len(x) > 0; x = x[digestLanes:] {
		for i, f := range x[:digestLanes] {
			acc[i] = bits.RotateLeft32(acc[i]^math.Float32bits(f), 13) * digestPrime
		}
	}
}

// tileGeneric computes rows x tileColsGeneric elements of a matrix product
// from packed panels: a holds k times rows elements, b k times cols.
func tileGeneric(rows, k int, a, b, c []float32, stride int, from []float32, fromStride int) {
	const cols = genericCols
	var t [genericRows * cols]float32
	for p := range k {
		ap, bp := a[p*rows:][:rows], b[p*cols:][:cols]
		for i, av := range ap {
			row := t[i*cols:][:cols]
			for j, bv := range bp {
				row[j] = fma32(av, bv, row[j])
			}
		}
	}
	for i := range rows {
		row := c[i*stride:][:cols]
		if from == nil {
			copy(row, t[i*cols:])
			continue
		}
		for j, x := range from[i*fromStride:][:cols] {
			row[j] = x + t[i*cols+j]
		}
	}
}
