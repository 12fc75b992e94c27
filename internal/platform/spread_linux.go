//go:build !portable

package platform

import (
	"os"
	"os/exec"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// spread is where the threads of this process run, but for computing ones, which run on all of its processors.
var spread struct {
	mu  sync.Mutex
	all *unix.CPUSet // nil before the first call of Spread
	to  unix.CPUSet
}

// Spread says that this process is the i-th of n, from 0 on, whose computing threads share the processors of a machine. Where there are
// more than processors, all its threads but those keep to one of them, which the processes take in turn, and so do processes that they
// start, but for those of [StartChild]. Where the system refuses, they run where they did.
func Spread(i, n int) {
	if nice == 0 || !mayBeNicer {
		return
	}
	spread.mu.Lock()
	defer spread.mu.Unlock()
	if spread.all == nil {
		var all unix.CPUSet
		if unix.SchedGetaffinity(0, &all) != nil {
			return
		}
		spread.all, spread.to = &all, all
	}
	to := *spread.all
	if count := to.Count(); n > count {
		to = nth(to, i%count)
	}
	if to != spread.to {
		spread.to = to
		moveThreads(&to)
	}
}

// usual is how nice this process was as it began: any of its threads may compute later, also the first one. mayBeNicer says that such a thread can be
// told from others.
var usual, mayBeNicer = niceness(0)

// niceness returns how nice a thread is, and whether it could be nicer.
func niceness(thread int) (n int, more bool) {
	a, err := unix.SchedGetAttr(thread, 0)
	if err != nil || a.Policy != unix.SCHED_NORMAL && a.Policy != unix.SCHED_BATCH {
		return 19, false
	}
	return int(a.Nice), a.Nice < 19
}

// nth returns the i-th processor of a set.
func nth(of unix.CPUSet, i int) (one unix.CPUSet) {
	for c := range 64 * len(of) {
		if of.IsSet(c) {
			if i == 0 {
				one.Set(c)
				return one
			}
			i--
		}
	}
	return of
}

// moveThreads has all threads run there that are not nicer than the process, as computing ones are. A thread that one starts meanwhile may
// be elsewhere, so it looks again until it has seen all.
func moveThreads(to *unix.CPUSet) {
	moved := make(map[int]bool)
	for more := true; more; {
		more = false
		dirs, _ := os.ReadDir("/proc/self/task")
		for _, d := range dirs {
			id, err := strconv.Atoi(d.Name())
			if err != nil || moved[id] {
				continue
			}
			more, moved[id] = true, true
			if n, _ := niceness(id); n <= usual {
				_ = unix.SchedSetaffinity(id, to)
			}
		}
	}
}

// computeAnywhere has a computing thread run on all processors. It is nicer than the process by now, so no later call of Spread moves it.
func computeAnywhere() {
	spread.mu.Lock()
	defer spread.mu.Unlock()
	if spread.all != nil {
		_ = unix.SchedSetaffinity(0, spread.all)
	}
}

// startAnywhere starts a process that may run on all processors, on a thread that the caller keeps.
func startAnywhere(cmd *exec.Cmd) error {
	spread.mu.Lock()
	defer spread.mu.Unlock()
	if spread.all != nil && unix.SchedSetaffinity(0, spread.all) == nil {
		defer func() { _ = unix.SchedSetaffinity(0, &spread.to) }()
	}
	return cmd.Start()
}
