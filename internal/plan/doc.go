// Package plan describes how a job runs: which worker holds which layers, runs
// which micro-batches, and owns or mirrors which part of the optimizer state.
// A [Plan] is plain data that every part of a run reads.
//
// There are two kinds of plans:
//
//   - A boundary plan may change everything and goes live between two steps.
//   - An in-step plan follows the loss of workers in the middle of a step. It
//     keeps the layers of stages and the ranges of shards, promotes mirrors and
//     reroutes micro-batches, and the step continues.
//
// [Plan.Validate] checks the numbered properties of a plan. Code that accepts
// plans from outside calls it; everything else expects valid plans. [Needs] lists
// the transfers that must be done before a boundary plan may go live.
//
// The packages below make plans, each importing only those before it:
//
//   - graph: a step as a graph of tasks, and the queue that a worker runs it by.
//   - simulate: how long a step takes under a plan.
//   - search: stages and routes with the shortest step.
//   - planner: the plan that an event calls for (planner.Next).
//   - straggler: which workers and links have become slow.
package plan
