// Package engine executes the steps of a job in a worker, and goes on with them
// when other workers are lost.
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
//     that are left, and the totals go on from the owners to the mirrors, which
//     apply the same updates to the same bits (in stage 1 of ZeRO, to all workers
//     of the stage, too); sums are kept until the commit;
//   - new parameters go from the owner of a shard to the workers of the stage
//     that do not compute them themselves, first layers first, under the next
//     step's forward passes, which wait for each layer as they come to it.
//
// A run of one worker is a plan of one worker; nothing is special about it.
//
// # Points
//
// Workers pass points together (package elastic): the commit of a step, the end
// of an evaluation, the end of the run. Each is one exchange between all workers,
// into which nobody goes before it has all that the point needs. The commit's
// has sums of losses, the norm of the gradient, the learning rate's bits,
// whether somebody was asked to stop, and the newest plan that has come. Before it
// nothing of the step has changed any state: a loss or a gradient that is not
// finite, or an error of the data, leaves parameters and moments as the step
// before left them. After it, the step can only be completed. All workers draw
// the same conclusions from it. One of them is whether there is a [Checkpoint] of
// the step: every owner copies its shards as soon as they are updated.
//
// # Recovery
//
// [Engine.Query] seals the worker: it passes no point and begins no task, and
// says what it has. [Engine.Order] ends that: who is one point behind passes it
// with the result that another one had; evicted sessions lose their links; groups
// are edited in place; and then the step is brought in line with the new plan
// (reroute). What was finished here stays so. Boundary tensors go to whom the
// plan now names; the gradients of a stage are either complete at their new
// owners (the stage is settled), or reduced once more from the sums that everybody
// has kept. The step goes on where it was.
//
// An order without a ballot brings a boundary plan. It goes live after the first
// commit for which all have received it, in the same way.
//
// State comes to new holders in the background (fill.go): the source copies a
// range after an update and sends the gradients of the steps since, and the new
// holder replays them.
//
// # Digests
//
// Before every exchange a worker reads the parameters and moments it holds again
// and says which are not as they were written (digest.go). Then the point is
// repaired instead of passed: good holders send the blocks, and the step, or what
// else it was, is done again.
//
// # Concurrency
//
// One goroutine, the loop, owns all state of an [Engine]. One computes: passes,
// updates, evaluations; what it computes does not depend on the number of threads
// in the pool. Each operation of a group has a goroutine of its own, which the
// loop ends before it goes over to another plan. All tell the loop what has come
// through a mailbox, and so do the network and the callers. Close joins them.
//
// # Cancellation
//
// A method ends with its context; the engine can then only be closed. The
// computing goroutine ends after what it runs.
package engine
