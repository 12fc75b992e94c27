// Package tensor holds the value that flows between layers, stages and
// workers, and the arenas its memory comes from.
//
// A Tensor is a plain view: it owns nothing, and copying it copies the view.
// It is row-major, and its first dimension counts rows (samples, or samples
// times positions).
package tensor

import (
	"fmt"
	"slices"
)

// Kind is the element type of a tensor.
type Kind uint8

// The two element types that inputs, targets and activations may have.
const (
	Float32 Kind = iota
	Int32
)

// String names the kind as it appears in messages.
func (k Kind) String() string {
	if k == Int32 {
		return "int32"
	}
	return "float32"
}

// Spec describes one sample: its shape, without the sample dimension, and
// its element type.
type Spec struct {
	Shape []int
	Kind  Kind
}

// Len returns the number of elements of one sample.
func (s Spec) Len() int { return Size(s.Shape) }

// String renders the spec as "int32[128]".
func (s Spec) String() string { return fmt.Sprintf("%v%v", s.Kind, s.Shape) }

// Equal reports whether both specs describe the same samples.
func (s Spec) Equal(o Spec) bool { return s.Kind == o.Kind && slices.Equal(s.Shape, o.Shape) }

// Size returns the number of elements of a shape; that of an empty shape is 1.
func Size(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// MaxElements bounds a tensor and a layer's parameters, so that sizes in bytes cannot overflow.
const MaxElements = 1 << 40

// CheckedSize is Size for a shape that comes from elsewhere. ok is false if a dimension is below 1, or the size above [MaxElements].
func CheckedSize(shape []int) (n int, ok bool) {
	n = 1
	for _, d := range shape {
		if d < 1 || n > MaxElements/d {
			return 0, false
		}
		n *= d
	}
	return n, true
}

// Tensor is a row-major array. Exactly one of F and I is set, by kind.
type Tensor struct {
	Shape []int
	F     []float32
	I     []int32
}

// New allocates a float32 tensor of zeros.
func New(shape ...int) Tensor {
	return Tensor{Shape: slices.Clone(shape), F: make([]float32, Size(shape))}
}

// NewInt allocates an int32 tensor of zeros.
func NewInt(shape ...int) Tensor {
	return Tensor{Shape: slices.Clone(shape), I: make([]int32, Size(shape))}
}

// Make allocates a tensor of zeros.
func Make(kind Kind, shape ...int) Tensor {
	if kind == Int32 {
		return NewInt(shape...)
	}
	return New(shape...)
}

// Of wraps data, which is not copied, in a float32 tensor of the given shape.
// It panics if the sizes differ.
func Of(data []float32, shape ...int) Tensor {
	if len(data) != Size(shape) {
		panic(fmt.Sprintf("tensor: %d elements do not fill shape %v", len(data), shape))
	}
	return Tensor{Shape: shape, F: data}
}

// Kind returns the element type.
func (t Tensor) Kind() Kind {
	if t.I != nil {
		return Int32
	}
	return Float32
}

// Len returns the number of elements.
func (t Tensor) Len() int { return Size(t.Shape) }

// Cols returns the size of the last dimension.
func (t Tensor) Cols() int { return t.Shape[len(t.Shape)-1] }

// Rows returns the number of rows when the tensor is seen as a matrix of
// Cols columns.
func (t Tensor) Rows() int { return Size(t.Shape[:len(t.Shape)-1]) }

// Reshape returns a view of the same elements under another shape of the
// same size. It panics if the sizes differ.
func (t Tensor) Reshape(shape ...int) Tensor {
	if Size(shape) != t.Len() {
		panic(fmt.Sprintf("tensor: shape %v does not fit %v", shape, t.Shape))
	}
	t.Shape = shape
	return t
}
