package training

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/testkit/require"
	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/trainer"
)

// python is the system's Python, which is the one that Debian's python3-torch
// serves.
const python = "/usr/bin/python3"

// PyTorch, with scripts that know nothing of Soliton, comes to the same hash of
// the parameters, the same held-out loss and the same losses step by step.
func TestPyTorchAgrees(t *testing.T) {
	out, err := exec.Command(python, "-c", "import torch, numpy").CombinedOutput()
	require.Tool(t, "torch", err == nil, python+" cannot import torch and numpy (Debian: python3-torch, python3-numpy): "+lastLine(out))

	text, err := trainer.Text("../../../internal/testkit/exact/testdata/corpus")
	if err != nil {
		t.Fatal(err)
	}
	train, held := text.HoldOut(20)
	dir := t.TempDir()
	job := trainer.Job{
		Model: nn.GPT(nn.GPTConfig{Layers: 2, Width: 96, Heads: 3, Context: 50}), Data: train, Eval: held,
		Optimizer:   trainer.AdamW{LR: trainer.Cosine(2e-3, 5), WeightDecay: 0.1},
		GlobalBatch: 8, MicroBatch: 2, Steps: 1, ClipNorm: 1, Seed: 3,
		RunDir: filepath.Join(dir, "first"),
	}
	if _, err := trainer.Run(t.Context(), job); err != nil {
		t.Fatal(err)
	}
	job.InitFrom, job.RunDir, job.Steps = job.RunDir, filepath.Join(dir, "second"), 20
	if _, err := trainer.Run(t.Context(), job); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"../peers/params_sha256.py", job.RunDir},
		{"../peers/torch_check.py", "val", job.RunDir},
		{"../peers/torch_check.py", "curve", job.RunDir},
	} {
		out, err := exec.Command(python, args...).CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v\n%s", strings.Join(args, " "), err, out)
		}
		t.Logf("%s: %s", args[0], lastLine(out))
	}
}

func lastLine(out []byte) string {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return lines[len(lines)-1]
}
