package nn

import (
	"fmt"
	"math"

	"github.com/soliton-train/soliton/kernel"
	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

// CausalAttention lets every position of a sequence attend to itself and the
// positions before it (A. Vaswani and others, "Attention is all you
// need", 2017): softmax(q·kᵀ/√d)·v in each of Heads heads of d = Width/Heads
// elements, between one projection to q, k and v and one of the heads' joint
// output.
//
// The output at a position has the same bits whatever follows it.
type CausalAttention struct {
	Width   int
	Heads   int     // a divisor of Width
	Dropout float64 // of the attention probabilities, in [0, 1)

	// Init and OutInit give the first weights of the projection to q, k and v
	// and of the output projection; see [Linear].
	Init, OutInit trainer.Init
}

func (a CausalAttention) parts() (qkv, out Linear) {
	return Linear{In: a.Width, Out: 3 * a.Width, Init: a.Init}, Linear{In: a.Width, Out: a.Width, Init: a.OutInit}
}

// Params declares "qkv.weight" [Width, 3·Width], "qkv.bias", "out.weight"
// [Width, Width] and "out.bias".
func (a CausalAttention) Params() []trainer.Param {
	qkv, out := a.parts()
	return append(prefixed("qkv.", qkv.Params()), prefixed("out.", out.Params())...)
}

// attentionStash is what Backward needs of Forward.
type attentionStash struct {
	in, qkv, heads trainer.Tensor

	// probs holds the probabilities of all heads, and dropped the same after
	// dropout, as [samples·heads, n, span(n)] in the layout of attentionHead.
	// They are one tensor when there is no dropout.
	probs, dropped trainer.Tensor
}

// Forward maps [samples, n, Width] to the same shape.
func (a CausalAttention) Forward(c *trainer.Context, p []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	matrix("CausalAttention", in, a.Width)
	if len(in.Shape) != 3 || a.Heads < 1 || a.Width%a.Heads != 0 {
		panic(fmt.Sprintf("nn: CausalAttention of width %d and %d heads was given %v%v: it takes [samples, n, width], and heads divide the width",
			a.Width, a.Heads, in.Kind(), in.Shape))
	}
	needDropout("CausalAttention", a.Dropout)
	samples, n := in.Shape[0], in.Shape[1]
	project, join := a.parts()
	s := &attentionStash{in: in}
	s.qkv, _ = project.Forward(c, p[:2], in)
	s.heads = like(c, in)
	s.probs = c.Tensor(samples*a.Heads, n, span(n))
	s.dropped = s.probs
	if a.Dropout > 0 && c.Train() {
		s.dropped = like(c, s.probs)
	}
	c.Pool().Each(samples*a.Heads, func(_, i int) {
		h := a.head(c, s, i)
		h.forward(a.matrix(s.heads, i, 0))
	})
	out, _ := join.Forward(c, p[2:], s.heads)
	return out, s
}

// Backward is the derivative of Forward.
func (a CausalAttention) Backward(c *trainer.Context, p []trainer.Tensor, stash any, dout trainer.Tensor, dp []trainer.Tensor) trainer.Tensor {
	s := stash.(*attentionStash)
	samples, n := s.in.Shape[0], s.in.Shape[1]
	project, join := a.parts()
	dheads := join.Backward(c, p[2:], s.heads, dout, dp[2:])
	dqkv := like(c, s.qkv)
	// One matrix of scores for each thread, so that it stays in its cache.
	scratch := c.Tensor(c.Threads(), n, span(n))
	c.Pool().Each(samples*a.Heads, func(thread, i int) {
		dscores := scratch.F[thread*n*span(n):][:n*span(n)]
		h := a.head(c, s, i)
		h.backward(a.matrix(dheads, i, 0), a.matrix(dqkv, i, 0), a.matrix(dqkv, i, 1), a.matrix(dqkv, i, 2), dscores)
	})
	return project.Backward(c, p[:2], s.in, dqkv, dp[:2])
}

// matrix returns the part of x, [samples, n, parts·Width], that belongs to
// head i of all samples' heads: n rows of d elements.
func (a CausalAttention) matrix(x trainer.Tensor, i, part int) kernel.Mat {
	n, stride, d := x.Shape[1], x.Shape[2], a.Width/a.Heads
	at := i/a.Heads*n*stride + part*a.Width + i%a.Heads*d
	return kernel.Mat{Data: x.F[at:], Rows: n, Cols: d, Stride: stride}
}

func (a CausalAttention) head(c *trainer.Context, s *attentionStash, i int) attentionHead {
	n := s.in.Shape[1]
	size := n * span(n)
	h := attentionHead{
		q: a.matrix(s.qkv, i, 0), k: a.matrix(s.qkv, i, 1), v: a.matrix(s.qkv, i, 2),
		probs:   s.probs.F[i*size:][:size],
		dropped: s.dropped.F[i*size:][:size],
		n:       n,
		scale:   float32(1 / math.Sqrt(float64(a.Width/a.Heads))),
	}
	if a.Dropout > 0 && c.Train() {
		h.drop, h.stream, h.first = float32(a.Dropout), c.Rand(i/a.Heads, 0), i%a.Heads*size
	}
	return h
}

// attentionHead is one head of one sample: n positions.
//
// Its matrices of scores and probabilities have a row for each position with
// span(n) columns. They are worked through in chunks of rows. The columns
// after the last position of a chunk, end, are left out of all products, and
// those after a row's own position hold zeros up to end: that is the causal
// mask. Chunks depend on nothing, so the same sums are made in the same order
// for a sequence and for its beginning.
type attentionHead struct {
	q, k, v        kernel.Mat // [n, d]
	probs, dropped []float32  // [n, span(n)]
	n              int
	scale          float32

	drop   float32 // probability of dropout, 0 outside of training
	stream rng.Stream
	first  int // the head's first element in the stream
}

// chunk is the number of rows of a chunk. Dropout starts at its multiples.
const chunk = 64

// span returns the columns that hold n positions: whole chunks, so that
// vector operations have no tail.
func span(n int) int { return (n + chunk - 1) / chunk * chunk }

// rows returns rows [lo, hi) of a matrix.
func rows(m kernel.Mat, lo, hi int) kernel.Mat {
	m.Data, m.Rows = m.Data[lo*m.Stride:], hi-lo
	return m
}

// scores returns rows [r0, r1) and columns [c0, c1) of a matrix of scores.
func (h *attentionHead) scores(x []float32, r0, r1, c0, c1 int) kernel.Mat {
	stride := span(h.n)
	return kernel.Mat{Data: x[r0*stride+c0:], Rows: r1 - r0, Cols: c1 - c0, Stride: stride}
}

var negInf = float32(math.Inf(-1))

// valid returns how many of the columns of row i its softmax reads: its
// positions filled up to a whole vector.
func valid(i int) int { return (i + 16) &^ 15 }

// forward sets out = dropout(softmax(scale·q·kᵀ))·v.
func (h *attentionHead) forward(out kernel.Mat) {
	for lo := 0; lo < h.n; lo += chunk {
		hi := min(lo+chunk, h.n)
		kernel.MatMul(nil, h.scores(h.probs, lo, hi, 0, hi), rows(h.q, lo, hi), rows(h.k, 0, hi).T())
		for i := lo; i < hi; i++ {
			at := i * span(h.n)
			y := h.probs[at : at+lo+chunk]
			w := valid(i)
			for j := i + 1; j < w; j++ {
				y[j] = negInf
			}
			kernel.Softmax(y[:w], y[:w], h.scale)
			clear(y[w:])
			if h.drop > 0 {
				kernel.Dropout(h.dropped[at:at+lo+chunk], y, h.first+at, h.drop, h.stream)
			}
		}
		kernel.MatMul(nil, rows(out, lo, hi), h.scores(h.dropped, lo, hi, 0, hi), rows(h.v, 0, hi))
	}
}

// backward sets dq, dk and dv. dscores is scratch memory for a matrix of
// scores.
func (h *attentionHead) backward(dout, dq, dk, dv kernel.Mat, dscores []float32) {
	for lo := 0; lo < h.n; lo += chunk {
		hi := min(lo+chunk, h.n)
		kernel.MatMul(nil, h.scores(dscores, lo, hi, 0, hi), rows(dout, lo, hi), rows(h.v, 0, hi).T())
		for i := lo; i < hi; i++ {
			at := i * span(h.n)
			d := dscores[at : at+lo+chunk]
			clear(d[i+1:])
			if h.drop > 0 {
				kernel.Dropout(d, d, h.first+at, h.drop, h.stream)
			}
			w := valid(i)
			kernel.SoftmaxBackward(d[:w], h.probs[at:][:w], d[:w], h.scale)
		}
		kernel.MatMul(nil, rows(dq, lo, hi), h.scores(dscores, lo, hi, 0, hi), rows(h.k, 0, hi))
	}
	// The rows before a chunk of columns hold zeros in them.
	for lo := 0; lo < h.n; lo += chunk {
		hi := min(lo+chunk, h.n)
		kernel.MatMul(nil, rows(dk, lo, hi), h.scores(dscores, lo, h.n, lo, hi).T(), rows(h.q, lo, h.n))
		kernel.MatMul(nil, rows(dv, lo, hi), h.scores(h.dropped, lo, h.n, lo, hi).T(), rows(dout, lo, h.n))
	}
}
