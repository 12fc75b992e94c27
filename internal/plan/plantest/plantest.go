// Package plantest has the models, workers and bounds that tests of plans share.
package plantest

import (
	"encoding/json"
	"time"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"pgregory.net/rapid"
)

// Model returns layers of equal cost, with a matrix and a vector each.
func Model(layers int) []plan.Layer {
	l := make([]plan.Layer, layers)
	for i := range l {
		l[i] = plan.Layer{Tensors: []int{100_000, 300}, Forward: time.Millisecond, Backward: 2 * time.Millisecond, Output: 1 << 16}
	}
	return l
}

// Workers returns n workers, so many on each host.
func Workers(n, perHost int) []plan.Worker {
	w := make([]plan.Worker, n)
	for i := range w {
		w[i] = plan.Worker{ID: id.WorkerID(i), Host: string(rune('A' + i/perHost))}
	}
	return w
}

// Fataler is a test.
type Fataler interface {
	Helper()
	Fatalf(string, ...any)
}

// AnyProfile draws a model and speeds.
func AnyProfile(t *rapid.T, layers, workers int) plan.Profile {
	prof := plan.Profile{Speed: map[id.WorkerID]float64{}}
	for range layers {
		prof.Layers = append(prof.Layers, plan.Layer{
			Tensors:  rapid.SliceOfN(rapid.IntRange(0, 5*kernel.Block), 0, 4).Draw(t, "tensors"),
			Forward:  time.Duration(rapid.IntRange(0, 20).Draw(t, "forward")) * time.Millisecond,
			Backward: time.Duration(rapid.IntRange(0, 20).Draw(t, "backward")) * time.Millisecond,
			Output:   1 << 10,
		})
	}
	if rapid.Bool().Draw(t, "uneven speeds") {
		for w := range workers {
			prof.Speed[id.WorkerID(w)] = rapid.Float64Range(0.2, 1).Draw(t, "speed")
		}
	}
	if rapid.Bool().Draw(t, "slow links") {
		prof.Latency, prof.Bandwidth, prof.Updates = time.Millisecond, 1e8, 1e8
	}
	return prof
}

// Uniform returns a profile of equal layers.
func Uniform(layers int) plan.Profile { return plan.Profile{Layers: Model(layers)} }

// Copied returns a plan that shares nothing with p.
func Copied(t Fataler, p plan.Plan) plan.Plan {
	t.Helper()
	b, err := json.Marshal(&p)
	if err != nil {
		t.Fatalf("%v", err)
	}
	q, err := plan.Parse(b)
	if err != nil {
		t.Fatalf("%v", err)
	}
	return q
}
