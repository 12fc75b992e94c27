package tensor

import (
	"slices"
	"unsafe"

	"github.com/soliton-train/soliton/internal/compute/pages"
)

// arenaChunk is the smallest number of float32 an arena takes from the heap
// at a time: 1 MiB.
const arenaChunk = 1 << 18

// Arena hands out float32 memory that is given back all at once. The zero
// value is ready. An arena is not safe for concurrent use.
//
// Memory is not cleared: its content is unspecified.
type Arena struct {
	chunks [][]float32
	chunk  int // index of the chunk in use
	off    int // floats used of it
}

// Tensor returns a tensor of unspecified content that is valid until Reset.
// Its data starts at a multiple of 16 elements.
func (a *Arena) Tensor(shape ...int) Tensor {
	return Tensor{Shape: append([]int(nil), shape...), F: a.take(Size(shape))}
}

// take returns n elements of unspecified content, valid until Reset.
func (a *Arena) take(n int) []float32 {
	need := (n + 15) &^ 15
	for a.chunk < len(a.chunks) && a.off+need > len(a.chunks[a.chunk]) {
		a.chunk++
		a.off = 0
	}
	if a.chunk == len(a.chunks) {
		a.chunks = append(a.chunks, pages.Make(max(need, arenaChunk)))
		a.off = 0
	}
	s := a.chunks[a.chunk][a.off : a.off+n : a.off+n]
	a.off += need
	return s
}

// Owns reports whether x lies in the arena's memory, handed out or not.
func (a *Arena) Owns(x []float32) bool {
	return len(x) > 0 && slices.ContainsFunc(a.chunks, func(c []float32) bool { return within(c, x) })
}

// within reports whether x, which has elements, begins in c.
func within(c, x []float32) bool {
	if len(c) == 0 {
		return false
	}
	at, lo := uintptr(unsafe.Pointer(&x[0])), uintptr(unsafe.Pointer(&c[0]))
	return lo <= at && at < lo+4*uintptr(len(c))
}

// Mark is a moment in the life of an arena, until its next Reset.
type Mark struct{ chunk, off int }

// Mark returns the moment.
func (a *Arena) Mark() Mark { return Mark{a.chunk, a.off} }

// Release makes what was handed out since a moment available again, but for x, whose content it moves to where it returns it. x
// stays where it is if it was not handed out since then.
func (a *Arena) Release(m Mark, x []float32) []float32 {
	since := false
	for i := m.chunk; i < len(a.chunks) && len(x) > 0; i++ {
		from := 0
		if i == m.chunk {
			from = m.off
		}
		since = since || within(a.chunks[i][from:], x)
	}
	a.chunk, a.off = m.chunk, m.off
	if !since {
		return x
	}
	moved := a.take(len(x)) // never behind x in its chunk, and copy minds the overlap
	copy(moved, x)
	return moved
}

// Reset makes all memory handed out so far available again.
func (a *Arena) Reset() { a.chunk, a.off = 0, 0 }
