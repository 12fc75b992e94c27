package nn

import (
	"errors"
	"fmt"

	"github.com/soliton-train/soliton/trainer"
)

// ClassifierConfig describes a [Classifier].
type ClassifierConfig struct {
	Inputs  int     `json:"inputs"`  // features of a sample
	Hidden  []int   `json:"hidden"`  // width of each hidden layer; none makes a linear classifier
	Classes int     `json:"classes"` // at least 2
	Dropout float64 `json:"dropout"` // after each hidden layer, in [0, 1)
}

// Validate returns an error that lists all faults, one a line, or nil.
func (k ClassifierConfig) Validate() error {
	var faults []error
	inRange := func(field string, x, least int) {
		if x < least || x > maxSize {
			faults = append(faults, fmt.Errorf("ClassifierConfig.%s is %d: use %d to %d", field, x, least, maxSize))
		}
	}
	inRange("Inputs", k.Inputs, 1)
	inRange("Classes", k.Classes, 2)
	inRange("Hidden: its length", len(k.Hidden), 0)
	for i, h := range k.Hidden {
		inRange(fmt.Sprintf("Hidden[%d]", i), h, 1)
	}
	if !isDropout(k.Dropout) {
		faults = append(faults, fmt.Errorf("ClassifierConfig.Dropout is %v: use 0 up to, but not including, 1", k.Dropout))
	}
	return errors.Join(faults...)
}

// Classifier returns a multi-layer perceptron with GELU. A sample is Inputs
// float32 features, its target one int32 class; the output has Classes logits.
//
// The model's layers are "hidden.0" and so on, and "output". An impossible
// configuration is reported through [trainer.Model.Fault].
func Classifier(config ClassifierConfig) trainer.Model {
	m := trainer.Model{
		Name: "classifier", Config: config, Fault: config.Validate(),
		Input:  trainer.Spec{Shape: []int{config.Inputs}},
		Target: trainer.Spec{Shape: []int{1}, Kind: trainer.Int32},
		Loss:   CrossEntropy{},
	}
	if m.Fault != nil {
		return m
	}
	width := config.Inputs
	for i, hidden := range config.Hidden {
		m.LayerNames = append(m.LayerNames, fmt.Sprintf("hidden.%d", i))
		m.Layers = append(m.Layers, Sequence(
			Named("", Linear{In: width, Out: hidden}),
			GELU{},
			Dropout{Prob: config.Dropout},
		))
		width = hidden
	}
	m.LayerNames = append(m.LayerNames, "output")
	m.Layers = append(m.Layers, Linear{In: width, Out: config.Classes})
	return m
}
