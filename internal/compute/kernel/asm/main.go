// Command asm generates the assembly kernels, with avo:
//
//	go run . -path avx512 -out ../avx512_amd64.s -stubs ../avx512_amd64.go -pkg kernel
//
// One description serves AVX-512 and AVX2. Vectors of 16 virtual lanes are
// one ZMM register or two YMM registers; every path does the same operations
// on a lane in the same order, which is what makes the bits equal. The plain
// Go in generic.go of the parent folder is the definition that both follow.
package main

import (
	"flag"
	"fmt"
	"os"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

var path = flag.String("path", "avx512", "avx512 or avx2")

// parts is the number of registers that hold 16 lanes.
func parts() int {
	if wide() {
		return 1
	}
	return 2
}

// width is the number of float32 in a register.
func width() int { return 16 / parts() }

// wide reports whether the registers are those of AVX-512.
func wide() bool { return *path == "avx512" }

// vec returns a new vector register.
func vec() VecVirtual {
	if wide() {
		return ZMM()
	}
	return YMM()
}

// text begins a function; its name gets the path's suffix.
func text(name, signature string) {
	suffix := map[string]string{"avx512": "AVX512", "avx2": "AVX2"}[*path]
	TEXT(name+suffix, NOSPLIT, signature)
	Pragma("noescape")
}

func main() {
	flag.Parse()
	if *path != "avx512" && *path != "avx2" {
		fmt.Fprintln(os.Stderr, "asm: -path must be avx512 or avx2")
		os.Exit(2)
	}
	ConstraintExpr("amd64")
	vectorKernels()
	foldKernels()
	digestKernel()
	dropoutKernel()
	normalsKernel()
	optimizerKernels()
	tiles()
	if wide() {
		packKernels()
	}
	Generate()
}

// constants hold 8 copies of a 64-bit value in read-only memory.
var constants = map[uint64]Mem{}

// constant returns 16 copies of a 32-bit value, and constant64 8 of a 64-bit one.
func constant(bits uint32) Mem { return constant64(uint64(bits)<<32 | uint64(bits)) }

func constant64(bits uint64) Mem {
	if m, ok := constants[bits]; ok {
		return m
	}
	m := GLOBL(fmt.Sprintf("k%016x_%s", bits, *path), RODATA|NOPTR)
	for i := range 8 {
		DATA(8*i, U64(bits))
	}
	constants[bits] = m
	return m
}

// blocks emits a loop over the 16-element blocks of the operands; n is their
// length in elements. body receives the element offset of a block's parts in
// pointer registers that advance by themselves.
func blocks(n Register, pointers []Register, body func()) {
	SHRQ(Imm(4), n)
	JZ(LabelRef("done"))
	Label("loop")
	body()
	for _, p := range pointers {
		ADDQ(Imm(64), p)
	}
	DECQ(n)
	JNZ(LabelRef("loop"))
	Label("done")
}

// slice loads the base of a slice parameter.
func slice(name string) Register { return Load(Param(name).Base(), GP64()) }

// length loads the length of a slice parameter.
func length(name string) Register { return Load(Param(name).Len(), GP64()) }

// at addresses part p of the current block.
func at(base Register, p int) Mem { return Mem{Base: base, Disp: 4 * width() * p} }

// load reads part p of the current block.
func load(base Register, p int) VecVirtual {
	v := vec()
	VMOVUPS(at(base, p), v)
	return v
}

// splat broadcasts a float32 parameter.
func splat(name string) VecVirtual {
	v := vec()
	VBROADCASTSS(paramMem(name), v)
	return v
}

// paramMem returns the memory of a scalar parameter.
func paramMem(name string) Mem {
	a, err := Param(name).Resolve()
	if err != nil {
		panic(err)
	}
	return a.Addr
}

// accumulators loads the lanes of a reduction.
func accumulators(base Register) []VecVirtual {
	acc := make([]VecVirtual, parts())
	for p := range acc {
		acc[p] = load(base, p)
	}
	return acc
}

// storeAll writes the lanes of a reduction back.
func storeAll(acc []VecVirtual, base Register) {
	for p := range acc {
		VMOVUPS(acc[p], at(base, p))
	}
}

func binary(op func(...Op), a, b Op) VecVirtual {
	v := vec()
	op(b, a, v)
	return v
}

// vadd, vsub, vmul and vdiv return a op b; b may be memory.
func vadd(a, b Op) VecVirtual { return binary(VADDPS, a, b) }
func vsub(a, b Op) VecVirtual { return binary(VSUBPS, a, b) }
func vmul(a, b Op) VecVirtual { return binary(VMULPS, a, b) }
func vdiv(a, b Op) VecVirtual { return binary(VDIVPS, a, b) }

// accumulate sets acc += a*b, fused.
func accumulate(acc, a VecVirtual, b Op) { VFMADD231PS(b, a, acc) }

// horner sets y = y*x + c, fused.
func horner(y, x VecVirtual, c Op) { VFMADD213PS(c, x, y) }

// move returns a copy of a.
func move(a Op) VecVirtual {
	v := vec()
	VMOVUPS(a, v)
	return v
}
