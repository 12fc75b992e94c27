// Package model holds the parameters of a model in a worker: memory by layers, first values, the model file, and the
// hashes over the whole state.
package model

import (
	"slices"

	"github.com/soliton-train/soliton/internal/compute/pages"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/store/safetensors"
	"github.com/soliton-train/soliton/internal/worker/engine"
)

// Params are all parameters of a model: one array for each layer that is held here, and views of its tensors.
type Params struct {
	Layers []engine.Layer

	// Memory, if it is not nil, returns the memory for the parameters of a layer, of unspecified content.
	Memory func(layer, size int) []float32

	tensors [][]Tensor        // by layer
	views   [][]tensor.Tensor // into Layers, without elements where a layer is not held

	checked bool             // the file of the first values has the SHA-256 of the job
	found   map[string]found // files of first values, by what they are called in a folder
}

// Tensor describes a parameter. Fill sets its first values.
type Tensor struct {
	Name   string // within the model
	Shape  []int
	Tuning zero.Tuning
	Fill   func([]float32)
}

// Add describes the next layer of the model.
func (p *Params) Add(name string, tensors []Tensor) {
	layer := engine.Layer{Name: name}
	views := make([]tensor.Tensor, len(tensors))
	for i, t := range tensors {
		views[i].Shape = slices.Clone(t.Shape)
		layer.Tensors = append(layer.Tensors, zero.Tensor{Size: tensor.Size(t.Shape), Tuning: t.Tuning})
	}
	p.Layers = append(p.Layers, layer)
	p.tensors = append(p.tensors, tensors)
	p.views = append(p.views, views)
}

// infos describes all tensors to a model file, in model order.
func (p *Params) infos() (infos []safetensors.Info) {
	for _, tensors := range p.tensors {
		for _, t := range tensors {
			infos = append(infos, safetensors.Info{Name: t.Name, Shape: t.Shape})
		}
	}
	return infos
}

// Describe returns the names and shapes of a layer's tensors, as the model file has them.
func (p *Params) Describe(layer int) (names []string, shapes [][]int) {
	for _, t := range p.tensors[layer] {
		names, shapes = append(names, t.Name), append(shapes, t.Shape)
	}
	return names, shapes
}

// Hold allocates layers [lo, hi) where they are not held: as zeros, unless their memory comes from Memory.
func (p *Params) Hold(lo, hi int) {
	for i := lo; i < hi; i++ {
		if p.Layers[i].Params == nil {
			if n := p.Layers[i].Size(); p.Memory != nil {
				p.Layers[i].Params = p.Memory(i, n)
			} else {
				p.Layers[i].Params = pages.Make(n)
			}
			p.views[i] = p.Split(i, p.Layers[i].Params)
		}
	}
}

// Views returns the tensors of a layer, whose memory is that of Hold.
func (p *Params) Views(layer int) []tensor.Tensor { return p.views[layer] }

// Split returns views of the tensors of a layer in flat.
func (p *Params) Split(layer int, flat []float32) []tensor.Tensor {
	views := make([]tensor.Tensor, len(p.views[layer]))
	at := 0
	for i, v := range p.views[layer] {
		end := at + tensor.Size(v.Shape)
		views[i] = tensor.Tensor{Shape: v.Shape, F: flat[at:end:end]}
		at = end
	}
	return views
}

// Count returns the number of parameters of the model.
func (p *Params) Count() (n int) {
	for _, l := range p.Layers {
		n += l.Size()
	}
	return n
}

// Held returns the layers that are held.
func (p *Params) Held() (layers []int) {
	for i, l := range p.Layers {
		if l.Params != nil {
			layers = append(layers, i)
		}
	}
	return layers
}

// Release frees the memory of all layers.
func (p *Params) Release() {
	for i := range p.Layers {
		p.Layers[i].Params = nil
		for k := range p.views[i] {
			p.views[i][k].F = nil
		}
	}
}

// First sets the first values of a layer: from the model file or run directory at path, which must have the given SHA-256, or
// by the tensors' Fill if path is "".
func (p *Params) First(layer int, flat []float32, path, sha256 string) error {
	if path == "" {
		for i, v := range p.Split(layer, flat) {
			p.tensors[layer][i].Fill(v.F)
		}
		return nil
	}
	f, err := p.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if !p.checked {
		now, err := f.SHA256()
		if err != nil {
			return err
		}
		if now != sha256 {
			return &safetensors.Error{Path: f.Path(), Reason: "has changed since the run began; --init-from takes a file that stays as it is"}
		}
		p.checked = true
	}
	return p.read(f, layer, flat)
}

// read reads the parameters of a layer from a file of Open.
func (p *Params) read(f *safetensors.File, layer int, flat []float32) error {
	for i, v := range p.Split(layer, flat) {
		if err := f.Read(p.tensors[layer][i].Name, v.F); err != nil {
			return err
		}
	}
	return nil
}
