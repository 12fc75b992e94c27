// Package engine executes a worker's part of the steps of a job, and goes on when other workers are lost.
//
// The engine is a shell around the state machine of package core, which decides everything: it feeds the core with events and does
// the duties that come back. Here are the goroutines, the network, the memory and the arithmetic:
//
//   - engine.go: the loop, its mailbox and the methods;
//   - compute.go: passes, commits, updates;
//   - network.go: messages and operations of groups;
//   - memory.go: boundary tensors, sums of gradients, arrays that are used again;
//   - shards.go: parameters and moments of shards, and what plans and transfers make of them;
//   - digest.go: digests of blocks, and reading the blocks again;
//   - spot.go: a pass that is repeated, and the digests of it;
//   - evaluate.go, keep.go: evaluations; checkpoints and the end of the run;
//   - flip.go: faults that are injected into memory.
//
// The engine knows nothing of layers: the model part the worker holds is a [Stage].
//
// # A step
//
// A step is made of forward and backward passes over micro-batches, the reduction of gradients and losses over the tree of package
// tree, the commit, and the update of the parameters:
//
//   - boundary tensors are copied from the memory of the pass and kept until the commit;
//   - the gradient of a layer goes into the tree as soon as its backward pass is done, while it is in the cache; when a worker's last
//     micro-batch is through a layer, its sums go to the owners of the layer's shards, under the passes that are left, and the totals
//     go on from the owners to the mirrors, which apply the same updates to the same bits (in stage 1 of ZeRO, to all workers of the
//     stage, too); sums are kept until the commit;
//   - new parameters go from the owner of a shard to the workers of the stage that do not compute them themselves, first layers
//     first, under the next step's forward passes, which wait for each layer as they come to it.
//
// A run of one worker is a plan of one worker; nothing is special about it.
//
// # Digests
//
// Before every exchange a worker reads the parameters and moments it holds again and says which are not as they were written. Between
// the check and the update blocks are not in use but by the update, which compares each block with its digest once more. A block that
// was altered then gets a digest that nothing fits, so the next check finds it.
//
// # Concurrency
//
// One goroutine, the loop, owns the core and all state of an [Engine]. The lanes compute, each in a goroutine: passes of different
// micro-batches side by side, and all else (updates, evaluations) in the first lane, with the threads of the pool, while the others are
// idle. Where threads yield, a lane has a second one, for passes that may give way to those of other workers. What they compute does not depend on the number of lanes and threads, and travels to the loop in the message that ends the task.
// Beside passes, one at a time and each in a goroutine of its own, run copies and replays of transfers, and the first values of a layer. What plans
// wait for, which first values are not, has a thread of standard priority, and so have the digests of a base that has come. Gradients are added by the lanes, one at a time for each layer, over the tree, whose sums do not depend on the order. Each
// operation of a group has a goroutine of its own, which ends before another plan is applied. All tell the loop what has come through a
// mailbox, and so do the network and the callers. Close joins them.
//
// # Cancellation
//
// A method ends with its context; the engine can then only be closed. The lanes end after what they run.
package engine
