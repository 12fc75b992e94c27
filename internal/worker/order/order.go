// Package order says which sample of the data a run reads at which place. It is a function of the job alone: no cursor moves, so any
// worker reads any sample at any time, and after a failure the place in the data is the committed step.
package order

import "github.com/soliton-train/soliton/rng"

// First returns the number of a sample in the run, counted over all steps, from its index in the global batch of a step.
func First(step, globalBatch, index int) uint64 {
	return uint64(step-1)*uint64(globalBatch) + uint64(index)
}

// Order maps samples of the run to samples of the data. Each epoch has an order of its own; an Order keeps that of the last one used,
// so it is for one goroutine.
type Order struct {
	seed, n uint64
	epoch   uint64
	perm    rng.Perm
}

// New returns the order of a run whose data has n samples.
func New(seed uint64, n int) *Order {
	return &Order{seed: seed, n: uint64(n), perm: rng.NewPerm(seed, 0, uint64(n))}
}

// At returns the index in the data of sample i of the run, and how often the run has gone through the data before.
func (o *Order) At(i uint64) (index, epoch uint64) {
	if epoch := i / o.n; epoch != o.epoch {
		o.epoch, o.perm = epoch, rng.NewPerm(o.seed, epoch, o.n)
	}
	return o.perm.At(i % o.n), o.epoch
}
