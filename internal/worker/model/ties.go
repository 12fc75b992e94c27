package model

import (
	"fmt"
	"math"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/tensor"
)

// Ties says which tensors that layers declare are tensors of earlier layers. The first layer that declares a shared tensor owns it: only
// there it is part of [Params]. The others borrow it. Its value crosses every boundary from its owner to its last borrower behind the
// output of the layer, and the sum of the borrowers' gradients crosses them on the way back. The zero value has no ties.
type Ties struct {
	numbers [][]int // for each tensor that a layer declares, the number of the shared one, or -1; nil without any
	shared  []sharedTensor
}

type sharedTensor struct {
	shape       []int
	owner, last int // layers
}

// Place is a tensor among those that a layer declares.
type Place struct{ Layer, Tensor int }

// Tie makes the tensor at borrower, of a later layer, the one at owner. declared are the numbers of tensors of all layers.
func (t *Ties) Tie(owner, borrower Place, shape []int, declared []int) {
	if t.numbers == nil {
		t.numbers = make([][]int, len(declared))
	}
	for _, p := range []Place{owner, borrower} {
		if t.numbers[p.Layer] == nil {
			t.numbers[p.Layer] = slices.Repeat([]int{-1}, declared[p.Layer])
		}
	}
	number := &t.numbers[owner.Layer][owner.Tensor]
	if *number < 0 {
		*number = len(t.shared)
		t.shared = append(t.shared, sharedTensor{shape: shape, owner: owner.Layer})
	}
	t.numbers[borrower.Layer][borrower.Tensor] = *number
	s := &t.shared[*number]
	s.last = max(s.last, borrower.Layer)
}

// Borrows reports whether a tensor that a layer declares is that of an earlier layer.
func (t *Ties) Borrows(p Place) bool {
	if t.numbers == nil || t.numbers[p.Layer] == nil {
		return false
	}
	k := t.numbers[p.Layer][p.Tensor]
	return k >= 0 && t.shared[k].owner < p.Layer
}

// Shared returns memory for one tensor for each that is shared.
func (t *Ties) Shared() []tensor.Tensor { return make([]tensor.Tensor, len(t.shared)) }

// Declared returns all tensors that a layer declares: its own ones, and for each that it borrows what borrow returns for its number
// and shape.
func (t *Ties) Declared(layer int, own []tensor.Tensor, borrow func(number int, shape []int) tensor.Tensor) []tensor.Tensor {
	if t.numbers == nil || t.numbers[layer] == nil {
		return own
	}
	all := make([]tensor.Tensor, 0, len(t.numbers[layer]))
	for i, k := range t.numbers[layer] {
		if t.Borrows(Place{layer, i}) {
			all = append(all, borrow(k, t.shared[k].shape))
		} else {
			all = append(all, own[0])
			own = own[1:]
		}
	}
	return all
}

// Each calls f with those of the tensors that a layer declares that are shared, their numbers, and whether the layer borrows them.
func (t *Ties) Each(layer int, declared []tensor.Tensor, f func(number int, x tensor.Tensor, borrowed bool)) {
	if t.numbers == nil {
		return
	}
	for i, k := range t.numbers[layer] {
		if k >= 0 {
			f(k, declared[i], t.shared[k].owner < layer)
		}
	}
}

// carries returns the numbers of the shared tensors that cross the boundary behind a layer.
func (t *Ties) carries(layer int) (numbers []int) {
	for k, s := range t.shared {
		if s.owner <= layer && layer < s.last {
			numbers = append(numbers, k)
		}
	}
	return numbers
}

// head is the number of words in which a tensor that crosses with others has its shape: the number of dimensions, and each of them.
const head = 16

// Shape returns the shape in which a tensor crosses the boundary behind a layer.
func (t *Ties) Shape(layer int, shape []int) []int {
	numbers := t.carries(layer)
	if numbers == nil {
		return slices.Clone(shape)
	}
	n := head + tensor.Size(shape)
	for _, k := range numbers {
		n += tensor.Size(t.shared[k].shape)
	}
	return []int{n}
}

// Pack returns x with what crosses the boundary behind a layer beside it, in memory from take.
func (t *Ties) Pack(layer int, x tensor.Tensor, shared []tensor.Tensor, take func(shape ...int) tensor.Tensor) tensor.Tensor {
	numbers := t.carries(layer)
	if numbers == nil {
		return x
	}
	if len(x.Shape) >= head {
		panic(fmt.Sprintf("a tensor of %d dimensions lies between layers that share parameters; at most %d are supported", len(x.Shape), head-1))
	}
	all := take(t.Shape(layer, x.Shape)...)
	clear(all.F[:head])
	for i, n := range append([]int{len(x.Shape)}, x.Shape...) {
		all.F[i] = math.Float32frombits(uint32(n)) // words are only copied
	}
	at := head + copy(all.F[head:], x.F)
	for _, k := range numbers {
		at += copy(all.F[at:], shared[k].F)
	}
	return all
}

// Unpack returns the tensor in one of Pack, and sets the shared ones that crossed with it. They are views.
func (t *Ties) Unpack(layer int, all tensor.Tensor, shared []tensor.Tensor) tensor.Tensor {
	numbers := t.carries(layer)
	if numbers == nil {
		return all
	}
	end := len(all.F)
	for _, k := range slices.Backward(numbers) {
		n := tensor.Size(t.shared[k].shape)
		if end-n < head {
			panic(fmt.Sprintf("%d numbers crossed between layers that share parameters: too few", len(all.F)))
		}
		shared[k] = tensor.Of(all.F[end-n:end:end], t.shared[k].shape...)
		end -= n
	}
	dims := make([]int, min(math.Float32bits(all.F[0]), head-1))
	for i := range dims {
		dims[i] = int(math.Float32bits(all.F[1+i]))
	}
	if n, ok := tensor.CheckedSize(dims); !ok || n != end-head {
		panic(fmt.Sprintf("%d numbers of shape %v crossed between layers that share parameters", end-head, dims))
	}
	return tensor.Of(all.F[head:end:end], dims...)
}
