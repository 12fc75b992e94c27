//go:build !amd64

package kernel

func available() []Path { return []Path{Generic} }

func tileShape() (rows, cols int) { return genericRows, genericCols }

func tile(rows, k int, a, b, c []float32, stride int, from []float32, fromStride int) {
	tileGeneric(rows, k, a, b, c, stride, from, fromStride)
}

func packCopy(dst, src []float32, srcStride, k, n, dstStride int) {
	packCopyGeneric(dst, src, srcStride, k, n, dstStride)
}

func packTrans(dst, src []float32, srcStride, k, n, dstStride int) {
	packTransGeneric(dst, src, srcStride, k, n, dstStride)
}

func foldSum(acc *[lanes]float32) float32 { return foldSumGeneric(acc) }

func foldMax(acc *[lanes]float32) float32 { return foldMaxGeneric(acc) }

func add(dst, a, b []float32) { addGeneric(dst, a, b) }

func scale(dst, a []float32, s float32) { scaleGeneric(dst, a, s) }

func gelu(dst, x []float32) { geluGeneric(dst, x) }

func geluBackward(dx, x, dout []float32) { geluBackwardGeneric(dx, x, dout) }

func sumLanes(acc *[lanes]float32, x []float32) { sumLanesGeneric(acc, x) }

func dotLanes(acc *[lanes]float32, a, b []float32) { dotLanesGeneric(acc, a, b) }

func sqDevLanes(acc *[lanes]float32, x []float32, mean float32) { sqDevLanesGeneric(acc, x, mean) }

func maxLanes(acc *[lanes]float32, x []float32) { maxLanesGeneric(acc, x) }

func expLanes(acc *[lanes]float32, dst, x []float32, peak, scale float32) {
	expLanesGeneric(acc, dst, x, peak, scale)
}

func softmaxApply(dx, y, dy []float32, dot, scale float32) {
	softmaxApplyGeneric(dx, y, dy, dot, scale)
}

func normApply(out, x, gain, bias []float32, mean, rstd float32) {
	normApplyGeneric(out, x, gain, bias, mean, rstd)
}

func normBackLanes(acc1, acc2 *[lanes]float32, dout, x, gain []float32, mean, rstd float32) {
	normBackLanesGeneric(acc1, acc2, dout, x, gain, mean, rstd)
}

func normBackApply(dx, dout, x, gain []float32, mean, rstd, m1, m2 float32) {
	normBackApplyGeneric(dx, dout, x, gain, mean, rstd, m1, m2)
}

func normGrad(dgain, dbias, dout, x []float32, mean, rstd float32) {
	normGradGeneric(dgain, dbias, dout, x, mean, rstd)
}

func dropout(dst, x []float32, threshold uint32, scale float32, ctr [4]uint32, key [2]uint32) {
	dropoutGeneric(dst, x, threshold, scale, ctr, key)
}

func adamW(params, m, v, grad []float32, h *adamWCoef) { adamWGeneric(params, m, v, grad, h) }

func sgd(params, m, grad []float32, h *sgdCoef) { sgdGeneric(params, m, grad, h) }

func sumSquares(acc *[lanes]float64, x []float32) { sumSquaresGeneric(acc, x) }

func digest(acc *[digestLanes]uint32, x []float32) { digestGeneric(acc, x) }

func hasNormals() bool { return false }

func normals([]float32, float32, [4]uint32, [2]uint32) { panic("kernel: no such kernel") }

func hasTileDirect() bool { return false }

func tileDirect(int, int, []float32, int, int, []float32, []float32, int, []float32, int) {
	panic("kernel: no such kernel")
}
