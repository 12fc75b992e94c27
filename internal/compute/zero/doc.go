// Package zero keeps the optimizer state of the shards a worker holds, and
// updates parameters with it.
//
// A shard is a range of one layer's parameters, which are seen as one
// flattened array: tensor after tensor, each row-major. The unit of everything
// is the block: [kernel.Block] elements of one tensor, and one short block at
// a tensor's end, so that no block holds parts of two tensors. Shards begin
// and end at borders of blocks, so what is computed over blocks (sums of squares,
// digests, updates) does not depend on how blocks are split into shards.
//
// # The gradient norm
//
// Each rank knows the squares of its own shards only, and the sum over all shards
// must not depend on how they were split. So the float64 sum of a block
// is scaled by a power of two that is constant for the job, converted to
// fixed point ([Fixed]: 64 bits before and 64 after the point), and the
// sums of blocks are added as integers, which is associative. With the scale
// of [NormScale] this represents norms of the mean gradient from 2e-10, below
// which a block counts as zero, to 4e9, above which the step fails with
// [ErrNonFinite] as it does for NaN and infinities.
//
// # Concurrency
//
// Methods of different shards may run concurrently; those of one shard may not.
// They use the threads of the pool they are given.
package zero
