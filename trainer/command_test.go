package trainer

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A flag that gathers its values gets each of them once.
func TestGatheringFlag(t *testing.T) {
	var got []string
	_, err := newCommand("prog", true, func(f *flag.FlagSet) func() (Job, error) {
		f.Func("path", "gathers", func(s string) error { got = append(got, s); return nil })
		return func() (Job, error) { return Job{}, nil }
	}).job([]string{"--path", "a", "--steps", "3", "--path", "b"})
	if err != nil || !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("values %q, error %v", got, err)
	}
}

// Workers start from the file that the job was checked with, or not at all.
func TestInitialParametersChange(t *testing.T) {
	m := Model{Layers: []Layer{block{size: 3}}}
	path := filepath.Join(t.TempDir(), "model.safetensors")
	write := func(x float32) (sum string) {
		p := newParameters(&m)
		w, err := p.newModelWriter(path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.w.Write([]float32{1, 2, x}); err != nil {
			t.Fatal(err)
		}
		if err := w.commit(); err != nil {
			t.Fatal(err)
		}
		f, err := p.openModel(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if sum, err = f.SHA256(); err != nil {
			t.Fatal(err)
		}
		return sum
	}
	p := newParameters(&m)
	p.hold(0, 1)
	load := func(sum string) error {
		p.checked = false
		return p.first(0, p.layers[0].Params, 1, path, sum)
	}
	sum := write(3)
	if err := load(sum); err != nil || p.layers[0].Params[2] != 3 {
		t.Errorf("parameters %v, error %v", p.layers[0].Params, err)
	}
	write(4)
	if err := load(sum); err == nil || !strings.Contains(err.Error(), path+": has changed") {
		t.Errorf("another file: error %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := load(sum); err == nil {
		t.Error("no file was read")
	}
}
