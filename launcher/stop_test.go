package main

import (
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// A stop is heard from the start: while PROGRAM is built, and before the first plan.
func TestStopBeforeTheRunBegins(t *testing.T) {
	built(t)
	tools := t.TempDir()
	if err := os.WriteFile(filepath.Join(tools, "go"), []byte("#!/bin/sh\nexec sleep 100\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	late := filepath.Join(tools, "late")
	if err := os.WriteFile(late, []byte("#!/bin/sh\nexec sleep 100\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, args := range map[string][]string{
		"building":      {testdata(t, "fake")},
		"reading data":  {late},
		"several hosts": {"--emulate-hosts", "3", late},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := launch(t, append([]string{"run", "--plain", "--run-dir", "run"}, args...)...)
			cmd.Env = append(os.Environ(), "PATH="+tools+":"+os.Getenv("PATH"))
			var out strings.Builder
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
			dir := filepath.Join(cmd.Dir, "run")
			await(t, "a run that commands find", func() bool {
				_, err := rundir.ReadWorkers(dir)
				return err == nil
			})
			stop := exec.Command(binary, "stop", dir)
			if status, stdout, stderr := result(t, stop); status != 0 {
				t.Fatalf("stop: status %d: %s%s", status, stdout, stderr)
			}
			cmd.Wait() // the status tells
			if status := cmd.ProcessState.ExitCode(); status != 1 || !strings.Contains(out.String(), "launcher: stopped before training began\n") {
				t.Errorf("status %d:\n%s", status, &out)
			}
			if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

// The second signal ends a run on several hosts at once, also where no host leads.
func TestSecondSignalWithoutMajority(t *testing.T) {
	built(t)
	t.Parallel()
	r := startHeldWith(t, []string{"--emulate-hosts", "3"})
	mark := "LAUNCHER_TEST=" + r.Dir
	for _, host := range []string{"host-0", "host-1"} {
		frozen := hostProcesses(t, mark, host)
		if len(frozen) == 0 {
			t.Fatalf("no processes of %s", host)
		}
		for _, pid := range frozen {
			syscall.Kill(pid, syscall.SIGSTOP)
		}
	}
	r.Process.Signal(syscall.SIGTERM)
	r.await(t, "waits for") // it hears of no leader
	r.Process.Signal(syscall.SIGTERM)
	if status := r.end(); status != 75 || !strings.Contains(r.errs.String(), "launcher: terminated at step ") {
		t.Errorf("status %d: %s", status, &r.errs)
	}
	if left := marked(t, mark); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A worker that a limit leaves without memory is said to be out of memory.
func TestOutOfMemory(t *testing.T) {
	built(t)
	for program, want := range map[string]string{fake: ", out of memory)\n", mlp: ", without a word, as where ulimit -v leaves too little memory)\n"} {
		script := filepath.Join(t.TempDir(), "limited")
		if err := os.WriteFile(script, []byte("#!/bin/sh\nulimit -v 40000\nexec "+program+" \"$@\"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		status, _, stderr := result(t, launch(t, "run", "--workers", "1", "--plain", script))
		if status != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%s: status %d: %s", program, status, stderr)
		}
	}
}

// The end of the terminal ends a run, but not one that was started by nohup.
func TestHangup(t *testing.T) {
	built(t)
	t.Parallel()
	for name, c := range map[string]struct {
		with   []string
		status int
	}{"terminal": {nil, 75}, "nohup": {[]string{"nohup"}, 0}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if c.status != 0 && signal.Ignored(syscall.SIGHUP) {
				t.Skip("these tests were started by nohup themselves")
			}
			cwd := t.TempDir()
			args := append(c.with, binary, "run", "--plain", "--workers", "2", "--threads", "1", "--run-dir", "run", mlp, "--steps", "400", "--eval-every", "0")
			cmd := exec.Command(args[0], args[1:]...)
			cmd.Dir = cwd
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { cmd.Process.Kill() })
			await(t, "a step", func() bool { return len(metricsSoFar(filepath.Join(cwd, "run"))) > 0 })
			if err := cmd.Process.Signal(syscall.SIGHUP); err != nil {
				t.Fatal(err)
			}
			cmd.Wait()
			if status := cmd.ProcessState.ExitCode(); status != c.status {
				t.Errorf("status %d, want %d", status, c.status)
			}
		})
	}
}
