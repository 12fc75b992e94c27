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

// standard gives a thread that answers three times the weight of one that computes. More makes it wait the other way
// round, if seldom: for a computing thread of its own process that has something, or is to stop for the garbage
// collector, and gets no processor. Of 11 recoveries of eight workers on two cores, turn by turn, the median and the longest were 22.6 and 173 ms with
// 0, 12.7 and 26 with 5, 11.1 and 537 with 10, 17.9 and 575 with 19.
const standard = 5

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
