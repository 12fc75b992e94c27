package exact

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/internal/store/safetensors"
	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

// What testdata/audit trains.
const (
	auditSteps, auditBatch, auditSamples, auditStride = 20, 8, 57, 512
)

type numbered struct{ n, base int }

func (d numbered) Len() int { return d.n }

func (d numbered) Sample(s trainer.Sample, in, _ trainer.Tensor) error {
	in.I[0] = int32(d.base + s.Index)
	return nil
}

// auditOrder is the order of samples in an undisturbed run, by step.
func auditOrder(t *testing.T) (steps [auditSteps][]int) {
	t.Helper()
	one := trainer.Spec{Shape: []int{1}, Kind: trainer.Int32}
	mix, err := trainer.Bind(data.Mix{Seed: 5, Parts: []data.Part{
		{Data: numbered{31, 0}, Weight: 0.5}, {Data: numbered{7, 31}, Weight: 0.3}, {Data: numbered{19, 38}, Weight: 0.2},
	}, Samples: 41}, one, one)
	if err != nil {
		t.Fatal(err)
	}
	in, n := trainer.NewTensor(trainer.Int32, 1), mix.Len()
	for i := range auditSteps * auditBatch {
		at := int(rng.NewPerm(9, uint64(i/n), uint64(n)).At(uint64(i % n)))
		if err := mix.Sample(trainer.Sample{Index: at, Epoch: i / n, Train: true}, in, trainer.Tensor{}); err != nil {
			t.Fatal(err)
		}
		steps[i/auditBatch] = append(steps[i/auditBatch], int(in.I[0]))
	}
	return steps
}

// The parameters of a run say which sample had a part in which step: while workers are killed, frozen and replaced, join and leave, and
// after a rollback, each step has the samples of an undisturbed run, none lost and none repeated.
func TestSamplesOfChaos(t *testing.T) {
	launcher, _ := programs(t)
	program := filepath.Join(bin, "audit")
	if out, err := exec.Command("go", "build", "-o", program, "./testdata/audit").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	steps := auditOrder(t)
	var want [auditSamples]float32
	for s, samples := range steps {
		for _, i := range samples {
			want[i] += (2 - float32(uint32(1)<<s)/(1<<(auditSteps-1))) / auditBatch
		}
	}
	for _, c := range []struct {
		chaos, mirrors string
	}{
		{"kill:1@3/backward,join@5,kill:0@9/commit,leave:3@12,kill:4@15/gather", "1"},
		{"kill:2@6+1,kill:0@11/reduce,kill:3@11/reduce", "0"},
	} {
		dir := filepath.Join(t.TempDir(), "run")
		sum, metrics := launchIn(t, dir, launcher, "--workers", "4", "--stages", "2", "--mirrors", c.mirrors, "--respawn", "--chaos", c.chaos, program, "--checkpoint-every", "4")
		if sum.WorkersLost == 0 || c.mirrors == "0" && sum.Rollbacks == 0 {
			t.Errorf("%s: %d workers lost and %d rollbacks", c.chaos, sum.WorkersLost, sum.Rollbacks)
		}
		written := make(map[int]bool) // after a rollback, steps are written again
		for _, line := range metrics {
			var m struct {
				Step int
				Loss float64
			}
			if err := json.Unmarshal([]byte(line), &m); err != nil || m.Step < 1 || m.Step > auditSteps {
				t.Fatal(line, err)
			}
			total := 0
			for _, i := range steps[m.Step-1] {
				total += i
			}
			if m.Loss != float64(total)/auditBatch {
				t.Errorf("%s: the loss of step %d is %v, want %v", c.chaos, m.Step, m.Loss, float64(total)/auditBatch)
			}
			written[m.Step] = true
		}
		if len(written) != auditSteps {
			t.Errorf("%s: metrics of %d steps", c.chaos, len(written))
		}
		file, err := safetensors.Open(filepath.Join(dir, "model.safetensors"))
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		for layer := range 3 {
			got := make([]float32, auditSamples*auditStride)
			if err := file.Read(fmt.Sprintf("%d.count", layer), got); err != nil {
				t.Fatal(err)
			}
			for i := range got {
				if i%auditStride == 0 && got[i] != want[i/auditStride] || i%auditStride != 0 && got[i] != 0 {
					t.Errorf("%s: layer %d: sample %d had a part in steps %v, want %v", c.chaos, layer, i/auditStride, stepsOf(got[i]), stepsOf(want[i/auditStride]))
				}
			}
		}
	}
}

// stepsOf are the steps that a parameter says.
func stepsOf(x float32) (steps []int) {
	bits := -int(x*auditBatch*(1<<(auditSteps-1))) & (1<<auditSteps - 1)
	for s := range auditSteps {
		if bits>>s&1 == 1 {
			steps = append(steps, s+1)
		}
	}
	return steps
}
