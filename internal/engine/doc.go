// Package engine executes the steps of a job in a worker.
//
// A step is made of forward and backward passes over micro-batches, the
// reduction of gradients and losses over the tree of package tree, the commit,
// and the update of the parameters. The engine knows these and nothing of
// layers: the model part the worker holds is a [Stage].
//
// At the moment one worker holds all layers and runs the micro-batches in
// ascending order, each forward and backward at once. The gradient of a layer
// goes into the tree as soon as its backward pass is done, while it is in the
// cache.
//
// # Commit
//
// Before the commit nothing of the step has changed any state: a loss or a
// gradient that is not finite, an error of the data, or the end of the
// context leaves parameters and moments as the step before left them. After
// it, the step can only be completed.
//
// # Concurrency
//
// An [Engine] belongs to one goroutine; the calls of a step use the threads
// of its pool. What a step computes does not depend on their number.
//
// # Cancellation
//
// Methods with a context look at it between micro-batches.
package engine
