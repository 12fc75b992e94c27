package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// A run whose launcher is killed before it began, before and after its first checkpoint goes on whenever the same command is started.
func TestResumeAuto(t *testing.T) {
	built(t)
	t.Parallel()
	cwd := t.TempDir()
	_, want := finished(t, cwd, filepath.Join(cwd, "whole"), "run", "--plain", "--workers", "1", "--threads", "1", "--run-dir", "whole", mlp, "--steps", "150")
	dir := filepath.Join(cwd, "run")
	command := func(workers, every string, flags ...string) *exec.Cmd {
		cmd := exec.Command(binary, append([]string{"run", "--plain", "--threads", "1", "--resume", "auto", "--run-dir", "run", "--workers", workers, mlp, "--steps", "150", "--checkpoint-every", every}, flags...)...)
		cmd.Dir = cwd
		return cmd
	}
	// What a launcher leaves that was killed while it built the program.
	for _, path := range []string{"log/worker-0.0.log", "bin/mlp", "metrics.jsonl", "lock"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, path), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	kill := func(cmd *exec.Cmd, when func() bool) {
		t.Helper()
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer cmd.Wait()
		defer cmd.Process.Kill()
		until(t, when)
	}
	slow := []string{"--chaos", "slow:0@1:0.02"}
	with := func(cmd *exec.Cmd) *exec.Cmd {
		cmd.Args = append(append(append([]string{}, cmd.Args[:2]...), slow...), cmd.Args[2:]...)
		return cmd
	}
	kill(with(command("2", "1h")), func() bool { return len(metricsSoFar(dir)) > 5 })
	kill(with(command("3", "5")), func() bool {
		saved, _ := filepath.Glob(filepath.Join(dir, "checkpoints", "*", "manifest.json"))
		return len(saved) > 1
	})
	cmd := command("2", "5")
	if status, out, errs := result(t, cmd); status != 0 {
		t.Fatalf("status %d\n%s%s", status, out, errs)
	}
	var sum rundir.Summary
	if readJSON(t, filepath.Join(dir, "summary.json"), &sum); sum.StateSHA256 != want.StateSHA256 || sum.Steps != 150 {
		t.Errorf("%+v\nwant %+v", sum, want)
	}
	again := false
	for _, e := range lines[rundir.Event](t, filepath.Join(dir, "events.jsonl")) {
		again = again || e.Kind == "resume"
	}
	if !again {
		t.Error("it did not go on from a checkpoint")
	}

	// All is done, also when it is asked once more; another flag that changes the result has to be allowed.
	if status, out, errs := result(t, command("2", "5")); status != 0 || out != "run: all 150 steps are done\n" {
		t.Errorf("once more: status %d, %q, %q", status, out, errs)
	}
	if status, _, errs := result(t, command("2", "5", "--lr", "0.5", "--steps", "160")); status != 1 || !strings.Contains(errs, "give --allow lr") {
		t.Errorf("another learning rate: status %d, %q", status, errs)
	}
	if status, _, errs := result(t, command("2", "5", "--steps", "160", "--lr-steps", "150")); status != 1 || !strings.Contains(errs, "give --allow schedule") {
		t.Errorf("another schedule: status %d, %q", status, errs)
	}
	if status, _, errs := result(t, command("2", "5", "--steps", "160")); status != 0 {
		t.Errorf("more steps: status %d, %q", status, errs)
	}
}

// The unit in the documentation is a command that the launcher takes.
func TestUnitFile(t *testing.T) {
	text, err := os.ReadFile("../docs/launcher.service")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		start, ok := strings.CutPrefix(strings.TrimSpace(line), "ExecStart=/usr/local/bin/launcher run ")
		if !ok {
			continue
		}
		cmd := newRun()
		if err := cmd.ParseFlags(strings.Fields(start)); err != nil {
			t.Fatal(err)
		}
		if args := cmd.Flags().Args(); len(args) != 3 || args[0] != "/srv/train/program" || cmd.Flag("resume").Value.String() != "auto" {
			t.Errorf("%q starts %q", start, args)
		}
		return
	}
	t.Error("no ExecStart")
}
