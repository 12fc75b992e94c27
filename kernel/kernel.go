// Package kernel holds the compute kernels that the layers of package nn are made of, for layers of your own: the matrix
// product and the vector operations around it, in AVX-512, AVX2 or plain Go.
//
//	func (l linear) Forward(c *trainer.Context, p []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
//		out := c.Tensor(in.Shape[0], l.out)
//		kernel.MatMul(c.Pool(), kernel.Matrix(out.F, in.Shape[0], l.out), kernel.Matrix(in.F, in.Shape[0], l.in), kernel.Matrix(p[0].F, l.in, l.out))
//		return out, in
//	}
//
// # The same bits
//
// A result depends on the operands only: not on the number of threads, not on what else is in the call, and not on the
// instructions that compute it.
//
//   - An element of a matrix product is one chain of fused multiply-adds over each block of 256 terms, in ascending order;
//     blocks are added one after the other.
//   - A reduction along a row uses 16 lanes and one fixed fold.
//   - A reduction over rows goes in row order. Threads split columns.
//
// # Threads
//
// Functions that take a [Pool] use its threads and return when the work is done. [trainer.Context.Pool] is the worker's pool.
// A nil pool, and one that is in use (inside [Pool.For] or trainer.Context.For), computes in the calling goroutine. The other
// functions always do. All functions are safe for concurrent use on disjoint outputs.
//
// [trainer.Context.Pool]: https://pkg.go.dev/github.com/soliton-train/soliton/trainer#Context.Pool
package kernel

import (
	"fmt"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/rng"
)

// Pool is a worker's compute threads.
type Pool = kernel.Pool

// Mat is a view of a row-major matrix. Stride is the distance of two stored rows in elements, so that a part of a matrix is a
// Mat, too.
type Mat = kernel.Mat

// Matrix returns a view of data as rows × cols without gaps.
func Matrix(data []float32, rows, cols int) Mat { return kernel.Matrix(data, rows, cols) }

// MatMul sets c = a·b. c must not overlap a or b, and not be transposed.
func MatMul(p *Pool, c, a, b Mat) { kernel.MatMul(p, c, a, b) }

// MatMulAdd sets c = c + a·b.
func MatMulAdd(p *Pool, c, a, b Mat) { kernel.MatMulAdd(p, c, a, b) }

// MatMulBias sets every row of c to bias, then c = c + a·b. bias has c.Cols elements.
func MatMulBias(p *Pool, c, a, b Mat, bias []float32) { kernel.MatMulBias(p, c, a, b, bias) }

// SumRows sets dst[j] to the sum over i, in row order, of x[i][j], where x has the given number of rows and columns.
func SumRows(p *Pool, dst, x []float32, rows, cols int) { kernel.SumRows(p, dst, x, rows, cols) }

// GELU sets dst to x/2·(1 + tanh(√(2/π)(x + 0.044715x³))), element by element (D. Hendrycks and K. Gimpel, "Gaussian error
// linear units", 2016). dst may be x.
func GELU(p *Pool, dst, x []float32) { kernel.GELU(p, dst, x) }

// GELUBackward sets dx to dout times the derivative of GELU at x. dx may be dout.
func GELUBackward(p *Pool, dx, x, dout []float32) { kernel.GELUBackward(p, dx, x, dout) }

// LayerNorm normalises each of rows rows of cols elements to mean 0 and variance 1, with eps added to the variance, and sets
// out = normalised·gain + bias. mean and rstd, of rows elements, receive the row's mean and the reciprocal of its standard
// deviation for the backward pass.
func LayerNorm(p *Pool, out, mean, rstd, x, gain, bias []float32, rows, cols int, eps float32) {
	kernel.LayerNorm(p, out, mean, rstd, x, gain, bias, rows, cols, eps)
}

// LayerNormBackward is the backward pass of [LayerNorm]: it sets dx, and sets dgain and dbias to sums over the rows.
func LayerNormBackward(p *Pool, dx, dgain, dbias, dout, x, mean, rstd, gain []float32, rows, cols int) {
	kernel.LayerNormBackward(p, dx, dgain, dbias, dout, x, mean, rstd, gain, rows, cols)
}

// CrossEntropy returns the sum, in row order, of −log softmax(logits)[target] over rows rows of cols logits, and the number
// of rows that counted: a row with target −1 does not. Other targets must lie in [0, cols).
//
// Unless it is nil, dlogits, which may be logits, receives the gradient of the sum.
func CrossEntropy(p *Pool, dlogits, logits []float32, targets []int32, rows, cols int) (sum float64, count int64) {
	return kernel.CrossEntropy(p, dlogits, logits, targets, rows, cols)
}

// Softmax sets dst to exp(scale·x) divided by its sum, for one row and a positive scale. dst may be x.
func Softmax(dst, x []float32, scale float32) { kernel.Softmax(dst, x, scale) }

// SoftmaxBackward sets dx = scale·y·(dy − y·dy) for one row y of a softmax with that scale. dx may be dy.
func SoftmaxBackward(dx, y, dy []float32, scale float32) { kernel.SoftmaxBackward(dx, y, dy, scale) }

// Dropout sets each element of dst to 0 with probability prob, else to x/(1 − prob). dst may be x. The elements that it drops
// follow from the stream s and their index only, so the same call with x = dout is the backward pass.
//
// dst and x may be the part of a longer slice that starts at element offset, a multiple of 64: the parts of a slice, in any
// order or at once, give what one call for the whole slice gives.
func Dropout(dst, x []float32, offset int, prob float32, s rng.Stream) {
	kernel.Dropout(dst, x, offset, prob, s)
}

// Add sets dst = a + b, element by element. dst may be a or b.
func Add(dst, a, b []float32) { kernel.Add(dst, a, b) }

// Scale sets dst = s·a, element by element. dst may be a.
func Scale(dst, a []float32, s float32) { kernel.Scale(dst, a, s) }

// AddScaled sets dst = dst + s·a, element by element: a product and an addition, each rounded (BLAS calls it axpy).
func AddScaled(dst, a []float32, s float32) {
	if len(dst) != len(a) {
		panic(fmt.Sprintf("kernel: AddScaled of operands of %d and %d elements", len(dst), len(a)))
	}
	var product [512]float32
	for len(dst) > 0 {
		n := min(len(dst), len(product))
		kernel.Scale(product[:n], a[:n], s)
		kernel.Add(dst[:n], dst[:n], product[:n])
		dst, a = dst[n:], a[n:]
	}
}

// Dot returns the inner product of two rows.
func Dot(a, b []float32) float32 { return kernel.Dot(a, b) }

// Sum returns the sum of a row.
func Sum(x []float32) float32 { return kernel.Sum(x) }

// Max returns the largest element of a row, −Inf if it is empty. The result for a row that holds a NaN is fixed but not
// specified.
func Max(x []float32) float32 { return kernel.Max(x) }

// Exp returns e^x with an error below 2 ulp. Below -87.34 it is 0, above 88.37 it is +Inf; NaN stays NaN.
func Exp(x float32) float32 { return kernel.Exp(x) }

// Log returns the natural logarithm of x with an error of a few ulp: -Inf for 0, NaN for negative x.
func Log(x float64) float64 { return kernel.Log(x) }
