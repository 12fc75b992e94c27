// Package graph describes a training step as a dataflow graph and decides
// what a worker does next.
//
// A step is made of tasks: forward and backward of every stage and
// micro-batch, the reduction of every shard's gradient, the commit, the update
// of every shard and the gathering of every layer's new parameters. Edges say
// what must be there before a task can begin. On which worker a task runs is
// not the graph's matter: a plan says so.
//
//   - [Queue] is the part that workers run for real: which of the tasks
//     routed to a worker begins next.
//   - [Graph] is a whole step with durations.
//   - [Graph.Simulate] executes it with one Queue per worker, as the workers
//     would, and says how long that takes and where workers wait.
//
// # Admission
//
// A worker holds the activations of a micro-batch from the begin of its
// forward pass to the end of its backward pass. The rules that bound their
// number without ever stopping the step:
//
//  1. Backward passes come before forward passes that no idle worker waits for, unless fewer micro-batches than a lead are in
//     flight for the stage: a stage that all wait for then has backward passes left for the time
//     at the end of the step in which the last micro-batches go through the others. The lead is 0
//     unless it is set.
//  2. Among forward passes whose input is there, that of the lowest
//     micro-batch begins; not that of the lowest micro-batch of all, which
//     may depend on workers that wait for this one after a re-routing. Ranks
//     go before that, where a plan has been made in the middle of a step: those below 0 are of
//     passes that idle workers wait for.
//  3. At most a limit of micro-batches are in flight for each stage on the
//     worker. The limit is never below the number of stages from this one on,
//     with which a pipeline of equal stages is always busy; uneven stages need
//     more. Where a worker runs several passes at a time, as many more may be in flight.
//  4. A forward pass whose gradient is already waiting is one that is run
//     again, because the worker that ran it is gone. It passes the limit, and
//     its backward pass follows at once. In the first stage, no worker waits for what it
//     makes, so forward passes, which give the next stage work, come before it.
//
// Why no step gets stuck: what is in flight in the last stage has its
// gradient as soon as its forward pass is done, so it always ends. If all that
// is in flight in stage s+1 ends, then slots there become free until every
// micro-batch whose input is there has been admitted, so all that is in
// flight in stage s ends too.
//
// # Shared processors
//
// Workers on the same processors have equal parts of them, whatever others wait for. So a queue says which passes may give way
// ([Queue.Spare]). These may not: a forward pass that feeds a worker of the next stage with little else to do, and a pass of a later stage
// where input for another one waits already, or all have begun, since workers of the stage before wait for its gradients. Micro-batches in flight
// then wait as gradients for the stage before and as input for the next one, not all for one of both.
//
// # Concurrency
//
// Everything here is plain data and pure functions. A [Queue] belongs to one
// goroutine; a [Graph] may be read by many.
package graph
