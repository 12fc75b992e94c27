package trainer

import (
	"fmt"

	"github.com/soliton-train/soliton/rng"
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
		s := rng.New(seed, rng.Place{Sample: uint32(param), Layer: uint16(layer)})
		for j := range x {
			x[j] = float32(float64(i.Scale) * s.Normal())
		}
	case InitUniform:
		s := rng.New(seed, rng.Place{Sample: uint32(param), Layer: uint16(layer)})
		for j := range x {
			x[j] = (float32(2*s.Float32()) - 1) * i.Scale
		}
	default:
		panic(fmt.Sprintf("trainer: initialiser of unknown kind %d", i.Kind))
	}
}
