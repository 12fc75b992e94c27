//go:build linux

package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// signalAll sends a signal to all workers, as nearly at once as can be.
func (r *underWay) signalAll(s syscall.Signal) {
	r.t.Helper()
	run, err := rundir.ReadWorkers(r.dir)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, p := range run.Workers {
		syscall.Kill(p.PID, s)
	}
}

// All workers are killed at once, twice: their replacements roll the run back.
func TestRespawnOfAll(t *testing.T) {
	r := begin(t, "--workers", "3", "--respawn")
	r.signalAll(syscall.SIGKILL)
	r.until("joined", 3)
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
	if testing.Short() {
		t.Skip("it stands still for seconds")
	}
	t.Parallel()
	r := begin(t, "--workers", "3", "--detect", "1s")
	r.signalAll(syscall.SIGSTOP)
	<-time.After(3 * time.Second) // that is how long they stand still
	r.signalAll(syscall.SIGCONT)
	if sum := r.end(); sum.WorkersLost != 0 || sum.Rollbacks != 0 {
		t.Errorf("summary: %+v", sum)
	}
}

// earlier starts a run and calls a function as soon as its command has a child, which is a worker or an agent.
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
	var children []int
	await(t, "a child", func() bool {
		children = platform.Children(r.cmd.Process.Pid)
		return len(children) > 0
	})
	do(r, children[len(children)-1])
	return r
}

// A worker, or an agent with its worker, is killed before the first plan: it is replaced, and nothing is left of it.
func TestKilledAtTheStart(t *testing.T) {
	for _, c := range []struct {
		name  string
		flags []string
	}{
		{"a worker", []string{"--workers", "3", "--respawn"}},
		{"an agent", []string{"--workers", "3", "--respawn", "--emulate-hosts", "3"}},
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
	t.Run("a worker that is not replaced", func(t *testing.T) {
		r := earlier(t, t.TempDir(), func(r *underWay, child int) { syscall.Kill(child, syscall.SIGKILL) }, "--workers", "3")
		r.cmd.Wait()
		if out := r.out.String(); r.cmd.ProcessState.ExitCode() != 1 || !strings.Contains(out, "exited: signal: killed, before training began") || strings.Contains(out, "trainer.Main") {
			t.Errorf("status %d\n%s", r.cmd.ProcessState.ExitCode(), out)
		}
	})
}
