// Package engine executes the steps of a job in a worker.
//
// A step is made of forward and backward passes over micro-batches, the
// reduction of gradients and losses over the tree of package tree, the commit,
// and the update of the parameters. The engine knows these and nothing of
// layers: the model part the worker holds is a [Stage].
//
// A plan says who does what. A worker is a small dataflow engine: it holds the
// passes routed to it, runs the ready one of highest priority (see
// [graph.Queue]), and sends what it makes to where the plan says it is needed.
// Data are keyed by what they are, so it does not matter who sends them, how
// often, or when:
//
//   - boundary tensors, by step, boundary, micro-batch and direction, are copied
//     from the memory of the pass and kept until the commit;
//   - the gradient of a layer goes into the tree as soon as its backward pass is
//     done, while it is in the cache; when a worker's last micro-batch is through
//     a layer, its sums go to the owners of the layer's shards, under the passes
//     that are left, and in stage 1 of ZeRO the totals go on from the owners to
//     all workers of the stage;
//   - new parameters go from the owner of a shard to all workers of the stage,
//     first layers first, under the next step's forward passes, which wait for
//     each layer as they come to it.
//
// A run of one worker is a plan of one worker; nothing is special about it.
//
// # Commit
//
// The commit is one exchange between all workers: sums of losses, the norm of
// the gradient, the learning rate's bits, and whether somebody was asked to
// stop. Before it nothing of the step has changed any state: a loss or a
// gradient that is not finite, an error of the data, or the end of the
// context leaves parameters and moments as the step before left them. After
// it, the step can only be completed. All workers draw the same conclusions
// from it. One of them is whether there is a [Checkpoint] of the step: every owner
// copies its shards as soon as they are updated.
//
// # Concurrency
//
// An [Engine] belongs to one goroutine, which runs all passes and changes all
// state; the calls of a step use the threads of its pool. What a step computes
// does not depend on their number. Beside it run the goroutines of the
// network, and one for each reduction under way, which the step joins; they
// tell what has come through a mailbox.
//
// # Cancellation
//
// Methods with a context look at it between passes and while they wait.
package engine
