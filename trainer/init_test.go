package trainer_test

import (
	"encoding/binary"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/safetensors"
	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/trainer"
)

// writeMoments writes moments for the model in a run directory, as launcher export --optimizer writes those of a run.
func writeMoments(t *testing.T, runDir, path string, metadata map[string]string, names ...string) {
	t.Helper()
	m, err := safetensors.Open(filepath.Join(runDir, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var infos []safetensors.Info
	for _, name := range names {
		for _, x := range m.Tensors {
			infos = append(infos, safetensors.Info{Name: name + "/" + x.Name, Shape: x.Shape})
		}
	}
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	w, err := safetensors.NewWriter(f, metadata, infos)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, x := range infos {
		values := make([]float32, x.Len())
		for i := range values {
			n++
			values[i] = float32(n%7) / 100
		}
		err = errors.Join(err, w.Write(values))
	}
	if err := errors.Join(err, w.Close(), f.Close()); err != nil {
		t.Fatal(err)
	}
}

// beginsWith is a job that begins with parameters of another run and with made-up moments after two updates, and the directory of both.
func beginsWith(t *testing.T) (job trainer.Job, dir string) {
	t.Helper()
	job = smallJob()
	job.Model = nn.Classifier(nn.ClassifierConfig{Inputs: 2, Hidden: []int{8, 8}, Classes: 2})
	job.Optimizer, job.Steps, job.MicroBatch = trainer.AdamW{LR: trainer.Constant(0.01)}, 2, 2
	first := job
	dir = filepath.Join(t.TempDir(), "run")
	first.RunDir = dir
	run(t, first)
	writeMoments(t, dir, filepath.Join(dir, "optimizer.safetensors"), map[string]string{"step": "2"}, "exp_avg", "exp_avg_sq")
	job.InitFrom, job.InitOptimizer = dir, dir
	return job, dir
}

// The optimizer's state that a run begins with, and the number of updates in it, have their part in the result, which no layout changes.
func TestInitOptimizer(t *testing.T) {
	job, dir := beginsWith(t)
	want := run(t, job).StateSHA256
	for i, one := range trainer.RunWorkers(t, 3, 2, exact, func() trainer.Job { return job }) {
		if one.Done.StateSHA256 != want {
			t.Errorf("worker %d of 3 has state %s, want %s", i, one.Done.StateSHA256, want)
		}
	}
	later := job
	later.InitOptimizer = filepath.Join(t.TempDir(), "later.safetensors")
	writeMoments(t, dir, later.InitOptimizer, map[string]string{"step": "3"}, "exp_avg", "exp_avg_sq")
	without := job
	without.InitOptimizer = ""
	if states := []string{want, run(t, later).StateSHA256, run(t, without).StateSHA256}; len(slices.Compact(slices.Sorted(slices.Values(states)))) != 3 {
		t.Errorf("states %v of other beginnings", states)
	}
}

// What does not fit is named.
func TestInitOptimizerFaults(t *testing.T) {
	job, dir := beginsWith(t)
	unnumbered := filepath.Join(t.TempDir(), "unnumbered.safetensors")
	writeMoments(t, dir, unnumbered, nil, "exp_avg", "exp_avg_sq")
	negative := filepath.Join(t.TempDir(), "negative.safetensors")
	writeMoments(t, dir, negative, map[string]string{"step": "2"}, "exp_avg", "exp_avg_sq")
	content, err := os.ReadFile(negative)
	if err == nil {
		binary.LittleEndian.PutUint32(content[len(content)-4:], math.Float32bits(-0.5))
		err = os.WriteFile(negative, content, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	wide := filepath.Join(t.TempDir(), "run")
	wider := job
	wider.Model = nn.Classifier(nn.ClassifierConfig{Inputs: 2, Hidden: []int{9, 8}, Classes: 2})
	wider.InitFrom, wider.InitOptimizer, wider.RunDir = "", "", wide
	run(t, wider)
	writeMoments(t, wide, filepath.Join(wide, "optimizer.safetensors"), map[string]string{"step": "2"}, "exp_avg", "exp_avg_sq")
	for want, change := range map[string]func(j *trainer.Job){
		`tensor "momentum/hidden.0.weight" is missing; the optimizer's state has it with shape [2 8]`: func(j *trainer.Job) {
			j.Optimizer = trainer.SGD{LR: trainer.Constant(0.1)}
		},
		`tensor "exp_avg/hidden.0.weight" has shape [2 9] in the file and [2 8] in the optimizer's state`:                          func(j *trainer.Job) { j.InitOptimizer = wide },
		"give --init-from (Job.InitFrom) as well":                                                                                  func(j *trainer.Job) { j.InitFrom = "" },
		`has the step "" in its metadata, not the number of updates in the state; write it again with launcher export --optimizer`: func(j *trainer.Job) { j.InitOptimizer = unnumbered },
		`tensor "exp_avg/hidden.0.weight" is missing`:                                                                              func(j *trainer.Job) { j.InitOptimizer = filepath.Join(dir, "model.safetensors") },
		`negative.safetensors: tensor "exp_avg_sq/output.bias" has -0.5 as element 1; a mean of squares is not negative`:           func(j *trainer.Job) { j.InitOptimizer = negative },
		"none: no such file": func(j *trainer.Job) { j.InitOptimizer = filepath.Join(dir, "none") },
	} {
		j := job
		change(&j)
		err := j.Validate()
		if !errors.As(err, new(*trainer.ValidationError)) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "--init-optimizer (Job.InitOptimizer)") {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
