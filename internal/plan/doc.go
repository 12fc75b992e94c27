// Package plan says who does what in a job: which worker holds which layers,
// runs which micro-batches, owns and mirrors which part of the optimizer
// state. A [Plan] is plain data; what follows from a change is [Diff].
//
// Plans are made by one pure function, [Next], from the live plan, the view of
// the workers, the profile of measured times and the event that made a new
// plan necessary. The same arguments give the same plan. There are two kinds:
//
//   - a boundary plan may change everything and goes live between two steps;
//   - an in-step plan follows the loss of workers in the middle of a step. It
//     changes neither the borders of layers nor those of shards: mirrors are
//     promoted and micro-batches are routed elsewhere, and the step goes on.
//
// # How the first plan is made
//
//  1. Layers and numbers of workers are dealt to stages so that a step is as
//     short as possible by its closed form, [Plan.Estimate]. If the same
//     number of workers in every stage is as good within 3 %, or nothing is
//     measured yet, it is that.
//  2. Workers go to stages in the order of their hosts, so that the workers
//     of a stage, which exchange gradients and parameters, are near to each
//     other. Where speeds differ, fast workers go where most work is.
//  3. Micro-batches go to the workers of a stage by their speed: in contiguous
//     runs whose borders are borders of the gradient tree where that costs no
//     time. In neighbouring stages with different numbers of workers such runs
//     would let workers wait for the end of a run, so there micro-batches are
//     dealt in the order in which the stage before makes them. A few
//     candidates are tried in the simulator of package graph.
//  4. Every layer is split over all workers of its stage, near equal, at
//     borders of blocks; rounding is made up for by the layers after it.
//  5. The mirrors of a shard are on other hosts than its owner if there are
//     any, of the owner's stage before others, and spread evenly.
//
// # What follows it
//
// A loss in the middle of a step gives an in-step plan; it needs no transfer
// but what the step itself sends again. Afterwards, a boundary plan for
// [Protect] gives every shard its mirrors again and deals the micro-batches
// anew. Workers that are asked to leave are taken out by one for [Leave], which
// as a rule needs no transfer, either: their mirrors take over. New workers
// come in by one for [Join].
//
// These boundary plans keep the borders of layers, and holders stay as far as
// possible. What has to be transferred before one may go live is told by
// [Needs]. If the live plan changes while transfers are under way, the plan is
// made again from the new one; what is filled already, View.Held, is used.
//
// A worker that serves several stages, because it took one over, has a part
// of its speed in each, such that all are done at about the same time. It leaves
// a stage in which nothing is left for it.
//
// # Trust
//
// A plan from outside is checked by [Plan.Validate], and against the plan
// before it by [Plan.ValidateAfter]; nothing else here expects anything but
// valid plans.
package plan
