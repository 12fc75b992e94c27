// Package rng holds the random numbers of a training run: counter-based streams and keyed permutations.
//
// Nothing here has a hidden state that could be lost, handed over or advanced twice. A draw is a pure function of the run's
// seed and of the place it is made for ([Place]): any worker that computes a micro-batch, in any order and however often, draws
// the same numbers. The data order is likewise a function: [Perm] maps a position of an epoch to a sample.
//
//	s := rng.New(seed, rng.Place{Step: 7, Sample: 3, Layer: 2, Op: 1})
//	keep := s.Float32() >= 0.1
//	order := rng.NewPerm(seed, epoch, uint64(samples))
//	first := order.At(0)
//
// # The generator
//
// [Philox] is Philox 4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): ten
// rounds of multiplication and exclusive-or turn a counter of four words under a key of two words into four random words.
// The key is the seed, low word first. The counter's words are
//
//	0  block: 0, 1, 2, ... along the stream, four draws of 32 bits each
//	1  layer<<OpBits | op
//	2  sample
//	3  step; 1<<32-1 is kept for the keys of permutations and of [ForSample]
//
// [ForSample] has a key for each epoch, and the number of the sample in words 2 and 3
//
// # The same bits everywhere
//
// Streams and permutations are a frozen contract: the golden tests of this package never change, so a run can be repeated
// by any later version. [Stream.Normal] uses only operations that IEEE 754 rounds in one way (+, -, *, /, square root), each
// rounded by itself, so that neither the processor nor GOAMD64 changes a bit.
//
// # Concurrency and limits
//
// [Stream] is a plain value: a copy continues where the original stood and each goroutine uses its own. [Perm] is never
// changed after [NewPerm] and may be shared. A stream ends after 1<<32 blocks, which is 1<<34 draws of 32 bits; it panics
// rather than begin again. The numbers are not fit for secrets.
package rng
