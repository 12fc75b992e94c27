// Package sched lets threads that compute give way to those that answer.
//
// A machine may have more computing threads than processors. A thread that wakes to
// answer then shares a processor with them, and what a recovery takes is made of such
// moments: each of them costs milliseconds where all have the same priority. So computing threads
// have a lower one. Between them nothing changes by that, and no privilege is needed to take a lower one.
package sched

import (
	"fmt"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// EnvNice is the environment variable that overrides by how much a computing thread is nicer than
// the process: 0 to 19.
const EnvNice = "SOLITON_NICE"

// standard makes ten computing threads count about as much as one that answers.
const standard = 10

var nice, errNice = parse(os.Getenv(EnvNice))

func parse(value string) (int, error) {
	if value == "" {
		return standard, nil
	}
	n, err := strconv.Atoi(value)
	if err != nil || n < 0 || n > 19 {
		return standard, fmt.Errorf("%s is %q: give 0 (computing threads give way to none) to 19", EnvNice, value)
	}
	return n, nil
}

// Err reports a value of SOLITON_NICE that could not be honoured. The standard is in force then; programs should refuse to
// go on.
func Err() error { return errNice }

// Compute makes the thread of the goroutine one that computes. The goroutine keeps it for good, and with the
// goroutine it ends: a lower priority cannot be taken back. Where the system refuses, the priority stays as it is.
func Compute() {
	runtime.LockOSThread()
	a, err := unix.SchedGetAttr(0, 0)
	if err != nil || a.Policy != unix.SCHED_NORMAL && a.Policy != unix.SCHED_BATCH {
		return
	}
	_ = unix.Setpriority(unix.PRIO_PROCESS, 0, min(int(a.Nice)+nice, 19))
}
