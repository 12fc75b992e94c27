package trainer

import (
	"fmt"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/rng"
)

// Tensor is a row-major array of float32 or int32; see its methods.
type Tensor = tensor.Tensor

// Spec describes one sample of an input or target: shape and element type.
type Spec = tensor.Spec

// Kind is the element type of a [Tensor].
type Kind = tensor.Kind

// NewTensor returns a tensor of zeros in memory of its own. Layers take theirs from [Context.Tensor].
func NewTensor(kind Kind, shape ...int) Tensor { return tensor.Make(kind, shape...) }

// The element types.
const (
	Float32 = tensor.Float32
	Int32   = tensor.Int32
)

// Layer is one unit of a model: a pure function of its parameters and its
// input, with an explicit derivative.
//
// A layer keeps nothing in its fields between calls. What Backward needs of
// Forward travels in the stash, so any number of micro-batches may be in
// flight side by side, and one may be run again; trainertest.Layer checks
// that. A worker with several threads runs micro-batches at the same time, one
// on each, so what calls share, such as a table, they only read. All randomness comes from [Context.Rand], so that Backward, or a
// second Forward, draws the same numbers.
//
// Exactness: a result for a micro-batch must depend on nothing but the
// arguments. In particular it must not depend on [Context.Threads], and
// sums over rows go in row order. Go code that must give the same bits
// everywhere writes float32(x*y) + z, because some builds fuse x*y + z.
type Layer interface {
	// Params declares the parameters, in the order in which Forward and
	// Backward receive them. The declaration never changes. Those that
	// [Model].Tied names are another layer's.
	Params() []Param

	// Forward computes the output for the samples of one micro-batch. in and
	// the returned tensor are read-only from then on and stay valid until
	// Backward of the same micro-batch has returned, so a stash may refer to
	// both. The first dimension counts samples.
	Forward(c *Context, p []Tensor, in Tensor) (out Tensor, stash any)

	// Backward receives the gradient of the loss with respect to out, and
	// returns that with respect to in. It sets every element of the
	// parameters' gradients dp, whose content is unspecified before, to
	// the sum over the micro-batch, without scaling. A layer whose
	// input is int32 returns the zero Tensor.
	Backward(c *Context, p []Tensor, stash any, dout Tensor, dp []Tensor) (din Tensor)
}

// Param declares one parameter tensor of a layer.
type Param struct {
	Name  string // dotted, unique within the layer, such as "attention.weight"
	Shape []int
	Init  Init
	// NoDecay exempts the parameter from weight decay. Vectors (gains and
	// biases) usually set it.
	NoDecay bool
	// LRScale multiplies the learning rate for the parameter; 0 means 1.
	LRScale float64
	// WeightDecay is that of the parameter, unless NoDecay is set; 0 means that of the optimizer.
	WeightDecay float64
}

// Init is the distribution of a parameter's first values. They follow from the
// job's seed and the positions of layer and parameter. The zero value means all
// zeros.
type Init struct {
	Kind  InitKind
	Scale float32 // Normal: standard deviation; Uniform: bound; Constant: value
}

// InitKind names a distribution of first values.
type InitKind uint8

// The kinds of initialisation.
const (
	InitZeros    InitKind = iota
	InitConstant          // every element is Scale
	InitNormal            // normal distribution, mean 0, standard deviation Scale
	InitUniform           // uniform in [-Scale, Scale)
)

// Fill sets x, the elements of a parameter in order, to its first values: a
// function of the seed, the layer's position in the model, the parameter's
// position in the layer, and the element's index.
func (i Init) Fill(x []float32, seed uint64, layer, param int) {
	switch i.Kind {
	case InitZeros:
		clear(x)
	case InitConstant:
		for j := range x {
			x[j] = i.Scale
		}
	case InitNormal:
		kernel.Normals(x, seed, rng.Place{Sample: uint32(param), Layer: uint16(layer)}, i.Scale)
	case InitUniform:
		s := rng.New(seed, rng.Place{Sample: uint32(param), Layer: uint16(layer)})
		for j := range x {
			x[j] = (float32(2*s.Float32()) - 1) * i.Scale
		}
	default:
		panic(fmt.Sprintf("trainer: initialiser of unknown kind %d", i.Kind))
	}
}

// Zeros initialises every element with 0.
func Zeros() Init { return Init{} }

// Ones initialises every element with 1.
func Ones() Init { return Init{Kind: InitConstant, Scale: 1} }

// Normal draws from a normal distribution of mean 0.
func Normal(std float32) Init { return Init{Kind: InitNormal, Scale: std} }

// Uniform draws evenly from [-bound, bound).
func Uniform(bound float32) Init { return Init{Kind: InitUniform, Scale: bound} }

// Loss ends a model: it compares the last layer's output with the targets.
// Like a layer it is pure and keeps nothing in its fields, and calls of it may run
// at the same time.
type Loss interface {
	// Loss returns the sum of the losses over the micro-batch's targets, in
	// row order, the number of targets that counted, and the gradient of that
	// sum with respect to out. When c.Train() is false the gradient is not
	// used and may be the zero Tensor.
	Loss(c *Context, out, target Tensor) (sum float64, count int64, dout Tensor)
}
