package tensor

import "testing"

// Release frees what came since a mark, but for one tensor, in whichever chunk that lies, and leaves older memory alone.
func TestRelease(t *testing.T) {
	for _, size := range []int{1, 100, arenaChunk - 100, arenaChunk, 3 * arenaChunk} {
		var a Arena
		before := a.Tensor(50)
		for i := range before.F {
			before.F[i] = -1
		}
		m := a.Mark()
		a.Tensor(70)
		x := a.Tensor(size)
		for i := range x.F {
			x.F[i] = float32(i % 1000)
		}
		kept := a.Release(m, x.F)
		if len(kept) != size {
			t.Fatalf("%d elements are kept, want %d", len(kept), size)
		}
		for i, v := range kept {
			if v != float32(i%1000) {
				t.Fatalf("size %d: element %d is %v", size, i, v)
			}
		}
		if size <= 100 && &kept[0] != &a.chunks[0][64] {
			t.Errorf("size %d: the memory since the mark is not free", size)
		}
		if next := a.Tensor(10); within(kept, next.F) {
			t.Errorf("size %d: what follows lies within what was kept", size)
		}
		m = a.Mark()
		if same := a.Release(m, before.F); &same[0] != &before.F[0] || a.Mark() != m {
			t.Errorf("size %d: older memory was moved", size)
		}
		if outside := make([]float32, 3); &a.Release(m, outside)[0] != &outside[0] {
			t.Errorf("size %d: memory from elsewhere was moved", size)
		}
		for _, v := range before.F {
			if v != -1 {
				t.Fatalf("size %d: older memory was written", size)
			}
		}
	}
	var a Arena
	if a.Release(a.Mark(), nil) != nil {
		t.Error("nothing became something")
	}
}
