// Package kernel holds the compute kernels of training: the matrix product
// and the vector operations around it.
//
// # The same bits
//
// A result depends on the operands only: not on the number of threads, not
// on what else is in the call, and not on the path (AVX-512, AVX2 or plain
// Go) that computes it. These rules ensure that:
//
//   - Matrix product: an output element is one chain of fused multiply-adds
//     over k, in ascending order from +0, within a block of [BlockK]; blocks
//     are added to the output one after the other, each as one addition.
//   - Reductions along a row use 16 virtual lanes (element i goes to lane
//     i mod 16) and one fixed fold, lane i with lane i+8, then +4, +2, +1.
//     The tail of a row is padded with the identity: −0 for sums, −Inf for
//     maxima.
//   - Reductions over rows go in row order. Threads split columns.
//   - exp is one polynomial on every path; division and square root are the
//     correctly rounded ones of IEEE 754.
//   - Where a formula has a fused multiply-add, every path fuses; where it
//     has not, none does. Plain Go gets its fused multiply-add from float64
//     arithmetic (see fma32), which is exact but slow.
//
// The paths and the plain Go beside them are compared bit for bit in tests.
//
// # Threads
//
// Functions that take a [Pool] may use its threads, and return when the work
// is done. The others run in the calling goroutine. No call into assembly
// runs longer than about 200 µs, so that the Go scheduler can always preempt
// a worker's compute threads. All functions are safe for concurrent use on
// disjoint outputs.
//
// # Paths
//
// The fastest path the CPU has is chosen at start. The environment variable
// SOLITON_KERNEL (avx512, avx2 or generic) overrides the choice; a value that
// is unknown or that the CPU does not support is reported by [Err].
//
// The assembly is generated: see the module in the folder asm, and "make
// generate".
package kernel
