package tree

import (
	"math"
	"math/bits"
	"testing"

	"pgregory.net/rapid"
)

func TestSplit(t *testing.T) {
	for _, c := range []struct{ n, left, right Node }{
		{Node{0, 2}, Node{0, 1}, Node{1, 2}},
		{Node{0, 3}, Node{0, 2}, Node{2, 3}},
		{Node{0, 4}, Node{0, 2}, Node{2, 4}},
		{Node{0, 6}, Node{0, 4}, Node{4, 6}},
		{Node{8, 15}, Node{8, 12}, Node{12, 15}},
		{Node{0, 17}, Node{0, 16}, Node{16, 17}},
	} {
		if l, r := c.n.Split(); l != c.left || r != c.right {
			t.Errorf("%v splits into %v and %v, want %v and %v", c.n, l, r, c.left, c.right)
		}
	}
}

// oracle adds the leaves by the definition of the tree.
func oracle(n Node, leaf func(int) float32) float32 {
	if n.Size() == 1 {
		return leaf(n.Lo)
	}
	l, r := n.Split()
	return oracle(l, leaf) + oracle(r, leaf)
}

func nodes(n Node) []Node {
	if n.Size() == 1 {
		return []Node{n}
	}
	l, r := n.Split()
	return append(append([]Node{n}, nodes(l)...), nodes(r)...)
}

func TestAnyOrderGivesTheSameBits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := rapid.IntRange(1, 40).Draw(t, "m")
		const width = 3
		leaves := make([][]float32, m)
		for i := range leaves {
			leaves[i] = rapid.SliceOfN(rapid.Float32Range(-1e6, 1e6), width, width).Draw(t, "leaf")
		}
		sums := NewSums(m, func(l, r []float32) []float32 {
			out := make([]float32, width)
			for i := range out {
				out[i] = l[i] + r[i]
			}
			return out
		})
		// Values of inner nodes may come too, early or twice.
		order := rapid.Permutation(nodes(Root(m))).Draw(t, "order")
		for _, n := range order {
			if n.Size() > 1 && !rapid.Bool().Draw(t, "send inner node") {
				continue
			}
			v := make([]float32, width)
			for i := range v {
				v[i] = oracle(n, func(j int) float32 { return leaves[j][i] })
			}
			sums.Put(n, v)
		}
		got, ok := sums.Total()
		if !ok || sums.Held() != 1 {
			t.Fatalf("incomplete: %d values held", sums.Held())
		}
		for i := range got {
			want := oracle(Root(m), func(j int) float32 { return leaves[j][i] })
			if math.Float32bits(got[i]) != math.Float32bits(want) {
				t.Fatalf("element %d is %v, the oracle says %v", i, got[i], want)
			}
		}
	})
}

func TestAscendingOrderHoldsFewSums(t *testing.T) {
	for m := 1; m <= 130; m++ {
		s := NewSums(m, func(l, r int) int { return l + r })
		for i := range m {
			if dropped := s.Put(Leaf(i), 1); dropped != nil {
				t.Fatalf("m=%d: leaf %d dropped %v", m, i, dropped)
			}
			if limit := bits.Len(uint(m)); s.Held() > limit {
				t.Fatalf("m=%d: %d sums held, want at most %d", m, s.Held(), limit)
			}
		}
		if total, ok := s.Take(); !ok || total != m || s.Held() != 0 {
			t.Fatalf("m=%d: total %d (complete: %v)", m, total, ok)
		}
	}
}

func TestDuplicatesAreDropped(t *testing.T) {
	s := NewSums(4, func(l, r string) string { return "(" + l + r + ")" })
	s.Put(Leaf(0), "a")
	if d := s.Put(Node{0, 2}, "(ab)"); len(d) != 1 || d[0] != "a" {
		t.Errorf("the replaced leaf was not handed back: %q", d)
	}
	if d := s.Put(Leaf(1), "b"); len(d) != 1 || d[0] != "b" {
		t.Errorf("a leaf inside a held node was kept: %q", d)
	}
	s.Put(Leaf(3), "d")
	s.Put(Leaf(2), "c")
	if got, ok := s.Total(); !ok || got != "((ab)(cd))" {
		t.Errorf("total %q", got)
	}
	if d := s.Clear(); len(d) != 1 || s.Held() != 0 {
		t.Errorf("Clear left %d values, returned %q", s.Held(), d)
	}
}

func TestForeignNodePanics(t *testing.T) {
	s := NewSums(6, func(l, r int) int { return l + r })
	for _, n := range []Node{{1, 3}, {0, 7}, {2, 2}, {-1, 0}, {3, 2}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%v was accepted", n)
				}
			}()
			s.Put(n, 1)
		}()
	}
}
