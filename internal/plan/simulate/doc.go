// Package simulate predicts how long a step takes under a plan.
//
// Four models trade accuracy for speed:
//
//   - [Estimate] is a closed form.
//   - [Passes] simulates forward and backward passes only. A search runs it
//     thousands of times.
//   - [Run] simulates the whole graph of a step; [Predict] also reports what
//     each worker does when, and the critical path.
//   - [Typical] is the mean of several runs with slightly different speeds.
package simulate
