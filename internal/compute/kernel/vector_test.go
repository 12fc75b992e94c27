package kernel

import (
	"math"
	"math/big"
	"testing"

	"github.com/soliton-train/soliton/rng"
)

// awkward returns n values among which are zeros of both signs, subnormals,
// values at the borders of exp, and very large ones.
func awkward(n int, seed uint64) []float32 {
	x := random(n, seed)
	special := []float32{0, negZero, 1e-40, -1e-42, 87.3, -87.4, 88.3, -88.5, 100, -104, 1e18, -1e18, math.SmallestNonzeroFloat32, 1, -1}
	s := rng.New(seed, rng.Place{Op: 1})
	for i := range x {
		switch s.IntN(8) {
		case 0:
			x[i] = special[s.IntN(len(special))]
		case 1:
			x[i] *= 30
		case 2:
			x[i] = math.Float32frombits(s.Uint32() &^ (1 << 30)) // below 2 in size
		}
	}
	return x
}

// lengths cover no body, bodies with and without a tail, and several blocks.
var lengths = []int{1, 2, 15, 16, 17, 31, 48, 63, 64, 65, 100, 128, 200, 256, 1000, 4096, 5000, longest + 100}

// TestPathsAgree runs every operation on every path and compares the bits
// with those of plain Go.
func TestPathsAgree(t *testing.T) {
	ops := map[string]func(p *Pool, n int, in func(seed uint64) []float32) [][]float32{
		"Add": func(_ *Pool, n int, in func(uint64) []float32) [][]float32 {
			dst := make([]float32, n)
			Add(dst, in(1), in(2))
			return [][]float32{dst}
		},
		"Scale": func(_ *Pool, n int, in func(uint64) []float32) [][]float32 {
			dst := make([]float32, n)
			Scale(dst, in(1), 1.7)
			return [][]float32{dst}
		},
		"Sum": func(_ *Pool, n int, in func(uint64) []float32) [][]float32 { return [][]float32{{Sum(in(1))}} },
		"Dot": func(_ *Pool, n int, in func(uint64) []float32) [][]float32 { return [][]float32{{Dot(in(1), in(2))}} },
		"Max": func(_ *Pool, n int, in func(uint64) []float32) [][]float32 { return [][]float32{{Max(in(1))}} },
		"GELU": func(p *Pool, n int, in func(uint64) []float32) [][]float32 {
			dst := make([]float32, n)
			GELU(p, dst, in(1))
			return [][]float32{dst}
		},
		"GELUBackward": func(p *Pool, n int, in func(uint64) []float32) [][]float32 {
			dst := make([]float32, n)
			GELUBackward(p, dst, in(1), in(2))
			return [][]float32{dst}
		},
		"Softmax": func(_ *Pool, n int, in func(uint64) []float32) [][]float32 {
			y, dx := make([]float32, n), make([]float32, n)
			Softmax(y, in(1), 0.3)
			SoftmaxBackward(dx, y, in(2), 0.3)
			return [][]float32{y, dx}
		},
		"LayerNorm": func(p *Pool, n int, in func(uint64) []float32) [][]float32 {
			const rows = 3
			x, dout := in(1), in(4)
			x, dout = append(x, append(in(5), in(6)...)...), append(dout, append(in(7), in(8)...)...)
			out, dx := make([]float32, rows*n), make([]float32, rows*n)
			mean, rstd := make([]float32, rows), make([]float32, rows)
			dgain, dbias := make([]float32, n), make([]float32, n)
			LayerNorm(p, out, mean, rstd, x, in(2), in(3), rows, n, 1e-5)
			LayerNormBackward(p, dx, dgain, dbias, dout, x, mean, rstd, in(2), rows, n)
			return [][]float32{out, mean, rstd, dx, dgain, dbias}
		},
		"CrossEntropy": func(p *Pool, n int, in func(uint64) []float32) [][]float32 {
			x := append(in(1), in(2)...)
			d := make([]float32, len(x))
			sum, _ := CrossEntropy(p, d, x, []int32{int32(n / 2), int32(n - 1)}, 2, n)
			plain, _ := CrossEntropy(p, nil, x, []int32{int32(n / 2), int32(n - 1)}, 2, n)
			b := math.Float64bits(sum)
			return [][]float32{d, {math.Float32frombits(uint32(b)), math.Float32frombits(uint32(b >> 32)), float32(plain)}}
		},
		"Dropout": func(_ *Pool, n int, in func(uint64) []float32) [][]float32 {
			dst := make([]float32, n)
			Dropout(dst, in(1), 0, 0.3, rng.New(7, rng.Place{Step: 1, Sample: 2, Layer: 3, Op: 4}))
			return [][]float32{dst}
		},
		"Normals": func(_ *Pool, n int, in func(uint64) []float32) [][]float32 {
			dst := make([]float32, n)
			Normals(dst, uint64(n)<<31|7, rng.Place{Step: 1, Sample: 2, Layer: 3, Op: 4}, in(1)[0])
			return [][]float32{dst}
		},
		"AdamW": func(_ *Pool, n int, in func(uint64) []float32) [][]float32 {
			p, m, v := in(1), in(2), in(3)
			for i := range v {
				v[i] = float32(math.Abs(float64(v[i])))
			}
			AdamW(p, m, v, in(4), AdamWStep{LR: 1e-3, Beta1: 0.9, Beta2: 0.999, Eps: 1e-8, WeightDecay: 0.1, Correction1: 0.19, Correction2: 0.002, GradScale: 0.01})
			return [][]float32{p, m, v}
		},
		"SGD": func(_ *Pool, n int, in func(uint64) []float32) [][]float32 {
			p, m := in(1), in(2)
			SGD(p, m, in(3), SGDStep{LR: 0.1, Momentum: 0.9, WeightDecay: 0.01, GradScale: 0.3})
			return [][]float32{p, m}
		},
		"SumRows": func(p *Pool, n int, in func(uint64) []float32) [][]float32 {
			dst := make([]float32, n)
			SumRows(p, dst, append(in(1), in(2)...), 2, n)
			return [][]float32{dst}
		},
		"Digest": func(_ *Pool, n int, in func(uint64) []float32) [][]float32 {
			d := Digest(in(1))
			return [][]float32{{float32(d >> 16), float32(d & 0xFFFF)}}
		},
		"SumSquares": func(_ *Pool, n int, in func(uint64) []float32) [][]float32 {
			b := math.Float64bits(SumSquares(in(1)))
			return [][]float32{{math.Float32frombits(uint32(b)), math.Float32frombits(uint32(b >> 32))}}
		},
	}
	pool := NewPool(3)
	defer pool.Close()
	for name, op := range ops {
		t.Run(name, func(t *testing.T) {
			for kind, fill := range map[string]func(int, uint64) []float32{"random": random, "awkward": awkward} {
				for _, n := range lengths {
					if testing.Short() && n > 100 && n != 5000 {
						continue
					}
					in := func(seed uint64) []float32 { return fill(n, seed) }
					restore, err := Use(Generic)
					if err != nil {
						t.Fatal(err)
					}
					want := op(nil, n, in)
					restore()
					withPaths(t, func(t *testing.T) {
						for _, p := range []*Pool{nil, pool} {
							for i, got := range op(p, n, in) {
								nanBits(got)
								nanBits(want[i])
								bitsEqual(t, kind, got, want[i])
							}
						}
					})
				}
			}
		})
	}
}

// nanBits makes all NaNs one: which of them an operation gives is not defined
// and ends a run anyway.
func nanBits(x []float32) {
	for i, v := range x {
		if v != v {
			x[i] = float32(math.NaN())
		}
	}
}

// Each path makes the numbers of package rng, many of them, since few are near the borders of its cases.
func TestNormals(t *testing.T) {
	n := 1 << 22
	if testing.Short() {
		n = 1 << 16
	}
	place := rng.Place{Sample: 5, Layer: 2}
	const scale = 0.25 // the product with it is exact
	want := make([]float32, n)
	s := rng.New(3, place)
	for i := range want {
		want[i] = float32(scale * s.Normal())
	}
	for _, p := range Available() {
		restore, err := Use(p)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]float32, n)
		Normals(got, 3, place, scale)
		restore()
		for i, x := range got {
			if math.Float32bits(x) != math.Float32bits(want[i]) {
				t.Fatalf("%v: number %d is %v, want %v", p, i, x, want[i])
			}
		}
	}
}

func BenchmarkNormals(b *testing.B) {
	x := make([]float32, 1<<16)
	b.SetBytes(int64(len(x)))
	for b.Loop() {
		Normals(x, 1, rng.Place{}, 0.02)
	}
}

// The fused multiply-add of plain Go is the correctly rounded one.
func TestFMA32(t *testing.T) {
	s, tries := rng.New(1, rng.Place{}), 300_000
	if testing.Short() {
		tries = 10_000
	}
	check := func(a, b, c float32) {
		got := fma32(a, b, c)
		if a != a || b != b || c != c || math.IsInf(float64(a), 0) || math.IsInf(float64(b), 0) || math.IsInf(float64(c), 0) {
			return
		}
		exact := new(big.Float).SetPrec(2000)
		exact.Mul(big.NewFloat(float64(a)).SetPrec(2000), big.NewFloat(float64(b)).SetPrec(2000))
		exact.Add(exact, big.NewFloat(float64(c)).SetPrec(2000))
		want, _ := exact.Float32()
		if got != want {
			t.Fatalf("fma32(%x, %x, %x) = %x, want %x", a, b, c, got, want)
		}
	}
	for range tries {
		check(math.Float32frombits(s.Uint32()), math.Float32frombits(s.Uint32()), math.Float32frombits(s.Uint32()))
	}
	// Sums near the middle between two float32, and subnormal results.
	for range tries {
		a := math.Float32frombits(s.Uint32()&0x807fffff | uint32(127+s.IntN(3))<<23)
		b := math.Float32frombits(0x3f800000 | 1<<s.IntN(23))
		c := math.Float32frombits(s.Uint32()&0x80000001 | uint32(90+s.IntN(60))<<23)
		check(a, b, c)
		check(a*1e-22, b*1e-22, c*1e-40)
	}
}

func TestExp(t *testing.T) {
	for x := float32(-87.3); x < 88.3; x += 0.00137 {
		got, want := float64(Exp(x)), math.Exp(float64(x))
		if e := math.Abs(got-want) / want; e > 2.4e-7 {
			t.Fatalf("Exp(%v) = %v, want %v, relative error %.3g", x, got, want, e)
		}
	}
	inf := float32(math.Inf(1))
	for _, c := range [][2]float32{{0, 1}, {-inf, 0}, {inf, inf}, {-88, 0}, {89, inf}} {
		if got := Exp(c[0]); got != c[1] {
			t.Errorf("Exp(%v) = %v, want %v", c[0], got, c[1])
		}
	}
	if e := Exp(float32(math.NaN())); e == e {
		t.Errorf("Exp(NaN) = %v", e)
	}
}

func TestLogAndCos(t *testing.T) {
	s := rng.New(2, rng.Place{})
	for range 100_000 {
		x := math.Float64frombits(s.Uint64() >> 1)
		if math.IsInf(x, 0) || x != x || x < 1e-300 {
			continue
		}
		if got, want := Log(x), math.Log(x); math.Abs(got-want) > 1e-15*math.Max(1, math.Abs(want)) {
			t.Fatalf("Log(%v) = %v, want %v", x, got, want)
		}
		a := s.Float64() * math.Pi
		if got, want := Cos(a), math.Cos(a); math.Abs(got-want) > 1e-15 {
			t.Fatalf("Cos(%v) = %v, want %v", a, got, want)
		}
	}
	if Log(1) != 0 || !math.IsInf(Log(0), -1) || !math.IsNaN(Log(-1)) || !math.IsInf(Log(math.Inf(1)), 1) {
		t.Error("Log of 1, 0, −1 or +Inf is wrong")
	}
	if Cos(0) != 1 || Cos(math.Pi) != -1 {
		t.Errorf("Cos(0) = %v, Cos(π) = %v", Cos(0), Cos(math.Pi))
	}
}

// The formulas, against float64 and the standard library.
func TestValues(t *testing.T) {
	near := func(what string, got float32, want, tol float64) {
		t.Helper()
		if math.Abs(float64(got)-want) > tol*math.Max(1, math.Abs(want)) {
			t.Errorf("%s = %v, want %v", what, got, want)
		}
	}
	x := random(100, 1)
	y, d := make([]float32, len(x)), make([]float32, len(x))
	one := make([]float32, len(x))
	for i := range one {
		one[i] = 1
	}
	gelu := func(x float64) float64 {
		return x / 2 * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
	}
	GELU(nil, y, x)
	GELUBackward(nil, d, x, one)
	for i, v := range x {
		v := float64(v)
		near("GELU", y[i], gelu(v), 1e-6)
		near("GELU'", d[i], (gelu(v+1e-5)-gelu(v-1e-5))/2e-5, 1e-5)
	}

	Softmax(y, x, 0.5)
	var z float64
	for _, v := range x {
		z += math.Exp(0.5 * float64(v))
	}
	for i, v := range x {
		near("Softmax", y[i], math.Exp(0.5*float64(v))/z, 1e-6)
	}
}

func TestCrossEntropyValue(t *testing.T) {
	x := random(3*7, 1)
	targets := []int32{3, -1, 6}
	d := make([]float32, len(x))
	sum, count := CrossEntropy(nil, d, x, targets, 3, 7)
	var want float64
	for i, tgt := range targets {
		var z float64
		for _, v := range x[7*i : 7*i+7] {
			z += math.Exp(float64(v))
		}
		for j, v := range x[7*i : 7*i+7] {
			g := math.Exp(float64(v)) / z
			switch {
			case tgt < 0:
				g = 0
			case j == int(tgt):
				want -= math.Log(g)
				g--
			}
			if math.Abs(float64(d[7*i+j])-g) > 1e-6 {
				t.Errorf("gradient of row %d, class %d is %v, want %v", i, j, d[7*i+j], g)
			}
		}
	}
	if count != 2 || math.Abs(sum-want) > 1e-6 {
		t.Errorf("loss %v over %d rows, want %v over 2", sum, count, want)
	}
}

func TestDropoutRate(t *testing.T) {
	const n = 1 << 16
	x := make([]float32, n)
	for i := range x {
		x[i] = 1
	}
	s := rng.New(3, rng.Place{})
	Dropout(x, x, 0, 0.1, s)
	zeros := 0
	for _, v := range x {
		switch v {
		case 0:
			zeros++
		case float32(1) / float32(1-float32(0.1)):
		default:
			t.Fatalf("an element became %v", v)
		}
	}
	if rate := float64(zeros) / n; math.Abs(rate-0.1) > 0.005 {
		t.Errorf("%.4f of the elements dropped, want 0.1", rate)
	}
}

// The parts of a slice, dropped one by one, are those of the whole.
func TestDropoutAt(t *testing.T) {
	withPaths(t, func(t *testing.T) {
		const n = 64*9 + 21
		x := random(n, 1)
		s := rng.New(3, rng.Place{Layer: 2})
		whole, parts := make([]float32, n), make([]float32, n)
		Dropout(whole, x, 0, 0.4, s)
		for lo := 0; lo < n; {
			hi := min(lo+64*(1+lo/64%3), n)
			Dropout(parts[lo:hi], x[lo:hi], lo, 0.4, s)
			lo = hi
		}
		bitsEqual(t, "parts", parts, whole)
	})
	defer func() {
		if recover() == nil {
			t.Error("a part may start within a group")
		}
	}()
	Dropout(nil, nil, 32, 0.4, rng.Stream{})
}

func TestDigest(t *testing.T) {
	withPaths(t, func(t *testing.T) {
		for _, n := range []int{1, 63, 64, 65, 700, Block} {
			if testing.Short() && n == Block {
				continue
			}
			x := random(n, uint64(n))
			was := Digest(x)
			for i := range x {
				old := x[i]
				for _, change := range []uint32{1 << (i % 32), 1 << 31, ^uint32(0), math.Float32bits(old)} {
					x[i] = math.Float32frombits(math.Float32bits(old) ^ change)
					if Digest(x) == was {
						t.Fatalf("of %d elements, element %d may change by %08x unnoticed", n, i, change)
					}
				}
				x[i] = old
			}
			for _, far := range []int{1, digestLanes, n / 2} { // two signs, and two elements in each other's place
				i, j := n/3, (n/3+far)%n
				if i == j {
					continue
				}
				x[i], x[j] = -x[i], -x[j]
				signs := Digest(x)
				x[i], x[j] = -x[j], -x[i]
				if swapped := Digest(x); signs == was || swapped == was {
					t.Errorf("of %d elements, %d and %d may change together unnoticed", n, i, j)
				}
				x[i], x[j] = x[j], x[i]
			}
			if Digest(x) != was {
				t.Errorf("%d elements have two digests", n)
			}
		}
		if got := Digest([]float32{1, -2.5, 3e-40}); got != 0x1edce17c {
			t.Errorf("digest %08x", got)
		}
	})
}

func BenchmarkVector(b *testing.B) {
	const n = 4096
	x, y, z, w := random(n, 1), random(n, 2), random(n, 3), make([]float32, n)
	for name, f := range map[string]func(){
		"Add":          func() { Add(w, x, y) },
		"GELU":         func() { GELU(nil, w, x) },
		"GELUBackward": func() { GELUBackward(nil, w, x, y) },
		"Softmax128": func() {
			for i := 0; i < n; i += 128 {
				Softmax(w[i:i+128], x[i:i+128], 0.2)
			}
		},
		"SoftmaxBackward128": func() {
			for i := 0; i < n; i += 128 {
				SoftmaxBackward(w[i:i+128], x[i:i+128], y[i:i+128], 0.2)
			}
		},
		"LayerNorm256":         func() { LayerNorm(nil, w, y[:16], y[16:32], x, z[:256], z[256:512], 16, 256, 1e-5) },
		"LayerNormBackward256": func() { LayerNormBackward(nil, w, y[:256], y[256:512], x, z, x[:16], x[16:32], z[:256], 16, 256) },
		"Dropout":              func() { Dropout(w, x, 0, 0.1, rng.New(1, rng.Place{})) },
		"AdamW":                func() { AdamW(y, z, w, x, AdamWStep{LR: 1e-9, Correction1: 1, Correction2: 1, Eps: 1}) },
		"SumSquares":           func() { _ = SumSquares(x) },
		"Digest":               func() { _ = Digest(x) },
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(4 * n)
			for b.Loop() {
				f()
			}
		})
	}
}
