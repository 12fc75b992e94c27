package tensor

import "unsafe"

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
		a.chunks = append(a.chunks, make([]float32, max(need, arenaChunk)))
		a.off = 0
	}
	s := a.chunks[a.chunk][a.off : a.off+n : a.off+n]
	a.off += need
	return s
}

// Owns reports whether x lies in the arena's memory, handed out or not.
func (a *Arena) Owns(x []float32) bool {
	if len(x) == 0 {
		return false
	}
	at := uintptr(unsafe.Pointer(&x[0]))
	for _, c := range a.chunks {
		if lo := uintptr(unsafe.Pointer(&c[0])); lo <= at && at < lo+4*uintptr(len(c)) {
			return true
		}
	}
	return false
}

// Reset makes all memory handed out so far available again.
func (a *Arena) Reset() { a.chunk, a.off = 0, 0 }
