// Package platform holds what operating systems do differently.
//
// Everything outside of it is written for any Unix. Linux lets the runtime notice faults early: a canary reports a SIGKILL before
// the process is gone, and the kernel kills workers together with their agent. Other systems have portable fallbacks: the agent
// learns of an exit when it reaps the process, and a worker exits when its agent closes their socket. [Missing] lists the differences.
//
// The files *_linux.go use Linux, portable.go is built everywhere else. The build tag "portable" chooses the fallbacks on
// Linux, too, so that they can be tested there.
package platform

// A Gap is something that this system does not offer, and what its absence means for a run.
type Gap struct{ Lacks, Effect string }
