package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

// finished runs the launcher to its end and returns what it says, and the summary of the run in dir.
func finished(t *testing.T, cwd, dir string, args ...string) (said string, sum rundir.Summary) {
	t.Helper()
	cmd := exec.Command(binary, args...)
	cmd.Dir = cwd
	status, out, errs := result(t, cmd)
	if status != 0 {
		t.Fatalf("%q: status %d\n%s%s", args, status, out, errs)
	}
	readJSON(t, filepath.Join(dir, "summary.json"), &sum)
	return out, sum
}

// A run that is extended twice equals one of the whole length, if the schedule has a length of its own.
func TestExtendedTwice(t *testing.T) {
	built(t)
	t.Parallel()
	cwd := t.TempDir()
	whole, parts := filepath.Join(cwd, "whole"), filepath.Join(cwd, "parts")
	_, want := finished(t, cwd, whole, "run", "--plain", "--workers", "1", "--threads", "1", "--run-dir", whole, mlp, "--steps", "90", "--lr-steps", "80")
	finished(t, cwd, parts, "run", "--plain", "--workers", "2", "--threads", "1", "--run-dir", parts, mlp, "--steps", "30", "--lr-steps", "80")
	if status, _, errs := result(t, exec.Command(binary, "resume", "--plain", parts)); status != 1 || !strings.Contains(errs, "nothing to resume: all 30 steps are done; give --steps with more") {
		t.Errorf("a finished run: status %d, %s", status, errs)
	}
	finished(t, cwd, parts, "resume", "--plain", parts, "--stages", "2", "--steps", "60")
	_, got := finished(t, cwd, parts, "resume", "--plain", "--workers", "1", "--stages", "1", parts, "--steps", "90")
	if got.Steps != 90 || got.ParamsSHA256 != want.ParamsSHA256 || got.StateSHA256 != want.StateSHA256 {
		t.Errorf("%+v\nwant %+v", got, want)
	}
	var status, errs strings.Builder
	if execute([]string{"status", parts}, &status, &errs); !strings.Contains(status.String(), "changed after step 30: steps: 60, not 30") || !strings.Contains(status.String(), "changed after step 60: steps: 90, not 60") {
		t.Errorf("%s%s", &status, &errs)
	}
	one, two := lines[rundir.Metrics](t, filepath.Join(whole, "metrics.jsonl")), lines[rundir.Metrics](t, filepath.Join(parts, "metrics.jsonl"))
	if len(one) != 90 || len(two) != 90 {
		t.Fatalf("metrics of %d and %d steps", len(one), len(two))
	}
	for i := range one {
		if one[i].Loss != two[i].Loss || one[i].LR != two[i].LR {
			t.Errorf("step %d: loss %v and lr %v, want %v and %v", i+1, two[i].Loss, two[i].LR, one[i].Loss, one[i].LR)
		}
	}
}

// A run is resumed with one thing after the other changed. Each has to be allowed, and is written down; the bits do not depend on the
// layout.
func TestResumeUnderChange(t *testing.T) {
	built(t)
	t.Parallel()
	code, err := os.ReadFile(mlp)
	if err != nil {
		t.Fatal(err)
	}
	var first rundir.Summary
	for i, layout := range [][]string{{"--workers", "1"}, {"--workers", "3", "--stages", "2"}} {
		cwd := t.TempDir()
		if err := os.WriteFile(filepath.Join(cwd, "program"), code, 0o700); err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(cwd, "run")
		finished(t, cwd, dir, append(append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run"}, layout...), "./program", "--steps", "10")...)
		var sum rundir.Summary
		for n, c := range []struct {
			name  string
			allow string
			flags string
			said  string // of what has changed
			do    func() error
		}{
			{name: "steps", said: "steps: 20, not 10"},
			{name: "lr", allow: "lr", flags: "--lr 0.01", said: "lr: peak=0.01, not peak=0.02"},
			{name: "schedule", allow: "schedule", flags: "--lr-steps=500", said: "steps=500"},
			{name: "batch", allow: "batch", flags: "--global-batch 24 --micro-batch 8", said: "batch: 24 by 8, not 64 by 16"},
			{name: "model", allow: "model", flags: "--dropout 0.1", said: `model: {"dropout":0.1}, not {"dropout":0}`},
			{name: "seed", allow: "seed", flags: "--seed 3", said: "seed: 3, not 0"},
			{name: "eval", flags: "--eval-every 5", said: "eval: -1 samples every 5 steps, not -1 samples every 100 steps"},
			{name: "program", allow: "program", said: "program: program ", do: func() error {
				return os.WriteFile(filepath.Join(cwd, "program"), append(bytes.Clone(code), 'x'), 0o700)
			}},
			{name: "folder", do: func() error {
				to := cwd + "-moved"
				err := os.Rename(cwd, to)
				cwd, dir = to, filepath.Join(to, "run")
				return err
			}},
		} {
			if c.do != nil {
				if err := c.do(); err != nil {
					t.Fatal(err)
				}
			}
			args := append([]string{"resume", "--plain", "run"}, append(strings.Fields(c.flags), "--steps", []string{"20", "30", "40", "50", "60", "70", "80", "90", "100"}[n])...)
			if c.allow != "" && i == 0 {
				cmd := exec.Command(binary, args...)
				cmd.Dir = cwd
				if status, _, errs := result(t, cmd); status != 1 || !strings.Contains(errs, c.said) || !strings.HasSuffix(errs, "if that is meant, give --allow "+c.allow+"\n") {
					t.Errorf("%s: status %d, %q", c.name, status, errs)
				}
			}
			if c.allow != "" {
				args = append([]string{"resume", "--plain", "--allow", c.allow}, args[2:]...)
			}
			var said string
			said, sum = finished(t, cwd, dir, args...)
			run, err := cli.ReadRun(dir)
			if err != nil {
				t.Fatal(err)
			}
			before := run.Job.Lineage[len(run.Job.Lineage)-1]
			if !strings.Contains(said, c.said) || len(run.Job.Lineage) != n+1 || before.Until != 10*(n+1) || run.Job.Dir != cwd {
				t.Errorf("%s: %q in %s; lineage %+v\n%s", c.name, run.Job.Args, run.Job.Dir, before.Changed, said)
			}
		}
		if i == 0 {
			first = sum
		} else if sum.StateSHA256 != first.StateSHA256 || sum.Steps != 100 {
			t.Errorf("%v: %+v\nwant %+v", layout, sum, first)
		}

		// What cannot work is refused whatever is allowed.
		cmd := exec.Command(binary, "resume", "--plain", "--allow", "model,data,program", "run", "--hidden", "32", "--steps", "200")
		cmd.Dir = cwd
		if status, _, errs := result(t, cmd); status != 1 || !strings.Contains(errs, "layers: 3 with") || !strings.HasSuffix(errs, "; its state has another shape\n") {
			t.Errorf("another shape: status %d, %q", status, errs)
		}
		if status, _, errs := result(t, exec.Command(binary, "resume", "--allow", "program,wheather", dir)); status != 2 || !strings.Contains(errs, "--allow wheather: give some of program,model,data,lr,schedule") {
			t.Errorf("an unknown name: status %d, %q", status, errs)
		}
	}
}
