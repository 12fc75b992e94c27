// Package exact holds the tests of the promise that the bits of a run depend
// on the job and on nothing else: golden hashes, equality between kernel
// paths, threads and builds, negative controls, and a recorded case of
// PyTorch.
//
// The corpus in testdata never changes. If a change alters a golden hash,
// that is a decision to be written down in docs/architecture.md with its
// reason, not a number to be regenerated.
package exact
