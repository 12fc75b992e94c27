package rng

import "testing"

// inverse undoes At: the network backwards, walked the same way.
func (p Perm) inverse(y uint64) uint64 {
	mask := uint32(1<<p.half - 1)
	for {
		if y < 2 {
			y ^= p.coin
		}
		left, right := uint32(y>>p.half), uint32(y)&mask
		for round := uint32(permRounds); round > 0; round-- {
			left, right = right^p.round(round-1, left)&mask, left
		}
		if y = uint64(left)<<p.half | uint64(right); y < p.n {
			return y
		}
	}
}

// checkBijection reports positions that share an element or lie outside [0,n).
func checkBijection(t *testing.T, p Perm) {
	t.Helper()
	seen := make([]bool, p.Len())
	for i := range p.Len() {
		v := p.At(i)
		if v >= p.Len() {
			t.Fatalf("n = %d: At(%d) = %d, want it below n", p.Len(), i, v)
		}
		if seen[v] {
			t.Fatalf("n = %d: At(%d) = %d, which another position has too", p.Len(), i, v)
		}
		seen[v] = true
		if back := p.inverse(v); back != i {
			t.Fatalf("n = %d: inverse of At(%d) = %d is %d", p.Len(), i, v, back)
		}
	}
}

func TestPermIsBijection(t *testing.T) {
	sizes := []uint64{1000, 1023, 1024, 1025, 4095, 4096, 4097, 10007, 1<<14 + 1, 1 << 15}
	for n := range uint64(130) {
		sizes = append(sizes, n+1)
	}
	for _, n := range sizes {
		for epoch := range uint64(3) {
			checkBijection(t, NewPerm(42, epoch, n))
		}
	}
}

// Too large to list: a position and its element must find each other, and no two of the sampled positions share an element.
func TestPermLarge(t *testing.T) {
	s := New(3, Place{})
	for _, n := range []uint64{
		1<<32 - 1, 1 << 32, 1<<32 + 1, 1_000_000_000_039, 1 << 40, 1<<40 + 1, 1<<62 + 1, 1<<63 + 1, 1<<64 - 1,
	} {
		p := NewPerm(42, 1, n)
		from := map[uint64]uint64{}
		for k := range uint64(2000) {
			i := k
			if k >= 1000 {
				i = s.below(n, s.Uint64())
			}
			v := p.At(i)
			if v >= n {
				t.Fatalf("n = %d: At(%d) = %d, want it below n", n, i, v)
			}
			if back := p.inverse(v); back != i {
				t.Fatalf("n = %d: inverse of At(%d) = %d is %d", n, i, v, back)
			}
			if j, ok := from[v]; ok && j != i {
				t.Fatalf("n = %d: At(%d) and At(%d) are both %d", n, i, j, v)
			}
			from[v] = i
		}
	}
}

// With small n every order must come up, and all about equally often: chi-squared over many epochs, with a bound that a true
// shuffle passes but for one seed in a million. The seed is fixed, so the test never fails by chance.
func TestPermOrdersAreEven(t *testing.T) {
	for _, c := range []struct {
		n      uint64
		orders int
		bound  float64 // of chi-squared with orders-1 degrees of freedom, at 1e-6
	}{
		{2, 2, 23.9},
		{3, 6, 35.9},
		{4, 24, 72.9},
		{5, 120, 207},
	} {
		const perOrder = 400
		counts := map[uint64]int{}
		epochs := perOrder * c.orders
		for epoch := range epochs {
			p := NewPerm(11, uint64(epoch), c.n)
			var order uint64
			for i := range c.n {
				order = order*c.n + p.At(i)
			}
			counts[order]++
		}
		if len(counts) != c.orders {
			t.Errorf("n = %d: %d orders came up in %d epochs, want %d", c.n, len(counts), epochs, c.orders)
		}
		var chi float64
		for _, got := range counts {
			d := float64(got) - perOrder
			chi += d * d / perOrder
		}
		if chi > c.bound {
			t.Errorf("n = %d: chi-squared of the orders is %.1f, want at most %v", c.n, chi, c.bound)
		}
	}
}

// With n a power of four there is no walking, and the network by itself gives even permutations only.
func TestPermIsOddHalfTheTime(t *testing.T) {
	const epochs = 4000
	for _, n := range []uint64{4, 16, 64} {
		odd := 0
		for epoch := range uint64(epochs) {
			p := NewPerm(13, epoch, n)
			seen := make([]bool, n)
			transpositions := n // less the number of cycles
			for i := range n {
				if !seen[i] {
					transpositions--
				}
				for j := i; !seen[j]; j = p.At(j) {
					seen[j] = true
				}
			}
			odd += int(transpositions & 1)
		}
		if odd < epochs/2-160 || odd > epochs/2+160 { // five standard deviations
			t.Errorf("n = %d: %d of %d permutations are odd, want about half", n, odd, epochs)
		}
	}
}

// Each position must receive each element about equally often, and the steps between neighbours must be spread too: a weak
// round function shows there first. n = 50 needs walking.
func TestPermPositionsAreEven(t *testing.T) {
	const n, perCell = 50, 100
	var place, step [n][n]int
	for epoch := range uint64(n * perCell) {
		p := NewPerm(12, epoch, n)
		last := p.At(n - 1)
		for i := range uint64(n) {
			v := p.At(i)
			place[i][v]++
			step[i][(v+n-last)%n]++
			last = v
		}
	}
	chi := func(table *[n][n]int, want float64, from int) (sum float64) {
		for _, row := range table {
			for _, got := range row[from:] {
				d := float64(got) - want
				sum += d * d / want
			}
		}
		return sum
	}
	// Mean about n*n and standard deviation about sqrt(2)*n; the bounds are six of those above it.
	if got := chi(&place, perCell, 0); got > n*n+6*1.42*n {
		t.Errorf("chi-squared of elements over positions is %.0f, want about %d", got, (n-1)*(n-1))
	}
	if got := chi(&step, perCell*float64(n)/(n-1), 1); got > n*n+6*1.42*n {
		t.Errorf("chi-squared of steps between neighbours is %.0f, want about %d", got, n*(n-2))
	}
}

// Seed and epoch must each give another order.
func TestPermKeys(t *testing.T) {
	const n = 1 << 20
	same := func(a, b Perm) (equal int) {
		for i := range uint64(1000) {
			if a.At(i) == b.At(i) {
				equal++
			}
		}
		return equal
	}
	base := NewPerm(1, 0, n)
	for name, other := range map[string]Perm{
		"seed": NewPerm(2, 0, n), "high seed": NewPerm(1|1<<32, 0, n),
		"epoch": NewPerm(1, 1, n), "high epoch": NewPerm(1, 1<<32, n),
	} {
		if got := same(base, other); got > 3 {
			t.Errorf("%d of 1000 positions stay the same with another %s, want hardly any", got, name)
		}
	}
	if got := same(base, NewPerm(1, 0, n)); got != 1000 {
		t.Errorf("only %d of 1000 positions are the same with equal seed and epoch", got)
	}
}

func FuzzPerm(f *testing.F) {
	f.Add(uint64(0), uint64(0), uint16(0))
	f.Add(uint64(1), uint64(2), uint16(1))
	f.Add(uint64(1<<63), uint64(1<<40), uint16(1024))
	f.Fuzz(func(t *testing.T, seed, epoch uint64, n uint16) {
		checkBijection(t, NewPerm(seed, epoch, uint64(n)%3000+1))
	})
}

func BenchmarkPerm(b *testing.B) {
	p := NewPerm(1, 0, 1<<20+1) // the most walking: just above a power of four
	var i uint64
	for b.Loop() {
		p.At(i)
		i = (i + 1) & (1<<20 - 1)
	}
}
