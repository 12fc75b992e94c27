//go:build !portable

package platform

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

func niceOf(t *testing.T) int {
	t.Helper()
	a, err := unix.SchedGetAttr(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	return int(a.Nice)
}

// A computing thread is nicer than its process, and no other thread inherits that.
func TestComputeThread(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	was := niceOf(t)
	for i, before := range []int{0, 3, 12, 0} {
		compute, more := ComputeThread, nice
		if i == 3 {
			compute, more = SpareThread, nice+spareNice
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // not unlocked: the thread ends with its priority
			if err := unix.Setpriority(unix.PRIO_PROCESS, 0, min(was+before, 19)); err != nil {
				t.Error(err)
			}
			compute()
			if got, want := niceOf(t), min(was+before+more, 19); got != want {
				t.Errorf("a computing thread of a process of niceness %d has %d, not %d", was+before, got, want)
			}
			started := make(chan int)
			go func() {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				started <- niceOf(t)
			}()
			if got := <-started; got != was {
				t.Errorf("a goroutine that a computing one has started has niceness %d, not %d", got, was)
			}
		}()
		<-done
	}
	if got := niceOf(t); got != was {
		t.Errorf("this thread has niceness %d, not %d", got, was)
	}
}
