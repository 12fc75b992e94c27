package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// blocksOfRandom draws Philox blocks, for 16 counters at a time.
type blocksOfRandom struct {
	keys  Mem      // the ten round keys, word by word
	ctr   Register // the counter of block 0
	block Register // word 0 of the next counter
	first Mem      // 0, 1, 2 ... 15
	odd   Register // mask, for AVX-512
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
	if wide() {
		b.odd = K()
		t := GP32()
		MOVL(U32(0xAAAA), t)
		KMOVW(t, b.odd)
	}
	b.first = counting()
	return b
}

var count Mem

// counting returns the numbers 0 to 15.
func counting() Mem {
	if count.Base == nil {
		count = GLOBL("count_"+*path, RODATA|NOPTR)
		for i := range 16 {
			DATA(4*i, U32(i))
		}
	}
	return count
}

// draw returns the words of part p of the next 16 blocks.
func (b blocksOfRandom) draw(p int) (c [4]VecVirtual) {
	c = [4]VecVirtual{vec(), vec(), vec(), vec()}
	if wide() {
		VPBROADCASTD(b.block, c[0])
	} else {
		t := XMM()
		VMOVD(b.block, t)
		VPBROADCASTD(t, c[0])
	}
	VPADDD(Mem{Symbol: b.first.Symbol, Base: b.first.Base, Disp: 4 * width() * p}, c[0], c[0])
	for w := 1; w < 4; w++ {
		VPBROADCASTD(Mem{Base: b.ctr, Disp: 4 * w}, c[w])
	}
	for r := range 10 {
		hi0, lo0 := wideProduct(c[0], 0xD2511F53, b.odd)
		hi1, lo1 := wideProduct(c[2], 0xCD9E8D57, b.odd)
		xor(hi1, c[1])
		xor(hi0, c[3])
		xorSplat(hi1, b.keys.Offset(8*r))
		xorSplat(hi0, b.keys.Offset(8*r+4))
		c = [4]VecVirtual{hi1, lo1, hi0, lo0}
	}
	return c
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

// dropoutKernel keeps the elements whose number is not below the threshold.
func dropoutKernel() {
	text("dropout", "func(dst, x []float32, threshold uint32, scale float32, ctr, key *uint32)")
	n := length("dst")
	dst, x := slice("dst"), slice("x")
	SHRQ(Imm(6), n)
	JZ(LabelRef("done"))
	random := philox()
	limit := AllocLocal(8)
	MOVL(Load(Param("threshold"), GP32()), limit)

	Label("loop")
	for p := range parts() {
		for w, u := range random.draw(p) {
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

	Label("loop")
	for p := range parts() {
		words := random.draw(p)
		for h := range 2 {
			radius := vec()
			VMOVUPD(d(1), radius)
			radius = sub64(radius, unit(words[0], words[1], h))
			r := rootOfLog(radius)
			r = mul64(r, cosTurn(unit(words[2], words[3], h)))
			s := vec()
			VBROADCASTSD(factor, s)
			r = mul64(s, r)
			at := Mem{Base: dst, Disp: 4*width()*p + 2*width()*h}
			if wide() {
				half := YMM()
				VCVTPD2PS(r, half)
				VMOVUPS(half, at)
			} else {
				half := XMM()
				VCVTPD2PSY(r, half)
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
func term(y, x VecVirtual, c Op) {
	VMULPD(x, y, y)
	VADDPD(c, y, y)
}

// magic makes a float64 out of an integer of 52 bits: its low bits are those of magic + the integer.
const magic = 1 << 52

// whole returns the integers x, of at most 52 bits, as float64 less a number; it uses up x.
func whole(x VecVirtual, less float64) VecVirtual {
	or64(x, constant64(math.Float64bits(magic)))
	return sub64(x, d(magic+less))
}

// widened returns half h of 32-bit words as 64-bit integers.
func widened(words VecVirtual, h int) VecVirtual {
	v := vec()
	switch {
	case wide() && h == 0:
		VPMOVZXDQ(words.AsY(), v)
	case wide():
		t := YMM()
		VEXTRACTI64X4(Imm(1), words, t)
		VPMOVZXDQ(t, v)
	case h == 0:
		VPMOVZXDQ(words.AsX(), v)
	default:
		t := XMM()
		VEXTRACTI128(Imm(1), words, t)
		VPMOVZXDQ(t, v)
	}
	return v
}

// unit emits the uniform number of half h of two words: their upper 53 bits by 2^53. Every operation is exact.
func unit(lo, hi VecVirtual, h int) VecVirtual {
	low := widened(lo, h)
	VPSRLQ(Imm(11), low, low)
	low = mul64(whole(low, 0), d(1.0/(1<<53)))
	high := mul64(whole(widened(hi, h), 0), d(1.0/(1<<32)))
	return add64(high, low)
}

// rootOfLog emits math.Sqrt(-2*log(x)) for x in (0,1].
func rootOfLog(x VecVirtual) VecVirtual {
	exponent := vec()
	VPSRLQ(Imm(52), x, exponent)
	k := whole(exponent, 1022)
	m := x
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
	f := vec()
	VDIVPD(add64(m, d(1)), sub64(m, d(1)), f)
	z := mul64(f, f)
	y := vec()
	VMOVUPD(d(1.0/21), y)
	for _, c := range []float64{1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3} {
		term(y, z, d(c))
	}
	VADDPD(f, f, f)
	const ln2hi = 0x1.62e42fep-1
	tail := add64(mul64(f, mul64(z, y)), mul64(k, d(math.Ln2-ln2hi)))
	log := add64(mul64(k, d(ln2hi)), add64(f, tail))
	root := vec()
	VSQRTPD(mul64(log, d(-2)), root)
	return root
}

// The coefficients of the series of cosine and sine, see package rng.
var (
	cosine = [9]float64{-1.0 / 6402373705728000, 1.0 / 20922789888000, -1.0 / 87178291200, 1.0 / 479001600, -1.0 / 3628800, 1.0 / 40320, -1.0 / 720, 1.0 / 24, -1.0 / 2}
	sine   = [9]float64{0, 1.0 / 355687428096000, -1.0 / 1307674368000, 1.0 / 6227020800, -1.0 / 39916800, 1.0 / 362880, -1.0 / 5040, 1.0 / 120, -1.0 / 6}
)

// cosTurn emits the cosine of t full turns, for t in [0,1).
func cosTurn(t VecVirtual) VecVirtual {
	t = mul64(t, d(4))
	quarters := add64(t, d(0.5))
	const down = 9 // and no exception for the lost digits
	if wide() {
		VRNDSCALEPD(Imm(down), quarters, quarters)
	} else {
		VROUNDPD(Imm(down), quarters, quarters)
	}
	a := mul64(sub64(t, quarters), d(math.Pi/2))
	z := mul64(a, a)
	number := add64(quarters, d(magic)) // its low bits are those of the quarter
	// odd chooses between the cosine and the sine.
	var choose func(cos, sin Op) VecVirtual
	if wide() {
		odd := K()
		VPTESTMQ(constant64(1), number, odd)
		choose = func(cos, sin Op) VecVirtual {
			v := vec()
			VMOVUPD(cos, v)
			VMOVUPD(sin, odd, v)
			return v
		}
	} else {
		odd := vec()
		VPSLLQ(Imm(63), number, odd)
		choose = func(cos, sin Op) VecVirtual {
			v := vec()
			VMOVUPD(cos, v)
			VBLENDVPD(odd, sin, v, v)
			return v
		}
	}
	y := choose(d(cosine[0]), d(sine[0]))
	for i := 1; i < len(cosine); i++ {
		term(y, z, choose(d(cosine[i]), d(sine[i])))
	}
	first := choose(d(1), a)
	cos := add64(first, mul64(first, mul64(z, y)))
	VPADDQ(constant64(1), number, number)
	VPSLLQ(Imm(62), number, number)
	and64(number, constant64(1<<63))
	if wide() {
		VPXORQ(number, cos, cos)
	} else {
		VPXOR(number, cos, cos)
	}
	return cos
}
