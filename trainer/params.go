package trainer

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/soliton-train/soliton/internal/engine"
	"github.com/soliton-train/soliton/internal/kernel"
	"github.com/soliton-train/soliton/internal/safetensors"
	"github.com/soliton-train/soliton/internal/tensor"
	"github.com/soliton-train/soliton/zero"
)

// modelFile is the name of the file with the parameters in a run directory.
const modelFile = "model.safetensors"

// parameters are all parameters of a model: one array for each layer, and
// views of its tensors.
type parameters struct {
	layers []engine.Layer
	views  [][]Tensor
	inits  [][]Init
	infos  []safetensors.Info // of all tensors, in model order
}

// newParameters allocates the parameters of a valid model, as zeros.
func newParameters(m *Model) *parameters {
	p := &parameters{}
	names := m.layerNames()
	for i, l := range m.Layers {
		layer := engine.Layer{Name: names[i]}
		var views []Tensor
		var inits []Init
		n := 0
		for _, t := range l.Params() {
			size := tensor.Size(t.Shape)
			layer.Tensors = append(layer.Tensors, zero.Tensor{Size: size, NoDecay: t.NoDecay})
			inits = append(inits, t.Init)
			views = append(views, Tensor{Shape: slices.Clone(t.Shape)})
			p.infos = append(p.infos, safetensors.Info{Name: names[i] + "." + t.Name, Shape: views[len(views)-1].Shape})
			n += size
		}
		layer.Params = make([]float32, n)
		p.layers = append(p.layers, layer)
		p.views = append(p.views, views)
		p.inits = append(p.inits, inits)
		p.views[i] = p.split(i, layer.Params)
	}
	return p
}

// split returns views of the tensors of a layer in flat.
func (p *parameters) split(layer int, flat []float32) []Tensor {
	views := make([]Tensor, len(p.views[layer]))
	at := 0
	for i, v := range p.views[layer] {
		end := at + tensor.Size(v.Shape)
		views[i] = Tensor{Shape: v.Shape, F: flat[at:end:end]}
		at = end
	}
	return views
}

// count returns the number of parameters.
func (p *parameters) count() (n int) {
	for _, l := range p.layers {
		n += len(l.Params)
	}
	return n
}

// init sets the first values from the seed.
func (p *parameters) init(seed uint64) {
	for i, views := range p.views {
		for j, v := range views {
			p.inits[i][j].Fill(v.F, seed, i, j)
		}
	}
}

// openModel opens the model file at path, which may be a run directory, and
// checks that it holds exactly the tensors of p.
func (p *parameters) openModel(path string) (*safetensors.File, error) {
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		path = filepath.Join(path, modelFile)
	}
	f, err := safetensors.Open(path)
	if err != nil {
		return nil, plainPathError(err)
	}
	have := make(map[string][]int, len(f.Tensors))
	for _, t := range f.Tensors {
		have[t.Name] = t.Shape
	}
	fail := func(tensor, format string, args ...any) (*safetensors.File, error) {
		f.Close()
		return nil, &safetensors.Error{Path: path, Tensor: tensor, Reason: fmt.Sprintf(format, args...)}
	}
	for _, want := range p.infos {
		shape, ok := have[want.Name]
		switch {
		case !ok:
			return fail(want.Name, "is missing; the model has it with shape %v", want.Shape)
		case !slices.Equal(shape, want.Shape):
			return fail(want.Name, "has shape %v in the file and %v in the model", shape, want.Shape)
		}
		delete(have, want.Name)
	}
	for _, t := range f.Tensors {
		if _, left := have[t.Name]; left {
			return fail(t.Name, "is not part of the model")
		}
	}
	return f, nil
}

// plainPathError strips the system call from errors about files.
func plainPathError(err error) error {
	var pe *os.PathError
	if errors.As(err, &pe) {
		return fmt.Errorf("%s: %w", pe.Path, pe.Err)
	}
	return err
}

// load reads the parameters from a file or run directory.
func (p *parameters) load(path string) error {
	f, err := p.openModel(path)
	if err != nil {
		return err
	}
	defer f.Close()
	i := 0
	for _, views := range p.views {
		for _, v := range views {
			if err := f.Read(p.infos[i].Name, v.F); err != nil {
				return err
			}
			i++
		}
	}
	return nil
}

// save writes the parameters to a file that appears under its name complete
// and synced.
func (p *parameters) save(path string, metadata map[string]string) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-")
	if err != nil {
		return err
	}
	err = p.write(f, metadata)
	err = errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

func (p *parameters) write(f *os.File, metadata map[string]string) error {
	b := bufio.NewWriterSize(f, 1<<20)
	w, err := safetensors.NewWriter(b, metadata, p.infos)
	if err != nil {
		return err
	}
	for _, views := range p.views {
		for _, v := range views {
			if err := w.Write(v.F); err != nil {
				return err
			}
		}
	}
	return errors.Join(w.Close(), b.Flush())
}

// hashes returns params_sha256 and state_sha256; see [Summary].
func (p *parameters) hashes(rule zero.Rule, moments func(layer int) [][]float32) (params, state string) {
	h := sha256.New()
	for _, l := range p.layers {
		h.Write(kernel.Bytes(l.Params))
	}
	params = hex.EncodeToString(h.Sum(nil))
	for k := range rule.Moments() {
		for i := range p.layers {
			h.Write(kernel.Bytes(moments(i)[k]))
		}
	}
	return params, hex.EncodeToString(h.Sum(nil))
}
