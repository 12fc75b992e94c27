package zero_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/zero"
)

// Two updates of two parameters with momentum.
func ExampleApply() {
	params, moments := []float32{1, 2}, [][]float32{{0, 0}}
	for step := 1; step <= 2; step++ {
		zero.Apply(zero.SGD{Momentum: 0.5}, zero.Update{Step: step, LR: 0.5, GradScale: 1}, params, moments, []float32{1, -1}, true)
		fmt.Println(params, moments[0])
	}
	// Output:
	// [0.5 2.5] [1 -1]
	// [-0.25 3.25] [1.5 -1.5]
}

func TestCheckpoint(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	run, err := rundir.Create(dir, "program", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	job := rundir.Job{Model: "small", Steps: 10}
	if err := run.WriteJob(job, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := zero.OpenCheckpoint(t.Context(), dir); err == nil {
		t.Error("a checkpoint was found where there is none")
	}
	part := checkpoint.Part{Job: job.ID(), Step: 7, Plan: id.Version{Generation: 1, N: 1}, Rule: "sgd", Shards: []checkpoint.Shard{
		{Range: id.Range{Layer: 0, Lo: 0, Hi: 3}, Params: []float32{1, 2, 3}, Moments: [][]float32{{4, 5, 6}}},
		{Range: id.Range{Layer: 1, Lo: 0, Hi: 1}, Params: []float32{7}, Moments: [][]float32{{8}}},
	}}
	file, err := checkpoint.Write(t.Context(), dir, part)
	if err != nil {
		t.Fatal(err)
	}
	if err := checkpoint.Commit(dir, checkpoint.Manifest{
		Job: job.ID(), Step: 7, Plan: part.Plan, Rule: "sgd", Layers: []int{3, 1}, Files: []checkpoint.File{file},
	}); err != nil {
		t.Fatal(err)
	}
	c, err := zero.OpenCheckpoint(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	params, momentum := make([]float32, 2), make([]float32, 2)
	err = errors.Join(c.Read(t.Context(), 0, 1, 3, params, nil), c.Read(t.Context(), 0, 1, 3, nil, [][]float32{momentum}), c.Close())
	if err != nil || c.Step() != 7 || !slices.Equal(c.Layers(), []int{3, 1}) || !slices.Equal(c.Moments(), []string{"momentum"}) ||
		!slices.Equal(params, []float32{2, 3}) || !slices.Equal(momentum, []float32{5, 6}) {
		t.Errorf("step %d of %v with %v: %v and %v, error %v", c.Step(), c.Layers(), c.Moments(), params, momentum, err)
	}
}
