package torch

import (
	"fmt"
	"math/bits"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/platform"
)

// reserved is the size of the shared memory in bytes. Only what is used takes room.
const reserved = 1 << 40

// firstPage is not used, so that no block is at 0, which in a request means none. Large blocks begin at multiples of it.
const firstPage = 1 << 12

// memory is memory that this process and Python processes see. Blocks are taken and given back by any goroutine.
type memory struct {
	file *os.File
	all  []byte

	mu   sync.Mutex
	end  int           // of what was ever taken
	free map[int][]int // by size, the offsets of blocks
	lent []block
}

// block is a part of the memory.
type block struct {
	at int // 0: none
	f  []float32
}

// newMemory returns memory of which at most size bytes can be used.
func newMemory(size int) (*memory, error) {
	file, err := platform.SharedFile("soliton-torch")
	if err != nil {
		return nil, err
	}
	if err := file.Truncate(int64(size)); err != nil {
		file.Close()
		return nil, fmt.Errorf("shared memory of %d bytes: %w", size, err)
	}
	all, err := unix.Mmap(int(file.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("map shared memory of %d bytes: %w", size, err)
	}
	return &memory{file: file, all: all, end: firstPage, free: make(map[int][]int)}, nil
}

// close unmaps the memory, which nothing may use any more.
func (m *memory) close() {
	_ = unix.Munmap(m.all) // it was mapped
	m.file.Close()
}

// take returns n numbers of unspecified content, zeros the first time.
func (m *memory) take(n int) block {
	size := sizeClass(n)
	m.mu.Lock()
	defer m.mu.Unlock()
	at := m.end
	if old := m.free[size]; len(old) > 0 {
		at, m.free[size] = old[len(old)-1], old[:len(old)-1]
	} else {
		if size >= firstPage { // a GPU's driver locks whole pages of large blocks
			at = (at + firstPage - 1) &^ (firstPage - 1)
		}
		if m.end = at + size; m.end > len(m.all) {
			panic(fmt.Sprintf("torch: the shared memory of %d bytes is too small", len(m.all)))
		}
	}
	return block{at, m.floats(at, n)}
}

// floats returns n numbers from an offset on.
func (m *memory) floats(at, n int) []float32 {
	return unsafe.Slice((*float32)(unsafe.Pointer(&m.all[at])), n)
}

// give gives a block back.
func (m *memory) give(b block) {
	if b.at == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	size := sizeClass(len(b.f))
	m.free[size] = append(m.free[size], b.at)
}

// lend is take, until reclaim gives the block back.
func (m *memory) lend(n int) block {
	b := m.take(n)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lent = append(m.lent, b)
	return b
}

// reclaim gives back what was lent.
func (m *memory) reclaim() {
	m.mu.Lock()
	lent := m.lent
	m.lent = nil
	m.mu.Unlock()
	for _, b := range lent {
		m.give(b)
	}
}

// sizeClass returns the bytes of the block for n numbers: a power of two, but at least a cache line.
func sizeClass(n int) int { return 1 << max(6, bits.Len(uint(max(4*n, 1)-1))) }

// where returns the offset of x in the memory, and false if it lies elsewhere.
func (m *memory) where(x []float32) (at int, ok bool) {
	if len(x) == 0 {
		return 0, false
	}
	base, p := uintptr(unsafe.Pointer(&m.all[0])), uintptr(unsafe.Pointer(&x[0]))
	if p < base || p >= base+uintptr(len(m.all)) {
		return 0, false
	}
	return int(p - base), true
}

// ints returns the block as integers.
func (b block) ints() []int32 {
	if len(b.f) == 0 {
		return nil
	}
	return unsafe.Slice((*int32)(unsafe.Pointer(&b.f[0])), len(b.f))
}
