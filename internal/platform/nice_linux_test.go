//go:build !portable

package platform

import (
	"os/exec"
	"runtime"
	"testing"
	"time"

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
	for _, before := range []int{0, 3, 12} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // not unlocked: the thread ends with its priority
			if err := unix.Setpriority(unix.PRIO_PROCESS, 0, min(was+before, 19)); err != nil {
				t.Error(err)
			}
			ComputeThread()
			if got, want := niceOf(t), min(was+before+nice, 19); got != want {
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

// After AnswerSoon, threads have short slices, but for computing ones and processes that StartChild starts.
func TestAnswerSoon(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	sliceOf := func(pid int) time.Duration {
		a, err := unix.SchedGetAttr(pid, 0)
		if err != nil {
			t.Fatal(err)
		}
		return time.Duration(a.Runtime)
	}
	usual := sliceOf(0)
	if usual == 0 {
		t.Skip("this kernel has no slices of threads; Linux has them from 6.12 on")
	}
	start := func() (pid int, end func()) {
		sleep := exec.Command("sleep", "60")
		if err := StartChild(sleep); err != nil {
			t.Fatal(err)
		}
		return sleep.Process.Pid, func() {
			_ = sleep.Process.Kill()
			_ = sleep.Wait() // it was killed
		}
	}
	_, end := start() // the thread that starts processes is there before
	end()
	shortenSlices(answerSlice) // AnswerSoon, each time that this test runs
	defer shortenSlices(0)
	if got := sliceOf(0); got != answerSlice {
		t.Errorf("this thread has a slice of %v", got)
	}
	slices := make(chan time.Duration)
	go func() {
		runtime.LockOSThread() // not unlocked: the thread ends with its priority
		slices <- sliceOf(0)
		ComputeThread()
		slices <- sliceOf(0)
	}()
	if got := <-slices; got != answerSlice {
		t.Errorf("another thread has a slice of %v", got)
	}
	if got := <-slices; got != usual {
		t.Errorf("a computing thread has a slice of %v, not %v", got, usual)
	}
	pid, end := start()
	defer end()
	if got := sliceOf(pid); got != usual {
		t.Errorf("a process that was started has a slice of %v, not %v", got, usual)
	}
}
