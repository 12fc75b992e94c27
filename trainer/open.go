package trainer

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/worker/engine"
	"github.com/soliton-train/soliton/internal/worker/model"
)

// maxConfig bounds the size of that file in bytes.
const maxConfig = 1 << 20

// Net is a model with its parameters, for inference. It may be used by one
// goroutine at a time.
type Net struct {
	stage *stage
	close func()
}

// Open loads the parameters of a model from a model.safetensors file, or from
// a run directory with one. They must have the names and shapes of the model.
// Close the net after use.
func Open(m Model, path string) (*Net, error) {
	if faults := m.faults(); len(faults) > 0 {
		return nil, &ValidationError{faults}
	}
	if err := kernel.Err(); err != nil {
		return nil, err
	}
	params := describeParams(&m, 0)
	// The file is checked before memory is allocated for it.
	f, err := params.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if available, ok := platform.AvailableMemory(); ok {
		if faults := memoryFault(&m, params, 1, 0, available); len(faults) > 0 {
			return nil, &ValidationError{faults}
		}
	}
	params.Hold(0, len(m.Layers))
	if err := params.Read(f); err != nil {
		return nil, err
	}
	pool := kernel.NewPool(runtime.GOMAXPROCS(0))
	return &Net{newStage(&m, 0, len(m.Layers), params, pool, 0, nil), pool.Close}, nil
}

// Forward returns the output of the last layer for one or more samples, which
// the first dimension of in counts. Layers such as dropout do nothing. It
// panics, as the layers do, if the shape of in does not fit the model.
func (n *Net) Forward(in Tensor) Tensor {
	pass, out, _ := n.stage.Forward(engine.Micro{Step: 1, Samples: in.Shape[0]}, in)
	defer n.stage.Drop(pass)
	return Tensor{Shape: slices.Clone(out.Shape), F: slices.Clone(out.F)}
}

// Close ends the net's threads.
func (n *Net) Close() { n.close() }

// savedConfig is what config.json holds.
type savedConfig struct {
	Model  string          `json:"model"`
	Config json.RawMessage `json:"config"`

	Tied map[string]string `json:"tied,omitempty"` // further names of shared parameters, each with that in the model file
}

// ReadConfig reads which model a run directory holds: the Name of the
// [Model], and its Config into the value that config points to.
func ReadConfig(runDir string, config any) (name string, err error) {
	path := filepath.Join(runDir, model.ConfigFile)
	st, err := os.Stat(path)
	if err != nil {
		return "", model.PathError(err)
	}
	if !st.Mode().IsRegular() {
		return "", fmt.Errorf("%s: not a regular file", path)
	}
	if st.Size() > maxConfig {
		return "", fmt.Errorf("%s: has %d bytes, too many to describe a model", path, st.Size())
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return "", model.PathError(err)
	}
	var c savedConfig
	if err := json.Unmarshal(b, &c); err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	if err := json.Unmarshal(c.Config, config); err != nil {
		return "", fmt.Errorf("%s: config: %w", path, err)
	}
	return c.Model, nil
}
