package kernel

import (
	"fmt"
	"math"
	"runtime"
	"testing"
	"time"

	"github.com/soliton-train/soliton/rng"
)

// random returns n values of mixed sign and size, the same in every run.
func random(n int, seed uint64) []float32 {
	s := rng.New(seed, rng.Place{})
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(s.Normal())
	}
	return x
}

// bitsEqual fails the test at the first element whose bits differ.
func bitsEqual(t *testing.T, what string, got, want []float32) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d elements, want %d", what, len(got), len(want))
	}
	for i := range got {
		if g, w := math.Float32bits(got[i]), math.Float32bits(want[i]); g != w {
			t.Fatalf("%s: element %d is %v (%08x), want %v (%08x)", what, i, got[i], g, want[i], w)
		}
	}
}

// withPaths runs f as a subtest on every path of this CPU.
func withPaths(t *testing.T, f func(t *testing.T)) {
	for _, p := range Available() {
		t.Run(p.String(), func(t *testing.T) {
			restore, err := Use(p)
			if err != nil {
				t.Fatal(err)
			}
			defer restore()
			f(t)
		})
	}
}

// at returns element (i, j) of a view.
func (m Mat) at(i, j int) float32 {
	if m.trans {
		i, j = j, i
	}
	return m.Data[i*m.Stride+j]
}

// oracle is the definition of the matrix product, one element at a time.
func oracle(c, a, b Mat, bias []float32, add bool) {
	for i := range c.Rows {
		for j := range c.Cols {
			out := &c.Data[i*c.Stride+j]
			if bias != nil {
				*out = bias[j]
			}
			for k0 := 0; k0 < a.Cols; k0 += BlockK {
				var sum float32
				for k := k0; k < min(k0+BlockK, a.Cols); k++ {
					sum = fma32(a.at(i, k), b.at(k, j), sum)
				}
				if k0 == 0 && !add && bias == nil {
					*out = sum
				} else {
					*out += sum
				}
			}
		}
	}
}

func TestMatMul(t *testing.T) {
	shapes := [][3]int{ // rows, terms, columns
		{1, 1, 1}, {12, 32, 32}, {4, 256, 16}, {13, 257, 33}, {24, 513, 65}, {7, 3, 100}, {50, 32, 50}, {100, 96, 37}, {5, 600, 11}, {200, 20, 40}, {64, 300, 32}, {35, 40, 20}, {150, 260, 70}, {90, 530, 33},
	}
	withPaths(t, func(t *testing.T) {
		pools := []*Pool{nil, NewPool(2), NewPool(3)}
		defer pools[1].Close()
		defer pools[2].Close()
		for _, s := range shapes {
			m, k, n := s[0], s[1], s[2]
			if testing.Short() && m*k*n > 90_000 {
				continue
			}
			for form := range 4 {
				const gap = 3 // strides are wider than the rows
				view := func(rows, cols int, trans bool, seed uint64) Mat {
					if trans {
						return Mat{Data: random(cols*(rows+gap), seed), Rows: cols, Cols: rows, Stride: rows + gap}.T()
					}
					return Mat{Data: random(rows*(cols+gap), seed), Rows: rows, Cols: cols, Stride: cols + gap}
				}
				a, b := view(m, k, form&1 != 0, 1), view(k, n, form&2 != 0, 2)
				bias := random(n, 3)
				fresh := func() Mat { return view(m, n, false, 4) }
				for _, p := range pools {
					name := fmt.Sprintf("%dx%dx%d form %d threads %d", m, k, n, form, p.Threads())
					got, want := fresh(), fresh()
					MatMul(p, got, a, b)
					oracle(want, a, b, nil, false)
					bitsEqual(t, name, got.Data, want.Data)

					got, want = fresh(), fresh()
					MatMulAdd(p, got, a, b)
					oracle(want, a, b, nil, true)
					bitsEqual(t, name+" add", got.Data, want.Data)

					got, want = fresh(), fresh()
					MatMulBias(p, got, a, b, bias)
					oracle(want, a, b, bias, false)
					bitsEqual(t, name+" bias", got.Data, want.Data)
				}
			}
		}
	})
}

func TestMatMulNoTerms(t *testing.T) {
	c := Matrix([]float32{1, 2, 3, 4}, 2, 2)
	MatMulAdd(nil, c, Mat{Rows: 2}, Mat{Cols: 2, Stride: 2})
	bitsEqual(t, "add", c.Data, []float32{1, 2, 3, 4})
	MatMulBias(nil, c, Mat{Rows: 2}, Mat{Cols: 2, Stride: 2}, []float32{5, 6})
	bitsEqual(t, "bias", c.Data, []float32{5, 6, 5, 6})
	MatMul(nil, c, Mat{Rows: 2}, Mat{Cols: 2, Stride: 2})
	bitsEqual(t, "set", c.Data, []float32{0, 0, 0, 0})
}

func TestMatMulRefusesMisfits(t *testing.T) {
	for name, f := range map[string]func(){
		"shapes": func() {
			MatMul(nil, Matrix(make([]float32, 4), 2, 2), Matrix(make([]float32, 6), 2, 3), Matrix(make([]float32, 4), 2, 2))
		},
		"short data": func() {
			MatMul(nil, Matrix(make([]float32, 4), 2, 2), Mat{Data: make([]float32, 3), Rows: 2, Cols: 2, Stride: 2}, Matrix(make([]float32, 4), 2, 2))
		},
		"bias": func() {
			MatMulBias(nil, Matrix(make([]float32, 4), 2, 2), Matrix(make([]float32, 4), 2, 2), Matrix(make([]float32, 4), 2, 2), make([]float32, 3))
		},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f()
		}()
	}
}

// The shapes of the GPT of width 256: projections, both halves of the MLP and
// their gradients.
var gptShapes = []struct {
	name    string
	m, k, n int
	form    string
}{
	{"qkv", 1024, 256, 768, "nn"},
	{"mlp-up", 1024, 256, 1024, "nn"},
	{"mlp-down", 1024, 1024, 256, "nn"},
	{"mlp-up-din", 1024, 1024, 256, "nt"},
	{"mlp-down-din", 1024, 256, 1024, "nt"},
	{"mlp-up-dweight", 256, 1024, 1024, "tn"},
	{"mlp-down-dweight", 1024, 1024, 256, "tn"},
	{"mlp-up-2", 256, 256, 1024, "nn"},
	{"mlp-up-dweight-2", 256, 256, 1024, "tn"},
}

func BenchmarkMatMul(b *testing.B) {
	for _, s := range gptShapes {
		for threads := 1; threads <= 2; threads++ {
			b.Run(fmt.Sprintf("%s/threads=%d", s.name, threads), func(b *testing.B) {
				runtime.LockOSThread() // as in a worker
				defer runtime.UnlockOSThread()
				p := NewPool(threads, runtime.LockOSThread)
				defer p.Close()
				x, w := Matrix(random(s.m*s.k, 1), s.m, s.k), Matrix(random(s.k*s.n, 2), s.k, s.n)
				if s.form[0] == 't' {
					x = Matrix(x.Data, s.k, s.m).T()
				}
				if s.form[1] == 't' {
					w = Matrix(w.Data, s.n, s.k).T()
				}
				c := Matrix(make([]float32, s.m*s.n), s.m, s.n)
				best := time.Hour // of all calls: the others may have shared the machine
				for b.Loop() {
					began := time.Now()
					MatMul(p, c, x, w)
					best = min(best, time.Since(began))
				}
				b.ReportMetric(2*float64(s.m*s.k*s.n)/best.Seconds()/1e9, "best-GFLOP/s")
				b.ReportMetric(2*float64(s.m*s.k*s.n)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
			})
		}
	}
}
