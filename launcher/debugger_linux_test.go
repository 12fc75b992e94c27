package main

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// A debugger stops a worker, which no signal tells: the run continues without it long before it has missed heartbeats for --detect, and it joins
// again when the debugger leaves it.
func TestFrozenWorkerRejoins(t *testing.T) {
	built(t)
	for _, hosts := range []string{"1", "2"} {
		t.Run("hosts="+hosts, func(t *testing.T) {
			t.Parallel()
			runtime.LockOSThread() // only the thread that has attached may detach
			defer runtime.UnlockOSThread()
			flags := []string{"--workers", "4", "--detect", "5m"}
			if hosts != "1" {
				flags = append(flags, "--emulate-hosts", hosts)
			}
			r := begin(t, flags...)
			pid := r.pid(2)
			detach := stopThreads(t, pid)
			r.until("lost", 1)
			detach()
			r.until("joined", 1)
			if now := r.pid(2); now != pid {
				t.Errorf("process %d has joined, and %d was frozen", now, pid)
			}
			sum := r.end()
			if sum.WorkersLost != 1 || sum.WorkersJoined != 1 || sum.Rollbacks != 0 || len(sum.Recoveries) == 0 || sum.Recoveries[0].Cause != "worker 2 is frozen: none of its threads runs" {
				t.Errorf("summary: %+v", sum)
			}
			r.goesOn()
		})
	}
}

// stopThreads stops all threads of a process as a debugger does, until detach is called or the test ends.
func stopThreads(t *testing.T, pid int) (detach func()) {
	dirs, err := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*")
	if err != nil || len(dirs) == 0 {
		t.Fatalf("process %d has no threads: %v", pid, err)
	}
	var threads []int
	detach = func() {
		for _, id := range threads {
			_ = unix.PtraceDetach(id) // one that has ended is gone
		}
		threads = nil
	}
	t.Cleanup(detach)
	for _, dir := range dirs {
		id, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			t.Fatal(err)
		}
		switch err := unix.PtraceSeize(id); {
		case errors.Is(err, unix.ESRCH): // it has ended
		case errors.Is(err, unix.EPERM), errors.Is(err, unix.ENOSYS):
			t.Skip("needs a system that lets a process be debugged:", os.NewSyscallError("ptrace", err))
		case err != nil:
			t.Fatal(err)
		default:
			threads = append(threads, id)
		}
	}
	for _, id := range threads {
		if err := unix.PtraceInterrupt(id); err != nil && !errors.Is(err, unix.ESRCH) {
			t.Fatal(err)
		}
		if _, err := unix.Wait4(id, nil, unix.WALL, nil); err != nil {
			t.Fatal(err)
		}
	}
	return detach
}
