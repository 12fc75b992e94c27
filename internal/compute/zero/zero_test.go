package zero

import (
	"errors"
	"math"
	"math/big"
	"slices"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/rng"
	"pgregory.net/rapid"
)

func bigFixed(f Fixed) *big.Int {
	v := new(big.Int).SetUint64(f.Hi)
	return v.Add(v.Lsh(v, 64), new(big.Int).SetUint64(f.Lo))
}

func TestToFixedIsTruncation(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := math.Ldexp(rapid.Float64Range(0.5, 1).Draw(t, "mantissa"), rapid.IntRange(-200, 64).Draw(t, "exponent"))
		got, ok := ToFixed(x)
		if x >= 1<<64 {
			if ok {
				t.Fatalf("ToFixed(%v) fits", x)
			}
			return
		}
		want, _ := new(big.Float).SetMantExp(big.NewFloat(x), 64).Int(nil)
		if !ok || bigFixed(got).Cmp(want) != 0 {
			t.Fatalf("ToFixed(%v) = %v, %v; want %v", x, got, ok, want)
		}
		if x > 1 && got.Float64() != x {
			t.Fatalf("ToFixed(%v).Float64() = %v", x, got.Float64())
		}
	})
	for _, x := range []float64{math.NaN(), math.Inf(1), -1, 1 << 64, math.MaxFloat64} {
		if _, ok := ToFixed(x); ok {
			t.Errorf("ToFixed(%v) fits", x)
		}
	}
	for _, x := range []float64{0, math.Copysign(0, -1), math.SmallestNonzeroFloat64} {
		if f, ok := ToFixed(x); !ok || f != (Fixed{}) {
			t.Errorf("ToFixed(%v) = %v, %v", x, f, ok)
		}
	}
}

func TestFixedAddOverflows(t *testing.T) {
	largest := Fixed{math.MaxUint64, math.MaxUint64}
	if _, ok := largest.Add(Fixed{Lo: 1}); ok {
		t.Error("overflow was not noticed")
	}
	if s, ok := (Fixed{1, math.MaxUint64}).Add(Fixed{0, 1}); !ok || s != (Fixed{2, 0}) {
		t.Errorf("carry: %v, %v", s, ok)
	}
}

func random(n int, op uint32) []float32 {
	s := rng.New(9, rng.Place{Op: op})
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(s.Normal())
	}
	return x
}

var layer = []Tensor{{Size: 5000}, {Size: 3, Tuning: Tuning{NoDecay: true}}, {Size: 0}, {Size: 2 * kernel.Block}, {Size: 100}}

func size(tensors []Tensor) (n int) {
	for _, t := range tensors {
		n += t.Size
	}
	return n
}

func TestBlocks(t *testing.T) {
	want := []Block{
		{0, 4096, Tuning{}}, {4096, 5000, Tuning{}}, {5000, 5003, Tuning{NoDecay: true}},
		{5003, 9099, Tuning{}}, {9099, 13195, Tuning{}}, {13195, 13295, Tuning{}},
	}
	if got := Blocks(layer); !slices.Equal(got, want) {
		t.Errorf("blocks %v, want %v", got, want)
	}
}

func TestShardBorders(t *testing.T) {
	for _, c := range []struct {
		lo, hi int
		ok     bool
	}{
		{0, 13295, true}, {0, 4096, true}, {4096, 5003, true}, {5003, 13195, true}, {7, 7, true},
		{0, 4095, false}, {1, 4096, false}, {5000, 13296, false}, {9099, 9099 + 4095, false}, {5, 4, false},
	} {
		if _, err := NewShard(SGD{}, id.Range{Layer: 0, Lo: c.lo, Hi: c.hi}, layer); (err == nil) != c.ok {
			t.Errorf("[%d,%d): error %v", c.lo, c.hi, err)
		}
	}
}

// TestShardsAgree deals the blocks to shards in every contiguous way: norm,
// parameters, moments and digests must be those of one shard.
func TestShardsAgree(t *testing.T) {
	pool := kernel.NewPool(3)
	defer pool.Close()
	n := size(layer)
	grad := random(n, 1)
	blocks := Blocks(layer)
	for _, rule := range []Rule{AdamW{0.9, 0.999, 1e-8, 0.1}, SGD{0.9, 0.01}} {
		type outcome struct {
			squares Fixed
			params  []float32
			moments []float32
			digests []Digest
		}
		run := func(p *kernel.Pool, cuts uint) outcome {
			o := outcome{params: random(n, 2)}
			lo := 0
			for i, b := range blocks {
				if i < len(blocks)-1 && cuts>>i&1 == 0 {
					continue
				}
				s, err := NewShard(rule, id.Range{Layer: 3, Lo: lo, Hi: b.Hi}, layer)
				if err != nil {
					t.Fatal(err)
				}
				sq, err := s.Squares(p, grad[lo:b.Hi], 4)
				if err != nil {
					t.Fatal(err)
				}
				o.squares, _ = o.squares.Add(sq)
				digests := make([][]Digest, 1+rule.Moments())
				for j := range digests {
					digests[j] = make([]Digest, len(s.blocks))
				}
				for step := 1; step <= 3; step++ {
					s.Update(p, o.params[lo:b.Hi], grad[lo:b.Hi], Update{Step: step, LR: 0.1, GradScale: 0.5}, digests...)
				}
				for _, m := range s.Moments {
					o.moments = append(o.moments, m[0], m[len(m)-1])
				}
				o.digests = append(o.digests, digests[0]...)
				lo = b.Hi
			}
			return o
		}
		want := run(nil, 0)
		for cuts := uint(0); cuts < 1<<(len(blocks)-1); cuts++ {
			got := run(pool, cuts)
			if got.squares != want.squares || !slices.Equal(got.params, want.params) || !slices.Equal(got.digests, want.digests) {
				t.Fatalf("%T, cuts %b: other bits than with one shard", rule, cuts)
			}
		}
		var exact float64
		for _, g := range grad {
			exact += float64(g) * float64(g)
		}
		if norm := Norm(want.squares, 4); math.Abs(norm-math.Sqrt(exact)) > 1e-9*norm {
			t.Errorf("norm %v, want %v", norm, math.Sqrt(exact))
		}
	}
}

// A tensor with a scale and a decay of its own is updated as if the rule had them.
func TestTuning(t *testing.T) {
	for _, c := range []struct {
		rule, own Rule
		tuning    Tuning
	}{
		{AdamW{0.9, 0.999, 1e-8, 0.1}, AdamW{0.9, 0.999, 1e-8, 0.3}, Tuning{LRScale: 0.5, WeightDecay: 0.3}},
		{AdamW{0.9, 0.999, 1e-8, 0.1}, AdamW{0.9, 0.999, 1e-8, 0}, Tuning{LRScale: 0.5, NoDecay: true, WeightDecay: 0.3}},
		{SGD{0.9, 0.1}, SGD{0.9, 0.3}, Tuning{LRScale: 0.5, WeightDecay: 0.3}},
		{SGD{0.9, 0.1}, SGD{0.9, 0.1}, Tuning{LRScale: 0.5}},
	} {
		update := func(rule Rule, lr float32, tuning Tuning) []float32 {
			params := random(300, 1)
			s, err := NewShard(rule, id.Range{Hi: 300}, []Tensor{{300, tuning}})
			if err != nil {
				t.Fatal(err)
			}
			for step := 1; step <= 3; step++ {
				s.Update(nil, params, random(300, 2), Update{Step: step, LR: lr, GradScale: 1})
			}
			return params
		}
		if !slices.Equal(update(c.rule, 0.25, c.tuning), update(c.own, 0.125, Tuning{})) {
			t.Errorf("%+v of %+v: not the bits of %+v at half the rate", c.tuning, c.rule, c.own)
		}
	}
}

func TestNonFiniteGradient(t *testing.T) {
	s, err := NewShard(SGD{}, id.Range{Layer: 1, Lo: 0, Hi: size(layer)}, layer)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []float32{float32(math.NaN()), float32(math.Inf(-1)), math.MaxFloat32} {
		for _, at := range []int{0, 4096, 5001, 13294} {
			grad := make([]float32, s.Len())
			grad[at] = x
			if _, err := s.Squares(nil, grad, 0); !errors.Is(err, ErrNonFinite) {
				t.Errorf("%v at %d: error %v", x, at, err)
			}
		}
	}
}

// TestAdamW holds the rule against the textbook in float64.
func TestAdamW(t *testing.T) {
	rule := AdamW{0.9, 0.999, 1e-8, 0.1}
	tensors := []Tensor{{Size: 50}, {Size: 7, Tuning: Tuning{NoDecay: true}}}
	s, err := NewShard(rule, id.Range{Layer: 0, Lo: 0, Hi: 57}, tensors)
	if err != nil {
		t.Fatal(err)
	}
	params := random(57, 3)
	p, m, v := make([]float64, 57), make([]float64, 57), make([]float64, 57)
	for i := range p {
		p[i] = float64(params[i])
	}
	for step := 1; step <= 20; step++ {
		grad := random(57, uint32(10+step))
		const lr, scale = 0.01, 0.25
		s.Update(nil, params, grad, Update{Step: step, LR: lr, GradScale: scale})
		for i := range p {
			g := float64(grad[i]) * scale
			if i < 50 {
				p[i] *= 1 - lr*0.1
			}
			m[i] = 0.9*m[i] + 0.1*g
			v[i] = 0.999*v[i] + 0.001*g*g
			p[i] -= lr / (1 - math.Pow(0.9, float64(step))) * m[i] / (math.Sqrt(v[i]/(1-math.Pow(0.999, float64(step)))) + 1e-8)
		}
	}
	for i := range p {
		if math.Abs(p[i]-float64(params[i])) > 2e-6*(1+math.Abs(p[i])) {
			t.Errorf("parameter %d is %v, want %v", i, params[i], p[i])
		}
	}
}

// A block that was altered stays known as such, with all that is computed from
// it; the others are none the worse.
func TestUpdateOfAlteredBlock(t *testing.T) {
	n := size(layer)
	for j := range 3 {
		s, err := NewShard(AdamW{0.9, 0.999, 1e-8, 0.1}, id.Range{Layer: 3, Lo: 0, Hi: n}, layer)
		if err != nil {
			t.Fatal(err)
		}
		params, grad := random(n, 1), random(n, 2)
		arrays := append([][]float32{params}, s.Moments...)
		digests := make([][]Digest, len(arrays))
		for i, x := range arrays {
			for _, b := range s.blocks {
				digests[i] = append(digests[i], DigestOf(x[b.Lo:b.Hi]))
			}
		}
		const bad = 1
		x := &arrays[j][s.blocks[bad].Hi-1]
		*x = math.Float32frombits(math.Float32bits(*x) ^ 1)
		for step := 1; step <= 2; step++ {
			s.Update(nil, params, grad, Update{Step: step, LR: 0.1, GradScale: 1}, digests...)
			for i, x := range arrays {
				for k, b := range s.blocks {
					if fits := digests[i][k].Fits(x[b.Lo:b.Hi]); fits != (k != bad) {
						t.Errorf("step %d, array %d altered: block %d of array %d fits: %v", step, j, k, i, fits)
					}
					if is, origin := digests[i][k].Altered(); is != (k == bad) || origin != (k == bad && i == j) {
						t.Errorf("step %d, array %d altered: block %d of array %d is marked %v, %v", step, j, k, i, is, origin)
					}
				}
			}
		}
	}
}

// BenchmarkUpdate updates a shard that fits no cache, with digests and without.
func BenchmarkUpdate(b *testing.B) {
	const n = 4 << 20
	s, err := NewShard(AdamW{0.9, 0.999, 1e-8, 0.1}, id.Range{Layer: 0, Lo: 0, Hi: n}, []Tensor{{Size: n}})
	if err != nil {
		b.Fatal(err)
	}
	params, grad := random(n, 1), random(n, 2)
	digests := make([][]Digest, 3)
	for j := range digests {
		digests[j] = make([]Digest, len(s.blocks))
	}
	for name, d := range map[string][][]Digest{"plain": nil, "digests": digests} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(4 * n)
			for range b.N {
				s.Update(nil, params, grad, Update{Step: 1, LR: 0.1, GradScale: 1}, d...)
			}
		})
	}
	b.Run("check", func(b *testing.B) {
		b.SetBytes(4 * n)
		for range b.N {
			for i, x := range s.blocks {
				for j, y := range [][]float32{params, s.Moments[0], s.Moments[1]} {
					if !digests[j][i].Fits(y[x.Lo:x.Hi]) {
						b.Fatal("altered")
					}
				}
			}
		}
	})
}
