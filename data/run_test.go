package data_test

import (
	"bytes"
	"path/filepath"
	"testing"

	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/trainer"
)

// A run on data that is read by position has the bits of one on data in memory, plain, compressed, or as tokens of two bytes.
func TestSameBits(t *testing.T) {
	text := bytes.Repeat([]byte("the quick brown fox jumps over the lazy dog. "), 30)
	dir := t.TempDir()
	path := write(t, filepath.Join(dir, "text"), text)
	var wide []byte
	for _, b := range text {
		wide = append(wide, b, 0)
	}
	inMemory, err := trainer.Text(path)
	if err != nil {
		t.Fatal(err)
	}
	sets := []trainer.Dataset{inMemory}
	for _, open := range []func() (*data.Stream, error){
		func() (*data.Stream, error) { return data.Text(path) },
		func() (*data.Stream, error) { return data.Text(write(t, path+".zst", packed(t, ".zst", text))) },
		func() (*data.Stream, error) { return data.Tokens(data.Uint16, write(t, path+".bin", wide)) },
	} {
		s, err := open()
		if err != nil {
			t.Fatal(err)
		}
		sets = append(sets, s)
	}
	var want string
	for i, d := range sets {
		got, err := trainer.Run(t.Context(), trainer.Job{
			Model:     nn.GPT(nn.GPTConfig{Vocab: 256, Context: 16, Width: 16, Heads: 2, Layers: 1, Dropout: 0.1}),
			Data:      d,
			Optimizer: trainer.AdamW{LR: trainer.Constant(1e-3)}, GlobalBatch: 4, MicroBatch: 2, Steps: 30, Seed: 1,
		})
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			want = got.StateSHA256
		} else if got.StateSHA256 != want {
			t.Errorf("data set %d: state %s, want %s", i, got.StateSHA256, want)
		}
	}
}
