//go:build linux && !portable

package board

import (
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/net/look"
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
	look.Slept(time.Since(began))
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

// Look waits for a short time until a condition holds that can become true when the bell rings, and reports whether it does.
func (l Bell) Look(done func() bool) bool {
	seen, known := uint32(0), false
	return look.For(func() bool {
		now := l.Now()
		if known && now == seen {
			return false
		}
		seen, known = now, true
		return done()
	})
}
