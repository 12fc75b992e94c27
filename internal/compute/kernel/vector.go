package kernel

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"unsafe"

	"github.com/soliton-train/soliton/rng"
)

// longest bounds the elements that one call into assembly works on, so that
// none takes longer than some tens of microseconds: the scheduler cannot
// interrupt it.
const longest = 32 << 10

// stretches calls f for consecutive parts of [0, n), all but the last of
// which are longest.
func stretches(n int, f func(lo, hi int)) {
	for lo := 0; lo < n; lo += longest {
		f(lo, min(lo+longest, n))
	}
}

// The smallest parts of a job that are worth a thread.
const (
	grainVec  = 4096 // elements
	grainCols = lanes
)

var negInf = float32(math.Inf(-1))

// negZero is the identity of addition: x + −0 is x, also for x = −0.
var negZero = math.Float32frombits(1 << 31)

// body returns the largest multiple of 16 that is at most n.
func body(n int) int { return n &^ (lanes - 1) }

// pad returns the tail of x, at most 15 elements, filled up with fill.
func pad(x []float32, fill float32) (t [lanes]float32) {
	for i := copy(t[:], x); i < lanes; i++ {
		t[i] = fill
	}
	return t
}

// splat returns lanes that all hold x.
func splat(x float32) (acc [lanes]float32) {
	for i := range acc {
		acc[i] = x
	}
	return acc
}

func sameLen(op string, want int, got ...int) {
	for _, n := range got {
		if n != want {
			panic(fmt.Sprintf("kernel: %s of operands of %d and %d elements", op, want, n))
		}
	}
}

// Add sets dst = a + b, element by element. dst may be a or b.
func Add(dst, a, b []float32) {
	sameLen("Add", len(dst), len(a), len(b))
	n := body(len(dst))
	stretches(n, func(lo, hi int) { add(dst[lo:hi], a[lo:hi], b[lo:hi]) })
	for i := n; i < len(dst); i++ {
		dst[i] = a[i] + b[i]
	}
}

// Scale sets dst = s·a, element by element. dst may be a.
func Scale(dst, a []float32, s float32) {
	sameLen("Scale", len(dst), len(a))
	n := body(len(dst))
	stretches(n, func(lo, hi int) { scale(dst[lo:hi], a[lo:hi], s) })
	for i := n; i < len(dst); i++ {
		dst[i] = a[i] * s
	}
}

// Sum returns the sum of a row.
func Sum(x []float32) float32 {
	acc := splat(negZero)
	n := body(len(x))
	sumLanes(&acc, x[:n])
	if n < len(x) {
		t := pad(x[n:], negZero)
		sumLanes(&acc, t[:])
	}
	return foldSum(&acc)
}

// Dot returns the inner product of two rows.
func Dot(a, b []float32) float32 {
	sameLen("Dot", len(a), len(b))
	acc := splat(negZero)
	n := body(len(a))
	dotLanes(&acc, a[:n], b[:n])
	if n < len(a) {
		// A padded product is −0·+0 = −0.
		s, t := pad(a[n:], negZero), pad(b[n:], 0)
		dotLanes(&acc, s[:], t[:])
	}
	return foldSum(&acc)
}

// Max is documented in the public package kernel.
func Max(x []float32) float32 {
	acc := splat(negInf)
	n := body(len(x))
	maxLanes(&acc, x[:n])
	if n < len(x) {
		t := pad(x[n:], negInf)
		maxLanes(&acc, t[:])
	}
	return foldMax(&acc)
}

// SumRows is documented in the public package kernel.
func SumRows(p *Pool, dst, x []float32, rows, cols int) {
	sameLen("SumRows", cols, len(dst))
	sameLen("SumRows", rows*cols, len(x))
	p.For(cols, grainCols, func(lo, hi int) {
		d := dst[lo:hi]
		clear(d)
		for i := range rows {
			Add(d, d, x[i*cols+lo:i*cols+hi])
		}
	})
}

// GELU is documented in the public package kernel.
func GELU(p *Pool, dst, x []float32) {
	sameLen("GELU", len(dst), len(x))
	p.For(len(dst), grainVec, func(lo, hi int) {
		d, x := dst[lo:hi], x[lo:hi]
		n := body(len(d))
		stretches(n, func(lo, hi int) { gelu(d[lo:hi], x[lo:hi]) })
		if n < len(d) {
			t := pad(x[n:], 0)
			gelu(t[:], t[:])
			copy(d[n:], t[:])
		}
	})
}

// GELUBackward is documented in the public package kernel.
func GELUBackward(p *Pool, dx, x, dout []float32) {
	sameLen("GELUBackward", len(dx), len(x), len(dout))
	p.For(len(dx), grainVec, func(lo, hi int) {
		d, x, g := dx[lo:hi], x[lo:hi], dout[lo:hi]
		n := body(len(d))
		stretches(n, func(lo, hi int) { geluBackward(d[lo:hi], x[lo:hi], g[lo:hi]) })
		if n < len(d) {
			s, t := pad(x[n:], 0), pad(g[n:], 0)
			geluBackward(t[:], s[:], t[:])
			copy(d[n:], t[:])
		}
	})
}

// LayerNorm is documented in the public package kernel.
func LayerNorm(p *Pool, out, mean, rstd, x, gain, bias []float32, rows, cols int, eps float32) {
	sameLen("LayerNorm", rows*cols, len(out), len(x))
	sameLen("LayerNorm", rows, len(mean), len(rstd))
	sameLen("LayerNorm", cols, len(gain), len(bias))
	p.For(rows, rowGrain(cols), func(lo, hi int) {
		for i := lo; i < hi; i++ {
			x, o := x[i*cols:][:cols], out[i*cols:][:cols]
			m := Sum(x) / float32(cols)
			acc := splat(negZero)
			n := body(cols)
			sqDevLanes(&acc, x[:n], m)
			if n < cols {
				t := pad(x[n:], m) // a deviation of 0
				sqDevLanes(&acc, t[:], m)
			}
			r := 1 / float32(math.Sqrt(float64(foldSum(&acc)/float32(cols)+eps)))
			mean[i], rstd[i] = m, r
			normApply(o[:n], x[:n], gain[:n], bias[:n], m, r)
			if n < cols {
				t, g, b := pad(x[n:], 0), pad(gain[n:], 0), pad(bias[n:], 0)
				normApply(t[:], t[:], g[:], b[:], m, r)
				copy(o[n:], t[:])
			}
		}
	})
}

// LayerNormBackward is documented in the public package kernel.
func LayerNormBackward(p *Pool, dx, dgain, dbias, dout, x, mean, rstd, gain []float32, rows, cols int) {
	sameLen("LayerNormBackward", rows*cols, len(dx), len(dout), len(x))
	sameLen("LayerNormBackward", rows, len(mean), len(rstd))
	sameLen("LayerNormBackward", cols, len(gain), len(dgain), len(dbias))
	p.For(rows, rowGrain(cols), func(lo, hi int) {
		n := body(cols)
		for i := lo; i < hi; i++ {
			x, g, d := x[i*cols:][:cols], dout[i*cols:][:cols], dx[i*cols:][:cols]
			acc1, acc2 := splat(negZero), splat(negZero)
			normBackLanes(&acc1, &acc2, g[:n], x[:n], gain[:n], mean[i], rstd[i])
			var tg, tx, tw [lanes]float32
			if n < cols {
				// A padded g is −0 and its deviation 0, so both sums add −0.
				tg, tx, tw = pad(g[n:], negZero), pad(x[n:], mean[i]), pad(gain[n:], 1)
				normBackLanes(&acc1, &acc2, tg[:], tx[:], tw[:], mean[i], rstd[i])
			}
			m1, m2 := foldSum(&acc1)/float32(cols), foldSum(&acc2)/float32(cols)
			normBackApply(d[:n], g[:n], x[:n], gain[:n], mean[i], rstd[i], m1, m2)
			if n < cols {
				normBackApply(tg[:], tg[:], tx[:], tw[:], mean[i], rstd[i], m1, m2)
				copy(d[n:], tg[:])
			}
		}
	})
	p.For(cols, grainCols, func(lo, hi int) {
		dg, db := dgain[lo:hi], dbias[lo:hi]
		clear(dg)
		clear(db)
		n := body(hi - lo)
		var tg, tb [lanes]float32
		for i := range rows {
			g, x := dout[i*cols+lo:i*cols+hi], x[i*cols+lo:i*cols+hi]
			normGrad(dg[:n], db[:n], g[:n], x[:n], mean[i], rstd[i])
			if n < len(g) {
				pg, px := pad(g[n:], 0), pad(x[n:], 0)
				normGrad(tg[:], tb[:], pg[:], px[:], mean[i], rstd[i])
			}
		}
		copy(dg[n:], tg[:])
		copy(db[n:], tb[:])
	})
}

// rowGrain returns how many rows of cols elements make a part worth a thread.
func rowGrain(cols int) int { return max(1, grainVec/max(cols, 1)) }

// expRow sets dst = exp((x − max x)·scale) and returns the row's sum.
func expRow(dst, x []float32, scale float32) (sum, peak float32) {
	peak = Max(x)
	acc := splat(negZero)
	n := body(len(x))
	expLanes(&acc, dst[:n], x[:n], peak, scale)
	if n < len(x) {
		t := pad(x[n:], negInf) // exp(−Inf) is +0
		expLanes(&acc, t[:], t[:], peak, scale)
		copy(dst[n:], t[:])
	}
	return foldSum(&acc), peak
}

// Softmax is documented in the public package kernel.
func Softmax(dst, x []float32, scale float32) {
	sameLen("Softmax", len(dst), len(x))
	if len(x) == 0 {
		return
	}
	sum, _ := expRow(dst, x, scale)
	Scale(dst, dst, 1/sum)
}

// SoftmaxBackward is documented in the public package kernel.
func SoftmaxBackward(dx, y, dy []float32, scale float32) {
	sameLen("SoftmaxBackward", len(dx), len(y), len(dy))
	dot := Dot(y, dy)
	n := body(len(dx))
	softmaxApply(dx[:n], y[:n], dy[:n], dot, scale)
	if n < len(dx) {
		s, t := pad(y[n:], 0), pad(dy[n:], 0)
		softmaxApply(t[:], s[:], t[:], dot, scale)
		copy(dx[n:], t[:])
	}
}

// CrossEntropy is documented in the public package kernel.
func CrossEntropy(p *Pool, dlogits, logits []float32, targets []int32, rows, cols int) (sum float64, count int64) {
	sameLen("CrossEntropy", rows*cols, len(logits))
	sameLen("CrossEntropy", rows, len(targets))
	for _, t := range targets {
		if t < -1 || int(t) >= cols {
			panic(fmt.Sprintf("kernel: target %d is not a class of [0, %d)", t, cols))
		}
	}
	loss := make([]float64, rows)
	p.For(rows, rowGrain(cols), func(lo, hi int) {
		var scratch []float32
		if dlogits == nil {
			scratch = make([]float32, cols)
		}
		for i := lo; i < hi; i++ {
			x, t := logits[i*cols:][:cols], targets[i]
			d := scratch
			if dlogits != nil {
				d = dlogits[i*cols:][:cols]
			}
			if t < 0 {
				if dlogits != nil {
					clear(d)
				}
				continue
			}
			hit := x[t]
			s, peak := expRow(d, x, 1)
			loss[i] = Log(float64(s)) + (float64(peak) - float64(hit))
			if dlogits != nil {
				Scale(d, d, 1/s)
				d[t]--
			}
		}
	})
	for i, t := range targets {
		if t >= 0 {
			sum += loss[i]
			count++
		}
	}
	return sum, count
}

// Dropout is documented in the public package kernel.
func Dropout(dst, x []float32, offset int, prob float32, s rng.Stream) {
	sameLen("Dropout", len(dst), len(x))
	if offset < 0 || offset%dropGroup != 0 {
		panic(fmt.Sprintf("kernel: Dropout at element %d: parts start at multiples of %d", offset, dropGroup))
	}
	threshold := uint32(float64(prob) * (1 << 32))
	k := 1 / (1 - prob)
	ctr, key := s.Counter(), s.Key()
	ctr[0] += uint32(offset / 4)
	n := len(dst) / dropGroup * dropGroup
	stretches(n, func(lo, hi int) {
		dropout(dst[lo:hi], x[lo:hi], threshold, k, ctr, key)
		ctr[0] += uint32((hi - lo) / 4)
	})
	if n < len(dst) {
		var t [dropGroup]float32
		copy(t[:], x[n:])
		dropout(t[:], t[:], threshold, k, ctr, key)
		copy(dst[n:], t[:])
	}
}

// normalStretch is longest for numbers that take a few nanoseconds each.
const normalStretch = 8 << 10

// Normals sets dst to scale times what as many calls of [rng.Stream.Normal] return in the stream of a place, in float64 and then rounded.
func Normals(dst []float32, seed uint64, place rng.Place, scale float32) {
	s := rng.New(seed, place)
	if !hasNormals() || uint64(len(dst)) > 1<<32 {
		var some [1024]float64
		for len(dst) > 0 {
			n := some[:min(len(dst), len(some))]
			s.Normals(n)
			for i, v := range n {
				dst[i] = float32(float64(scale) * v)
			}
			dst = dst[len(n):]
		}
		return
	}
	ctr, key := s.Counter(), s.Key()
	for len(dst) >= lanes {
		n := body(min(len(dst), normalStretch))
		normals(dst[:n], scale, ctr, key)
		ctr[0] += uint32(n)
		dst = dst[n:]
	}
	if len(dst) > 0 {
		var t [lanes]float32
		normals(t[:], scale, ctr, key)
		copy(dst, t[:])
	}
}

// AdamWStep holds the numbers of one AdamW update.
type AdamWStep struct {
	LR, Beta1, Beta2, Eps, WeightDecay float32
	// Correction1 and Correction2 are 1 − Beta^t for update t = 1, 2, ...
	Correction1, Correction2 float32
	// GradScale multiplies the gradient first.
	GradScale float32
}

// AdamW updates params and the moments m and v in place (I. Loshchilov and F.
// Hutter, "Decoupled weight decay regularization", 2019):
//
//	g = GradScale·grad
//	m = Beta1·m + (1−Beta1)·g
//	v = Beta2·v + (1−Beta2)·g²
//	params = (1 − LR·WeightDecay)·params − LR/Correction1 · m / (√(v/Correction2) + Eps)
func AdamW(params, m, v, grad []float32, h AdamWStep) {
	sameLen("AdamW", len(params), len(m), len(v), len(grad))
	c := adamWCoef{
		grad:  h.GradScale,
		b1:    h.Beta1,
		c1:    float32(1 - float64(h.Beta1)),
		b2:    h.Beta2,
		c2:    float32(1 - float64(h.Beta2)),
		root:  float32(1 / math.Sqrt(float64(h.Correction2))),
		eps:   h.Eps,
		step:  float32(float64(h.LR) / float64(h.Correction1)),
		decay: float32(1 - float64(float64(h.LR)*float64(h.WeightDecay))),
	}
	n := body(len(params))
	stretches(n, func(lo, hi int) { adamW(params[lo:hi], m[lo:hi], v[lo:hi], grad[lo:hi], &c) })
	if n < len(params) {
		tp, tm, tv, tg := pad(params[n:], 0), pad(m[n:], 0), pad(v[n:], 1), pad(grad[n:], 0)
		adamW(tp[:], tm[:], tv[:], tg[:], &c)
		copy(params[n:], tp[:])
		copy(m[n:], tm[:])
		copy(v[n:], tv[:])
	}
}

// SGDStep holds the numbers of one SGD update.
type SGDStep struct {
	LR, Momentum, WeightDecay float32
	// GradScale multiplies the gradient first.
	GradScale float32
}

// SGD updates params and the momentum m in place:
//
//	m = Momentum·m + (GradScale·grad + WeightDecay·params)
//	params = params − LR·m
func SGD(params, m, grad []float32, h SGDStep) {
	sameLen("SGD", len(params), len(m), len(grad))
	c := sgdCoef{grad: h.GradScale, momentum: h.Momentum, decay: h.WeightDecay, step: h.LR}
	n := body(len(params))
	stretches(n, func(lo, hi int) { sgd(params[lo:hi], m[lo:hi], grad[lo:hi], &c) })
	if n < len(params) {
		tp, tm, tg := pad(params[n:], 0), pad(m[n:], 0), pad(grad[n:], 0)
		sgd(tp[:], tm[:], tg[:], &c)
		copy(params[n:], tp[:])
		copy(m[n:], tm[:])
	}
}

// Block is the number of elements of a block, over which digests and sums of
// squares are taken. A tensor's tail is one short block.
const Block = 4096

// SumSquares returns the sum of the squares of the elements of a block.
func SumSquares(x []float32) float64 {
	var acc [lanes]float64
	n := body(len(x))
	sumSquares(&acc, x[:n])
	if n < len(x) {
		t := pad(x[n:], 0)
		sumSquares(&acc, t[:])
	}
	for w := lanes / 2; w > 0; w /= 2 {
		for i := range w {
			acc[i] += acc[i+w]
		}
	}
	return acc[0]
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// digestLanes is the number of chains of a digest.
const digestLanes = 64

// Digest returns 32 bits that differ, for certain, between two arrays of one length which differ
// in one element, whatever became of it; other pairs have the same in one of 2³² cases. Elements
// are dealt to 64 chains. A chain goes from h to rotl(h xor x, 13) · P, which is one to one
// in h and in x, so a change of one element changes its chain for good and no other; the
// result is the CRC-32C of the chains' ends, which tells any two apart that differ in 32
// bits in a row. It runs at the speed of memory, where the CRC of all would take three times as
// long.
func Digest(x []float32) uint32 {
	var acc [digestLanes]uint32
	n := len(x) - len(x)%digestLanes
	digest(&acc, x[:n])
	if n < len(x) {
		var t [digestLanes]float32
		copy(t[:], x[n:])
		digest(&acc, t[:])
	}
	var b [4 * digestLanes]byte
	for i, h := range acc {
		binary.LittleEndian.PutUint32(b[4*i:], h)
	}
	return crc32.Checksum(b[:], castagnoli)
}

// Bytes returns the little-endian bytes of x: on a little-endian machine its
// own memory, which must not be written.
func Bytes(x []float32) []byte {
	if len(x) == 0 {
		return nil
	}
	if !bigEndian {
		return unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), 4*len(x))
	}
	b := make([]byte, 0, 4*len(x))
	for _, f := range x {
		u := math.Float32bits(f)
		b = append(b, byte(u), byte(u>>8), byte(u>>16), byte(u>>24))
	}
	return b
}

var bigEndian = func() bool {
	u := uint16(1)
	return *(*byte)(unsafe.Pointer(&u)) == 0
}()
