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
	l.sleepers.Add(1)
	defer l.sleepers.Add(^uint32(0))
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

// Who waits looks again and again before it sleeps: to wake it takes 30 to 40 µs on a virtual machine, and while it is woken, the one that it then waits for falls asleep
// in turn, unless that one looks for longer. Between two looks it yields the processor, which is how the others of its host get on where there are more of them than
// processors.
//
// It sleeps at once after lookLull without a wait: what waits rarely gains nothing, and has others computing beside it. And it sleeps at once for a while after the
// processor was gone for longer than lookGap between two looks, because then programs may use it that nothing is expected of, and the system lets those run soon that it
// wakes: for leastRest, or twice as long as the last time, up to mostRest, where that was not long ago.
const (
	lookFor   = 100 * time.Microsecond
	lookLull  = 2 * time.Millisecond
	lookGap   = 2 * time.Millisecond
	leastRest = time.Millisecond
	mostRest  = 64 * time.Millisecond
)

var (
	start  = time.Now()
	waited atomic.Int64 // when a wait last began or ended, since start
	rests  resting
)

// resting is when nothing looks.
type resting struct{ until, length atomic.Int64 }

// begin begins a rest at a time since start.
func (r *resting) begin(now time.Duration) {
	length := time.Duration(r.length.Load())
	if now-time.Duration(r.until.Load()) < 4*length {
		length = min(2*length, mostRest)
	} else {
		length = leastRest
	}
	r.length.Store(int64(length))
	r.until.Store(int64(now + length))
}

// Look waits for a short time until a condition holds that can become true when the bell rings, and reports whether it does.
func (l Bell) Look(done func() bool) bool {
	seen := l.Now()
	if done() {
		return true
	}
	began := time.Since(start)
	if last := waited.Swap(int64(began)); began > time.Duration(last)+lookLull {
		return false
	}
	for last := began; int64(last) >= rests.until.Load() && last-began < lookFor; {
		_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		if now := l.Now(); now != seen {
			if done() {
				waited.Store(int64(last))
				return true
			}
			seen = now
		}
		now := time.Since(start)
		if now-last > lookGap {
			rests.begin(now)
		}
		last = now
	}
	return false
}
