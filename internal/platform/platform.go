// Package platform holds what operating systems do differently.
//
// Everything outside of it is written for any Unix. Linux lets the runtime notice faults early: a canary reports a SIGKILL before
// the process is gone, and the kernel kills workers together with their agent. Other systems have portable fallbacks: the agent
// learns of an exit when it reaps the process, and a worker exits when its agent closes their socket. [Missing] lists the differences.
//
// The files *_linux.go use Linux, portable.go is built everywhere else. The build tag "portable" chooses the fallbacks on
// Linux, too, so that they can be tested there.
package platform

import "time"

// A Gap is something that this system does not offer, and what its absence means for a run.
type Gap struct{ Lacks, Effect string }

// A Thread is what a thread of a process does.
type Thread struct {
	State byte          // as in proc(5)
	Ran   time.Duration // for how long it has had a processor so far
}

// States of a [Thread].
const (
	ThreadRunnable = 'R' // it has a processor or waits for one
	ThreadBlocked  = 'D' // it waits for a disk, or for the kernel
	ThreadStopped  = 'T' // by a signal
)
