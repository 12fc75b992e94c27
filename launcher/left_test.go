package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// However a run ends, it leaves its run directory and nothing else: no process, no socket, no shared
// memory, no temporary file. Only a launcher that is killed has no time for its socket; the next
// one removes that.
func TestNothingIsLeft(t *testing.T) {
	built(t)
	signal := func(s syscall.Signal) func(r *underWay) {
		return func(r *underWay) { r.cmd.Process.Signal(s) }
	}
	for _, c := range []struct {
		name   string
		do     func(r *underWay)
		status int
		saved  bool // and the state is in a checkpoint
	}{
		{"interrupted", signal(syscall.SIGINT), 130, true},
		{"terminated", signal(syscall.SIGTERM), 75, true},
		{"terminated with a frozen worker", func(r *underWay) {
			r.signal(1, syscall.SIGSTOP)
			r.cmd.Process.Signal(syscall.SIGTERM)
		}, 75, true},
		{"all but one killed", func(r *underWay) { r.kill(0); r.kill(2); r.until("recovered", 1); r.cmd.Process.Signal(os.Interrupt) }, 130, true},
		{"all killed", func(r *underWay) { r.kill(0); r.kill(1); r.kill(2) }, 1, false},
		{"all leave", func(r *underWay) {
			for id := range 3 {
				r.signal(id, syscall.SIGTERM)
			}
		}, 75, true},
		{"launcher killed", signal(syscall.SIGKILL), -1, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			temp := t.TempDir()
			before := sharedMemory(t)
			r := beginIn(t, temp, "--workers", "3", "--stages", "2", "--detect", "2s")
			c.do(r)
			r.cmd.Wait()
			if status := r.cmd.ProcessState.ExitCode(); status != c.status {
				t.Errorf("status %d, want %d\n%s", status, c.status, &r.out)
			}
			until(t, func() bool { return len(marked(t, "LAUNCHER_TEST="+r.cmd.Dir)) == 0 })
			if c.status < 0 {
				// The next launcher comes when that has been there for a while.
				old := time.Now().Add(-time.Hour)
				for _, dir := range entries(t, temp) {
					if err := os.Chtimes(filepath.Join(temp, dir), old, old); err != nil {
						t.Error(err)
					}
				}
				next := exec.Command(binary, "run", "--plain", "--run-dir", "next", fake)
				next.Dir, next.Env = r.cmd.Dir, append(os.Environ(), "TMPDIR="+temp)
				if status, _, stderr := result(t, next); status != 0 {
					t.Error(stderr)
				}
			}
			if left := entries(t, temp); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
			for name := range sharedMemory(t) {
				if !before[name] {
					t.Errorf("shared memory is left: %s", name)
				}
			}
			all, err := checkpoint.List(r.dir)
			if c.saved && (err != nil || len(all) == 0 || all[0].Err != nil) {
				t.Errorf("checkpoints: %v, %v", all, err)
			}
		})
	}
}

func entries(t *testing.T, dir string) (names []string) {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		names = append(names, e.Name())
	}
	return names
}

// sharedMemory returns what this project's processes have in the folder of shared memory.
func sharedMemory(t *testing.T) map[string]bool {
	t.Helper()
	found := make(map[string]bool)
	if _, err := os.Stat("/dev/shm"); err != nil {
		return found
	}
	for _, name := range entries(t, "/dev/shm") {
		if strings.Contains(name, "soliton") {
			found[name] = true
		}
	}
	return found
}

func (r *underWay) signal(id int, s syscall.Signal) {
	r.t.Helper()
	run, err := rundir.ReadWorkers(r.dir)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, p := range run.Workers {
		if p.ID == id {
			syscall.Kill(p.PID, s)
		}
	}
}
