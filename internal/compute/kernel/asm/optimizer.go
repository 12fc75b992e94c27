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
