package checkpoint

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/store/safetensors"
)

// A checkpoint is exported tensor by tensor, whatever its layout.
func TestExport(t *testing.T) {
	dir := t.TempDir()
	m := writeParts(t, dir, 3, 3, "adamw")
	shapes := [][]int{{5, 2659}, {0, 7}, {4095}, {1}, {1}, {3, 100, 100}}
	for i, layer := range []int{0, 1, 2, 2, 3, 4} {
		m.Tensors = append(m.Tensors, Tensor{Layer: layer, Name: string(rune('a' + i)), Shape: shapes[i]})
	}
	if err := Commit(dir, m); err != nil {
		t.Fatal(err)
	}
	r, err := Open(dir, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var model, optimizer bytes.Buffer
	if err := errors.Join(r.ExportModel(t.Context(), &model), r.ExportOptimizer(t.Context(), &optimizer, 0)); err != nil {
		t.Fatal(err)
	}
	for part, c := range map[string]*bytes.Buffer{"": &model, "exp_avg/": &optimizer, "exp_avg_sq/": &optimizer} {
		f, err := safetensors.New("exported", bytes.NewReader(c.Bytes()), int64(c.Len()))
		if err != nil {
			t.Fatal(err)
		}
		moment := slices.Index([]string{"", "exp_avg/", "exp_avg_sq/"}, part) - 1
		at, layer := 0, 0
		for _, x := range m.Tensors {
			if x.Layer != layer {
				layer, at = x.Layer, 0
			}
			got, want := make([]float32, x.Len()), make([]float32, x.Len())
			if err := f.Read(part+x.Name, got); err != nil {
				t.Fatal(err)
			}
			values, states := want, make([][]float32, 2)
			if moment >= 0 {
				values, states[moment] = nil, want
			}
			if err := r.Read(t.Context(), layer, at, at+len(want), values, states); err != nil {
				t.Fatal(err)
			}
			if !sameBits(got, want) {
				t.Errorf("%s%s has other values than [%d,%d) of layer %d", part, x.Name, at, at+len(want), layer)
			}
			at += x.Len()
		}
	}
}

// What a manifest says of tensors has to be what its layers hold.
func TestTensorsFaults(t *testing.T) {
	m := writeParts(t, t.TempDir(), 1, 1, "sgd")
	whole := []Tensor{{0, "a", []int{13295}}, {2, "b", []int{4096}}, {3, "c", []int{1}}, {4, "d", []int{30000}}}
	for want, change := range map[string]func([]Tensor) []Tensor{
		"":             func(x []Tensor) []Tensor { return x },
		"has 13295":    func(x []Tensor) []Tensor { return x[1:] },
		"twice":        func(x []Tensor) []Tensor { x[1].Name = "a"; return x },
		"out of order": func(x []Tensor) []Tensor { x[0], x[1] = x[1], x[0]; return x },
		"shape [1099511627776 1099511627776]": func(x []Tensor) []Tensor {
			x[0].Shape = []int{1 << 40, 1 << 40}
			return x
		},
		"shape [-1]": func(x []Tensor) []Tensor { x[0].Shape = []int{-1}; return x },
		"layer 5":    func(x []Tensor) []Tensor { x[3].Layer = 5; return x },
	} {
		m.Tensors = change(slices.Clone(whole))
		if err := m.Validate(); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if m.Describe(whole); len(m.Tensors) != len(whole) {
		t.Errorf("described by %v", m.Tensors)
	}
	long := slices.Clone(whole)
	long[1].Name = strings.Repeat("b", 5<<20)
	for _, bad := range [][]Tensor{nil, whole[1:], long} {
		if m.Describe(bad); m.Tensors != nil || m.Validate() != nil {
			t.Errorf("described by %d of %d tensors", len(bad), len(whole))
		}
	}
	m.Tensors, m.Format = whole, 1
	if err := m.Validate(); err == nil {
		t.Error("a manifest of version 1 has tensors")
	}
}

// Checkpoints of version 1, which an earlier version has written, stay readable.
func TestFormat1(t *testing.T) {
	r, refused, err := Newest(t.Context(), "testdata/format-1", rundir.Only(job))
	if err != nil || refused != nil {
		t.Fatal(refused, err)
	}
	defer r.Close()
	if m := r.Manifest(); m.Format != 1 || m.Step != 3 || m.Plan != (id.Version{Generation: 1, N: 7}) || m.Size() != 692 || !m.Made.IsZero() {
		t.Errorf("%+v", m)
	}
	whole := id.Range{Layer: 0, Lo: 0, Hi: 4}
	params, mean, square := make([]float32, 4), make([]float32, 4), make([]float32, 4)
	if err := r.Read(t.Context(), 0, 0, 4, params, [][]float32{mean, square}); err != nil {
		t.Fatal(err)
	}
	for i, got := range [][]float32{params, mean, square} {
		if !sameBits(got, bitsOf(3, i, whole)) {
			t.Errorf("part %d has other values", i)
		}
	}
	if err := r.ExportModel(t.Context(), new(bytes.Buffer)); !errors.Is(err, ErrNoTensors) {
		t.Errorf("exported without names of tensors: %v", err)
	}
}

// So do those of version 2, which is written now: a change of the format keeps this example, and adds one of its own.
func TestFormat2(t *testing.T) {
	r, refused, err := Newest(t.Context(), "testdata/format-2", rundir.Only(job))
	if err != nil || refused != nil {
		t.Fatal(refused, err)
	}
	defer r.Close()
	m := r.Manifest()
	if m.Format != 2 || m.Step != 3 || *m.Loss != 1.5 || *m.ValLoss != 2.5 || m.Made.IsZero() || len(m.Tensors) != 1 || m.Tensors[0].Name != "0.weight" {
		t.Errorf("%+v", m)
	}
	params, mean, square := make([]float32, 4), make([]float32, 4), make([]float32, 4)
	if err := r.Read(t.Context(), 0, 0, 4, params, [][]float32{mean, square}); err != nil {
		t.Fatal(err)
	}
	for i, got := range [][]float32{params, mean, square} {
		if !sameBits(got, bitsOf(3, i, id.Range{Layer: 0, Lo: 0, Hi: 4})) {
			t.Errorf("part %d has other values", i)
		}
	}
	var model bytes.Buffer
	if err := r.ExportModel(t.Context(), &model); err != nil || model.Len() == 0 {
		t.Errorf("exported %d bytes, %v", model.Len(), err)
	}
}
