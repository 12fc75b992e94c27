// Package planner makes the plan that an event calls for. [Next] is a pure
// function of the live plan, the view of the workers, the profile of measured
// times and the event: the same arguments give the same plan.
//
// The kinds of events, each in a file of its own:
//
//   - [Start] makes the first plan. Package search finds its stages and routes.
//     Every layer is split over all workers of its stage at borders of blocks,
//     nearly evenly; the layers after it compensate for rounding. Mirrors are on
//     other hosts than the owner if possible, in the owner's stage before others,
//     and spread evenly.
//   - [Lost] makes an in-step plan, which transfers nothing but what the step
//     itself sends again.
//   - [Protect] follows a loss: every shard gets its mirrors again, and all
//     workers get micro-batches.
//   - [Leave] takes out workers that are asked to leave. As a rule it transfers
//     nothing either, because their mirrors take over.
//   - [Join] brings in new workers. [Spread] gives them their shards if Join
//     did not, because these are large.
//   - [Rebalance] moves micro-batches, layers and workers to shorten the step.
//
// All plans but those for Lost are boundary plans. They change as few holders as
// possible. plan.Needs lists the transfers that such a plan waits for; if the live
// plan changes meanwhile, the planner runs again.
package planner
