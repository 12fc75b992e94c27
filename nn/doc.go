// Package nn holds layers with explicit derivatives and the models built from
// them: a decoder-only transformer over tokens, [GPT], and a classifier,
// [Classifier].
//
// A layer is a small value that describes itself, such as
// Linear{In: 64, Out: 10}. It owns no parameters and keeps no state, as
// [trainer.Layer] demands. The layers are made of package kernel, as your own can
// be. [Sequence] and [Residual] make one layer of several, and [Named] names the
// parameters inside:
//
//	nn.Residual(
//		nn.Named("norm", nn.LayerNorm{Width: 64}),
//		nn.Named("mlp", nn.MLP{Width: 64}),
//		nn.Dropout{Prob: 0.1},
//	)
//
// Activations are float32 tensors whose first dimension counts samples; most
// layers work on the last dimension, of the given width, and take any shape
// before it. A tensor of another width, a token outside the vocabulary or a
// sequence longer than the context is an error of the program: the layer panics
// with a message that says so.
//
// Every layer gives the same bits on any number of threads. Layers are safe
// for concurrent use with different contexts.
package nn

import (
	"fmt"

	"github.com/soliton-train/soliton/kernel"
	"github.com/soliton-train/soliton/trainer"
)

// matrix views x as a matrix of the given width.
func matrix(layer string, x trainer.Tensor, width int) kernel.Mat {
	if x.F == nil || len(x.Shape) < 2 || x.Cols() != width {
		panic(fmt.Sprintf("nn: %s of width %d was given %v%v: its last dimension must be %d", layer, width, x.Kind(), x.Shape, width))
	}
	return kernel.Matrix(x.F, x.Rows(), width)
}

// like returns a new tensor of the shape of x.
func like(c *trainer.Context, x trainer.Tensor) trainer.Tensor { return c.Tensor(x.Shape...) }

// withCols returns a new tensor of the shape of x, but for its last dimension.
func withCols(c *trainer.Context, x trainer.Tensor, cols int) trainer.Tensor {
	shape := append([]int(nil), x.Shape...)
	shape[len(shape)-1] = cols
	return c.Tensor(shape...)
}

// grain is the number of elements of a vector operation worth a thread.
const grain = 4096
