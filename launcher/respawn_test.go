//go:build linux

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// signalAll sends a signal to all workers. Their agent, which is stopped meanwhile, sees it at once of all.
func (r *underWay) signalAll(s syscall.Signal) {
	r.t.Helper()
	run, err := rundir.ReadWorkers(r.dir)
	if err != nil {
		r.t.Fatal(err)
	}
	syscall.Kill(r.cmd.Process.Pid, syscall.SIGSTOP)
	defer syscall.Kill(r.cmd.Process.Pid, syscall.SIGCONT)
	for _, p := range run.Workers {
		syscall.Kill(p.PID, s)
	}
}

// All workers are killed at once, twice: their replacements roll the run back.
func TestRespawnOfAll(t *testing.T) {
	built(t)
	t.Parallel()
	r := begin(t, "--workers", "3", "--respawn")
	r.signalAll(syscall.SIGKILL)
	r.until("joined", 3)
	before := len(metricsSoFar(r.dir))
	await(t, "steps after the rollback", func() bool { return len(metricsSoFar(r.dir)) > before+1 }) // without one it is the same rollback
	r.signalAll(syscall.SIGKILL)
	r.until("joined", 6)
	sum := r.end()
	if sum.WorkersLost != 6 || sum.WorkersJoined != 6 || sum.Rollbacks != 2 {
		t.Errorf("summary: %+v", sum)
	}
	r.goesOn()
}

// All workers are stopped for three seconds, and none is blamed.
func TestAllWorkersStopped(t *testing.T) {
	built(t)
	t.Parallel()
	r := begin(t, "--workers", "3", "--detect", "1s")
	r.signalAll(syscall.SIGSTOP)
	<-time.After(3 * time.Second) // that is how long they stand still
	r.signalAll(syscall.SIGCONT)
	if sum := r.end(); sum.WorkersLost != 0 || sum.Rollbacks != 0 {
		t.Errorf("summary: %+v", sum)
	}
}

// earlier starts a run and calls a function as soon as its command has a child that runs a program, which is a worker or an agent:
// before that, Go's library forks one to see what the kernel can do.
func earlier(t *testing.T, temp string, do func(r *underWay, child int), flags ...string) *underWay {
	t.Helper()
	args := append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run", "--detect", "10s"}, flags...)
	r := &underWay{t: t, cmd: launch(t, append(append(args, mlp), joinArgs[1:]...)...)}
	r.cmd.Env = append(os.Environ(), "LAUNCHER_TEST="+r.cmd.Dir, "TMPDIR="+temp)
	r.cmd.Stdout, r.cmd.Stderr = &r.out, &r.out
	r.dir = filepath.Join(r.cmd.Dir, "run")
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.cmd.Process.Kill(); r.cmd.Wait() })
	line := func(pid int) string {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		return string(text)
	}
	own, child := line(r.cmd.Process.Pid), 0
	await(t, "a child", func() bool {
		for _, child = range platform.Children(r.cmd.Process.Pid) {
			if text := line(child); text != "" && text != own {
				return true
			}
		}
		return false
	})
	do(r, child)
	return r
}

// A worker, or an agent with its worker, is killed before the first plan: it is replaced, and nothing is left of it.
func TestKilledAtTheStart(t *testing.T) {
	built(t)
	t.Parallel()
	for _, c := range []struct {
		name  string
		flags []string
	}{
		{"a worker", []string{"--workers", "3", "--respawn"}},
		{"an agent", []string{"--workers", "3", "--respawn", "--emulate-hosts", "3", "--detect", "3s"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			temp := t.TempDir()
			r := earlier(t, temp, func(r *underWay, child int) { syscall.Kill(child, syscall.SIGKILL) }, c.flags...)
			r.until("start", 1)
			r.end()
			if left := entries(t, temp); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
			r.goesOn()
		})
	}
	t.Run("a worker, and its host leaves", func(t *testing.T) {
		r := earlier(t, t.TempDir(), func(r *underWay, agent int) {
			var workers []int
			await(t, "its workers", func() bool { workers = platform.Children(agent); return len(workers) == 2 })
			syscall.Kill(workers[0], syscall.SIGKILL)
			syscall.Kill(agent, syscall.SIGTERM)
		}, "--workers", "6", "--respawn", "--emulate-hosts", "3")
		r.until("start", 1)
		if sum := r.end(); sum.Rollbacks != 0 {
			t.Errorf("summary: %+v", sum)
		}
	})
	t.Run("a worker that is not replaced", func(t *testing.T) {
		r := earlier(t, t.TempDir(), func(r *underWay, child int) { syscall.Kill(child, syscall.SIGKILL) }, "--workers", "3")
		r.until("start", 1)
		if sum := r.end(); sum.WorkersLost != 1 || sum.WorkersJoined != 0 {
			t.Errorf("summary: %+v", sum)
		}
	})
	t.Run("one of too few", func(t *testing.T) {
		r := earlier(t, t.TempDir(), func(r *underWay, child int) { syscall.Kill(child, syscall.SIGKILL) }, "--workers", "3", "--min-workers", "3")
		r.cmd.Wait()
		if out := r.out.String(); r.cmd.ProcessState.ExitCode() != 1 || !strings.Contains(out, "exited: signal: killed, before training began") || strings.Contains(out, "trainer.Main") {
			t.Errorf("status %d\n%s", r.cmd.ProcessState.ExitCode(), out)
		}
	})
}

// A worker that is stopped for a while is fenced: the run goes on without it, and its process joins when it continues. One that
// is stopped for ever is killed after the grace period.
func TestStoppedWorkerRejoins(t *testing.T) {
	built(t)
	for _, hosts := range []string{"1", "2"} {
		t.Run("hosts="+hosts, func(t *testing.T) {
			t.Parallel()
			flags := []string{"--workers", "4", "--detect", "1s"}
			if hosts != "1" {
				flags = append(flags, "--emulate-hosts", hosts)
			}
			r := begin(t, flags...)
			pid := r.pid(2)
			syscall.Kill(pid, syscall.SIGSTOP)
			r.until("lost", 1)
			syscall.Kill(pid, syscall.SIGCONT)
			r.until("joined", 1)
			if now := r.pid(2); now != pid {
				t.Errorf("process %d has joined, and %d was stopped", now, pid)
			}
			sum := r.end()
			if sum.WorkersLost != 1 || sum.WorkersJoined != 1 || sum.Rollbacks != 0 {
				t.Errorf("summary: %+v", sum)
			}
			r.goesOn()
		})
	}
}

func TestStoppedWorkerIsKilledAfterGrace(t *testing.T) {
	built(t)
	t.Parallel()
	r := begin(t, "--workers", "3", "--min-workers", "3", "--detect", "300ms", "--respawn") // holds meanwhile, so the run cannot end first
	pid := r.pid(1)
	syscall.Kill(pid, syscall.SIGSTOP)
	r.until("lost", 2) // the worker, and its process
	r.until("joined", 1)
	if now := r.pid(1); now == pid {
		t.Errorf("process %d has joined, and was stopped for ever", pid)
	}
	r.end()
	r.goesOn()
}

// pid is the process of a worker.
func (r *underWay) pid(id int) int {
	r.t.Helper()
	run, err := rundir.ReadWorkers(r.dir)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, p := range run.Workers {
		if p.ID == id {
			return p.PID
		}
	}
	r.t.Fatalf("worker %d is not among %v", id, run.Workers)
	return 0
}
