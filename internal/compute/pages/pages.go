// Package pages makes and copies arrays that are large, in ways that hold up nothing else in the process.
//
// The first use of memory costs a page fault for each page. 1 GB has 260,000 pages of 4 KB, whose faults take half a second;
// in pages of 2 MB, where the system has them, it may be a fifth of that. And the scheduler cannot interrupt a copy, nor can a garbage
// collection begin or end beside one, so that all goroutines of the process, its heartbeats too, may wait for the end of it.
package pages

import "unsafe"

// hugePage is the size of a large page, in bytes.
const hugePage = 2 << 20

// Make returns n zeros, in large pages where the system has them.
func Make(n int) []float32 {
	x := make([]float32, n)
	if size := 4 * n; size >= 2*hugePage {
		advise(unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), size))
	}
	return x
}

// longest bounds the elements of one part of a copy, which takes some tens of microseconds.
const longest = 32 << 10

// Copy copies src into dst, which is as long or longer and does not overlap it, in parts between which the scheduler can interrupt it.
func Copy(dst, src []float32) {
	dst = dst[:len(src)]
	for ; len(src) > longest; dst, src = dst[longest:], src[longest:] {
		part(dst[:longest], src)
	}
	part(dst, src)
}

// Clear sets all elements to zero, in parts as [Copy].
func Clear(dst []float32) {
	for ; len(dst) > longest; dst = dst[longest:] {
		zero(dst[:longest])
	}
	zero(dst)
}

// part and zero are not inlined: the scheduler interrupts a goroutine that is nearly always in a copy only where a function begins.
//
//go:noinline
func part(dst, src []float32) { copy(dst, src) }

//go:noinline
func zero(dst []float32) { clear(dst) }
