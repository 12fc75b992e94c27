//go:build linux && !portable

package look

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	limit = 100 * time.Microsecond
	gap   = 2 * time.Millisecond   // between two looks, if the processor was gone
	pause = 8                      // no thread looks for so many times as long as it was gone
	long  = 300 * time.Microsecond // for a sleep
)

var (
	start = time.Now()
	rest  atomic.Int64 // until when no thread looks, since start
	quick atomic.Bool  // the last sleep was not long
)

// Slept notes how long a thread has slept.
func Slept(d time.Duration) { quick.Store(d < long) }

// For waits for a short time until a condition holds, and reports whether it does.
func For(done func() bool) bool {
	if done() {
		return true
	}
	if !quick.Load() {
		return false
	}
	began := time.Since(start)
	for last := began; int64(last) >= rest.Load() && last-began < limit; {
		_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		if done() {
			return true
		}
		now := time.Since(start)
		if gone := now - last; gone > gap {
			rest.Store(int64(now + pause*gone))
		}
		last = now
	}
	return false
}
