package trainer

import (
	"fmt"
	"slices"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/worker/engine"
	"github.com/soliton-train/soliton/internal/worker/model"
	"github.com/soliton-train/soliton/rng"
)

// scaled multiplies a sample with a table, and adds a bias.
type scaled struct{ rows, cols int }

func (l scaled) Params() []Param {
	return []Param{{Name: "bias", Shape: []int{l.cols}, Init: Normal(1)}, {Name: "table", Shape: []int{l.rows, l.cols}, Init: Normal(1)}}
}

func (l scaled) Forward(c *Context, p []Tensor, in Tensor) (Tensor, any) {
	out := c.Tensor(in.Shape...)
	for i, x := range in.F {
		out.F[i] = float32(x*p[1].F[i%len(p[1].F)]) + p[0].F[i%l.cols]
	}
	return out, in
}

func (l scaled) Backward(c *Context, p []Tensor, stash any, dout Tensor, dp []Tensor) Tensor {
	in := stash.(Tensor)
	din := c.Tensor(len(in.F)) // a shape of its own, which must not matter
	clear(dp[0].F)
	clear(dp[1].F)
	for i, d := range dout.F {
		k := i % len(p[1].F)
		dp[0].F[i%l.cols] += d
		dp[1].F[k] += float32(d * in.F[i])
		din.F[i] = float32(d * p[1].F[k])
	}
	return din
}

// squares is half the sum of the outputs' squares.
type squares struct{}

func (squares) Loss(c *Context, out, _ Tensor) (sum float64, count int64, dout Tensor) {
	for _, x := range out.F {
		sum += float64(x) * float64(x) / 2
	}
	return sum, int64(len(out.F)), out
}

// collected are the gradients of a micro-batch, by layer.
type collected [][]float32

func (g collected) Buffer(layer int) []float32   { return g[layer] }
func (collected) Done(layer int, grad []float32) {}
func (collected) Sum(int, tree.Node, []float32)  {}
func (collected) Last() bool                     { return true }
func (collected) Lane() int                      { return 0 }

func cloneOf(t tensor.Tensor) tensor.Tensor {
	return tensor.Of(slices.Clone(t.F), slices.Clone(t.Shape)...)
}
func namesOf(p *model.Params, i int) (names []string) { names, _ = p.Describe(i); return names }

// pipeline runs micro-batches through stages that end before the given layers, all forward passes first, as workers may.
func pipeline(m *Model, params *model.Params, borders []int, samples []tensor.Tensor) (sums []float64, grads []collected) {
	pool := kernel.NewPool(1)
	defer pool.Close()
	var stages []*stage
	lo := 0
	for _, hi := range append(slices.Clone(borders), len(m.Layers)) {
		stages = append(stages, newStage(m, lo, hi, params, pool, 1, nil))
		lo = hi
	}
	passes := make([][]engine.Pass, len(samples))
	douts := make([]tensor.Tensor, len(samples))
	forward := func(micro engine.Micro, x tensor.Tensor) (ps []engine.Pass, sum float64, dout tensor.Tensor) {
		for _, s := range stages {
			p, out, _ := s.Forward(micro, x)
			ps = append(ps, p)
			if s.hi == len(m.Layers) {
				sum, _, dout = s.Loss(p, tensor.Tensor{})
			}
			x = cloneOf(out)
		}
		return ps, sum, dout
	}
	for i, x := range samples {
		sum := 0.0
		passes[i], sum, douts[i] = forward(engine.Micro{Step: 1, Index: i, First: i * x.Shape[0], Samples: x.Shape[0], Train: true}, x)
		ps, evaluated, _ := forward(engine.Micro{Step: 1, Samples: x.Shape[0]}, x)
		for k, p := range ps {
			stages[k].Drop(p)
		}
		sums = append(sums, sum, evaluated)
	}
	for i := range samples {
		g := make(collected, len(m.Layers))
		for l := range m.Layers {
			g[l] = make([]float32, params.Layers[l].Size())
		}
		dout := douts[i]
		for k, s := range slices.Backward(stages) {
			dout = s.Backward(passes[i][k], dout, g)
			if s.lo > 0 {
				dout = cloneOf(dout)
			}
		}
		grads = append(grads, g)
	}
	return sums, grads
}

// A shared parameter's gradient is the sum of those of a model in which each layer has its own copy, from the last layer to the
// first, wherever stages end.
func TestTies(t *testing.T) {
	const rows, cols = 3, 5
	l := scaled{rows, cols}
	m := Model{Input: Spec{Shape: []int{rows, cols}}, Layers: []Layer{l, l, l, l, l}, Loss: squares{}}
	tied := m
	tied.Tied = map[string]string{"2.table": "0.table", "4.table": "0.table", "3.bias": "1.bias"}
	if _, f := tied.ties(); len(f) > 0 {
		t.Fatal(f)
	}
	held := func(m *Model) *model.Params {
		p := describeParams(m, 5)
		p.Hold(0, len(m.Layers))
		for i := range m.Layers {
			if err := p.First(i, p.Layers[i].Params, "", ""); err != nil {
				t.Fatal(err)
			}
		}
		return p
	}
	own, shared := held(&m), held(&tied)
	for further, first := range tied.Tied {
		to, from := own.Views(int(further[0]-'0')), own.Views(int(first[0]-'0'))
		k := 0
		if further[2:] == "table" {
			k = 1
		}
		copy(to[k].F, from[k].F)
	}
	if got, want := fmt.Sprint(namesOf(shared, 0), namesOf(shared, 2), namesOf(shared, 3)), "[0.bias 0.table] [2.bias] [3.table]"; got != want {
		t.Errorf("parameters %s, want %s", got, want)
	}
	draw := rng.New(3, rng.Place{})
	var samples []tensor.Tensor
	for _, n := range []int{2, 1} {
		x := tensor.New(n, rows, cols)
		for i := range x.F {
			x.F[i] = float32(draw.Normal())
		}
		samples = append(samples, x)
	}
	wantSums, apart := pipeline(&m, own, nil, samples)
	add := func(x, y []float32) []float32 {
		z := make([]float32, len(x))
		for i := range x {
			z[i] = x[i] + y[i]
		}
		return z
	}
	var want []collected
	for _, g := range apart {
		bias, table := func(l int) []float32 { return g[l][:cols] }, func(l int) []float32 { return g[l][cols:] }
		want = append(want, collected{
			slices.Concat(bias(0), add(add(table(4), table(2)), table(0))), slices.Concat(add(bias(3), bias(1)), table(1)), bias(2), table(3), bias(4),
		})
	}
	for _, borders := range [][]int{nil, {1}, {2}, {3}, {4}, {1, 2}, {2, 4}, {1, 3, 4}, {1, 2, 3, 4}} {
		sums, grads := pipeline(&tied, shared, borders, samples)
		if !slices.Equal(sums, wantSums) {
			t.Errorf("borders %v: losses %v, want %v", borders, sums, wantSums)
		}
		if got, want := fmt.Sprint(grads), fmt.Sprint(want); got != want {
			t.Errorf("borders %v: gradients\n%s\nwant\n%s", borders, got, want)
		}
	}
}

// passed passes on what it is given.
type passed struct{}

func (passed) Params() []Param { return nil }

func (passed) Forward(_ *Context, _ []Tensor, in Tensor) (Tensor, any) { return in, nil }

func (passed) Backward(_ *Context, _ []Tensor, _ any, dout Tensor, _ []Tensor) Tensor { return dout }

// copied is squares with memory of its own for the gradient.
type copied struct{}

func (copied) Loss(c *Context, out, target Tensor) (sum float64, count int64, dout Tensor) {
	sum, count, _ = squares{}.Loss(c, out, target)
	dout = c.Tensor(out.Shape...)
	copy(dout.F, out.F)
	return sum, count, dout
}

// What a stage hands on is its own until the next Backward of the lane, also where a layer has passed on the loss's gradient: another lane
// begins a pass meanwhile.
func TestGradientOutlivesItsPass(t *testing.T) {
	m := Model{Input: Spec{Shape: []int{2}}, Layers: []Layer{passed{}, passed{}}, Loss: copied{}}
	pool := kernel.NewPool(1)
	defer pool.Close()
	s := newStage(&m, 1, 2, describeParams(&m, 2), pool, 1, nil)
	loss := func(lane int, x ...float32) (engine.Pass, Tensor) {
		p, _, err := s.Forward(engine.Micro{Step: 1, Samples: 1, Train: true, Lane: lane}, tensor.Of(x, 1, 2))
		if err != nil {
			t.Fatal(err)
		}
		_, _, dout := s.Loss(p, Tensor{})
		return p, dout
	}
	p, dout := loss(0, 1, 2)
	din := s.Backward(p, dout, make(collected, 2))
	loss(1, 3, 4)
	if !slices.Equal(din.F, []float32{1, 2}) {
		t.Errorf("the gradient is %v now", din.F)
	}
}
