// Package shm carries the bytes of a connection between two processes of one host in shared memory.
//
// A connection has two rings, one for each direction, in one sealed memory file without a name. The memory goes when both processes
// have ended, however they end. A [Ring] is pure: it moves bytes and indices, and says whom to wake; [Conn] waits and wakes.
//
// # What is shared is hostile
//
// The other process may write any byte of the memory at any moment. So each side keeps its own index in memory of its own and only
// publishes it; the other's index is read once, and checked, before it bounds a copy. Bytes are copied out once, and parsed
// after that. Whatever the other side writes, it gets no byte written or read outside of the rings: its connection ends, or delivers
// other bytes than were sent.
//
// # Layout
//
// The file has a page of indices, then the bytes of both rings, [Size] each. Direction 0 is from the caller to the answerer. All
// numbers are little-endian.
//
//	256·d        uint64  bytes written so far, of the writer
//	256·d + 64   uint64  bytes read so far, of the reader
//	256·d + 128  uint32  1 while the reader sleeps
//	256·d + 192  uint32  1 while the writer sleeps
//	4096 + Size·d        bytes
package shm

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"
)

// Size is the number of bytes of a ring, a power of two. It bounds what waits for the reader, which a more urgent message
// cannot overtake, and stays in the cache of a core.
const Size = 256 << 10

const (
	page = 4096
	// FileSize is the size of the memory of a connection.
	FileSize = page + 2*Size
)

// ErrCorrupt means that the other side has written an index that cannot be.
var ErrCorrupt = errors.New("shm: the other side has broken a ring")

// Ring is one side of one direction. The writer's methods are Put, Publish, Full and WakeReader; the reader's are Take, Empty and WakeWriter. Each side
// belongs to one goroutine at a time.
type Ring struct {
	data []byte
	at   uint64 // our index

	ours, theirs *atomic.Uint64 // published
	sleeps       *atomic.Uint32 // our flag
	sleeper      *atomic.Uint32 // theirs
}

// Writer and Reader return the sides of direction d in the memory of a connection, which has [FileSize] bytes.
func Writer(mem []byte, d int) *Ring { return side(mem, d, 0) }

// Reader is documented with [Writer].
func Reader(mem []byte, d int) *Ring { return side(mem, d, 1) }

func side(mem []byte, d, own int) *Ring {
	_ = mem[:FileSize]
	word := func(i int) unsafe.Pointer { return unsafe.Pointer(&mem[256*d+64*i]) }
	return &Ring{
		data:    mem[page+Size*d:][:Size:Size],
		ours:    (*atomic.Uint64)(word(own)),
		theirs:  (*atomic.Uint64)(word(1 - own)),
		sleeps:  (*atomic.Uint32)(word(3 - own)),
		sleeper: (*atomic.Uint32)(word(2 + own)),
	}
}

// used returns how many bytes are in the ring, for the side whose index is ahead or behind.
func used(written, read uint64) (int, error) {
	if n := written - read; n <= Size {
		return int(n), nil
	}
	return 0, fmt.Errorf("%w: %d bytes written, %d read", ErrCorrupt, written, read)
}

// move copies n bytes, at most Size, between the ring, from our index on, and what f is given the places of.
func (r *Ring) move(n int, f func(ring []byte, at int)) {
	from := int(r.at % Size)
	first := min(n, Size-from)
	f(r.data[from:from+first], 0)
	if first < n {
		f(r.data[:n-first], first)
	}
	r.at += uint64(n)
}

// Put writes as much of b as there is room for. The reader sees it after Publish.
func (r *Ring) Put(b []byte) (int, error) {
	have, err := used(r.at, r.theirs.Load())
	if err != nil {
		return 0, err
	}
	n := min(len(b), Size-have)
	if n > 0 {
		r.move(n, func(ring []byte, at int) { copy(ring, b[at:]) })
	}
	return n, nil
}

// Publish lets the reader see all that was put.
func (r *Ring) Publish() { r.ours.Store(r.at) }

// Take reads what there is into b, at most len(b) bytes.
func (r *Ring) Take(b []byte) (int, error) {
	have, err := used(r.theirs.Load(), r.at)
	if err != nil {
		return 0, err
	}
	n := min(len(b), have)
	if n > 0 {
		r.move(n, func(ring []byte, at int) { copy(b[at:], ring) })
		r.ours.Store(r.at)
	}
	return n, nil
}

// Full says that the writer is about to sleep, and reports whether it should: there is still no room.
func (r *Ring) Full() (bool, error) {
	r.sleeps.Store(1)
	have, err := used(r.at, r.theirs.Load())
	if err != nil || have < Size {
		r.sleeps.Store(0)
		return false, err
	}
	return true, nil
}

// Empty says that the reader is about to sleep, and reports whether it should: there is still nothing.
func (r *Ring) Empty() (bool, error) {
	r.sleeps.Store(1)
	have, err := used(r.theirs.Load(), r.at)
	if err != nil || have > 0 {
		r.sleeps.Store(0)
		return false, err
	}
	return true, nil
}

// Awake says that our side does not sleep any more.
func (r *Ring) Awake() { r.sleeps.Store(0) }

// WakeReader reports whether the reader sleeps. The caller has published something, and must wake the reader then.
func (r *Ring) WakeReader() bool {
	return r.sleeper.Load() != 0 && r.sleeper.Swap(0) != 0
}

// WakeWriter reports whether the writer sleeps and half the ring is free again; the caller must wake the writer then. With less
// room, each read would wake it.
func (r *Ring) WakeWriter() bool {
	if r.sleeper.Load() == 0 {
		return false
	}
	have, err := used(r.theirs.Load(), r.at)
	return (err != nil || have <= Size/2) && r.sleeper.Swap(0) != 0
}
