package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// blocksOfRandom draws Philox blocks, of 16 counters in an iteration.
type blocksOfRandom struct {
	keys  Mem      // the ten round keys, word by word
	ctr   Register // the counter of block 0
	block Register // word 0 of the iteration's first counter
}

// philox loads the parameters ctr and key.
func philox() (b blocksOfRandom) {
	b.keys = AllocLocal(80)
	k := Load(Param("key"), GP64())
	k0, k1 := GP32(), GP32()
	MOVL(Mem{Base: k}, k0)
	MOVL(Mem{Base: k, Disp: 4}, k1)
	for r := range 10 {
		MOVL(k0, b.keys.Offset(8*r))
		MOVL(k1, b.keys.Offset(8*r+4))
		ADDL(U32(0x9E3779B9), k0)
		ADDL(U32(0xBB67AE85), k1)
	}
	b.ctr = Load(Param("ctr"), GP64())
	b.block = GP32()
	MOVL(Mem{Base: b.ctr}, b.block)
	return b
}

// pair is two registers that the same operations are done on, in turns, so that one's wait for the other's results is used.
type pair [2]VecVirtual

// both returns f of each half.
func both(f func(h int) VecVirtual) pair { return pair{f(0), f(1)} }

// tables hold 16 numbers of 64 bits.
var tables = map[string]Mem{}

// table returns 16 numbers, in the order in which 8 or 4 of them fill a register.
func table(name string, number func(i int) int) Mem {
	if m, ok := tables[name]; ok {
		return m
	}
	m := GLOBL(name+"_"+*path, RODATA|NOPTR)
	for i := range 16 {
		DATA(8*i, U64(number(i)))
	}
	tables[name] = m
	return m
}

// draw returns the words of part p of the next 16 blocks, each in the low half of 64 bits; in the high halves is what was left there. The counters
// are those of 16 that counters lists, a register's after another's.
//
// So a product is one instruction, whose low half is the next round's word as it is.
func (b blocksOfRandom) draw(p int, counters Mem) (c [4]pair) {
	for w := range c {
		c[w] = both(func(h int) VecVirtual {
			v := vec()
			switch {
			case w > 0:
				VPBROADCASTD(Mem{Base: b.ctr, Disp: 4 * w}, v)
			case wide():
				VPBROADCASTD(b.block, v)
				VPADDD(counters.Offset(2*4*width()*p+4*width()*h), v, v)
			default:
				t := XMM()
				VMOVD(b.block, t)
				VPBROADCASTD(t, v)
				VPADDD(counters.Offset(2*4*width()*p+4*width()*h), v, v)
			}
			return v
		})
	}
	for r := range 10 {
		for h := range 2 {
			VPMULUDQ(constant(0xD2511F53), c[0][h], c[0][h])
			VPMULUDQ(constant(0xCD9E8D57), c[2][h], c[2][h])
		}
		for h := range 2 {
			mix(c[1][h], c[2][h], b.keys.Offset(8*r))
			mix(c[3][h], c[0][h], b.keys.Offset(8*r+4))
		}
		c = [4]pair{c[1], c[2], c[3], c[0]}
	}
	return c
}

// mix sets x to x ^ the high words of a product ^ a round key.
func mix(x, product VecVirtual, key Mem) {
	high := vec()
	VMOVSHDUP(product, high)
	if wide() {
		const xor3 = 0x96
		VPTERNLOGD_BCST(Imm(xor3), key, high, x)
		return
	}
	VPXOR(high, x, x)
	VPBROADCASTD(key, high)
	VPXOR(high, x, x)
}

// dropoutKernel keeps the elements whose number is not below the threshold.
func dropoutKernel() {
	text("dropout", "func(dst, x []float32, threshold uint32, scale float32, ctr, key *uint32)")
	n := length("dst")
	dst, x := slice("dst"), slice("x")
	SHRQ(Imm(6), n)
	JZ(LabelRef("done"))
	random := philox()
	var odd Register
	if wide() {
		odd = K()
		t := GP32()
		MOVL(U32(0xAAAA), t)
		KMOVW(t, odd)
	}
	// Words of the second register go between those of the first.
	counters := table("even_odd", func(i int) int {
		n := width() / 2
		return i/(2*n)*2*n + i%n*2 + i/n%2
	})
	limit := AllocLocal(8)
	MOVL(Load(Param("threshold"), GP32()), limit)

	Label("loop")
	for p := range parts() {
		for w, words := range random.draw(p, counters) {
			off := 64*w + 4*width()*p
			u, v := words[0], vec()
			if wide() {
				VMOVSLDUP(words[1], odd, u)
				threshold, keep := vec(), K()
				VPBROADCASTD(limit, threshold)
				VPCMPUD(Imm(5), threshold, u, keep) // not below
				VBROADCASTSS(paramMem("scale"), v)
				VMULPS_Z(Mem{Base: x, Disp: off}, v, keep, v)
			} else {
				VPSLLQ(Imm(32), words[1], words[1])
				VPBLENDD(Imm(0xAA), words[1], u, u)
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
	ADDL(Imm(16), random.block)
	ADDQ(U32(256), x)
	ADDQ(U32(256), dst)
	DECQ(n)
	JNZ(LabelRef("loop"))
	Label("done")
	ret()
}

// normalsKernel emits [rng.Stream.Normal], one block for each element, with the operations of that in their order, and no fused one.
func normalsKernel() {
	text("normals", "func(dst []float32, scale float32, ctr, key *uint32)")
	n, dst := length("dst"), slice("dst")
	SHRQ(Imm(4), n)
	JZ(LabelRef("done"))
	random := philox()
	factor := AllocLocal(8)
	x := XMM()
	VXORPS(x, x, x)
	VCVTSS2SD(paramMem("scale"), x, x)
	VMOVSD(x, factor)

	counters := table("in_order", func(i int) int { return i })

	Label("loop")
	for p := range parts() {
		words := random.draw(p, counters)
		radius, turn := unit(words[0], words[1]), unit(words[2], words[3])
		for h := range 2 {
			one := vec()
			VMOVUPD(d(1), one)
			radius[h] = sub64(one, radius[h])
		}
		r, cos := rootOfLog(radius), cosTurn(turn)
		for h := range 2 {
			s := mul64(r[h], cos[h])
			f := vec()
			VBROADCASTSD(factor, f)
			s = mul64(f, s)
			at := Mem{Base: dst, Disp: 4*width()*p + 2*width()*h}
			if wide() {
				half := YMM()
				VCVTPD2PS(s, half)
				VMOVUPS(half, at)
			} else {
				half := XMM()
				VCVTPD2PSY(s, half)
				VMOVUPS(half, at)
			}
		}
	}
	ADDL(Imm(16), random.block)
	ADDQ(Imm(64), dst)
	DECQ(n)
	JNZ(LabelRef("loop"))
	Label("done")
	ret()
}

// d returns the constant of a float64.
func d(x float64) Mem { return constant64(math.Float64bits(x)) }

func add64(a, b Op) VecVirtual { return binary(VADDPD, a, b) }
func sub64(a, b Op) VecVirtual { return binary(VSUBPD, a, b) }
func mul64(a, b Op) VecVirtual { return binary(VMULPD, a, b) }

// and64 and or64 set x to x & b and x | b.
func and64(x VecVirtual, b Op) {
	if wide() {
		VPANDQ(b, x, x)
	} else {
		VPAND(b, x, x)
	}
}

func or64(x VecVirtual, b Op) {
	if wide() {
		VPORQ(b, x, x)
	} else {
		VPOR(b, x, x)
	}
}

// term sets y = y*x + c, not fused.
func term(y, x pair, c func(h int) Op) {
	for h := range 2 {
		VMULPD(x[h], y[h], y[h])
	}
	for h := range 2 {
		VADDPD(c(h), y[h], y[h])
	}
}

// magic makes a float64 out of an integer of 52 bits: its low bits are those of magic + the integer.
const magic = 1 << 52

// whole returns the integers x, of at most 52 bits, as float64 less a number; it uses up x.
func whole(x VecVirtual, less float64) VecVirtual {
	or64(x, constant64(math.Float64bits(magic)))
	return sub64(x, d(magic+less))
}

// unit emits the uniform numbers of two words, which it uses up: their upper 53 bits by 2^53. Every operation is exact.
func unit(lo, hi pair) pair {
	return both(func(h int) VecVirtual {
		lo, hi := lo[h], hi[h]
		if wide() {
			VPSLLQ(Imm(32), hi, hi)
			const low = 1<<32 - 1
			const choose = 0xF8 // hi | lo & low
			VPTERNLOGQ(Imm(choose), constant64(low), lo, hi)
			VPSRLQ(Imm(11), hi, hi)
			VCVTUQQ2PD(hi, hi)
			return mul64(hi, d(1.0/(1<<53)))
		}
		and64(hi, constant64(1<<32-1))
		high := mul64(whole(hi, 0), d(1.0/(1<<32)))
		VPSLLQ(Imm(32), lo, lo)
		VPSRLQ(Imm(43), lo, lo)
		return add64(high, mul64(whole(lo, 0), d(1.0/(1<<53))))
	})
}

// rootOfLog emits math.Sqrt(-2*log(x)) for x in (0,1], which it uses up.
func rootOfLog(m pair) pair {
	k := both(func(h int) VecVirtual {
		exponent := vec()
		VPSRLQ(Imm(52), m[h], exponent)
		return whole(exponent, 1022)
	})
	f := both(func(h int) VecVirtual {
		m, k := m[h], k[h]
		and64(m, constant64(1<<52-1))
		or64(m, constant64(1022<<52)) // in [1/2,1)
		const less = 1
		if wide() {
			below := K()
			VCMPPD(Imm(less), constant64(0x3FE6A09E667F3BCD), m, below)
			VSUBPD(d(1), k, below, k)
			VADDPD(m, m, below, m)
		} else {
			below := vec()
			VCMPPD(Imm(less), constant64(0x3FE6A09E667F3BCD), m, below)
			one := vec()
			VANDPD(d(1), below, one)
			VSUBPD(one, k, k)
			VANDPD(m, below, below)
			VADDPD(below, m, m)
		}
		f := sub64(m, d(1))
		VDIVPD(add64(m, d(1)), f, f)
		return f
	})
	z := both(func(h int) VecVirtual { return mul64(f[h], f[h]) })
	y := both(func(int) VecVirtual {
		y := vec()
		VMOVUPD(d(1.0/21), y)
		return y
	})
	for _, c := range []float64{1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3} {
		term(y, z, func(int) Op { return d(c) })
	}
	return both(func(h int) VecVirtual {
		f, z, y, k := f[h], z[h], y[h], k[h]
		VADDPD(f, f, f)
		const ln2hi = 0x1.62e42fep-1
		VMULPD(z, y, y)
		VMULPD(f, y, y)
		tail := mul64(k, d(math.Ln2-ln2hi))
		VADDPD(tail, y, y)
		VADDPD(f, y, y)
		VMULPD(d(ln2hi), k, k)
		VADDPD(k, y, y)
		VMULPD(d(-2), y, y)
		VSQRTPD(y, y)
		return y
	})
}

// The coefficients of the series of cosine and sine, see package rng.
var (
	cosine = [9]float64{-1.0 / 6402373705728000, 1.0 / 20922789888000, -1.0 / 87178291200, 1.0 / 479001600, -1.0 / 3628800, 1.0 / 40320, -1.0 / 720, 1.0 / 24, -1.0 / 2}
	sine   = [9]float64{0, 1.0 / 355687428096000, -1.0 / 1307674368000, 1.0 / 6227020800, -1.0 / 39916800, 1.0 / 362880, -1.0 / 5040, 1.0 / 120, -1.0 / 6}
)

// cosTurn emits the cosine of t full turns, for t in [0,1).
func cosTurn(t pair) pair {
	var odd [2]Register
	number := both(func(h int) VecVirtual {
		VMULPD(d(4), t[h], t[h])
		quarters := add64(t[h], d(0.5))
		const down = 9 // and no exception for the lost digits
		if wide() {
			VRNDSCALEPD(Imm(down), quarters, quarters)
		} else {
			VROUNDPD(Imm(down), quarters, quarters)
		}
		VSUBPD(quarters, t[h], t[h])
		VADDPD(d(magic), quarters, quarters) // its low bits are those of the quarter
		if wide() {
			odd[h] = K()
			VPTESTMQ(constant64(1), quarters, odd[h])
		} else {
			v := vec()
			VPSLLQ(Imm(63), quarters, v)
			odd[h] = v
		}
		return quarters
	})
	a := both(func(h int) VecVirtual { return mul64(t[h], d(math.Pi/2)) })
	z := both(func(h int) VecVirtual { return mul64(a[h], a[h]) })
	// choose returns the cosine's or the sine's.
	choose := func(h int, cos, sin Op) VecVirtual {
		v := vec()
		VMOVUPD(cos, v)
		if wide() {
			VMOVUPD(sin, odd[h], v)
		} else {
			VBLENDVPD(odd[h], sin, v, v)
		}
		return v
	}
	y := both(func(h int) VecVirtual { return choose(h, d(cosine[0]), d(sine[0])) })
	for i := 1; i < len(cosine); i++ {
		term(y, z, func(h int) Op { return choose(h, d(cosine[i]), d(sine[i])) })
	}
	return both(func(h int) VecVirtual {
		first, y, number := choose(h, d(1), a[h]), y[h], number[h]
		VMULPD(z[h], y, y)
		VMULPD(first, y, y)
		VADDPD(first, y, y)
		VPADDQ(constant64(1), number, number)
		VPSLLQ(Imm(62), number, number)
		and64(number, constant64(1<<63))
		if wide() {
			VPXORQ(number, y, y)
		} else {
			VPXOR(number, y, y)
		}
		return y
	})
}
