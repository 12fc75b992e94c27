package engine

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/worker/core"
)

// TestCheckpoint: any worker's wish is enough, one that is busy puts it off, a run that is stopped
// makes one; all owners copy the same step, and the copy stays as it was.
func TestCheckpoint(t *testing.T) {
	const workers = 3
	var mu sync.Mutex
	type part struct {
		checkpoint.Part
		by int
	}
	var made []part
	var wanted, busy atomic.Bool
	var stop atomic.Value
	stop.Store("")
	engines, stages := lines{workers: workers, mirrors: 1, global: 6, micro: 1, change: func(worker int, c *Config) {
		c.Rule = adam
		c.Saving = func(int) (say core.Saving) {
			if worker == 1 && wanted.Load() {
				say |= core.SavingWanted
			}
			if worker == 2 && busy.Load() {
				say |= core.SavingBusy
			}
			return say
		}
		c.Save = func(c checkpoint.Part) {
			mu.Lock()
			made = append(made, part{c, worker})
			mu.Unlock()
			wanted.Store(false)
		}
		if worker == 0 {
			c.Stop = func() string { return stop.Load().(string) }
		}
	}}.start(t)
	step := func(n int) []part {
		made = nil
		all(engines, func(i int, e *Engine) {
			if _, err := e.Step(t.Context(), n); err != nil {
				t.Errorf("worker %d: %v", i, err)
			}
		})
		return made
	}
	check := func(n int, got []part) {
		t.Helper()
		var found []id.Range
		for _, c := range got {
			if c.Step != n || c.Plan != (id.Version{Generation: 1, N: 1}) {
				t.Errorf("a checkpoint of step %d, plan %v", c.Step, c.Plan)
			}
			for _, s := range c.Shards {
				found = append(found, s.Range)
				if want := [][]float32{stages[c.by].b, stages[c.by].w}[s.Layer]; s.Params[0] != want[0] || len(s.Moments) != 2 {
					t.Errorf("step %d: layer %d is %v with %d moments, want %v", n, s.Layer, s.Params, len(s.Moments), want)
				}
			}
		}
		slices.SortFunc(found, func(a, b id.Range) int { return a.Layer - b.Layer })
		if len(got) != workers || !slices.Equal(found, ranges) {
			t.Errorf("step %d: %d parts with %v", n, len(got), found)
		}
	}
	if got := step(1); len(got) > 0 {
		t.Errorf("no worker asked for %+v", got)
	}
	wanted.Store(true)
	busy.Store(true)
	if got := step(2); len(got) > 0 {
		t.Errorf("a worker was busy, and there is %+v", got)
	}
	busy.Store(false)
	got := step(3)
	check(3, got)
	before := make(map[int]float32)
	for _, c := range got {
		for _, s := range c.Shards {
			before[s.Layer] = s.Params[0]
		}
	}
	if more := step(4); len(more) > 0 {
		t.Errorf("a second one, %+v", more)
	}
	for _, c := range got {
		for _, s := range c.Shards {
			if s.Params[0] != before[s.Layer] {
				t.Errorf("the copy of layer %d has changed", s.Layer)
			}
		}
	}
	busy.Store(true)
	stop.Store("interrupt")
	check(5, step(5))
}
