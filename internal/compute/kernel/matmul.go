package kernel

import (
	"fmt"
	"sync"
)

// BlockK is the number of terms of an output element that one chain of fused
// multiply-adds covers. It is part of the definition of a matrix product's
// bits.
const BlockK = 256

// Cache blocking, which no bit depends on: rows of a and columns of b packed
// at a time. A packed block of a (192 KiB) stays in the second-level cache.
const (
	blockRows = 192
	blockCols = 2048
)

// Tile sizes of the plain Go path.
const (
	genericRows = 4
	genericCols = 16
)

// Mat is a view of a row-major matrix. The zero Mat has no elements.
type Mat struct {
	Data       []float32
	Rows, Cols int
	Stride     int  // elements from one stored row to the next
	trans      bool // Data holds the transposed matrix
}

// Matrix returns a view of data as rows × cols without gaps.
func Matrix(data []float32, rows, cols int) Mat {
	if len(data) < rows*cols {
		panic(fmt.Sprintf("kernel: %d elements do not fill %d x %d", len(data), rows, cols))
	}
	return Mat{Data: data, Rows: rows, Cols: cols, Stride: cols}
}

// T returns the transposed view of the same elements.
func (m Mat) T() Mat {
	m.Rows, m.Cols, m.trans = m.Cols, m.Rows, !m.trans
	return m
}

// check panics unless the view lies within its data.
func (m Mat) check(name string) {
	r, c := m.Rows, m.Cols
	if m.trans {
		r, c = c, r
	}
	if r < 0 || c < 0 || m.Stride < c || (r > 0 && c > 0 && (r-1)*m.Stride+c > len(m.Data)) {
		panic(fmt.Sprintf("kernel: matrix %s of %d x %d, stride %d, exceeds its %d elements", name, m.Rows, m.Cols, m.Stride, len(m.Data)))
	}
}

// MatMul sets c = a·b. c must not overlap a or b, and not be transposed.
func MatMul(p *Pool, c, a, b Mat) { matMul(p, c, a, b, nil, false) }

// MatMulAdd sets c = c + a·b.
func MatMulAdd(p *Pool, c, a, b Mat) { matMul(p, c, a, b, nil, true) }

// MatMulBias sets every row of c to bias, then c = c + a·b. bias has c.Cols
// elements.
func MatMulBias(p *Pool, c, a, b Mat, bias []float32) {
	sameLen("MatMulBias", c.Cols, len(bias))
	matMul(p, c, a, b, bias, true)
}

func matMul(p *Pool, c, a, b Mat, bias []float32, add bool) {
	if c.trans || a.Rows != c.Rows || b.Cols != c.Cols || a.Cols != b.Rows {
		panic(fmt.Sprintf("kernel: product of %d x %d and %d x %d into %d x %d (transposed %v)",
			a.Rows, a.Cols, b.Rows, b.Cols, c.Rows, c.Cols, c.trans))
	}
	a.check("a")
	b.check("b")
	c.check("c")
	if p.Threads() > 1 && c.Rows*c.Cols*a.Cols >= 1<<16 {
		matMulBands(p, c, a, b, bias, add)
		return
	}
	g := product{c: c, a: a, b: b, bias: bias, add: add}
	g.tileRows, g.tileCols = tileShape()
	g.run(0, c.Rows, 0, c.Cols)
}

// matMulBands is matMul on several threads. It is a function of its own so
// that the product on one thread needs no memory from the heap.
func matMulBands(p *Pool, c, a, b Mat, bias []float32, add bool) {
	g := &product{c: c, a: a, b: b, bias: bias, add: add}
	g.tileRows, g.tileCols = tileShape()
	// Each thread computes a band of the output: of columns, which repeats
	// the packing of a, or of rows, which repeats that of b.
	if c.Cols >= c.Rows {
		p.For(c.Cols, g.tileCols, func(lo, hi int) { g.run(0, c.Rows, lo, hi) })
	} else {
		p.For(c.Rows, g.tileRows, func(lo, hi int) { g.run(lo, hi, 0, c.Cols) })
	}
}

// product is one matrix product: the blocked algorithm of K. Goto and R. van
// de Geijn, "Anatomy of high-performance matrix multiplication", 2008.
type product struct {
	c, a, b            Mat
	bias               []float32
	add                bool
	tileRows, tileCols int
}

// packed is the memory of packed blocks and of a tile at the edge.
type packed struct {
	a, b []float32
	edge [maxTileRows * maxTileCols]float32
}

// The largest tile of any path, and how far packing may write past a panel.
const (
	maxTileRows = 12
	maxTileCols = 32
	packSlack   = 16
)

var packedPool = sync.Pool{New: func() any { return new(packed) }}

// grow returns a slice of n elements, reusing s where it is large enough.
func grow(s []float32, n int) []float32 {
	if cap(s) < n {
		return make([]float32, n)
	}
	return s[:n]
}

// run computes rows [i0, i1) and columns [j0, j1) of the output.
func (g *product) run(i0, i1, j0, j1 int) {
	if g.a.Cols == 0 {
		g.runEmpty(i0, i1, j0, j1)
		return
	}
	w := packedPool.Get().(*packed)
	defer packedPool.Put(w)
	for jc := j0; jc < j1; jc += blockCols {
		nc := min(blockCols, j1-jc)
		for kc := 0; kc < g.a.Cols; kc += BlockK {
			k := min(BlockK, g.a.Cols-kc)
			w.b = grow(w.b, (nc+g.tileCols-1)/g.tileCols*g.tileCols*k+packSlack)
			g.pack(w.b, g.b, jc, nc, kc, k, g.tileCols)
			if nc <= g.tileCols && hasTileDirect() {
				// Packing a would cost more than it saves: it is used once.
				g.block(w, i0, i1-i0, jc, nc, kc, k, true)
				continue
			}
			for ic := i0; ic < i1; ic += blockRows {
				mc := min(blockRows, i1-ic)
				w.a = grow(w.a, mc*k+packSlack)
				g.pack(w.a, g.a.T(), ic, mc, kc, k, 0)
				g.block(w, ic, mc, jc, nc, kc, k, false)
			}
		}
	}
}

// runEmpty gives a product over no terms.
func (g *product) runEmpty(i0, i1, j0, j1 int) {
	for i := i0; i < i1; i++ {
		row := g.c.Data[i*g.c.Stride:][j0:j1]
		switch {
		case g.bias != nil:
			copy(row, g.bias[j0:j1])
		case !g.add:
			clear(row)
		}
	}
}

// block multiplies a block of a, packed or where it lies, with a packed one of
// b.
func (g *product) block(w *packed, ic, mc, jc, nc, kc, k int, direct bool) {
	rowStep, termStep := g.a.Stride, 1
	if g.a.trans {
		rowStep, termStep = termStep, rowStep
	}
	c, stride := g.c.Data, g.c.Stride
	add := g.add || kc > 0
	bias := g.bias
	if kc > 0 {
		bias = nil
	}
	for jr := 0; jr < nc; jr += g.tileCols {
		cols := min(g.tileCols, nc-jr)
		pb := w.b[jr*k:]
		for ir := 0; ir < mc; ir += g.tileRows {
			rows := min(g.tileRows, mc-ir)
			at := (ic+ir)*stride + jc + jr
			// What the product is added to.
			out, outStride := c[at:], stride
			var from []float32
			fromStride := stride
			switch {
			case cols < g.tileCols:
				out, outStride = w.edge[:], g.tileCols
			case bias != nil:
				from, fromStride = bias[jc+jr:], 0
			case add:
				from = out
			}
			if direct {
				tileDirect(rows, k, g.a.Data[(ic+ir)*rowStep+kc*termStep:], rowStep, termStep, pb, out, outStride, from, fromStride)
			} else {
				tile(rows, k, w.a[ir*k:], pb, out, outStride, from, fromStride)
			}
			if cols == g.tileCols {
				continue
			}
			for i := range rows {
				row := c[at+i*stride:][:cols]
				if bias != nil {
					copy(row, bias[jc+jr:])
				}
				for j, v := range w.edge[i*g.tileCols:][:cols] {
					if add {
						row[j] += v
					} else {
						row[j] = v
					}
				}
			}
		}
	}
}

// pack copies columns [j0, j0+n) of terms [k0, k0+k) of m, whose rows are the
// terms, into panels: each holds, term after term, the neighbouring elements
// that one tile needs. Panels are width wide, the last one filled up with
// anything; with width 0 they are tileRows wide and the last is narrower.
func (g *product) pack(dst []float32, m Mat, j0, n, k0, k, width int) {
	w := width
	if width == 0 {
		w = g.tileRows
	}
	for j := 0; j < n; j += w {
		have := min(w, n-j)
		stride := w
		if width == 0 {
			stride = have
		}
		if m.trans {
			packTrans(dst[j*k:], m.Data[(j0+j)*m.Stride+k0:], m.Stride, k, have, stride)
		} else {
			packCopy(dst[j*k:], m.Data[k0*m.Stride+j0+j:], m.Stride, k, have, stride)
		}
	}
}

// packCopyGeneric sets dst[p·dstStride+i] = src[p·srcStride+i] for p < k and
// i < n. It may write anything up to packSlack elements past the panel.
func packCopyGeneric(dst, src []float32, srcStride, k, n, dstStride int) {
	for p := range k {
		copy(dst[p*dstStride:][:n], src[p*srcStride:][:n])
	}
}

// packTransGeneric sets dst[p·dstStride+i] = src[i·srcStride+p].
func packTransGeneric(dst, src []float32, srcStride, k, n, dstStride int) {
	for i := range n {
		for p, v := range src[i*srcStride:][:k] {
			dst[p*dstStride+i] = v
		}
	}
}
