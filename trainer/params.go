package trainer

import (
	"bufio"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"os"
	"path/filepath"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/safetensors"
	"github.com/soliton-train/soliton/internal/worker/engine"
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

	checked bool // the file that the run begins with is the one that was meant
}

// newParameters describes the parameters of a valid model.
func newParameters(m *Model) *parameters {
	p := &parameters{}
	names := m.layerNames()
	for i, l := range m.Layers {
		layer := engine.Layer{Name: names[i]}
		var views []Tensor
		var inits []Init
		for _, t := range l.Params() {
			size := tensor.Size(t.Shape)
			layer.Tensors = append(layer.Tensors, zero.Tensor{Size: size, NoDecay: t.NoDecay})
			inits = append(inits, t.Init)
			views = append(views, Tensor{Shape: slices.Clone(t.Shape)})
			p.infos = append(p.infos, safetensors.Info{Name: names[i] + "." + t.Name, Shape: views[len(views)-1].Shape})
		}
		p.layers = append(p.layers, layer)
		p.views = append(p.views, views)
		p.inits = append(p.inits, inits)
	}
	return p
}

// hold allocates layers [lo, hi), as zeros.
func (p *parameters) hold(lo, hi int) {
	for i := lo; i < hi; i++ {
		if p.layers[i].Params != nil {
			continue // of a stage that had other layers, too
		}
		p.layers[i].Params = make([]float32, p.layers[i].Size())
		p.views[i] = p.split(i, p.layers[i].Params)
	}
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

// count returns the number of parameters of the model.
func (p *parameters) count() (n int) {
	for _, l := range p.layers {
		n += l.Size()
	}
	return n
}

// held returns the layers that are allocated, and the number of their
// parameters.
func (p *parameters) held() (layers []int, count int) {
	for i, l := range p.layers {
		if l.Params != nil {
			layers = append(layers, i)
			count += len(l.Params)
		}
	}
	return layers, count
}

// release gives up the memory of a layer.
func (p *parameters) release(layer int) {
	p.layers[layer].Params = nil
	for i := range p.views[layer] {
		p.views[layer][i].F = nil
	}
}

// first sets the first values of a layer: from the file or run directory path,
// if it is not "", which must have the SHA-256 that it had when the job was
// checked, else from the seed.
func (p *parameters) first(layer int, flat []float32, seed uint64, path, sum string) error {
	if path == "" {
		for i, v := range p.split(layer, flat) {
			p.inits[layer][i].Fill(v.F, seed, layer, i)
		}
		return nil
	}
	f, err := p.openModel(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if !p.checked {
		now, err := f.SHA256()
		if err != nil {
			return err
		}
		if now != sum {
			return &safetensors.Error{Path: f.Path(), Reason: "has changed since the run began; --init-from takes a file that stays as it is"}
		}
		p.checked = true
	}
	at := 0
	for _, views := range p.views[:layer] {
		at += len(views)
	}
	for i, v := range p.split(layer, flat) {
		if err := f.Read(p.infos[at+i].Name, v.F); err != nil {
			return err
		}
	}
	return nil
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

// read reads the parameters of the layers held from a file of openModel.
func (p *parameters) read(f *safetensors.File) error {
	i := 0
	for _, views := range p.views {
		for _, v := range views {
			if v.F != nil {
				if err := f.Read(p.infos[i].Name, v.F); err != nil {
					return err
				}
			}
			i++
		}
	}
	return nil
}

// modelWriter writes parameters to a file that appears under its name
// complete and synced, with commit.
type modelWriter struct {
	path string
	f    *os.File
	b    *bufio.Writer
	w    *safetensors.Writer
}

func (p *parameters) newModelWriter(path string, metadata map[string]string) (*modelWriter, error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-")
	if err != nil {
		return nil, err
	}
	m := &modelWriter{path: path, f: f, b: bufio.NewWriterSize(f, 1<<20)}
	if m.w, err = safetensors.NewWriter(m.b, metadata, p.infos); err != nil {
		m.discard()
		return nil, err
	}
	return m, nil
}

func (m *modelWriter) commit() error {
	err := errors.Join(m.w.Close(), m.b.Flush(), m.f.Chmod(0o644), m.f.Sync(), m.f.Close())
	if err == nil {
		err = os.Rename(m.f.Name(), m.path)
	}
	if err != nil {
		m.discard()
	}
	return err
}

// discard removes the file before it has its name.
func (m *modelWriter) discard() {
	m.f.Close()
	os.Remove(m.f.Name())
}

// pieces calls f with the parts of data that belong to one tensor each, in
// order. data are the elements of a layer from lo on.
func (p *parameters) pieces(layer, lo int, data []float32, f func([]float32) error) error {
	at := 0 // first element of the tensor
	for _, t := range p.layers[layer].Tensors {
		from, to := max(lo, at), min(lo+len(data), at+t.Size)
		if from < to {
			if err := f(data[from-lo : to-lo]); err != nil {
				return err
			}
		}
		at += t.Size
	}
	return nil
}

// controlLayers describes the layers to the agent, planLayers to a plan.
func (p *parameters) controlLayers() (layers []control.Layer) {
	for _, l := range p.layers {
		c := control.Layer{Name: l.Name}
		for _, t := range l.Tensors {
			c.Tensors = append(c.Tensors, t.Size)
		}
		layers = append(layers, c)
	}
	return layers
}

func (p *parameters) planLayers() (layers []plan.Layer) {
	for _, l := range p.controlLayers() {
		layers = append(layers, plan.Layer{Tensors: l.Tensors})
	}
	return layers
}

// stateHash computes params_sha256 and state_sha256; see [Summary].
type stateHash struct {
	h      hash.Hash
	params []byte
}

func newStateHash() *stateHash { return &stateHash{h: sha256.New()} }

// add takes the next part of the state; moment is -1 for parameters.
func (s *stateHash) add(moment int, data []float32) {
	if moment >= 0 && s.params == nil {
		s.params = s.h.Sum(nil)
	}
	s.h.Write(kernel.Bytes(data))
}

// sums returns both hashes, one after the other.
func (s *stateHash) sums() []byte {
	state := s.h.Sum(nil)
	if s.params == nil {
		s.params = state
	}
	return append(slices.Clone(s.params), state...)
}
