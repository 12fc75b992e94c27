package exact

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/trainer"
)

// outcome is what must not depend on anything but the job.
type outcome struct {
	params, state string
	losses        []float64 // training losses, then the held-out loss
}

func (o outcome) equal(p outcome) bool {
	if o.params != p.params || o.state != p.state || len(o.losses) != len(p.losses) {
		return false
	}
	for i := range o.losses {
		if math.Float64bits(o.losses[i]) != math.Float64bits(p.losses[i]) {
			return false
		}
	}
	return true
}

// run trains a job and keeps its losses.
func run(t *testing.T, j trainer.Job) outcome {
	t.Helper()
	var o outcome
	j.OnStep = func(s trainer.StepInfo) error {
		o.losses = append(o.losses, s.Loss, s.GradNorm)
		return nil
	}
	s, err := trainer.Run(context.Background(), j)
	if err != nil {
		t.Fatal(err)
	}
	o.params, o.state = s.ParamsSHA256, s.StateSHA256
	o.losses = append(o.losses, *s.ValLoss)
	return o
}

// job makes a job over the corpus in the folder.
func job(t *testing.T, corpus string, config nn.GPTConfig, global, micro, steps int) trainer.Job {
	t.Helper()
	text, err := trainer.Text(corpus)
	if err != nil {
		t.Fatal(err)
	}
	train, held := text.HoldOut(4)
	return trainer.Job{
		Model: nn.GPT(config), Data: train, Eval: held, EvalSamples: 8,
		Optimizer:   trainer.AdamW{LR: trainer.Cosine(2e-3, 2), WeightDecay: 0.1},
		GlobalBatch: global, MicroBatch: micro, Steps: steps, ClipNorm: 1, Seed: 1, Threads: 1,
	}
}

const corpus = "testdata/corpus"

var (
	tiny  = nn.GPTConfig{Layers: 1, Width: 32, Heads: 2, Context: 16, Dropout: 0.1}
	small = nn.GPTConfig{Layers: 2, Width: 64, Heads: 4, Context: 32, Dropout: 0.1}
	odd   = nn.GPTConfig{Layers: 1, Width: 96, Heads: 3, Context: 50, Dropout: 0.1}
	large = nn.GPTConfig{Dropout: 0.1} // the default GPT
)

// The golden hashes of the jobs, with every path and 1 and 2 threads.
// See the package comment before changing one.
func TestGolden(t *testing.T) {
	for _, c := range []struct {
		name                 string
		config               nn.GPTConfig
		global, micro, steps int
		slowest              kernel.Path // plain Go takes too long for the large one
		params, state        string
	}{
		{"tiny", tiny, 4, 2, 2, kernel.Generic,
			"ad84bd1b0604c081463d6f6c2c8895868f3f9fa2f28f17b9a02c1024c4a8284a", "7ce414e682d114ed47bf20c64945468b4bfefbcf096a79dd671248c21c3fbb21"},
		{"small", small, 8, 2, 3, kernel.Generic,
			"bcf8da48012b11701c308c2e84a7cc91cd3b8c57f2b1e79abda7df61c055970b", "b70da79253c11ced1c4c3cc6a02a60c1b86384177623b3ce2dff510d2bb8a778"},
		{"odd sizes", odd, 9, 3, 2, kernel.Generic,
			"4054b5a3f02ddb134358827a47c6c488b7ebd42123dcd6c157e08ac62551c5a7", "7c8ba4ba670a919bfbddd121c93bb4c662e6ebe155afcfb12679346f3fac3d20"},
		{"default GPT", large, 6, 2, 2, kernel.AVX2,
			"e357bb506c284be0559b9b77d3b1d2d3537b131092198ebc4ca65e89b2d5f599", "0b798ee35ba36d8a22c9da5f7f4660ae9761e4ecc1a996c7cdf2d5f4a756d13b"},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := job(t, corpus, c.config, c.global, c.micro, c.steps)
			var first *outcome
			for _, p := range kernel.Available() {
				if p < c.slowest || testing.Short() && (p == kernel.Generic || c.slowest != kernel.Generic) {
					continue
				}
				for _, threads := range []int{1, 2} {
					restore, err := kernel.Use(p)
					if err != nil {
						t.Fatal(err)
					}
					j.Threads = threads
					o := run(t, j)
					restore()
					if o.params != c.params || o.state != c.state {
						t.Errorf("%v, %d threads: params_sha256 %s, state_sha256 %s, want %s and %s", p, threads, o.params, o.state, c.params, c.state)
					}
					if first == nil {
						first = &o
					}
					if !o.equal(*first) {
						t.Errorf("%v, %d threads: losses %v, want %v", p, threads, o.losses, first.losses)
					}
				}
			}
			if first == nil {
				t.Skipf("left out with -short, or this CPU has plain Go only, which takes too long here")
			}
		})
	}
}

// What the job does depend on changes the hashes: the tests above could not
// pass by never looking.
func TestNegativeControls(t *testing.T) {
	base := run(t, job(t, corpus, small, 8, 2, 2))
	if again := run(t, job(t, corpus, small, 8, 2, 2)); !again.equal(base) {
		t.Fatalf("the same job gave %v and %v", base, again)
	}
	for name, change := range map[string]func(j *trainer.Job){
		"another seed": func(j *trainer.Job) { j.Seed = 2 },
		"dropout 0": func(j *trainer.Job) {
			c := small
			c.Dropout = 0
			j.Model = nn.GPT(c)
		},
		"another micro-batch": func(j *trainer.Job) { j.MicroBatch = 4 },
		"one changed data byte": func(j *trainer.Job) {
			changed := job(t, changedCorpus(t), small, 8, 2, 2)
			j.Data, j.Eval = changed.Data, changed.Eval
			j.Steps = 58 // an epoch, so that the byte is seen
		},
	} {
		t.Run(name, func(t *testing.T) {
			j := job(t, corpus, small, 8, 2, 2)
			change(&j)
			want := base
			if j.Steps != 2 {
				same := job(t, corpus, small, 8, 2, j.Steps)
				want = run(t, same)
			}
			if o := run(t, j); o.params == want.params || o.state == want.state {
				t.Errorf("params_sha256 and state_sha256 are still %s and %s", o.params, o.state)
			}
		})
	}
}

// changedCorpus is the corpus with another byte in the middle of a file that
// is trained on.
func changedCorpus(t *testing.T) string {
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(corpus)); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, "matmul.txt")
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	text[len(text)/2] ^= 1
	if err := os.WriteFile(name, text, 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}
