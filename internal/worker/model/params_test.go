package model

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Workers start from the file that the job was checked with, or not at all.
func TestInitialParametersChange(t *testing.T) {
	describe := func() *Params {
		p := &Params{}
		p.Add("0", []Tensor{{Name: "0.w", Shape: []int{3}}})
		return p
	}
	path := filepath.Join(t.TempDir(), "model.safetensors")
	write := func(x float32) (sum string) {
		p := describe()
		w, err := p.newWriter(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.w.Write([]float32{1, 2, x}); err != nil {
			t.Fatal(err)
		}
		if err := w.commit(); err != nil {
			t.Fatal(err)
		}
		f, err := p.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if sum, err = f.SHA256(); err != nil {
			t.Fatal(err)
		}
		return sum
	}
	p := describe()
	p.Hold(0, 1)
	load := func(sum string) error {
		p.checked = false
		return p.First(0, p.Layers[0].Params, path, sum)
	}
	sum := write(3)
	if err := load(sum); err != nil || p.Layers[0].Params[2] != 3 {
		t.Errorf("parameters %v, error %v", p.Layers[0].Params, err)
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
