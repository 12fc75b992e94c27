package main

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/inspect"
)

// A worker that another process has started is silent for no reason that its host can see: missed heartbeats decide, and the gossip ring says
// so, too. Gossip may be late on a busy machine; then there is more time for it.
func TestFrozenWorkerIsSuspected(t *testing.T) {
	built(t)
	t.Parallel()
	for _, detect := range []string{"4s", "12s", "36s"} {
		if frozenIsSuspected(t, detect) {
			return
		}
	}
	t.Error("the ring suspected no worker")
}

// A debugger stops a worker, which no signal tells: the run continues without it long before it has missed heartbeats for --detect, and it joins
// again when the debugger leaves it.
func TestFrozenWorkerRejoins(t *testing.T) {
	built(t)
	for _, hosts := range []string{"1", "2"} {
		t.Run("hosts="+hosts, func(t *testing.T) {
			t.Parallel()
			flags := []string{"--workers", "4", "--detect", "5m"}
			if hosts != "1" {
				flags = append(flags, "--emulate-hosts", hosts)
			}
			r := begin(t, flags...)
			pid := r.pid(2)
			release := hold(t, pid)
			r.until("lost", 1)
			release()
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

func frozenIsSuspected(t *testing.T, detect string) bool {
	wrapper := filepath.Join(t.TempDir(), "wrapper")
	if err := os.WriteFile(wrapper, []byte("#!/bin/sh\n'"+mlp+"' \"$@\"\nexit $?\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	r := beginProgram(t, "", wrapper, "--workers", "4", "--detect", detect)
	r.formed(4)
	run, err := rundir.ReadWorkers(r.dir)
	if err != nil {
		t.Fatal(err)
	}
	var told inspect.Status
	if record, err := cli.ReadRun(r.dir); err != nil {
		t.Error(err)
	} else if told, err = inspect.StatusOf(record); err != nil || len(told.Workers) != 4 || told.Workers[3].Ring != "alive" {
		t.Errorf("status: %+v, %v", told.Workers, err)
	}
	i := slices.IndexFunc(run.Workers, func(p rundir.Process) bool { return p.ID == 2 })
	release := hold(t, run.Workers[i].PID)
	r.until("lost", 1)
	release()
	lost := r.events("lost")[0]
	if lost.Worker != 2 || !strings.Contains(lost.Reason, "worker 2 has been silent for") {
		t.Errorf("lost: %+v", lost)
	}
	if sum := r.end(); sum.WorkersLost != 1 {
		t.Errorf("%d workers were lost", sum.WorkersLost)
	}
	t.Log(lost.Reason)
	return strings.Contains(lost.Reason, "cannot reach it")
}

// hold stops all threads of a process as a debugger does, which its parent is not told, and returns what has them continue.
func hold(t *testing.T, pid int) (release func()) {
	t.Helper()
	held, released, ended := make(chan error, 1), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // the tracer is a thread, which ends with this goroutine
		threads, err := holdThreads(pid)
		held <- err
		<-released
		for _, tid := range threads {
			_ = unix.PtraceDetach(tid)
		}
	}()
	if err := <-held; err != nil {
		close(released)
		<-ended
		t.Skipf("needs ptrace: %v", err)
	}
	return func() {
		close(released)
		<-ended
	}
}

// holdThreads stops all threads of a process, those that it starts meanwhile included.
func holdThreads(pid int) (threads []int, err error) {
	for more := true; more; {
		more = false
		all, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(pid), "task"))
		if err != nil {
			return threads, err
		}
		for _, thread := range all {
			tid, _ := strconv.Atoi(thread.Name())
			if slices.Contains(threads, tid) {
				continue
			}
			if err := unix.PtraceSeize(tid); err != nil {
				return threads, err
			}
			threads, more = append(threads, tid), true
			if err := unix.PtraceInterrupt(tid); err != nil {
				return threads, err
			}
			if _, err := unix.Wait4(tid, nil, unix.WALL, nil); err != nil {
				return threads, err
			}
		}
	}
	return threads, nil
}
