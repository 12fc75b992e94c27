package model

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/find"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/store/safetensors"
)

// File and ConfigFile are the names of the files in a run directory that hold the parameters and describe the model.
const (
	File       = "model.safetensors"
	ConfigFile = "config.json"
)

// Open opens the model file at path, which may be a run directory, and checks that it holds exactly the tensors of p. A file that this
// machine lacks comes from another one of the run.
func (p *Params) Open(path string) (*safetensors.File, error) {
	path, err := p.local(path, File)
	if err != nil {
		return nil, err
	}
	return openExact(path, p.infos(), "the model")
}

// local returns where the content of a file is that a user names. It asks once.
func (p *Params) local(path, name string) (string, error) {
	if at := p.found[name]; at.named == path && path != "" {
		return at.here, nil
	}
	here, err := find.Local(path, name)
	if err == nil {
		if p.found == nil {
			p.found = make(map[string]found)
		}
		p.found[name] = found{path, here}
	}
	return here, err
}

// found is where the content of a file is, which a user named.
type found struct{ named, here string }

// openExact opens a file and checks that it has exactly these tensors, which are those of what.
func openExact(path string, tensors []safetensors.Info, what string) (*safetensors.File, error) {
	f, err := safetensors.Open(path)
	if err != nil {
		return nil, PathError(err)
	}
	have := make(map[string][]int, len(f.Tensors))
	for _, t := range f.Tensors {
		have[t.Name] = t.Shape
	}
	fail := func(tensor, format string, args ...any) (*safetensors.File, error) {
		f.Close()
		return nil, &safetensors.Error{Path: path, Tensor: tensor, Reason: fmt.Sprintf(format, args...)}
	}
	for _, want := range tensors {
		shape, ok := have[want.Name]
		switch {
		case !ok:
			return fail(want.Name, "is missing; %s has it with shape %v", what, want.Shape)
		case !slices.Equal(shape, want.Shape):
			return fail(want.Name, "has shape %v in the file and %v in %s", shape, want.Shape, what)
		}
		delete(have, want.Name)
	}
	for _, t := range f.Tensors {
		if _, left := have[t.Name]; left {
			return fail(t.Name, "is not part of %s", what)
		}
	}
	return f, nil
}

// PathError strips the system call from errors about files.
func PathError(err error) error {
	var pe *os.PathError
	if errors.As(err, &pe) {
		return fmt.Errorf("%s: %w", pe.Path, pe.Err)
	}
	return err
}

// Read reads the parameters of the held layers from a file of Open.
func (p *Params) Read(f *safetensors.File) error {
	for i, l := range p.Layers {
		if l.Params != nil {
			if err := p.read(f, i, l.Params); err != nil {
				return err
			}
		}
	}
	return nil
}

// writer writes parameters to a file that appears under its name complete and synced, with commit.
type writer struct {
	f *rundir.File
	b *bufio.Writer
	w *safetensors.Writer
}

func (p *Params) newWriter(path string) (*writer, error) {
	f, err := rundir.NewFile(path)
	if err != nil {
		return nil, err
	}
	m := &writer{f: f, b: bufio.NewWriterSize(f, 1<<20)}
	if err := platform.Allocate(f.File, p.size()); platform.IsFull(err) {
		f.Discard()
		return nil, err
	}
	if m.w, err = safetensors.NewWriter(m.b, map[string]string{"format": "pt"}, p.infos()); err != nil {
		f.Discard()
		return nil, err
	}
	return m, nil
}

// size returns the bytes of all parameters.
func (p *Params) size() (bytes int64) {
	for _, l := range p.Layers {
		bytes += 4 * int64(l.Size())
	}
	return bytes
}

func (m *writer) commit() error {
	if err := errors.Join(m.w.Close(), m.b.Flush()); err != nil {
		m.f.Discard()
		return err
	}
	return m.f.Commit()
}
