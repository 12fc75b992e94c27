package engine

import (
	"slices"
	"sync/atomic"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/tree"
)

// keeper is a line that keeps its gradients. With asked set it does so in each last pass, too, as if that had been another one.
type keeper struct {
	*line
	asked  bool
	sums   []*tree.Sums[[]float32]
	handed *atomic.Int64 // times that HandOver was called
}

// caught takes the gradients of a pass.
type caught struct {
	Gradients
	found map[int][]float32
}

func (c caught) Done(layer int, grad []float32) { c.found[layer] = grad }

func (k *keeper) Backward(p Pass, dout tensor.Tensor, grads Gradients) tensor.Tensor {
	m, c := p.(*linePass).m, caught{grads, map[int][]float32{}}
	din := k.line.Backward(p, dout, c)
	for layer, g := range c.found {
		for len(k.sums) <= layer {
			k.sums = append(k.sums, tree.NewSums(m.Of, func(a, b []float32) []float32 { return []float32{a[0] + b[0]} }))
		}
		k.sums[layer].Put(tree.Leaf(m.Index), slices.Clone(g))
	}
	if grads.Last() && !k.asked {
		k.hand(grads)
	}
	return din
}

func (k *keeper) hand(grads Gradients) {
	for layer, sums := range slices.Backward(k.sums) {
		for _, n := range sums.Nodes() {
			sum, _ := sums.At(n)
			buf := grads.Buffer(layer)
			copy(buf, sum)
			grads.Sum(layer, n, buf)
		}
		sums.Clear()
	}
}

func (k *keeper) HandOver(grads Gradients) {
	k.handed.Add(1)
	k.hand(grads)
}

func (k *keeper) Forget() { k.sums = nil }

// Where gradients are added does not change the bits, nor whether a stage hands over its sums with the last pass or is asked.
func TestKeepersSameBits(t *testing.T) {
	const steps = 5
	train := func(workers int, keep, asked bool) (params []float32, calls int64) {
		var handed atomic.Int64
		s := lines{workers: workers, global: 14, micro: 2, change: func(_ int, c *Config) {
			plain := c.Stage
			c.Stage = func(lo, hi int) Stage {
				l := plain(lo, hi).(*line)
				if !keep {
					return l
				}
				return &keeper{line: l, asked: asked, handed: &handed}
			}
		}}
		engines, stages := s.start(t)
		all(engines, func(i int, e *Engine) {
			for step := 1; step <= steps; step++ {
				if _, err := e.Step(t.Context(), step); err != nil {
					t.Errorf("worker %d: %v", i, err)
					return
				}
			}
			// Parameters come under the next forward pass.
			if _, _, err := e.Evaluate(t.Context(), steps, 1, func(int, tensor.Tensor, tensor.Tensor) error { return nil }); err != nil {
				t.Error(err)
			}
		})
		return []float32{stages[0].b[0], stages[0].w[0]}, handed.Load()
	}
	want, _ := train(1, false, false)
	for workers := 1; workers <= 3; workers++ {
		for _, asked := range []bool{false, true} {
			params, handed := train(workers, true, asked)
			if !slices.Equal(params, want) {
				t.Errorf("%d workers, asked %v: %v, want %v", workers, asked, params, want)
			}
			if asked != (handed == int64(steps*workers)) {
				t.Errorf("%d workers, asked %v: asked %d times in %d steps", workers, asked, handed, steps)
			}
		}
	}
}

// counter is a line that notes the numbers of its parameters' values.
type counter struct {
	*line
	seen map[uint64]int // steps in which the number was seen
}

func (c counter) Forward(m Micro, in tensor.Tensor) (Pass, tensor.Tensor, error) {
	if m.Train {
		if err := m.Ready(0); err != nil {
			return nil, tensor.Tensor{}, err
		}
		if step, ok := c.seen[m.Values(0)]; ok && step != m.Step {
			panic("the number of the values of another step")
		}
		c.seen[m.Values(0)] = m.Step
	}
	return c.line.Forward(m, in)
}

// A process that has a copy of parameters outlives engines: no number stands for the values of two steps, nor of two engines.
func TestValuesAreNumberedOnce(t *testing.T) {
	seen := map[uint64]int{}
	for engine := range 3 {
		e, _ := newLine(t, 6, 2, func(c *Config) {
			plain := c.Stage
			c.Stage = func(lo, hi int) Stage { return counter{plain(lo, hi).(*line), seen} }
		})
		for step := 1; step <= 3; step++ {
			if _, err := e.Step(t.Context(), step); err != nil {
				t.Fatal(err)
			}
		}
		e.Close()
		if want := 3 * (engine + 1); len(seen) != want {
			t.Fatalf("%d numbers in %d steps", len(seen), want)
		}
	}
}
