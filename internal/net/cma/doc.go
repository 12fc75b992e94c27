// Package cma reads the memory of another process of the machine into ours: cross memory attach, process_vm_readv(2). The kernel copies once, where a
// socket takes two copies and memory of its own, and the other process has nothing to do.
//
// Who reads does not know whether the bytes still are what was announced. So the other process keeps a word in its memory that it changes
// before it uses announced memory for something else, and a Read ends with that word.
package cma

import "errors"

var (
	// ErrChanged is the error of a read whose bytes may have been overwritten meanwhile.
	ErrChanged = errors.New("cma: the memory was used for something else")
	// ErrStopped is the error of a read that was stopped.
	ErrStopped = errors.New("cma: stopped")
)
