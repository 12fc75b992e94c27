package engine

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/comm"
	"github.com/soliton-train/soliton/elastic/plan"
	"github.com/soliton-train/soliton/internal/kernel"
	"github.com/soliton-train/soliton/internal/tensor"
	"github.com/soliton-train/soliton/internal/tree"
	"github.com/soliton-train/soliton/zero"
)

// line is a stage of two layers, y = (x + b)·w, with a squared loss, which
// counts the passes in flight.
type line struct {
	b, w  []float32
	live  int // passes in flight
	spoil func(m Micro, db, dw *float32)
}

type linePass struct {
	m       Micro
	in, out tensor.Tensor
}

func (l *line) Forward(m Micro, in tensor.Tensor) (Pass, tensor.Tensor, error) {
	l.live++
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
	l.live--
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

func (l *line) Drop(Pass)        { l.live-- }
func (l *line) Suspect(Pass) int { return 1 }

func newLine(t *testing.T, global, micro int, change func(c *Config)) (*Engine, *line) {
	t.Helper()
	l := &line{b: []float32{0}, w: []float32{1}}
	c := Config{
		Stages: map[int]Stage{0: l},
		Stop:   func() string { return "" },
		Layers: []Layer{
			{Name: "shift", Tensors: []zero.Tensor{{Size: 1}}, Params: l.b},
			{Name: "slope", Tensors: []zero.Tensor{{Size: 1}}, Params: l.w},
		},
		Input: tensor.Spec{Shape: []int{1}}, Target: tensor.Spec{Shape: []int{1}},
		GlobalBatch: global, MicroBatch: micro,
		Rule: zero.SGD{}, LR: func(int) float64 { return 0.05 },
		Load: func(i uint64, in, target tensor.Tensor) error {
			in.F[0] = float32(i%7) - 3
			target.F[0] = 2*in.F[0] + 3
			return nil
		},
	}
	if change != nil {
		change(&c)
	}
	network, err := comm.Listen(comm.Config{Transport: comm.NewMem()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { network.Close() })
	var prof plan.Profile
	for _, l := range c.Layers {
		prof.Layers = append(prof.Layers, plan.Layer{Tensors: []int{l.Size()}})
	}
	p, _, err := plan.Next(plan.Plan{}, plan.View{Workers: []plan.Worker{{}}}, prof, plan.Event{Micros: global / micro})
	if err != nil {
		t.Fatal(err)
	}
	c.Plan, c.Network = &p, network
	e, err := New(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return e, l
}

func TestLearns(t *testing.T) {
	e, l := newLine(t, 12, 2, nil)
	var first, last Result
	for step := 1; step <= 200; step++ {
		r, err := e.Step(context.Background(), step)
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
	if e.Forwards != 1200 || e.Backwards != 1200 || l.live != 0 {
		t.Errorf("%d forwards, %d backwards, %d in flight", e.Forwards, e.Backwards, l.live)
	}
	// Memory: the depth of the tree, not the number of micro-batches.
	if n := len(e.free.free[1]); n > 8 {
		t.Errorf("%d gradient buffers for two layers", n)
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
	r, err := e.Step(context.Background(), 1)
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

// TestFailedStepChangesNothing fails steps in every way before the commit and
// then runs them again.
func TestFailedStepChangesNothing(t *testing.T) {
	boom := errors.New("boom")
	fail := false
	e, l := newLine(t, 8, 2, func(c *Config) {
		load := c.Load
		c.Load = func(i uint64, in, target tensor.Tensor) error {
			if fail && i%8 == 5 {
				return boom
			}
			return load(i, in, target)
		}
		c.Rule = zero.AdamW{Beta1: 0.9, Beta2: 0.999, Eps: 1e-8}
	})
	twin, clean := newLine(t, 8, 2, func(c *Config) { c.Rule = zero.AdamW{Beta1: 0.9, Beta2: 0.999, Eps: 1e-8} })
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for step := 1; step <= 4; step++ {
		fail = true
		if _, err := e.Step(context.Background(), step); !errors.Is(err, boom) {
			t.Fatalf("error %v", err)
		}
		fail = false
		if _, err := e.Step(ctx, step); !errors.Is(err, context.Canceled) {
			t.Fatalf("error %v", err)
		}
		l.spoil = func(m Micro, db, dw *float32) {
			if m.Index == 2 {
				*db = float32(math.NaN())
			}
		}
		var bad *NonFiniteError
		if _, err := e.Step(context.Background(), step); !errors.As(err, &bad) || bad.Layer != "shift" || bad.Step != step || bad.What != "gradient" {
			t.Fatalf("error %v", err)
		}
		l.spoil = nil
		got, err := e.Step(context.Background(), step)
		if err != nil {
			t.Fatal(err)
		}
		if want, _ := twin.Step(context.Background(), step); got != want {
			t.Fatalf("step %d: %+v, want %+v", step, got, want)
		}
	}
	if !slices.Equal(l.b, clean.b) || !slices.Equal(l.w, clean.w) || !slices.Equal(e.Moments(1)[1], twin.Moments(1)[1]) {
		t.Error("failed steps left traces")
	}
	if l.live != 0 {
		t.Errorf("%d passes were never ended", l.live)
	}
}

func TestGradientTree(t *testing.T) {
	const m = 6
	values := [m]float32{1e8, 1, -1e8, 1, 3e7, 0.25}
	e, l := newLine(t, m, 1, nil)
	l.spoil = func(q Micro, db, dw *float32) { *db, *dw = values[q.Index], 0 }
	if err := e.compute(context.Background(), 1); err != nil {
		t.Fatal(err)
	}
	want := ((values[0] + values[1]) + (values[2] + values[3])) + (values[4] + values[5])
	got, ok := e.grads[0].Total()
	if !ok || got[0] != want {
		t.Errorf("sum %v, want %v", got, want)
	}
}

func TestEvaluate(t *testing.T) {
	e, l := newLine(t, 4, 4, nil)
	seen := 0
	sample := func(i int, in, target tensor.Tensor) error {
		seen++
		in.F[0], target.F[0] = float32(i), 0
		return nil
	}
	loss, err := e.Evaluate(context.Background(), 1, 10, sample)
	if err != nil || seen != 10 || loss != (Loss{Sum: 285. / 2, Count: 10}) || l.live != 0 {
		t.Errorf("%+v over %d samples, %d in flight: %v", loss, seen, l.live, err)
	}
	l.w[0] = float32(math.Inf(1))
	var bad *NonFiniteError
	if _, err := e.Evaluate(context.Background(), 3, 10, sample); !errors.As(err, &bad) || bad.Step != 3 || !strings.Contains(err.Error(), "evaluation") || l.live != 0 {
		t.Errorf("error %v, %d in flight", err, l.live)
	}
	if e.Forwards != 0 {
		t.Error("evaluation was counted as training")
	}
}

func TestUnevenMicroBatch(t *testing.T) {
	if _, err := New(t.Context(), Config{Plan: new(plan.Plan), GlobalBatch: 8, MicroBatch: 3}); err == nil {
		t.Error("micro-batch 3 of 8 was accepted")
	}
	if _, err := New(t.Context(), Config{Plan: new(plan.Plan), GlobalBatch: 8, MicroBatch: 2}); err == nil {
		t.Error("a plan of no micro-batches was accepted for 4")
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
