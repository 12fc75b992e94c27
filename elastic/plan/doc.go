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
// # Trust
//
// A plan from outside is checked by [Plan.Validate], and against the plan
// before it by [Plan.ValidateAfter]; nothing else here expects anything but
// valid plans.
package plan
