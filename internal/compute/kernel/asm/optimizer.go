package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// coefficients broadcasts n float32 from the struct that h points to.
func coefficients(n int) []VecVirtual {
	h := Load(Param("h"), GP64())
	c := make([]VecVirtual, n)
	for i := range c {
		c[i] = vec()
		VBROADCASTSS(Mem{Base: h, Disp: 4 * i}, c[i])
	}
	return c
}

func optimizerKernels() {
	text("adamW", "func(params, m, v, grad []float32, h *float32)")
	{
		n := length("params")
		params, mBase, vBase, grad := slice("params"), slice("m"), slice("v"), slice("grad")
		c := coefficients(9)
		scale, b1, c1, b2, c2, root, eps, step, decay := c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8]
		blocks(n, []Register{params, mBase, vBase, grad}, func() {
			for p := range parts() {
				g := vmul(scale, at(grad, p))
				m := vmul(c1, g)
				accumulate(m, b1, at(mBase, p))
				VMOVUPS(m, at(mBase, p))
				v := vmul(vmul(c2, g), g)
				accumulate(v, b2, at(vBase, p))
				VMOVUPS(v, at(vBase, p))
				d := vec()
				VSQRTPS(v, d)
				horner(d, root, eps)
				q := vdiv(m, d)
				x := vmul(decay, at(params, p))
				VFNMADD231PS(q, step, x)
				VMOVUPS(x, at(params, p))
			}
		})
		ret()
	}

	text("sgd", "func(params, m, grad []float32, h *float32)")
	{
		n := length("params")
		params, mBase, grad := slice("params"), slice("m"), slice("grad")
		c := coefficients(4)
		scale, momentum, decay, step := c[0], c[1], c[2], c[3]
		blocks(n, []Register{params, mBase, grad}, func() {
			for p := range parts() {
				x := load(params, p)
				g := vmul(scale, at(grad, p))
				accumulate(g, x, decay)
				accumulate(g, momentum, at(mBase, p))
				VMOVUPS(g, at(mBase, p))
				VFNMADD231PS(g, step, x)
				VMOVUPS(x, at(params, p))
			}
		})
		ret()
	}
}

// dropoutKernel draws Philox blocks for 16 counters at a time and keeps the
// elements whose number is not below the threshold.
func dropoutKernel() {
	text("dropout", "func(dst, x []float32, threshold uint32, scale float32, ctr, key *uint32)")
	n := length("dst")
	dst, x := slice("dst"), slice("x")
	SHRQ(Imm(6), n)
	JZ(LabelRef("done"))

	// The ten round keys, word by word.
	keys := AllocLocal(80)
	k := Load(Param("key"), GP64())
	k0, k1 := GP32(), GP32()
	MOVL(Mem{Base: k}, k0)
	MOVL(Mem{Base: k, Disp: 4}, k1)
	for r := range 10 {
		MOVL(k0, keys.Offset(8*r))
		MOVL(k1, keys.Offset(8*r+4))
		ADDL(U32(0x9E3779B9), k0)
		ADDL(U32(0xBB67AE85), k1)
	}
	limit := AllocLocal(8)
	MOVL(Load(Param("threshold"), GP32()), limit)
	ctr := Load(Param("ctr"), GP64())
	block := GP32()
	MOVL(Mem{Base: ctr}, block)
	var odd Register
	if wide() {
		odd = K()
		t := GP32()
		MOVL(U32(0xAAAA), t)
		KMOVW(t, odd)
	}
	first := GLOBL("count_"+*path, RODATA|NOPTR)
	for i := range 16 {
		DATA(4*i, U32(i))
	}

	Label("loop")
	for p := range parts() {
		c := [4]VecVirtual{vec(), vec(), vec(), vec()}
		if wide() {
			VPBROADCASTD(block, c[0])
		} else {
			t := XMM()
			VMOVD(block, t)
			VPBROADCASTD(t, c[0])
		}
		VPADDD(Mem{Symbol: first.Symbol, Base: first.Base, Disp: 4 * width() * p}, c[0], c[0])
		for w := 1; w < 4; w++ {
			VPBROADCASTD(Mem{Base: ctr, Disp: 4 * w}, c[w])
		}
		for r := range 10 {
			hi0, lo0 := wideProduct(c[0], 0xD2511F53, odd)
			hi1, lo1 := wideProduct(c[2], 0xCD9E8D57, odd)
			xor(hi1, c[1])
			xor(hi0, c[3])
			xorSplat(hi1, keys.Offset(8*r))
			xorSplat(hi0, keys.Offset(8*r+4))
			c = [4]VecVirtual{hi1, lo1, hi0, lo0}
		}
		for w, u := range c {
			off := 64*w + 4*width()*p
			v := vec()
			if wide() {
				threshold, keep := vec(), K()
				VPBROADCASTD(limit, threshold)
				VPCMPUD(Imm(5), threshold, u, keep) // not below
				VBROADCASTSS(paramMem("scale"), v)
				VMULPS_Z(Mem{Base: x, Disp: off}, v, keep, v)
			} else {
				m := vec()
				VPBROADCASTD(limit, m)
				VPMAXUD(m, u, m)
				VPCMPEQD(m, u, m)
				VBROADCASTSS(paramMem("scale"), v)
				VMULPS(Mem{Base: x, Disp: off}, v, v)
				VANDPS(m, v, v)
			}
			VMOVUPS(v, Mem{Base: dst, Disp: off})
		}
	}
	ADDL(Imm(16), block)
	ADDQ(U32(256), x)
	ADDQ(U32(256), dst)
	DECQ(n)
	JNZ(LabelRef("loop"))
	Label("done")
	ret()
}

// wideProduct returns the halves of the 64-bit products of x and a constant.
func wideProduct(x VecVirtual, m uint32, odd Register) (hi, lo VecVirtual) {
	even, other := vec(), vec()
	VPMULUDQ(constant(m), x, even)
	VPSRLQ(Imm(32), x, other)
	VPMULUDQ(constant(m), other, other)
	hi, lo = vec(), vec()
	VMOVSHDUP(even, hi)
	if wide() {
		VPMULLD(constant(m), x, lo)
		VMOVDQU32(other, odd, hi)
	} else {
		VPSLLQ(Imm(32), other, lo)
		VPBLENDD(Imm(0xAA), lo, even, lo)
		VPBLENDD(Imm(0xAA), other, hi, hi)
	}
	return hi, lo
}

func xor(dst, a VecVirtual) {
	if wide() {
		VPXORD(a, dst, dst)
	} else {
		VPXOR(a, dst, dst)
	}
}

func xorSplat(dst VecVirtual, m Mem) {
	if wide() {
		VPXORD_BCST(m, dst, dst)
		return
	}
	t := vec()
	VPBROADCASTD(m, t)
	VPXOR(t, dst, dst)
}
