package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// tiles emits the kernels of the matrix product: one for each number of rows,
// 1 to 12 (AVX-512) or 1 to 6 (AVX2), of two registers' width. The sums of a
// tile stay in registers; of the packed panels a term's neighbours lie side by
// side.
func tiles() {
	most := 6
	if wide() {
		most = 12
	}
	for rows := 1; rows <= most; rows++ {
		tile(rows, false)
		if wide() {
			tile(rows, true)
		}
	}
}

// tile emits the kernel for a number of rows. The direct one reads a where it
// lies, elements rowStep from row to row and termStep from term to term,
// which is worth it where a is used once.
func tile(rows int, direct bool) {
	// Of a, element x of term t is at address(t, x); next moves on by some terms.
	var address func(t, i int) Mem
	var next func(terms int)
	if direct {
		text(fmt.Sprintf("tileDirect%d", rows), "func(k int, a *float32, rowStep, termStep int, b, c *float32, stride int, from *float32, fromStride int)")
	} else {
		text(fmt.Sprintf("tile%d", rows), "func(k int, a, b, c *float32, stride int, from *float32, fromStride int)")
	}
	k := Load(Param("k"), GP64())
	a := Load(Param("a"), GP64())
	if direct {
		rowStep, termStep := Load(Param("rowStep"), GP64()), Load(Param("termStep"), GP64())
		SHLQ(Imm(2), rowStep)
		SHLQ(Imm(2), termStep)
		// One register serves three rows.
		bases := []Register{a}
		for i := 3; i < rows; i += 3 {
			base := GP64()
			LEAQ(Mem{Base: bases[len(bases)-1], Index: rowStep, Scale: 2}, base)
			ADDQ(rowStep, base)
			bases = append(bases, base)
		}
		address = func(_, i int) Mem {
			m := Mem{Base: bases[i/3]}
			if i%3 > 0 {
				m.Index, m.Scale = rowStep, uint8(i%3)
			}
			return m
		}
		next = func(int) {
			for _, base := range bases {
				ADDQ(termStep, base)
			}
		}
	} else {
		address = func(t, i int) Mem { return Mem{Base: a, Disp: 4 * (rows*t + i)} }
		next = func(terms int) { ADDQ(U32(uint32(4*rows*terms)), a) }
	}
	b := Load(Param("b"), GP64())
	c := Load(Param("c"), GP64())
	stride := Load(Param("stride"), GP64())
	SHLQ(Imm(2), stride)
	bytes := 4 * width()

	// Fetch the output while the sums are made.
	row := GP64()
	MOVQ(c, row)
	for i := range rows {
		PREFETCHT0(Mem{Base: row})
		PREFETCHT0(Mem{Base: row, Disp: 2*bytes - 4})
		if i < rows-1 {
			ADDQ(stride, row)
		}
	}

	sums := make([][2]VecVirtual, rows)
	for i := range sums {
		for j := range sums[i] {
			sums[i][j] = vec()
			if wide() {
				VPXORD(sums[i][j], sums[i][j], sums[i][j])
			} else {
				VXORPS(sums[i][j], sums[i][j], sums[i][j])
			}
		}
	}
	term := func(t int) {
		b0, b1 := vec(), vec()
		VMOVUPS(Mem{Base: b, Disp: 2 * bytes * t}, b0)
		VMOVUPS(Mem{Base: b, Disp: 2*bytes*t + bytes}, b1)
		for i := range rows {
			x := vec()
			VBROADCASTSS(address(t, i), x)
			VFMADD231PS(b0, x, sums[i][0])
			VFMADD231PS(b1, x, sums[i][1])
		}
	}
	// Terms go in ascending order, four to a turn.
	const unroll = 4
	turns := GP64()
	MOVQ(k, turns)
	SHRQ(Imm(2), turns)
	JZ(LabelRef("rest"))
	Label("loop")
	for t := range unroll {
		term(t)
		if direct {
			next(1)
		}
	}
	if !direct {
		next(unroll)
	}
	ADDQ(U32(uint32(2*bytes*unroll)), b)
	DECQ(turns)
	JNZ(LabelRef("loop"))
	Label("rest")
	ANDQ(Imm(unroll-1), k)
	JZ(LabelRef("store"))
	Label("single")
	term(0)
	next(1)
	ADDQ(U32(uint32(2*bytes)), b)
	DECQ(k)
	JNZ(LabelRef("single"))

	Label("store")
	// What the sums are added to: nothing, c itself, or one row for all.
	from := Load(Param("from"), GP64())
	TESTQ(from, from)
	JZ(LabelRef("set"))
	fromStride := Load(Param("fromStride"), GP64())
	SHLQ(Imm(2), fromStride)
	out := func(adding bool) {
		for i := range rows {
			for j, s := range sums[i] {
				if adding {
					VADDPS(Mem{Base: from, Disp: bytes * j}, s, s)
				}
				VMOVUPS(s, Mem{Base: c, Disp: bytes * j})
			}
			if i < rows-1 {
				ADDQ(stride, c)
				if adding {
					ADDQ(fromStride, from)
				}
			}
		}
		ret()
	}
	out(true)
	Label("set")
	out(false)
}

// packKernels emits the copies into panels, AVX-512 only.
func packKernels() {
	text("packCopy", "func(dst, src *float32, srcStride, k, n, dstStride int)")
	dst, src := Load(Param("dst"), GP64()), Load(Param("src"), GP64())
	srcStride, k := Load(Param("srcStride"), GP64()), Load(Param("k"), GP64())
	n, dstStride := Load(Param("n"), GP64()), Load(Param("dstStride"), GP64())
	SHLQ(Imm(2), srcStride)
	SHLQ(Imm(2), dstStride)
	// The low n bits select the elements, 16 to a register.
	bits := GP64()
	MOVQ(I64(-1), bits)
	BZHIQ(n, bits, bits)
	low, high := K(), K()
	KMOVW(bits.As32(), low)
	SHRQ(Imm(16), bits)
	KMOVW(bits.As32(), high)
	TESTQ(k, k)
	JZ(LabelRef("done"))
	CMPQ(n, Imm(16))
	JGT(LabelRef("double"))
	z := ZMM()
	Label("single")
	VMOVUPS_Z(Mem{Base: src}, low, z)
	VMOVUPS(z, low, Mem{Base: dst})
	ADDQ(srcStride, src)
	ADDQ(dstStride, dst)
	DECQ(k)
	JNZ(LabelRef("single"))
	ret()
	Label("double")
	y := ZMM()
	VMOVUPS_Z(Mem{Base: src}, low, z)
	VMOVUPS_Z(Mem{Base: src, Disp: 64}, high, y)
	VMOVUPS(z, low, Mem{Base: dst})
	VMOVUPS(y, high, Mem{Base: dst, Disp: 64})
	ADDQ(srcStride, src)
	ADDQ(dstStride, dst)
	DECQ(k)
	JNZ(LabelRef("double"))
	Label("done")
	ret()

	for _, rows := range []int{4, 8, 12, 16} {
		packTrans(rows)
	}
}

// packTrans emits the transposition of rows rows of 16 elements each, blocks
// times over. It writes 16 elements for each term, in ascending order, so that
// what it writes too much of one term the next one overwrites.
func packTrans(rows int) {
	text(fmt.Sprintf("packTrans%d", rows), "func(dst, src *float32, srcStride, blocks, dstStride int)")
	dst, src := Load(Param("dst"), GP64()), Load(Param("src"), GP64())
	srcStride, count := Load(Param("srcStride"), GP64()), Load(Param("blocks"), GP64())
	dstStride := Load(Param("dstStride"), GP64())
	SHLQ(Imm(2), srcStride)
	SHLQ(Imm(2), dstStride)
	Label("loop")
	row := GP64()
	MOVQ(src, row)
	var r [16]VecVirtual
	for i := range r {
		if i >= rows {
			r[i] = r[rows-1] // its place is overwritten
			continue
		}
		r[i] = ZMM()
		VMOVUPS(Mem{Base: row}, r[i])
		if i < rows-1 {
			ADDQ(srcStride, row)
		}
	}
	two := func(op func(...Op), a, b VecVirtual) VecVirtual {
		z := ZMM()
		op(b, a, z)
		return z
	}
	shuffle := func(a, b VecVirtual, order uint64) VecVirtual {
		z := ZMM()
		VSHUFF32X4(Imm(order), b, a, z)
		return z
	}
	// u[4g+e] holds, in 128-bit part l, terms 4l+e of rows 4g to 4g+3.
	var u [16]VecVirtual
	for g := range 4 {
		a, b, c, d := r[4*g], r[4*g+1], r[4*g+2], r[4*g+3]
		ab, cd := two(VUNPCKLPS, a, b), two(VUNPCKLPS, c, d)
		AB, CD := two(VUNPCKHPS, a, b), two(VUNPCKHPS, c, d)
		u[4*g], u[4*g+1] = two(VUNPCKLPD, ab, cd), two(VUNPCKHPD, ab, cd)
		u[4*g+2], u[4*g+3] = two(VUNPCKLPD, AB, CD), two(VUNPCKHPD, AB, CD)
	}
	// Transpose the 4 x 4 parts.
	var out [16]VecVirtual
	const even, odd = 0x88, 0xDD
	for e := range 4 {
		x0, x1 := shuffle(u[e], u[4+e], even), shuffle(u[e], u[4+e], odd)
		y0, y1 := shuffle(u[8+e], u[12+e], even), shuffle(u[8+e], u[12+e], odd)
		out[e], out[8+e] = shuffle(x0, y0, even), shuffle(x0, y0, odd)
		out[4+e], out[12+e] = shuffle(x1, y1, even), shuffle(x1, y1, odd)
	}
	for _, z := range out {
		VMOVUPS(z, Mem{Base: dst})
		ADDQ(dstStride, dst)
	}
	ADDQ(Imm(64), src)
	DECQ(count)
	JNZ(LabelRef("loop"))
	ret()
}
