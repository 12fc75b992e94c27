//go:build !portable

package platform

import (
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// processors returns on how many processors this thread may run.
func processors(t *testing.T) int {
	t.Helper()
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		t.Error(err)
	}
	return set.Count()
}

// Where processes share processors, all threads keep to one but those that compute and those of children, and to all where they do not.
func TestSpread(t *testing.T) {
	all := processors(t)
	switch {
	case all < 2:
		t.Skip("needs 2 processors")
	case nice == 0 || !mayBeNicer:
		t.Skip("needs another " + envNice + " than 0, and a process that is not as nice as can be")
	}
	defer Spread(0, 1)
	elsewhere := func(f func()) (n int) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // not unlocked: a new thread
			if f != nil {
				f()
			}
			n = processors(t)
		}()
		<-done
		return n
	}
	check := func(i, n, want int) {
		t.Helper()
		early, began := make(chan struct{}), make(chan int)
		go func() {
			ComputeThread()
			began <- 0
			<-early
			began <- processors(t)
		}()
		<-began
		Spread(i, n)
		close(early)
		if got := <-began; got != all {
			t.Errorf("%d of %d: a thread that computed before runs on %d processors of %d", i, n, got, all)
		}
		if got := processors(t); got != want {
			t.Errorf("%d of %d: this thread runs on %d processors, want %d", i, n, got, want)
		}
		for name, c := range map[string]struct {
			f    func()
			want int
		}{"new": {nil, want}, "computing": {ComputeThread, all}, "spare": {SpareThread, all}} {
			if got := elsewhere(c.f); got != c.want {
				t.Errorf("%d of %d: a %s thread runs on %d processors, want %d", i, n, name, got, c.want)
			}
		}
		cmd := exec.Command("nproc")
		var out strings.Builder
		cmd.Stdout, cmd.Env = &out, []string{"LC_ALL=C"} // OMP_NUM_THREADS would change the answer
		if err := StartChild(cmd); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
		if got := strings.TrimSpace(out.String()); got != strconv.Itoa(all) {
			t.Errorf("%d of %d: a child runs on %s processors, want %d", i, n, got, all)
		}
	}
	check(0, 1, all)
	check(1, all, all)
	check(1, all+1, 1)
	check(all, all+1, 1)
	check(0, all, all)
}
