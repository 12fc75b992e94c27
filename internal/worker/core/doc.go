// Package core is a worker's side of the protocol: a state machine that decides what a worker does, and does nothing itself.
//
// [Worker.Step] takes an [Event]: a query, an order, a message that has come, the end of a task. [Worker.Ready] returns what is to be
// done, a list of [Duty] values in the order in which they must be done. The shell, package engine, does them and brings back what
// comes of them as events. The core has no goroutine, clock, socket, callback or lock, and computes with no tensor: it knows memory by
// name (ranges, boundary tensors, layers, see [Buffer]), and the shell holds it.
//
// # What it decides
//
//   - step.go: which pass runs next, which boundary tensors are needed, kept and sent, when a layer is reduced;
//   - shards.go: which ranges are here, whether the gradient of each is complete (shard.complete, and nowhere else), which
//     parameters are on their way;
//   - commit.go: what the worker says at a point, and what follows from what all say;
//   - repair.go: which blocks were altered, and which worker sends them to which;
//   - attest.go: whether what a lost worker has computed is what another one computes in its place;
//   - spot.go: which micro-batch runs twice in a step, and whether both runs made the same;
//   - fill.go: state on its way to workers that will hold it;
//   - recover.go: queries, orders, and plans that go live.
//
// # Points
//
// Workers pass points together (package controller): the commit of a step, the end of an evaluation, the end of the run. Each is one
// exchange between all workers, which a worker enters when it has all that the point needs. Before a commit nothing of the step has
// changed any state. After it, the step can only be completed. All workers draw the same conclusions from what all said. Where a block
// was altered the point is not passed: it is repaired, and the step is done again.
//
// # States
//
//	state        the worker ...                                 ends with                              then
//	Joining      has no plan: state is copied to it             its first plan is live elsewhere       Draining
//	                                                            an order                               CatchingUp, Draining
//	Working      works under its plan                           a boundary plan goes live at a commit  Draining
//	                                                            an order                               CatchingUp, Draining
//	Sealed       has answered a query, or could not go over to  an order                               CatchingUp, Draining
//	             the live plan: it passes no point and begins   the order of its plan, again           Working
//	             no pass; passes that run end                   a boundary plan, its first one         Joining
//	CatchingUp   passes the point that others have passed,      it has passed                          Draining
//	             with their result
//	Draining     waits for its operations to end, for its       nothing is left                        Editing
//	             update, its evaluation or the job at the end   the plan goes on without it            Left
//	             where the plan alters what it holds or
//	             serves, and for parameters or gradients that
//	             come under the old plan only
//	Editing      edits its groups                               all links are there                    Working, Preparing
//	                                                            a link breaks again                    Sealed, Joining
//	Preparing    makes the state at the beginning of the run,   it is made                             Working
//	             but for first values that passes wait for
//	Left         answers queries                                -
//	Dead         has failed                                     -
//
// A query seals a worker in every state but Dead, and withdraws the order that is being applied; in Left it is answered. An order with a
// ballot that is not below the last query's takes the place of the one that is being applied. Every state but Left may end with Dead. The
// plan is applied in one event, at the end of Editing or Preparing.
package core
