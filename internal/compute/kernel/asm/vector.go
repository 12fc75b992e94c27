package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// f returns the constant of a float32.
func f(x float32) Mem { return constant(math.Float32bits(x)) }

// elementwise emits dst = body(operands) for slices of one length, of which
// the first is written. Parameters after the slices are loaded by scalars.
func elementwise(slices []string, prepare func(), body func(p int, in []Register) VecVirtual) {
	n := length(slices[0])
	base := make([]Register, len(slices))
	for i, s := range slices {
		base[i] = slice(s)
	}
	if prepare != nil {
		prepare()
	}
	blocks(n, base, func() {
		for p := range parts() {
			VMOVUPS(body(p, base[1:]), at(base[0], p))
		}
	})
	ret()
}

// ret ends a function.
func ret() {
	VZEROUPPER()
	RET()
}

// exp emits the polynomial of Exp in math.go.
func exp(x VecVirtual) VecVirtual {
	low, high := f(-87.3365478515625), f(88.37626266479492)
	t := move(low)
	VMAXPS(x, t, t) // keeps x where it is NaN
	h := move(high)
	VMINPS(t, h, t)
	n := vmul(t, f(1.44269504088896341))
	if wide() {
		VRNDSCALEPS(Imm(8), n, n)
	} else {
		VROUNDPS(Imm(8), n, n)
	}
	r := t
	accumulate(r, n, f(-0.693359375))
	accumulate(r, n, f(2.12194440e-4))
	y := move(f(1.9875691500e-4))
	for _, c := range []float32{1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1} {
		horner(y, r, f(c))
	}
	horner(y, vmul(r, r), r)
	VADDPS(f(1), y, y)
	VCVTPS2DQ(n, n)
	VPADDD(constant(127), n, n)
	VPSLLD(Imm(23), n, n)
	VMULPS(n, y, y)
	const notLess, greater = 5, 14
	if wide() {
		k := K()
		VCMPPS(Imm(notLess), low, x, k)
		VMOVUPS_Z(y, k, y)
		VCMPPS(Imm(greater), high, x, k)
		VMOVUPS(f(float32(math.Inf(1))), k, y)
	} else {
		m := vec()
		VCMPPS(Imm(notLess), low, x, m)
		VANDPS(m, y, y)
		VCMPPS(Imm(greater), high, x, m)
		VBLENDVPS(m, f(float32(math.Inf(1))), y, y)
	}
	return y
}

// sigmoid2u emits σ(2u) of GELU and returns it with the square of x.
func sigmoid2u(x VecVirtual) (s, x2 VecVirtual) {
	x2 = vmul(x, x)
	w := move(f(-0.07135481627260025))
	horner(w, x2, f(-1.5957691216057308))
	e := exp(vmul(x, w))
	VADDPS(f(1), e, e)
	return vdiv(move(f(1)), e), x2
}

// normalised emits (x − mean)·rstd.
func normalised(x Register, p int, mean, rstd VecVirtual) VecVirtual {
	d := load(x, p)
	VSUBPS(mean, d, d)
	VMULPS(rstd, d, d)
	return d
}

func vectorKernels() {
	text("add", "func(dst, a, b []float32)")
	elementwise([]string{"dst", "a", "b"}, nil, func(p int, in []Register) VecVirtual {
		return vadd(load(in[0], p), at(in[1], p))
	})

	var s VecVirtual
	text("scale", "func(dst, a []float32, s float32)")
	elementwise([]string{"dst", "a"}, func() { s = splat("s") }, func(p int, in []Register) VecVirtual {
		return vmul(s, at(in[0], p))
	})

	text("gelu", "func(dst, x []float32)")
	elementwise([]string{"dst", "x"}, nil, func(p int, in []Register) VecVirtual {
		x := load(in[0], p)
		s, _ := sigmoid2u(x)
		return vmul(x, s)
	})

	text("geluBackward", "func(dx, x, dout []float32)")
	elementwise([]string{"dx", "x", "dout"}, nil, func(p int, in []Register) VecVirtual {
		x := load(in[0], p)
		s, x2 := sigmoid2u(x)
		q := move(f(0.21406444881780074))
		horner(q, x2, f(1.5957691216057308))
		w := vmul(vmul(x, s), vsub(move(f(1)), s))
		horner(w, q, s)
		return vmul(w, at(in[1], p))
	})

	text("sumLanes", "func(acc *[16]float32, x []float32)")
	reduction([]string{"x"}, nil, func(acc VecVirtual, p int, in []Register) {
		VADDPS(at(in[0], p), acc, acc)
	})

	text("dotLanes", "func(acc *[16]float32, a, b []float32)")
	reduction([]string{"a", "b"}, nil, func(acc VecVirtual, p int, in []Register) {
		accumulate(acc, load(in[0], p), at(in[1], p))
	})

	var mean VecVirtual
	text("sqDevLanes", "func(acc *[16]float32, x []float32, mean float32)")
	reduction([]string{"x"}, func() { mean = splat("mean") }, func(acc VecVirtual, p int, in []Register) {
		d := load(in[0], p)
		VSUBPS(mean, d, d)
		accumulate(acc, d, d)
	})

	text("maxLanes", "func(acc *[16]float32, x []float32)")
	reduction([]string{"x"}, nil, func(acc VecVirtual, p int, in []Register) {
		VMAXPS(at(in[0], p), acc, acc)
	})

	var peak, scale VecVirtual
	text("expLanes", "func(acc *[16]float32, dst, x []float32, peak, scale float32)")
	reduction([]string{"dst", "x"}, func() { peak, scale = splat("peak"), splat("scale") }, func(acc VecVirtual, p int, in []Register) {
		x := load(in[1], p)
		VSUBPS(peak, x, x)
		VMULPS(scale, x, x)
		e := exp(x)
		VMOVUPS(e, at(in[0], p))
		VADDPS(e, acc, acc)
	})

	var dot VecVirtual
	text("softmaxApply", "func(dx, y, dy []float32, dot, scale float32)")
	elementwise([]string{"dx", "y", "dy"}, func() { dot, scale = splat("dot"), splat("scale") }, func(p int, in []Register) VecVirtual {
		d := load(in[1], p)
		VSUBPS(dot, d, d)
		return vmul(vmul(d, at(in[0], p)), scale)
	})

	var rstd VecVirtual
	text("normApply", "func(out, x, gain, bias []float32, mean, rstd float32)")
	elementwise([]string{"out", "x", "gain", "bias"}, func() { mean, rstd = splat("mean"), splat("rstd") }, func(p int, in []Register) VecVirtual {
		h := normalised(in[0], p, mean, rstd)
		g := load(in[1], p)
		horner(h, g, at(in[2], p))
		return h
	})

	text("normBackLanes", "func(acc1, acc2 *[16]float32, dout, x, gain []float32, mean, rstd float32)")
	{
		n := length("dout")
		dout, x, gain := slice("dout"), slice("x"), slice("gain")
		p1, p2 := Load(Param("acc1"), GP64()), Load(Param("acc2"), GP64())
		mean, rstd := splat("mean"), splat("rstd")
		acc1, acc2 := accumulators(p1), accumulators(p2)
		blocks(n, []Register{dout, x, gain}, func() {
			for p := range parts() {
				h := normalised(x, p, mean, rstd)
				g := vmul(load(dout, p), at(gain, p))
				VADDPS(g, acc1[p], acc1[p])
				accumulate(acc2[p], g, h)
			}
		})
		storeAll(acc1, p1)
		storeAll(acc2, p2)
		ret()
	}

	var m1, m2 VecVirtual
	text("normBackApply", "func(dx, dout, x, gain []float32, mean, rstd, m1, m2 float32)")
	elementwise([]string{"dx", "dout", "x", "gain"}, func() {
		mean, rstd, m1, m2 = splat("mean"), splat("rstd"), splat("m1"), splat("m2")
	}, func(p int, in []Register) VecVirtual {
		h := normalised(in[1], p, mean, rstd)
		g := vmul(load(in[0], p), at(in[2], p))
		VSUBPS(m1, g, g)
		VFNMADD231PS(m2, h, g)
		return vmul(g, rstd)
	})

	text("normGrad", "func(dgain, dbias, dout, x []float32, mean, rstd float32)")
	{
		n := length("dgain")
		dgain, dbias, dout, x := slice("dgain"), slice("dbias"), slice("dout"), slice("x")
		mean, rstd := splat("mean"), splat("rstd")
		blocks(n, []Register{dgain, dbias, dout, x}, func() {
			for p := range parts() {
				h := normalised(x, p, mean, rstd)
				d, dg := load(dout, p), load(dgain, p)
				accumulate(dg, d, h)
				VMOVUPS(dg, at(dgain, p))
				VMOVUPS(vadd(d, at(dbias, p)), at(dbias, p))
			}
		})
		ret()
	}

	text("sumSquares", "func(acc *[16]float64, x []float32)")
	{
		n := length("x")
		x, base := slice("x"), Load(Param("acc"), GP64())
		// 16 float64 take twice the registers of 16 float32.
		acc := make([]VecVirtual, 2*parts())
		for i := range acc {
			acc[i] = vec()
			VMOVUPD(Mem{Base: base, Disp: 4 * width() * i}, acc[i])
		}
		blocks(n, []Register{x}, func() {
			for i := range acc {
				d := vec()
				VCVTPS2PD(Mem{Base: x, Disp: 2 * width() * i}, d)
				VFMADD231PD(d, d, acc[i]) // the square is exact
			}
		})
		for i := range acc {
			VMOVUPD(acc[i], Mem{Base: base, Disp: 4 * width() * i})
		}
		ret()
	}
}

// foldKernels emit what is made of the lanes of a reduction: each of the first half with its like in the second, and so on.
func foldKernels() {
	for _, op := range []struct {
		name string
		of   func(...Op)
	}{{"foldSum", VADDPS}, {"foldMax", VMAXPS}} {
		text(op.name, "func(acc *[16]float32) float32")
		base := Load(Param("acc"), GP64())
		y := YMM()
		VMOVUPS(Mem{Base: base}, y)
		op.of(Mem{Base: base, Disp: 32}, y, y)
		x, t := XMM(), XMM()
		VEXTRACTF128(Imm(1), y, t)
		op.of(t, y.AsX(), x)
		VPERMILPD(Imm(1), x, t)
		op.of(t, x, x)
		VMOVSHDUP(x, t)
		op.of(t, x, x)
		result, err := ReturnIndex(0).Resolve()
		if err != nil {
			panic(err)
		}
		VMOVSS(x, result.Addr)
		ret()
	}
}

// digestKernel emits the chains of Digest: four registers of lanes, or eight, so that each
// waits for its product while the others run. They are too many instructions for the processor to
// look ahead for what is not in its caches, so it is told of what comes one page later.
func digestKernel() {
	const ahead = 4096
	text("digest", "func(acc *[64]uint32, x []float32)")
	n := length("x")
	x, base := slice("x"), Load(Param("acc"), GP64())
	prime := move(constant(0x9E3779B1))
	acc := make([]VecVirtual, 4*parts())
	for i := range acc {
		acc[i] = move(at(base, i))
	}
	SHRQ(Imm(6), n)
	JZ(LabelRef("done"))
	Label("loop")
	for line := 0; line < 256; line += 64 {
		PREFETCHT1(Mem{Base: x, Disp: ahead + line})
	}
	for i, a := range acc {
		if wide() {
			VPXORD(at(x, i), a, a)
			VPROLD(Imm(13), a, a)
		} else {
			VPXOR(at(x, i), a, a)
			t := vec()
			VPSLLD(Imm(13), a, t)
			VPSRLD(Imm(19), a, a)
			VPOR(t, a, a)
		}
		VPMULLD(prime, a, a)
	}
	ADDQ(U32(256), x)
	DECQ(n)
	JNZ(LabelRef("loop"))
	Label("done")
	for i := range acc {
		VMOVUPS(acc[i], at(base, i))
	}
	ret()
}

// reduction emits a loop that adds to the lanes at acc.
func reduction(slices []string, prepare func(), body func(acc VecVirtual, p int, in []Register)) {
	base := make([]Register, len(slices))
	for i, s := range slices {
		base[i] = slice(s)
	}
	n := length(slices[0])
	accBase := Load(Param("acc"), GP64())
	acc := accumulators(accBase)
	if prepare != nil {
		prepare()
	}
	blocks(n, base, func() {
		for p := range parts() {
			body(acc[p], p, base)
		}
	})
	storeAll(acc, accBase)
	ret()
}
