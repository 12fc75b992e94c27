// Package search finds the stages and routes with the shortest step. It knows
// nothing about shards, mirrors or events.
//
// [Arrange] makes the stages and routes of a first plan:
//
//  1. Layers and numbers of workers go to stages such that the closed form of
//     a step is shortest. If the same number of workers in every stage is at
//     most 3 % slower, or nothing is measured yet, all stages get that number.
//  2. Workers go to stages in the order of their hosts, so that the workers of
//     a stage, which exchange gradients and parameters, are near each other.
//     Where speeds differ, fast workers go where most work is.
//  3. [Route] gives the micro-batches of a stage to its workers by their speed:
//     in contiguous runs with borders of the gradient tree where that costs no
//     time. Between neighbouring stages with different numbers of workers such
//     runs would let workers idle until a run ends, so there a stage takes
//     micro-batches in the order in which the one before finishes them.
//     Package simulate decides between several candidates.
//
// [Improve] looks for stages and routes that are better than those of a plan.
//
// A worker that serves several stages has a part of its speed in each, such that
// all its stages finish at about the same time.
package search
