package kernel

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// The switches below call the kernels directly, so that operands on the stack stay there.

func available() []Path {
	paths := []Path{Generic}
	x := &cpu.X86
	if x.HasAVX2 && x.HasFMA {
		paths = append(paths, AVX2)
		if x.HasAVX512F && x.HasAVX512BW && x.HasAVX512DQ && x.HasAVX512VL {
			paths = append(paths, AVX512)
		}
	}
	return paths
}

func add(dst, a, b []float32) {
	switch active {
	case AVX512:
		addAVX512(dst, a, b)
	case AVX2:
		addAVX2(dst, a, b)
	default:
		addGeneric(dst, a, b)
	}
}

func scale(dst, a []float32, s float32) {
	switch active {
	case AVX512:
		scaleAVX512(dst, a, s)
	case AVX2:
		scaleAVX2(dst, a, s)
	default:
		scaleGeneric(dst, a, s)
	}
}

func gelu(dst, x []float32) {
	switch active {
	case AVX512:
		geluAVX512(dst, x)
	case AVX2:
		geluAVX2(dst, x)
	default:
		geluGeneric(dst, x)
	}
}

func geluBackward(dx, x, dout []float32) {
	switch active {
	case AVX512:
		geluBackwardAVX512(dx, x, dout)
	case AVX2:
		geluBackwardAVX2(dx, x, dout)
	default:
		geluBackwardGeneric(dx, x, dout)
	}
}

func sumLanes(acc *[lanes]float32, x []float32) {
	switch active {
	case AVX512:
		sumLanesAVX512(acc, x)
	case AVX2:
		sumLanesAVX2(acc, x)
	default:
		sumLanesGeneric(acc, x)
	}
}

func dotLanes(acc *[lanes]float32, a, b []float32) {
	switch active {
	case AVX512:
		dotLanesAVX512(acc, a, b)
	case AVX2:
		dotLanesAVX2(acc, a, b)
	default:
		dotLanesGeneric(acc, a, b)
	}
}

func sqDevLanes(acc *[lanes]float32, x []float32, mean float32) {
	switch active {
	case AVX512:
		sqDevLanesAVX512(acc, x, mean)
	case AVX2:
		sqDevLanesAVX2(acc, x, mean)
	default:
		sqDevLanesGeneric(acc, x, mean)
	}
}

func maxLanes(acc *[lanes]float32, x []float32) {
	switch active {
	case AVX512:
		maxLanesAVX512(acc, x)
	case AVX2:
		maxLanesAVX2(acc, x)
	default:
		maxLanesGeneric(acc, x)
	}
}

func expLanes(acc *[lanes]float32, dst, x []float32, peak, scale float32) {
	switch active {
	case AVX512:
		expLanesAVX512(acc, dst, x, peak, scale)
	case AVX2:
		expLanesAVX2(acc, dst, x, peak, scale)
	default:
		expLanesGeneric(acc, dst, x, peak, scale)
	}
}

func softmaxApply(dx, y, dy []float32, dot, scale float32) {
	switch active {
	case AVX512:
		softmaxApplyAVX512(dx, y, dy, dot, scale)
	case AVX2:
		softmaxApplyAVX2(dx, y, dy, dot, scale)
	default:
		softmaxApplyGeneric(dx, y, dy, dot, scale)
	}
}

func normApply(out, x, gain, bias []float32, mean, rstd float32) {
	switch active {
	case AVX512:
		normApplyAVX512(out, x, gain, bias, mean, rstd)
	case AVX2:
		normApplyAVX2(out, x, gain, bias, mean, rstd)
	default:
		normApplyGeneric(out, x, gain, bias, mean, rstd)
	}
}

func normBackLanes(acc1, acc2 *[lanes]float32, dout, x, gain []float32, mean, rstd float32) {
	switch active {
	case AVX512:
		normBackLanesAVX512(acc1, acc2, dout, x, gain, mean, rstd)
	case AVX2:
		normBackLanesAVX2(acc1, acc2, dout, x, gain, mean, rstd)
	default:
		normBackLanesGeneric(acc1, acc2, dout, x, gain, mean, rstd)
	}
}

func normBackApply(dx, dout, x, gain []float32, mean, rstd, m1, m2 float32) {
	switch active {
	case AVX512:
		normBackApplyAVX512(dx, dout, x, gain, mean, rstd, m1, m2)
	case AVX2:
		normBackApplyAVX2(dx, dout, x, gain, mean, rstd, m1, m2)
	default:
		normBackApplyGeneric(dx, dout, x, gain, mean, rstd, m1, m2)
	}
}

func normGrad(dgain, dbias, dout, x []float32, mean, rstd float32) {
	switch active {
	case AVX512:
		normGradAVX512(dgain, dbias, dout, x, mean, rstd)
	case AVX2:
		normGradAVX2(dgain, dbias, dout, x, mean, rstd)
	default:
		normGradGeneric(dgain, dbias, dout, x, mean, rstd)
	}
}

func dropout(dst, x []float32, threshold uint32, scale float32, ctr [4]uint32, key [2]uint32) {
	switch active {
	case AVX512:
		dropoutAVX512(dst, x, threshold, scale, &ctr[0], &key[0])
	case AVX2:
		dropoutAVX2(dst, x, threshold, scale, &ctr[0], &key[0])
	default:
		dropoutGeneric(dst, x, threshold, scale, ctr, key)
	}
}

// hasNormals reports whether normals may be called.
func hasNormals() bool { return active != Generic }

// normals sets dst to normal numbers times scale, of a block of the stream each.
func normals(dst []float32, scale float32, ctr [4]uint32, key [2]uint32) {
	if active == AVX512 {
		normalsAVX512(dst, scale, &ctr[0], &key[0])
	} else {
		normalsAVX2(dst, scale, &ctr[0], &key[0])
	}
}

func foldSum(acc *[lanes]float32) float32 {
	switch active {
	case AVX512:
		return foldSumAVX512(acc)
	case AVX2:
		return foldSumAVX2(acc)
	default:
		return foldSumGeneric(acc)
	}
}

func foldMax(acc *[lanes]float32) float32 {
	switch active {
	case AVX512:
		return foldMaxAVX512(acc)
	case AVX2:
		return foldMaxAVX2(acc)
	default:
		return foldMaxGeneric(acc)
	}
}

func adamW(params, m, v, grad []float32, h *adamWCoef) {
	switch active {
	case AVX512:
		adamWAVX512(params, m, v, grad, &h.grad)
	case AVX2:
		adamWAVX2(params, m, v, grad, &h.grad)
	default:
		adamWGeneric(params, m, v, grad, h)
	}
}

func sgd(params, m, grad []float32, h *sgdCoef) {
	switch active {
	case AVX512:
		sgdAVX512(params, m, grad, &h.grad)
	case AVX2:
		sgdAVX2(params, m, grad, &h.grad)
	default:
		sgdGeneric(params, m, grad, h)
	}
}

func sumSquares(acc *[lanes]float64, x []float32) {
	switch active {
	case AVX512:
		sumSquaresAVX512(acc, x)
	case AVX2:
		sumSquaresAVX2(acc, x)
	default:
		sumSquaresGeneric(acc, x)
	}
}

func digest(acc *[digestLanes]uint32, x []float32) {
	switch active {
	case AVX512:
		digestAVX512(acc, x)
	case AVX2:
		digestAVX2(acc, x)
	default:
		digestGeneric(acc, x)
	}
}

func tileShape() (rows, cols int) {
	switch active {
	case AVX512:
		return 12, 32
	case AVX2:
		return 6, 16
	default:
		return genericRows, genericCols
	}
}

// The kernels of a tile by its rows. Calls through a variable make operands escape, but these are in the heap anyway.
var (
	tileAVX2 = [...]func(k int, a, b, c *float32, stride int, from *float32, fromStride int){
		1: tile1AVX2, tile2AVX2, tile3AVX2, tile4AVX2, tile5AVX2, tile6AVX2,
	}
	tileAVX512 = [...]func(k int, a, b, c *float32, stride int, from *float32, fromStride int){
		1: tile1AVX512, tile2AVX512, tile3AVX512, tile4AVX512, tile5AVX512, tile6AVX512,
		tile7AVX512, tile8AVX512, tile9AVX512, tile10AVX512, tile11AVX512, tile12AVX512,
	}
	tileDirectAVX512 = [...]func(k int, a *float32, rowStep, termStep int, b, c *float32, stride int, from *float32, fromStride int){
		1: tileDirect1AVX512, tileDirect2AVX512, tileDirect3AVX512, tileDirect4AVX512, tileDirect5AVX512, tileDirect6AVX512,
		tileDirect7AVX512, tileDirect8AVX512, tileDirect9AVX512, tileDirect10AVX512, tileDirect11AVX512, tileDirect12AVX512,
	}
)

// tile sets a tile of c to the product of packed panels, plus what is in from, where that is not nil: a tile, or one row for all if its
// stride is 0.
func tile(rows, k int, a, b, c []float32, stride int, from []float32, fromStride int) {
	switch active {
	case AVX512:
		tileAVX512[rows](k, &a[0], &b[0], &c[0], stride, unsafe.SliceData(from), fromStride)
	case AVX2:
		tileAVX2[rows](k, &a[0], &b[0], &c[0], stride, unsafe.SliceData(from), fromStride)
	default:
		tileGeneric(rows, k, a, b, c, stride, from, fromStride)
	}
}

func packCopy(dst, src []float32, srcStride, k, n, dstStride int) {
	if active != AVX512 {
		packCopyGeneric(dst, src, srcStride, k, n, dstStride)
		return
	}
	packCopyAVX512(&dst[0], &src[0], srcStride, k, n, dstStride)
}

func packTrans(dst, src []float32, srcStride, k, n, dstStride int) {
	blocks := k / 16
	if active != AVX512 || blocks == 0 || n%4 != 0 {
		packTransGeneric(dst, src, srcStride, k, n, dstStride)
		return
	}
	for i := 0; i < n; i += 16 {
		d, s := &dst[i], &src[i*srcStride]
		switch n - i {
		case 4:
			packTrans4AVX512(d, s, srcStride, blocks, dstStride)
		case 8:
			packTrans8AVX512(d, s, srcStride, blocks, dstStride)
		case 12:
			packTrans12AVX512(d, s, srcStride, blocks, dstStride)
		default:
			packTrans16AVX512(d, s, srcStride, blocks, dstStride)
		}
	}
	if p := blocks * 16; p < k {
		packTransGeneric(dst[p*dstStride:], src[p:], srcStride, k-p, n, dstStride)
	}
}

// hasTileDirect reports whether tileDirect may be called.
func hasTileDirect() bool { return active == AVX512 }

// tileDirect is tile for an a that was not packed: its element of row i and
// term p is a[i·rowStep+p·termStep].
func tileDirect(rows, k int, a []float32, rowStep, termStep int, b, c []float32, stride int, from []float32, fromStride int) {
	tileDirectAVX512[rows](k, &a[0], rowStep, termStep, &b[0], &c[0], stride, unsafe.SliceData(from), fromStride)
}
