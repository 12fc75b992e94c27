package exact

import (
	"context"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/trainer"
)

// PyTorch's losses from the same first weights, data and optimizer, without
// dropout. testdata/torch.json was recorded by bench/internal/peers/torch_check.py:
//
//	gpt="go run ./examples/gpt --plain --data internal/testkit/exact/testdata/corpus --layers 2 --width 64 --heads 4
//	  --context 32 --global-batch 8 --micro-batch 4 --dropout 0"
//	$gpt --steps 1 --run-dir /tmp/a && $gpt --steps 20 --init-from /tmp/a --run-dir /tmp/b
//	/usr/bin/python3 bench/internal/peers/torch_check.py record /tmp/b > internal/testkit/exact/testdata/torch.json
func TestPyTorchRecorded(t *testing.T) {
	raw, err := os.ReadFile("testdata/torch.json")
	if err != nil {
		t.Fatal(err)
	}
	var torch struct {
		ValLoss float64 `json:"val_loss"`
		Losses  []float64
	}
	if err := json.Unmarshal(raw, &torch); err != nil {
		t.Fatal(err)
	}
	text, err := trainer.Text(corpus)
	if err != nil {
		t.Fatal(err)
	}
	train, held := text.HoldOut(20)
	var losses []float64
	j := trainer.Job{
		Model: nn.GPT(nn.GPTConfig{Layers: 2, Width: 64, Heads: 4, Context: 32}), Data: train, Eval: held,
		Optimizer:   trainer.AdamW{LR: trainer.Cosine(2e-3, 20), Beta2: 0.95, WeightDecay: 0.1},
		GlobalBatch: 8, MicroBatch: 4, Steps: 1, ClipNorm: 1, Seed: 1,
		RunDir: filepath.Join(t.TempDir(), "first"),
	}
	if _, err := trainer.Run(context.Background(), j); err != nil {
		t.Fatal(err)
	}
	j.InitFrom, j.RunDir, j.Steps = j.RunDir, "", 20
	j.OnStep = func(s trainer.StepInfo) error {
		losses = append(losses, s.Loss)
		return nil
	}
	sum, err := trainer.Run(context.Background(), j)
	if err != nil {
		t.Fatal(err)
	}
	if len(losses) != 20 || len(torch.Losses) != 20 {
		t.Fatalf("%d losses against %d, want 20", len(losses), len(torch.Losses))
	}
	for i, want := range torch.Losses {
		if math.Abs(losses[i]-want) > 1e-3 {
			t.Errorf("step %d: loss %v, PyTorch %v", i+1, losses[i], want)
		}
	}
	if math.Abs(*sum.ValLoss-torch.ValLoss) > 1e-4 {
		t.Errorf("val_loss %v, PyTorch %v", *sum.ValLoss, torch.ValLoss)
	}
}
