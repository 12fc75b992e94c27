//go:build linux && !portable

package board

import (
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Bell is a number on the board of a peer that changes when it rings.
type Bell struct {
	word     *atomic.Uint32
	sleepers *atomic.Uint32 // on our board
}

// Alarm is a number of our process that wakes those that sleep on a bell.
type Alarm struct{ word atomic.Uint32 }

// Now returns the number.
func (l Bell) Now() uint32 { return l.word.Load() }

// Now returns the number.
func (a *Alarm) Now() uint32 { return a.word.Load() }

// Ring changes the number.
func (a *Alarm) Ring() {
	a.word.Add(1)
	futexWake(&a.word)
}

// futexWake wakes all that sleep on a number.
func futexWake(word *atomic.Uint32) {
	const wake, all = 1, 1<<31 - 1
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), wake, all, 0, 0, 0)
}

// futexWaitV is one of the numbers of futex_waitv(2), of 32 bits.
type futexWaitV struct {
	value, address uint64
	flags, zero    uint32
}

const futexU32 = 2

var pairs = sync.Pool{New: func() any { return new([2]futexWaitV) }}

// nap is how long a thread sleeps at most where the system cannot wait for two numbers (before Linux 5.16).
const nap = 10 * time.Millisecond

var oneOnly atomic.Bool

// Sleep returns when the bell or the alarm has another number than these, or earlier.
func (l Bell) Sleep(old uint32, a *Alarm, alarm uint32) {
	began := time.Now()
	l.sleepers.Add(1)
	l.sleep(old, a, alarm)
	l.sleepers.Add(^uint32(0))
	quick.Store(time.Since(began) < long)
}

func (l Bell) sleep(old uint32, a *Alarm, alarm uint32) {
	if !oneOnly.Load() {
		both := pairs.Get().(*[2]futexWaitV)
		both[0] = futexWaitV{uint64(old), uint64(uintptr(unsafe.Pointer(l.word))), futexU32, 0}
		both[1] = futexWaitV{uint64(alarm), uint64(uintptr(unsafe.Pointer(&a.word))), futexU32, 0}
		_, _, err := unix.Syscall6(unix.SYS_FUTEX_WAITV, uintptr(unsafe.Pointer(both)), uintptr(len(both)), 0, 0, 0, 0)
		pairs.Put(both)
		if err != unix.ENOSYS && err != unix.EPERM { // the second is what filters of system calls say of those that they do not know
			return
		}
		oneOnly.Store(true)
	}
	const wait = 0
	limit := unix.NsecToTimespec(int64(nap))
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(l.word)), wait, uintptr(old), uintptr(unsafe.Pointer(&limit)), 0, 0)
}

// A thread that waits looks again and again before it sleeps: to wake it takes 30 to 40 µs on a virtual machine, and while it is woken, the one that it then waits for falls asleep
// in turn, unless that one looks for longer. Between two looks it yields the processor, which is how the others of its host get on where there are more of them than
// processors.
//
// That is for collectives that come one after the other. What slept long before sleeps at once: it waits for others that compute, and looking would take time from them. And
// nothing looks for a while after the processor was gone for longer than lookGap between two looks, because then programs may use it that nothing is expected of, and the
// system lets those run soon that it wakes: for lookRest times as long as it was gone.
const (
	lookFor  = 100 * time.Microsecond
	lookGap  = 2 * time.Millisecond
	lookRest = 8
	long     = 300 * time.Microsecond // for a sleep
)

var (
	start = time.Now()
	rest  atomic.Int64 // until when nothing looks, since start
	quick atomic.Bool  // the last sleep was not long
)

// Look waits for a short time until a condition holds that can become true when the bell rings, and reports whether it does.
func (l Bell) Look(done func() bool) bool {
	seen := l.Now()
	if done() {
		return true
	}
	if !quick.Load() {
		return false
	}
	began := time.Since(start)
	for last := began; int64(last) >= rest.Load() && last-began < lookFor; {
		_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		if now := l.Now(); now != seen {
			if done() {
				return true
			}
			seen = now
		}
		now := time.Since(start)
		if gone := now - last; gone > lookGap {
			rest.Store(int64(now + lookRest*gone))
		}
		last = now
	}
	return false
}
