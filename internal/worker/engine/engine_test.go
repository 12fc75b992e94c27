package engine

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/core"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func (e *Engine) passes() (forwards, backwards int64) {
	var d control.Done
	e.Describe(&d)
	return d.Worker.Forwards, d.Worker.Backwards
}

// line is a stage of two layers, y = (x + b)·w, with a squared loss, which
// counts the passes in flight.
type line struct {
	KeepsNothing
	b, w  []float32
	live  atomic.Int64 // passes in flight
	spoil func(m Micro, db, dw *float32)
}

type linePass struct {
	m       Micro
	in, out tensor.Tensor
}

func (l *line) Forward(m Micro, in tensor.Tensor) (Pass, tensor.Tensor, error) {
	for layer := range 2 {
		if err := m.Ready(layer); err != nil {
			return nil, tensor.Tensor{}, err
		}
	}
	l.live.Add(1)
	p := &linePass{m: m, in: in, out: tensor.New(m.Samples, 1)}
	for i, x := range in.F {
		p.out.F[i] = (x + l.b[0]) * l.w[0]
	}
	return p, p.out, nil
}

func (l *line) Loss(p Pass, target tensor.Tensor) (sum float64, count int64, dout tensor.Tensor) {
	q := p.(*linePass)
	dout = tensor.New(q.m.Samples, 1)
	for i, y := range q.out.F {
		d := y - target.F[i]
		dout.F[i] = d
		sum += float64(float64(d)*float64(d)) / 2
	}
	return sum, int64(q.m.Samples), dout
}

func (l *line) Backward(p Pass, dout tensor.Tensor, grads Gradients) tensor.Tensor {
	l.live.Add(-1)
	q := p.(*linePass)
	var db, dw float32
	for i, d := range dout.F {
		dw += float32(d * (q.in.F[i] + l.b[0]))
		db += float32(d * l.w[0])
	}
	if l.spoil != nil {
		l.spoil(q.m, &db, &dw)
	}
	for layer, g := range []float32{1: dw, 0: db} {
		buf := grads.Buffer(layer)
		buf[0] = g
		grads.Done(layer, buf)
	}
	return tensor.Tensor{}
}

func (l *line) Drop(Pass)           { l.live.Add(-1) }
func (l *line) Suspect(Pass) int    { return 1 }
func (l *line) Shapes(Pass) [][]int { return nil }

// ranges are the shards of a line's layers.
var ranges = []id.Range{{Layer: 0, Lo: 0, Hi: 1}, {Layer: 1, Lo: 0, Hi: 1}}

// shape of a test: workers that all serve the one stage.
type lines struct {
	workers, mirrors, global, micro int
	change                          func(worker int, c *Config)
}

// start makes the engines, which end with the test.
func (s lines) start(t *testing.T) (engines []*Engine, stages []*line) {
	t.Helper()
	v := plan.View{}
	prof := plan.Profile{Layers: []plan.Layer{{Tensors: []int{1}}, {Tensors: []int{1}}}}
	networks := make([]*comm.Endpoint, s.workers)
	mem := transport.NewMem()
	var peers []control.Peer
	for i := range networks {
		var err error
		if networks[i], err = comm.Listen(comm.Config{Self: id.Session{Worker: id.WorkerID(i)}, Transport: mem}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { networks[i].Close() })
		w := plan.Worker{ID: id.WorkerID(i)}
		v.Workers = append(v.Workers, w)
		peers = append(peers, control.Peer{Worker: w, Addr: networks[i].Addr()})
	}
	p, _, err := planner.Next(plan.Plan{}, v, prof, planner.Event{Micros: s.global / s.micro, Mirrors: s.mirrors})
	if err != nil {
		t.Fatal(err)
	}
	for i := range networks {
		// What a stage begins with is up to Begin.
		nan := float32(math.NaN())
		l := &line{b: []float32{nan}, w: []float32{nan}}
		layers := []Layer{{Name: "shift", Tensors: []zero.Tensor{{Size: 1}}}, {Name: "slope", Tensors: []zero.Tensor{{Size: 1}}}}
		c := Config{
			Self:    v.Workers[i],
			Network: networks[i],
			Groups:  make(map[uint16]*group.Group),
			First:   control.Order{Plan: p, Peers: peers},
			Stage: func(lo, hi int) Stage {
				if lo != 0 || hi != 2 {
					t.Errorf("a stage of layers [%d,%d)", lo, hi)
				}
				layers[0].Params, layers[1].Params = l.b, l.w
				return l
			},
			Layers: layers,
			Begin: func(r id.Range, params []float32, _ [][]float32) error {
				params[0] = float32(r.Layer) // b = 0, w = 1
				return nil
			},
			Zeros: true, Beside: true,
			Input: tensor.Spec{Shape: []int{1}}, Target: tensor.Spec{Shape: []int{1}},
			Job:  rundir.Job{GlobalBatch: s.global, MicroBatch: s.micro},
			Rule: zero.SGD{}, LR: func(int) float64 { return 0.05 },
			Load: func(_ int, i uint64, in, target tensor.Tensor) error {
				in.F[0] = float32(i%7) - 3
				target.F[0] = 2*in.F[0] + 3
				return nil
			},
			Stop: func() string { return "" },
			Tell: func(control.Message) {},
		}
		if s.change != nil {
			s.change(i, &c)
		}
		e, err := New(c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		engines, stages = append(engines, e), append(stages, l)
	}
	return engines, stages
}

// newLine makes an engine that is the only worker.
func newLine(t *testing.T, global, micro int, change func(c *Config)) (*Engine, *line) {
	t.Helper()
	s := lines{workers: 1, global: global, micro: micro}
	if change != nil {
		s.change = func(_ int, c *Config) { change(c) }
	}
	engines, stages := s.start(t)
	return engines[0], stages[0]
}

var adam = zero.AdamW{Beta1: 0.9, Beta2: 0.999, Eps: 1e-8}

func TestLearns(t *testing.T) {
	var applied []control.Applied
	e, l := newLine(t, 12, 2, func(c *Config) {
		c.Tell = func(m control.Message) {
			if a, ok := m.(control.Applied); ok {
				applied = append(applied, a)
			}
		}
	})
	var first, last core.Result
	for step := 1; step <= 200; step++ {
		r, err := e.Step(t.Context(), step)
		if err != nil {
			t.Fatal(err)
		}
		if step == 1 {
			first = r
		}
		last = r
	}
	if first.Targets != 12 || last.Step != 200 || !(last.Loss < 1e-6*first.Loss) {
		t.Errorf("from %+v to %+v", first, last)
	}
	if math.Abs(float64(l.w[0])-2) > 1e-3 || math.Abs(float64(l.b[0])-1.5) > 1e-3 {
		t.Errorf("(x + %v)·%v, want (x + 1.5)·2", l.b, l.w)
	}
	forwards, backwards := e.passes()
	if forwards != 1200 || backwards != 1200 || last.Forwards != 1200 || last.Backwards != 1200 || l.live.Load() != 0 {
		t.Errorf("%d forwards, %d backwards, %d in flight, %+v", forwards, backwards, l.live.Load(), last)
	}
	// Memory: the depth of the tree, not the number of micro-batches.
	e.Close()
	if n := len(e.free.free[1]); n > 8 {
		t.Errorf("%d gradient buffers for two layers", n)
	}
	if len(applied) != 1 || applied[0].Version != last.Plan || applied[0].Opened != 0 {
		t.Errorf("plans that were applied: %+v, want one of version %v", applied, last.Plan)
	}
}

// TestStepIsTheFormula computes one clipped step by hand.
func TestStepIsTheFormula(t *testing.T) {
	e, l := newLine(t, 6, 1, func(c *Config) { c.ClipNorm = 0.5 })
	var db, dw, loss [6]float64
	for i := range 6 {
		x := float64(i) - 3
		d := x - (2*x + 3)
		db[i], dw[i], loss[i] = d, d*x, d*d/2
	}
	add := func(v [6]float64) float64 { // the tree of 6, in float32 where gradients are
		return ((v[0] + v[1]) + (v[2] + v[3])) + (v[4] + v[5])
	}
	r, err := e.Step(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	norm := math.Hypot(add(db), add(dw)) / 6
	if math.Abs(r.GradNorm-norm) > 1e-9 || r.Loss != add(loss)/6 || r.LR != 0.05 {
		t.Errorf("%+v, want norm %v, loss %v", r, norm, add(loss)/6)
	}
	scale := 0.5 / (norm + 1e-6) / 6
	for _, c := range []struct{ got, want float64 }{
		{float64(l.b[0]), 0 - 0.05*scale*add(db)}, {float64(l.w[0]), 1 - 0.05*scale*add(dw)},
	} {
		if math.Abs(c.got-c.want) > 1e-6 {
			t.Errorf("parameter %v, want %v", c.got, c.want)
		}
	}
}

// The clock is read for spans only where a callback takes them.
func TestSpansOff(t *testing.T) {
	for _, on := range []bool{false, true} {
		var told atomic.Int64
		e, _ := newLine(t, 6, 1, func(c *Config) {
			if on {
				c.Span = func(Span) { told.Add(1) }
			}
		})
		if _, err := e.Step(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		e.Close()
		if (told.Load() > 0) != on || e.now().IsZero() == on {
			t.Errorf("on %v: %d spans, and it is %v", on, told.Load(), e.now())
		}
	}
}

// Several workers have the bits of one, whatever copies the plan has them hold;
// so have the mirrors.
func TestWorkersSameBits(t *testing.T) {
	const steps = 5
	alone, want := newLine(t, 12, 1, func(c *Config) { c.Rule = adam })
	results := make([]core.Result, steps)
	for i := range results {
		var err error
		if results[i], err = alone.Step(t.Context(), 1+i); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ workers, mirrors, zero int }{{2, 0, 2}, {3, 0, 1}, {3, 1, 2}, {4, 2, 1}} {
		t.Run(fmt.Sprintf("%d workers, %d mirrors, ZeRO %d", c.workers, c.mirrors, c.zero), func(t *testing.T) {
			engines, stages := lines{c.workers, c.mirrors, 12, 1, func(_ int, f *Config) {
				f.Rule, f.Zero = adam, c.zero
			}}.start(t)
			all(engines, func(i int, e *Engine) {
				for step := 1; step <= steps; step++ {
					r, err := e.Step(t.Context(), step)
					if err != nil {
						t.Errorf("worker %d: %v", i, err)
						return
					}
					w := results[step-1]
					if r.Loss != w.Loss || r.GradNorm != w.GradNorm || r.Targets != w.Targets {
						t.Errorf("worker %d: %+v, want %+v", i, r, w)
					}
				}
				// Parameters come under the next forward pass.
				if _, _, err := e.Evaluate(t.Context(), steps, 1, func(_ int, in, target tensor.Tensor) error { return nil }); err != nil {
					t.Error(err)
				}
			})
			holders := make([]int, len(ranges))
			passes := int64(0)
			for i, e := range engines {
				f, b := e.passes()
				if passes += f; f != b {
					t.Errorf("worker %d: %d forwards and %d backwards", i, f, b)
				}
				for r, x := range ranges {
					m := e.Moments(x)
					if m == nil {
						continue
					}
					holders[r]++
					for j, w := range alone.Moments(x) {
						if !slices.Equal(m[j], w) {
							t.Errorf("worker %d has moment %d of layer %d %v, want %v", i, j, r, m[j], w)
						}
					}
				}
			}
			for i, e := range engines {
				e.Close()
				checkParams(t, i, e, stages[i], want)
			}
			for r, n := range holders {
				if n != 1+c.mirrors {
					t.Errorf("layer %d has %d holders", r, n)
				}
			}
			if passes != 12*steps {
				t.Errorf("%d passes", passes)
			}
		})
	}
}

// Passes that run at the same time have the bits of those that run one after the other.
func TestPassesSideBySide(t *testing.T) {
	const steps = 4
	run := func(passes int) (*line, []core.Result) {
		var met sync.WaitGroup
		met.Add(passes)
		e, l := newLine(t, 12, 1, func(c *Config) {
			c.Rule, c.Passes, c.Pool = adam, passes, kernel.NewPool(passes)
			t.Cleanup(c.Pool.Close)
			load := c.Load
			c.Load = func(lane int, i uint64, in, target tensor.Tensor) error {
				if i < uint64(passes) { // the first passes wait for each other
					met.Done()
					met.Wait()
				}
				return load(lane, i, in, target)
			}
		})
		var all []core.Result
		for step := 1; step <= steps; step++ {
			r, err := e.Step(t.Context(), step)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, r)
		}
		e.Close()
		return l, all
	}
	want, results := run(1)
	for _, passes := range []int{2, 3, Lanes} {
		got, all := run(passes)
		if got.b[0] != want.b[0] || got.w[0] != want.w[0] || got.live.Load() != 0 {
			t.Errorf("%d at a time: (x + %v)·%v, %d in flight; want (x + %v)·%v", passes, got.b, got.w, got.live.Load(), want.b, want.w)
		}
		for i, r := range all {
			if w := results[i]; r.Loss != w.Loss || r.GradNorm != w.GradNorm || r.Forwards != w.Forwards || r.Backwards != w.Backwards {
				t.Errorf("%d at a time: %+v, want %+v", passes, r, w)
			}
		}
	}
}

// checkParams compares the parameters of a worker whose engine is closed.
// Those of other owners may still have been on their way.
func checkParams(t *testing.T, worker int, e *Engine, got, want *line) {
	t.Helper()
	if e.gates[0].isOpen() && got.b[0] != want.b[0] {
		t.Errorf("worker %d has the shift %v, want %v", worker, got.b, want.b)
	}
	if e.gates[1].isOpen() && got.w[0] != want.w[0] {
		t.Errorf("worker %d has the slope %v, want %v", worker, got.w, want.w)
	}
}

// all calls f for all engines at the same time.
func all(engines []*Engine, f func(i int, e *Engine)) {
	var group sync.WaitGroup
	for i, e := range engines {
		group.Go(func() { f(i, e) })
	}
	group.Wait()
}

// A step that fails before its commit leaves parameters and moments as they
// were. The engine is over then.
func TestFailedStepChangesNothing(t *testing.T) {
	boom := errors.New("boom")
	nan := float32(math.NaN())
	isBoom := func(err error) bool { return errors.Is(err, boom) }
	nonFinite := func(layer, what string) func(error) bool {
		return func(err error) bool {
			var bad *core.NonFiniteError
			return errors.As(err, &bad) && *bad == core.NonFiniteError{Step: 3, Layer: layer, What: what}
		}
	}
	for name, c := range map[string]struct {
		load  func(i uint64, target tensor.Tensor) error // of step 3
		spoil func(m Micro, db, dw *float32)
		lr    float64 // of the last worker
		fails func(error) bool
	}{
		"data": {
			load: func(i uint64, _ tensor.Tensor) error {
				if i%8 == 5 {
					return boom
				}
				return nil
			},
			fails: isBoom,
		},
		"loss": {
			load: func(i uint64, target tensor.Tensor) error {
				if i%8 == 5 {
					target.F[0] = nan
				}
				return nil
			},
			fails: nonFinite("slope", "loss"),
		},
		"gradient": {
			spoil: func(m Micro, db, _ *float32) {
				if m.Index == 2 {
					*db = nan
				}
			},
			fails: nonFinite("shift", "gradient"),
		},
		"gradient of two layers": {
			spoil: func(m Micro, db, dw *float32) {
				if m.Index == 2 {
					*db, *dw = nan, float32(math.Inf(1))
				}
			},
			fails: nonFinite("slope", "gradient"),
		},
		"learning rate": {
			lr:    0.06,
			fails: func(err error) bool { return err != nil && strings.Contains(err.Error(), "learning rate") },
		},
	} {
		for workers := 1; workers <= 2; workers++ {
			if workers == 1 && c.lr != 0 {
				continue // it agrees with itself
			}
			t.Run(fmt.Sprintf("%s, %d workers", name, workers), func(t *testing.T) {
				engines, stages := lines{workers: workers, global: 8, micro: 2, change: func(i int, f *Config) {
					f.Rule = adam
					load := f.Load
					f.Load = func(lane int, i uint64, in, target tensor.Tensor) error {
						err := load(lane, i, in, target)
						if i >= 16 && c.load != nil {
							err = errors.Join(err, c.load(i, target))
						}
						return err
					}
					f.LR = func(step int) float64 {
						if step == 3 && i == 1 && c.lr != 0 {
							return c.lr
						}
						return 0.05
					}
				}}.start(t)
				for _, l := range stages {
					l.spoil = func(m Micro, db, dw *float32) {
						if m.Step == 3 && c.spoil != nil {
							c.spoil(m, db, dw)
						}
					}
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				states, errs := make([][]float32, workers), make([]error, workers)
				all(engines, func(i int, e *Engine) {
					for step := 1; step <= 2; step++ {
						if _, err := e.Step(t.Context(), step); err != nil {
							t.Error(err)
						}
					}
					states[i] = moments(e)
					// Where one fails alone, the others wait for what is done about it.
					_, errs[i] = e.Step(ctx, 3)
					if c.fails(errs[i]) {
						cancel()
					}
					if _, err := e.Step(t.Context(), 3); err == nil {
						t.Errorf("worker %d goes on after %v", i, errs[i])
					}
				})
				failed := 0
				for i, e := range engines {
					switch {
					case c.fails(errs[i]):
						failed++
					case !errors.Is(errs[i], context.Canceled):
						t.Errorf("worker %d: %v", i, errs[i])
					}
					if now := moments(e); !slices.Equal(now, states[i]) {
						t.Errorf("worker %d had the moments %v, and now %v", i, states[i], now)
					}
				}
				if failed == 0 {
					t.Errorf("no worker failed: %v", errs)
				}
				for i, e := range engines {
					e.Close()
					if stages[i].live.Load() != 0 {
						t.Errorf("worker %d: %d passes were never ended", i, stages[i].live.Load())
					}
				}
				two, twin := lines{workers: 1, global: 8, micro: 2, change: func(_ int, f *Config) { f.Rule = adam }}.start(t)
				for step := 1; step <= 2; step++ {
					if _, err := two[0].Step(t.Context(), step); err != nil {
						t.Fatal(err)
					}
				}
				for i, e := range engines {
					checkParams(t, i, e, stages[i], twin[0])
				}
			})
		}
	}
}

// moments returns copies of all moments that an engine holds.
func moments(e *Engine) (all []float32) {
	for _, r := range ranges {
		for _, m := range e.Moments(r) {
			all = append(all, m...)
		}
	}
	return all
}

func TestGradientTree(t *testing.T) {
	const m = 6
	values := [m]float32{1e8, 1, -1e8, 1, 3e7, 0.25}
	var e *Engine
	var got float32
	// The loop asks in the commit, before it gives the gradients up.
	e, l := newLine(t, m, 1, func(c *Config) {
		c.Stop = func() string {
			if total, ok := e.grads[0].Total(); ok {
				got = total[0]
			}
			return "why"
		}
	})
	l.spoil = func(q Micro, db, dw *float32) { *db, *dw = values[q.Index], 0 }
	if r, err := e.Step(t.Context(), 1); err != nil || r.Stop != "why" {
		t.Fatal(r, err)
	}
	want := ((values[0] + values[1]) + (values[2] + values[3])) + (values[4] + values[5])
	if got != want {
		t.Errorf("sum %v, want %v", got, want)
	}
}

func TestEvaluate(t *testing.T) {
	e, l := newLine(t, 4, 4, func(c *Config) { c.NoDigests = true }) // the test writes parameters
	seen := 0
	sample := func(i int, in, target tensor.Tensor) error {
		seen++
		in.F[0], target.F[0] = float32(i), 0
		return nil
	}
	if _, _, err := e.Evaluate(t.Context(), 1, 0, sample); err == nil {
		t.Error("an evaluation of nothing has a loss")
	}
	loss, _, err := e.Evaluate(t.Context(), 1, 10, sample)
	if err != nil || seen != 10 || loss != (core.Loss{Sum: 285. / 2, Count: 10}) || l.live.Load() != 0 {
		t.Errorf("%+v over %d samples, %d in flight: %v", loss, seen, l.live.Load(), err)
	}
	l.w[0] = float32(math.Inf(1))
	var bad *core.NonFiniteError
	if _, _, err := e.Evaluate(t.Context(), 3, 10, sample); !errors.As(err, &bad) || bad.Step != 3 || !strings.Contains(err.Error(), "evaluation") || l.live.Load() != 0 {
		t.Errorf("error %v, %d in flight", err, l.live.Load())
	}
	if n, _ := e.passes(); n != 0 {
		t.Error("evaluation was counted as training")
	}
}

// A call that its context ends leaves its results to the loop, which may conclude later.
func TestEvaluateEndsAsItConcludes(t *testing.T) {
	e, _ := newLine(t, 4, 4, nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	loss, metrics, err := e.Evaluate(ctx, 1, 10, func(i int, in, target tensor.Tensor) error {
		if in.F[0], target.F[0] = 1, 1; i == 9 {
			cancel()
		}
		return nil
	})
	if err == nil { // it had concluded
		return
	}
	if !errors.Is(err, context.Canceled) || loss != (core.Loss{}) || metrics != nil {
		t.Errorf("%+v, %+v, error %v", loss, metrics, err)
	}
	e.Close()
}

func TestUnevenMicroBatch(t *testing.T) {
	if _, err := New(Config{Job: rundir.Job{GlobalBatch: 8, MicroBatch: 3}}); err == nil {
		t.Error("micro-batch 3 of 8 was accepted")
	}
	other := control.Order{Plan: plan.Plan{Workers: make([]plan.Worker, 1), Route: [][]id.WorkerID{{0, 0, 0}}}}
	if _, err := New(Config{Job: rundir.Job{GlobalBatch: 8, MicroBatch: 2}, First: other}); err == nil {
		t.Error("a plan of 3 micro-batches was accepted for 4")
	}
}

// A step that waits for others, or computes, ends when it is told to.
func TestStepEnds(t *testing.T) {
	boom := errors.New("boom")
	for name, c := range map[string]struct {
		end  func(e *Engine, cancel func())
		want error
	}{
		"context": {func(_ *Engine, cancel func()) { cancel() }, context.Canceled},
		"close":   {func(e *Engine, _ func()) { e.Close() }, errClosed},
		"abandon": {func(e *Engine, _ func()) { e.Abandon(boom) }, boom},
	} {
		t.Run(name+" while it waits", func(t *testing.T) {
			engines, stages := lines{workers: 2, global: 4, micro: 1}.start(t)
			computed := make(chan struct{}, 4)
			stages[0].spoil = func(Micro, *float32, *float32) { computed <- struct{}{} }
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error)
			go func() {
				_, err := engines[0].Step(ctx, 1)
				ended <- err
			}()
			<-computed // and the other worker never begins
			c.end(engines[0], cancel)
			if err := <-ended; !errors.Is(err, c.want) {
				t.Errorf("error %v, want %v", err, c.want)
			}
		})
		if name == "close" {
			continue // which waits for what computes
		}
		t.Run(name+" while it computes", func(t *testing.T) {
			entered, leave := make(chan struct{}), make(chan struct{})
			e, l := newLine(t, 4, 1, func(c *Config) {
				load := c.Load
				c.Load = func(lane int, i uint64, in, target tensor.Tensor) error {
					if i == 2 {
						close(entered)
						<-leave
					}
					return load(lane, i, in, target)
				}
			})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error)
			go func() {
				_, err := e.Step(ctx, 1)
				ended <- err
			}()
			<-entered
			c.end(e, cancel)
			if err := <-ended; !errors.Is(err, c.want) {
				t.Errorf("error %v, want %v", err, c.want)
			}
			closed := make(chan struct{})
			go func() {
				e.Close()
				close(closed)
			}()
			<-e.ctx.Done()
			close(leave)
			<-closed
			if _, err := e.Step(t.Context(), 1); err == nil {
				t.Error("a closed engine goes on")
			}
			if l.live.Load() != 0 || l.b[0] != 0 || l.w[0] != 1 {
				t.Errorf("%d passes in flight, (x + %v)·%v", l.live.Load(), l.b, l.w)
			}
		})
	}
}

// The caller of an operation gets the panics of its stages and its data, with
// the stack of where they were.
func TestPanicArrives(t *testing.T) {
	for name, spoil := range map[string]func(c *Config, l **line){
		"data": func(c *Config, _ **line) {
			c.Load = func(int, uint64, tensor.Tensor, tensor.Tensor) error { return panicker() }
		},
		"backward": func(c *Config, l **line) {
			load := c.Load
			c.Load = func(lane int, i uint64, in, target tensor.Tensor) error {
				(*l).spoil = func(Micro, *float32, *float32) { _ = panicker() }
				return load(lane, i, in, target)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			var l *line
			e, made := newLine(t, 2, 1, func(c *Config) { spoil(c, &l) })
			l = made
			step := func() (v any) {
				defer func() { v = recover() }()
				_, err := e.Step(t.Context(), 1)
				t.Errorf("error %v", err)
				return nil
			}
			for range 2 { // and nothing goes on afterwards
				p, ok := step().(*kernel.Panic)
				if !ok || p.Value != "ouch" || !strings.Contains(string(p.Stack), "panicker") {
					t.Errorf("panic %+v", p)
				}
			}
		})
	}
	for _, beside := range []bool{false, true} { // passes
		t.Run(fmt.Sprint("first values ", beside), func(t *testing.T) {
			e, _ := newLine(t, 2, 1, func(c *Config) {
				c.Begin, c.Beside = func(id.Range, []float32, [][]float32) error { return panicker() }, beside
			})
			defer func() {
				if p, ok := recover().(*kernel.Panic); !ok || p.Value != "ouch" {
					t.Errorf("panic %+v", p)
				}
			}()
			_, _, err := e.Begun(t.Context())
			if beside && err == nil { // the plan is live before they are made
				_, err = e.Step(t.Context(), 1)
			}
			t.Errorf("error %v", err)
		})
	}
	e, _ := newLine(t, 2, 1, nil)
	defer func() {
		if p, ok := recover().(*kernel.Panic); !ok || p.Value != "ouch" {
			t.Errorf("panic %+v", p)
		}
	}()
	_, _, err := e.Evaluate(t.Context(), 1, 2, func(int, tensor.Tensor, tensor.Tensor) error { return panicker() })
	t.Errorf("error %v", err)
}

func panicker() error { panic("ouch") }

// A plan is live before the first values are made, and passes wait for them.
func TestFirstValuesBesidePasses(t *testing.T) {
	var out [2]core.Result
	for i, beside := range []bool{false, true} {
		begun := make(chan struct{})
		e, l := newLine(t, 4, 1, func(c *Config) {
			begin := c.Begin
			c.Beside = beside
			c.Begin = func(r id.Range, params []float32, moments [][]float32) error {
				if beside {
					<-begun
				}
				return begin(r, params, moments)
			}
		})
		if _, _, err := e.Begun(t.Context()); err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			var err error
			if out[i], err = e.Step(t.Context(), 1); err != nil {
				t.Error(err)
			}
		}()
		for running := !beside; !running; e.inspect(func() { running = len(e.works) > 0 }) {
		}
		if beside && l.live.Load() > 0 {
			t.Error("a pass runs without parameters")
		}
		close(begun)
		<-done
	}
	if math.Float64bits(out[0].Loss) != math.Float64bits(out[1].Loss) || out[0].GradNorm != out[1].GradNorm {
		t.Errorf("%+v and %+v", out[0], out[1])
	}
}

// stopping is a line that has the repetition of its first pair stopped, before or behind its forward pass, and counts those of the pair.
type stopping struct {
	*line
	e      **Engine
	behind bool
	runs   *int
}

func (s stopping) Forward(m Micro, in tensor.Tensor) (Pass, tensor.Tensor, error) {
	stop := func() { (*s.e).repeatStop.Store(true) }
	*s.runs++
	if *s.runs == m.Of+1 && !s.behind {
		stop()
	}
	p, out, err := s.line.Forward(m, in)
	if *s.runs == m.Of+1 && s.behind {
		stop()
	}
	for i := 0; i < 2 && m.Made != nil && err == nil; i++ {
		m.Made(out)
	}
	return p, out, err
}

func (s stopping) Backward(p Pass, dout tensor.Tensor, grads Gradients) tensor.Tensor {
	for m := p.(*linePass).m; m.Made != nil; m.Made = nil {
		m.Made(dout)
		m.Made(dout)
	}
	return s.line.Backward(p, dout, grads)
}

// A pair that is being repeated can be stopped, and is repeated again unless the plan has changed.
func TestRepeatStops(t *testing.T) {
	var want core.Result
	for i, behind := range []bool{false, true} {
		var e *Engine
		runs := 0
		e, l := newLine(t, 4, 1, func(c *Config) {
			plain := c.Stage
			c.Verify = 1
			c.Stage = func(lo, hi int) Stage { return stopping{plain(lo, hi).(*line), &e, behind, &runs} }
		})
		if _, _, err := e.Begun(t.Context()); err != nil {
			t.Fatal(err)
		}
		got, err := e.Step(t.Context(), 1)
		if err != nil || runs != 4+2 || l.live.Load() != 0 {
			t.Errorf("behind %v: %d forward passes, %d in flight: %v", behind, runs, l.live.Load(), err)
		}
		if i == 0 {
			want = got
		} else if got.Loss != want.Loss || got.GradNorm != want.GradNorm {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
}

// A worker that is held does all its work and enters no commit.
func TestHeld(t *testing.T) {
	var held atomic.Bool
	held.Store(true)
	engines, _ := lines{workers: 2, global: 4, micro: 1, change: func(worker int, c *Config) {
		if worker == 0 {
			c.Held = held.Load
		}
	}}.start(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		all(engines, func(_ int, e *Engine) {
			if _, err := e.Step(t.Context(), 1); err != nil {
				t.Error(err)
			}
		})
	}()
	for ready := false; !ready; {
		engines[0].inspect(func() {
			said, entered := engines[0].core.Exchanging()
			if ready = said; entered {
				t.Error("it has entered the commit")
			}
		})
	}
	held.Store(false)
	engines[0].Wake()
	<-done
}

// Whatever an engine is about, nothing of it is left after Close.
func TestCloseJoins(t *testing.T) {
	for name, meet := range map[string]func(t *testing.T, engines []*Engine){
		"at once": func(*testing.T, []*Engine) {},
		"before a plan": func(t *testing.T, _ []*Engine) {
			e, err := New(Config{Job: rundir.Job{GlobalBatch: 8, MicroBatch: 2}}) // one that joins
			if err != nil {
				t.Fatal(err)
			}
			e.Close()
			if _, _, err := e.Begun(t.Context()); err == nil {
				t.Error("a closed engine has begun")
			}
		},
		"after a step": func(t *testing.T, engines []*Engine) {
			all(engines, func(_ int, e *Engine) {
				if _, err := e.Step(t.Context(), 1); err != nil {
					t.Error(err)
				}
			})
		},
		"in an exchange": func(t *testing.T, engines []*Engine) {
			said := make(chan struct{})
			e := engines[0]
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			go func() {
				defer close(said)
				_, _, _ = e.Evaluate(ctx, 0, 1, func(int, tensor.Tensor, tensor.Tensor) error { return nil })
			}()
			for exchanging := false; !exchanging; {
				e.inspect(func() { _, exchanging = e.core.Exchanging() })
			}
			cancel()
			<-said
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			t.Run("", func(t *testing.T) {
				engines, _ := lines{workers: 2, global: 4, micro: 1}.start(t)
				meet(t, engines)
				for _, e := range engines {
					e.Close()
					e.Close()
					if e.req != nil || e.opsCtx.Err() == nil {
						t.Error("something goes on")
					}
				}
			})
			goleak.VerifyNone(t, before)
		})
	}
}

func TestMergeUsesThreads(t *testing.T) {
	pool := kernel.NewPool(3)
	defer pool.Close()
	e := &Engine{c: Config{Pool: pool}}
	s := tree.NewSums(2, e.mergeGrads)
	const n = 3*grainAdd + 7
	for i := range 2 {
		g := make([]float32, n)
		for j := range g {
			g[j] = float32(j * (i + 1))
		}
		s.Put(tree.Leaf(i), g)
	}
	total, _ := s.Total()
	for j, x := range total {
		if x != float32(j)+float32(2*j) {
			t.Fatalf("element %d is %v", j, x)
		}
	}
	if len(e.free.free[n]) != 1 {
		t.Errorf("%d buffers are free", len(e.free.free[n]))
	}
}

// Queries that come together are all answered.
func TestQueriesTogether(t *testing.T) {
	e, _ := newLine(t, 4, 1, nil)
	answers := make(chan uint64, 3)
	e.inspect(func() { // the loop finds them all when this ends
		for _, attempt := range []uint64{1, 2, 1, 3} {
			e.Query(id.Ballot{Term: 1, Attempt: attempt}, func(control.Report) { answers <- attempt })
		}
	})
	for _, want := range []uint64{1, 2, 3} {
		if got := <-answers; got != want {
			t.Errorf("attempt %d is answered, want %d", got, want)
		}
	}
}
