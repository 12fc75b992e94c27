package sched

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

// The thread that computes is nicer, on top of what the process is, and no other thread gets
// that from it.
func TestCompute(t *testing.T) {
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
			Compute()
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

func TestParse(t *testing.T) {
	for _, c := range []struct {
		value string
		want  int
		ok    bool
	}{{"", standard, true}, {"0", 0, true}, {"19", 19, true}, {"20", standard, false}, {"-1", standard, false}, {"low", standard, false}} {
		if got, err := parse(c.value); got != c.want || (err == nil) != c.ok {
			t.Errorf("%q: %d, %v", c.value, got, err)
		}
	}
}
