package platform

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
)

// A machine may have more computing threads than processors. A thread that wakes to answer then shares a processor with them, and a
// recovery consists of such moments: each costs milliseconds where all threads have the same priority. So computing threads
// have a lower one, which needs no privilege and changes nothing between them.
//
// And a thread that is woken hardly ever moves to another processor that computes: it waits behind others that were woken, on a processor that they
// all come to share, while the others compute. So where processes share processors, each keeps to one of them ([Spread]).

// envNice is the environment variable that sets how much nicer a computing thread is than the process: 0 to 19.
const envNice = "SOLITON_NICE"

// standardNice gives a thread that answers three times the weight of one that computes. A higher value sometimes makes it wait for a
// computing thread of its own process that holds a lock, or must stop for the garbage collector, and gets no processor. Of 11
// recoveries of eight workers on two cores, interleaved, the median and the longest were 22.6 and 173 ms with 0, 12.7 and 26 with 5,
// 11.1 and 537 with 10, 17.9 and 575 with 19.
const standardNice = 5

// spareNice is how much nicer a thread is for passes that no worker waits for soon: such a thread has half the weight of one whose pass feeds
// others. With 2 and 3, undisturbed waits of eight workers on two processors were alike; with 5, they were as short in some runs, and twice as long
// as without in others.
const spareNice = 3

var nice, errNice = parseNice(os.Getenv(envNice))

func parseNice(value string) (int, error) {
	if value == "" {
		return standardNice, nil
	}
	n, err := strconv.Atoi(value)
	if err != nil || n < 0 || n > 19 {
		return standardNice, fmt.Errorf("%s is %q: give 0 (computing threads give way to none) to 19", envNice, value)
	}
	return n, nil
}

// NiceErr returns the error of an invalid SOLITON_NICE; the default applies then, and programs should refuse to start.
func NiceErr() error { return errNice }

// Nice returns how much nicer than this process its computing threads are: for a process that computes for it.
func Nice() int { return nice }

// ComputeThread makes the calling goroutine's thread a computing one, where the system has priorities of threads. The goroutine
// keeps the thread, which exits with it: a lower priority cannot be taken back.
func ComputeThread() {
	runtime.LockOSThread()
	lowerPriority(nice)
	computeAnywhere()
}

// SpareThread is ComputeThread for what may give way to other computing threads.
func SpareThread() {
	runtime.LockOSThread()
	if nice > 0 {
		lowerPriority(nice + spareNice)
	}
	computeAnywhere()
}
