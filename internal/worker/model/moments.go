package model

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/soliton-train/soliton/internal/store/safetensors"
)

// OptimizerFile is the name of the file that an export of a checkpoint has the optimizer's state in.
const OptimizerFile = "optimizer.safetensors"

// Moments is the optimizer's state that a run begins with: a file as an export writes it.
type Moments struct {
	Updates int // that are in the state

	file   *safetensors.File
	params *Params
	names  []string
}

// OpenMoments opens the file at path, which may be its directory, and checks that it holds exactly the moments of those names for all
// tensors of p.
func (p *Params) OpenMoments(path string, names []string) (*Moments, error) {
	path, err := p.local(path, OptimizerFile)
	if err != nil {
		return nil, err
	}
	var infos []safetensors.Info
	for _, name := range names {
		for _, info := range p.infos() {
			info.Name = momentName(name, info.Name)
			infos = append(infos, info)
		}
	}
	f, err := openExact(path, infos, "the optimizer's state")
	if err != nil {
		return nil, err
	}
	updates, err := strconv.Atoi(f.Metadata["step"])
	if err != nil || updates < 1 || updates > math.MaxInt32 {
		f.Close()
		return nil, &safetensors.Error{Path: path, Reason: fmt.Sprintf("has the step %q in its metadata, not the number of updates in the state; write it again with launcher export --optimizer", f.Metadata["step"])}
	}
	return &Moments{Updates: updates, file: f, params: p, names: names}, nil
}

// momentName is the name of the moment of a tensor in the file.
func momentName(moment, tensor string) string { return moment + "/" + tensor }

// squares is the name of the moment that is a mean of squares, whose root AdamW takes.
const squares = "exp_avg_sq"

// Sum checks that all numbers are finite and that means of squares are not negative, and returns the SHA-256 of the file.
func (m *Moments) Sum() (string, error) {
	if err := m.file.Finite(func(tensor string) bool { return strings.HasPrefix(tensor, squares+"/") }); err != nil {
		return "", err
	}
	return m.file.SHA256()
}

// Check returns an error unless the file has the given SHA-256.
func (m *Moments) Check(sha256 string) error {
	now, err := m.file.SHA256()
	if err == nil && now != sha256 {
		err = &safetensors.Error{Path: m.file.Path(), Reason: "has changed since the run began; --init-optimizer takes a file that stays as it is"}
	}
	return err
}

// Read fills each of dst with a moment of the parameters of a layer, from parameter lo on.
func (m *Moments) Read(layer, lo int, dst [][]float32) error {
	for i, x := range dst {
		at := 0 // first element of the tensor
		for k, t := range m.params.Layers[layer].Tensors {
			from, to := max(lo, at), min(lo+len(x), at+t.Size)
			if from < to {
				if err := m.file.ReadAt(momentName(m.names[i], m.params.tensors[layer][k].Name), from-at, x[from-lo:to-lo]); err != nil {
					return err
				}
			}
			at += t.Size
		}
	}
	return nil
}

// Close closes the file.
func (m *Moments) Close() error { return m.file.Close() }
