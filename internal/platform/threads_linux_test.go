//go:build !portable

package platform

import (
	"os"
	"testing"
)

func TestThreads(t *testing.T) {
	threads, ok := Threads(os.Getpid())
	if !ok {
		t.Skip("needs a kernel with /proc/PID/schedstat")
	}
	running := 0
	for _, thread := range threads {
		if thread.State == ThreadRunnable && thread.Ran > 0 {
			running++
		}
	}
	if running == 0 {
		t.Errorf("no thread of this process runs: %v", threads)
	}
	if threads, ok := Threads(1 << 30); ok {
		t.Errorf("a process that does not exist has threads %v", threads)
	}
	if got := parseState([]byte("7 (a) S b) t 1 7")); got != 't' {
		t.Errorf("state %c", got)
	}
	for line, want := range map[string]bool{"12 34 5\n": true, "12 34\n": false, "": false, "x 34 5\n": false} {
		if ran, ok := parseRan([]byte(line)); ok != want || ok && ran != 12 {
			t.Errorf("%q: %v, %v", line, ran, ok)
		}
	}
}
