package engine

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/worker/core"
)

// A bit that flips in any memory of any worker, between passes, between the check
// and the update, or in an evaluation, is found and named by that worker before
// the next commit, and the run ends with the bits of an undisturbed one.
func TestFlips(t *testing.T) {
	const steps, at = 4, 2
	moments := []string{"forward", "window", "evaluation"}
	alone, _ := newLine(t, 12, 1, func(c *Config) { c.Rule = adam })
	evaluate := func(e *Engine, sample func()) (core.Loss, error) {
		loss, _, err := e.Evaluate(t.Context(), at, 6, func(i int, in, target tensor.Tensor) error {
			sample()
			in.F[0], target.F[0] = float32(i), 1
			return nil
		})
		return loss, err
	}
	type history struct {
		results [steps]core.Result
		eval    core.Loss
	}
	run := func(t *testing.T, e *Engine, sample func(), h history) (history, error) {
		var err error
		for step := 2; step <= steps; step++ {
			r, err := e.Step(t.Context(), step)
			if err != nil {
				return h, err
			}
			r.Forwards, r.Backwards, r.Reading, r.Plan = 0, 0, 0, id.Version{}
			h.results[step-1] = r
			if step == at {
				if h.eval, err = evaluate(e, sample); err != nil {
					return h, err
				}
			}
		}
		_, _, err = e.Keep(t.Context(), steps, 0, func(context.Context) (Collector, error) { return nothing{}, nil })
		return h, err
	}
	if _, err := alone.Step(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	want, err := run(t, alone, func() {}, history{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ workers, mirrors, zero int }{{2, 1, 2}, {3, 1, 2}, {4, 2, 1}} {
		for target := core.Own; target <= core.Moment; target++ {
			for _, moment := range moments {
				t.Run(fmt.Sprintf("%d workers, %d mirrors, ZeRO %d, %v, %s", c.workers, c.mirrors, c.zero, target, moment), func(t *testing.T) {
					var engines []*Engine
					var mu sync.Mutex
					var repairs []control.Repaired
					culprit := -1
					var once sync.Once
					flip := func(i int, now string) {
						if now == moment && i == culprit {
							once.Do(func() { engines[i].Flip(target) })
						}
					}
					engines, _ = lines{c.workers, c.mirrors, 12, 1, func(i int, f *Config) {
						f.Rule, f.Zero = adam, c.zero
						step := 0
						load := f.Load
						f.Load = func(lane int, n uint64, in, target tensor.Tensor) error {
							if n/12+1 == at {
								flip(i, "forward")
							}
							return load(lane, n, in, target)
						}
						f.Stop = func() string {
							if step++; step == at {
								flip(i, "window")
							}
							return ""
						}
						f.Tell = func(m control.Message) {
							r, ok := m.(control.Repaired)
							if !ok {
								return
							}
							mu.Lock()
							defer mu.Unlock()
							if i != culprit {
								t.Errorf("worker %d had to be repaired", i)
							}
							repairs = append(repairs, r)
						}
					}}.start(t)
					all(engines, func(_ int, e *Engine) {
						if _, err := e.Step(t.Context(), 1); err != nil {
							t.Error(err)
						}
					})
					for i, e := range engines {
						e.inspect(func() {
							for _, s := range e.spans() {
								for j := range s.arrays {
									if s.target(j) == target {
										culprit = i
									}
								}
							}
						})
					}
					if culprit < 0 {
						if target != core.CopiedParams || c.workers > 2 {
							t.Error("no worker has such memory")
						}
						return
					}
					all(engines, func(i int, e *Engine) {
						got, err := run(t, e, func() { flip(i, "evaluation") }, history{})
						if err != nil || !reflect.DeepEqual(got, want) {
							t.Errorf("worker %d: %+v, want %+v: %v", i, got, want, err)
						}
					})
					if target == core.CopiedParams && moment == "window" {
						if len(repairs) > 1 {
							t.Errorf("repairs of what was not used any more: %+v", repairs)
						}
					} else if len(repairs) != 1 || repairs[0].Target != target.String() || repairs[0].Block != 0 || repairs[0].Try != 1 {
						t.Errorf("repairs %+v", repairs)
					}
					for i, e := range engines {
						for _, r := range ranges {
							for j, m := range e.Moments(r) {
								if w := alone.Moments(r)[j]; !slices.Equal(m, w) {
									t.Errorf("worker %d has moment %d of layer %d %v, want %v", i, j, r.Layer, m, w)
								}
							}
						}
					}
				})
			}
		}
	}
}

// nothing takes all and keeps nothing.
type nothing struct{}

func (nothing) Take(Part, []float32) error { return nil }
func (nothing) Finish() ([]byte, error)    { return nil, nil }
func (nothing) Discard()                   {}

// Without another holder the worker ends, rather than to go on with what is
// wrong. Others wait for what is done about it. What is wrong is not written: a commit that may be that of a checkpoint checks moments.
func TestFlipWithoutMirrors(t *testing.T) {
	for _, c := range []struct {
		target core.Target
		saving core.Saving // in step 2
		stop   string      // of step 2
		step   int         // of the error
		in     int         // the step that fails
	}{
		{core.Own, 0, "", 1, 2},
		{core.Moment, 0, "", 2, 3},
		{core.Moment, core.SavingWanted, "", 1, 2},
		{core.Moment, core.SavingLast, "", 1, 2},
		{core.Moment, 0, "stop", 1, 2},
	} {
		step := 1
		e, _ := newLine(t, 4, 1, func(f *Config) {
			f.Rule = adam
			f.Saving = func(at int) core.Saving {
				if at == 2 {
					return c.saving
				}
				return 0
			}
			f.Stop = func() string {
				if step == 2 {
					return c.stop
				}
				return ""
			}
			f.Save = func(p checkpoint.Part) { t.Errorf("%+v: a checkpoint of step %d", c, p.Step) }
		})
		if _, err := e.Step(t.Context(), step); err != nil {
			t.Fatal(err)
		}
		e.Flip(c.target)
		var err error
		for err == nil && step < 4 {
			step++
			_, err = e.Step(t.Context(), step)
		}
		var bad *core.CorruptError
		if !errors.As(err, &bad) || bad.Step != c.step || bad.Target != c.target || bad.Block != 0 || step != c.in {
			t.Errorf("%+v: step %d: %v", c, step, err)
		}
	}
}

// What an update has made of an altered block is known as such, with what was altered: it gets into no checkpoint.
func TestSpoiled(t *testing.T) {
	tensors := []zero.Tensor{{Size: 2}, {Size: 3}}
	c := Config{Rule: adam, Layers: []Layer{{Name: "a", Tensors: tensors}}}
	r := id.Range{Layer: 0, Lo: 0, Hi: 5}
	for array := range 3 {
		state, err := zero.NewShard(adam, r, tensors)
		if err != nil {
			t.Fatal(err)
		}
		e := &Engine{c: c, guard: newGuard(&c)}
		sh := &shard{Range: r, state: state, params: make([]float32, 5), owner: true}
		e.guard.take(r, sh.params, state.Moments...)
		sh.arrays()[array][2]++
		if err := e.spoiled(sh); err != nil {
			t.Errorf("array %d: before the update: %v", array, err)
		}
		state.Update(nil, sh.params, make([]float32, 5), zero.Update{Step: 1, LR: 0.1, GradScale: 1}, e.guard.of(r)...)
		var bad *core.CorruptError
		if err := e.spoiled(sh); !errors.As(err, &bad) || bad.Block != 1 || (bad.Target == core.Moment) != (array > 0) {
			t.Errorf("array %d: %v", array, err)
		}
	}
}

// Holders of a shard that differ, each with digests that fit, all end.
func TestHoldersDiffer(t *testing.T) {
	engines, _ := lines{workers: 2, mirrors: 1, global: 4, micro: 1}.start(t)
	all(engines, func(_ int, e *Engine) {
		if _, err := e.Step(t.Context(), 1); err != nil {
			t.Error(err)
		}
	})
	engines[1].inspect(func() {
		for _, s := range engines[1].spans() {
			if s.owner {
				s.arrays[0][0]++
				s.sums[0][0] = zero.DigestOf(s.arrays[0])
			}
		}
	})
	all(engines, func(i int, e *Engine) {
		_, err := e.Step(t.Context(), 2)
		var bad *core.CorruptError
		if !errors.As(err, &bad) || bad.Block != -1 {
			t.Errorf("worker %d: %v", i, err)
		}
	})
}

func TestTargetNames(t *testing.T) {
	for x := core.Own; x <= core.Moment; x++ {
		if got, ok := core.ParseTarget(x.String()); !ok || got != x {
			t.Errorf("%v is %v, %v", x, got, ok)
		}
	}
	for _, none := range []string{"own ", core.Passed.String()} {
		if _, ok := core.ParseTarget(none); ok {
			t.Errorf("%q can be flipped", none)
		}
	}
}

// Moments returns the moments of a range that is held here, nil for others. There must be no operation.
func (e *Engine) Moments(r id.Range) (moments [][]float32) {
	e.inspect(func() {
		if sh := e.shards[r]; sh != nil && sh.state != nil {
			moments = sh.state.Moments
		}
	})
	return moments
}
