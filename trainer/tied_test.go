package trainer_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/trainer"
)

// tiedJob is gptJob with one table for the embedding and the head.
func tiedJob(t *testing.T, text string) trainer.Job {
	j := gptJob(t, text, 0.1)
	config := j.Model.Config.(nn.GPTConfig)
	config.Tied = true
	j.Model = nn.GPT(config)
	return j
}

// A model whose first and last layer share a parameter has the same bits however many workers and stages there are, whichever of them
// die, and wherever stages are moved.
func TestTiedSameBits(t *testing.T) {
	text := writeText(t, 4000)
	job := func() trainer.Job { return tiedJob(t, text) }
	want := trainer.RunWorkers(t, 1, 1, exact, job)[0]
	if trainer.SameHistory(want, trainer.RunWorkers(t, 1, 1, exact, func() trainer.Job { return gptJob(t, text, 0.1) })[0]) {
		t.Error("a model without shared parameters has the same bits")
	}
	for seed, c := range []struct {
		workers, stages, zero, kills int
		moves                        bool // of stages
	}{
		{2, 1, 1, 0, false}, {2, 2, 2, 0, false}, {4, 3, 1, 0, false},
		{3, 1, 2, 1, false}, {4, 2, 1, 1, false}, {4, 3, 2, 1, false}, {5, 3, 2, 2, false}, {5, 2, 2, 0, true}, {6, 3, 1, 1, true},
	} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			r := rand.New(rand.NewPCG(uint64(seed), 1))
			at := 1 + r.IntN(len(want.Steps)-2)
			told, kills := 0, c.kills
			config := trainer.SurviveConfig{
				Workers: c.workers, Stages: c.stages, Mirrors: 1, Start: control.Start{Reduction: "exact", Zero: c.zero, Verify: 1},
				Moment: func(_ int, m control.Message) (int, time.Duration) {
					if st, ok := m.(control.Step); ok && st.Step >= at && kills > 0 {
						kills--
						return r.IntN(c.workers), time.Duration(r.IntN(8000)) * time.Microsecond
					}
					return -1, 0
				},
			}
			if c.moves {
				config.Speeds = func(_ int, m control.Message) map[int]float64 {
					st, ok := m.(control.Step)
					if !ok || st.Step < told+1 {
						return nil
					}
					told = st.Step
					speeds := make(map[int]float64)
					for w := range c.workers {
						speeds[w] = []float64{1, 1, 0.25}[r.IntN(3)]
					}
					return speeds
				}
			}
			s := trainer.Survive(t, config, job)
			for id, got := range s.Left {
				if !trainer.SameHistory(got, want) {
					t.Errorf("worker %d: %+v, want %+v\n%s", id, got, want, strings.Join(s.Notes, "\n"))
				}
			}
			t.Logf("%d recoveries, %d borders moved", len(s.Recoveries), s.Borders)
		})
	}
}

// The model file has a shared parameter once, and the model is opened and trained on with it.
func TestTiedFile(t *testing.T) {
	job := tiedJob(t, writeText(t, 4000))
	job.RunDir = filepath.Join(t.TempDir(), "run")
	tokens := trainer.Tensor{Shape: []int{1, 7}, I: []int32{97, 98, 99, 100, 101, 102, 103}}
	var trained trainer.Tensor
	job.OnEnd = func(e trainer.End) error {
		trained = e.Net.Forward(tokens)
		return nil
	}
	run(t, job)
	net, err := trainer.Open(job.Model, job.RunDir)
	if err != nil {
		t.Fatal(err)
	}
	defer net.Close()
	if opened := net.Forward(tokens); !slices.Equal(opened.F, trained.F) {
		t.Error("the opened model computes something else")
	}
	text, err := os.ReadFile(filepath.Join(job.RunDir, "config.json"))
	if err != nil || !strings.Contains(string(text), `"head.weight": "embedding.token.weight"`) {
		t.Errorf("config.json: %s, %v", text, err)
	}
	weights, err := os.ReadFile(filepath.Join(job.RunDir, "model.safetensors"))
	if err != nil || strings.Contains(string(weights), "head.weight") || !strings.Contains(string(weights), "embedding.token.weight") {
		t.Errorf("model.safetensors: %v", err)
	}
	job.InitFrom, job.RunDir, job.Steps, job.OnEnd = job.RunDir, "", 1, nil
	run(t, job)
	job.Model = gptJob(t, writeText(t, 4000), 0.1).Model
	if _, err := trainer.Run(context.Background(), job); err == nil || !strings.Contains(err.Error(), `"head.weight" is missing`) {
		t.Errorf("a model without shared parameters begins with the file: %v", err)
	}
}
