package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// A run that begins with what launcher export has written of another one continues it, to the same bits on any layout where no number
// depends on the step or the sample. So does a run that begins with its state in turn, and that is resumed.
func TestInitOptimizer(t *testing.T) {
	built(t)
	t.Parallel()
	for name, flags := range map[string][]string{"adamw": nil, "sgd": {"--sgd"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			work := t.TempDir()
			do := func(args ...string) {
				t.Helper()
				cmd := launch(t, args...)
				cmd.Dir = work
				if status, out, errs := result(t, cmd); status != 0 {
					t.Fatalf("%v: status %d\n%s%s", args, status, out, errs)
				}
			}
			train := func(dir string, layout []string, more ...string) {
				t.Helper()
				args := append([]string{"run", "--plain", "--threads", "1", "--run-dir", dir}, layout...)
				do(append(append(append(args, alike), flags...), more...)...)
			}
			train("whole", []string{"--workers", "1"}, "--steps", "9")
			train("a", []string{"--workers", "1"}, "--steps", "3")
			do("export", "--optimizer", "--output", "after-a", "a")
			train("b", []string{"--workers", "3", "--stages", "2"}, "--steps", "3", "--init-from", "after-a", "--init-optimizer", "after-a")
			do("export", "--optimizer", "--output", "after-b", "b")
			train("c", []string{"--workers", "2", "--chaos", "kill:1@2"}, "--steps", "2", "--init-from", "after-b", "--init-optimizer", filepath.Join("after-b", "optimizer.safetensors"))
			do("resume", "--plain", "--workers", "1", "c", "--steps", "3")
			var job rundir.Job
			readJSON(t, filepath.Join(work, "c", "job.json"), &job)
			want, got := summaryOf(t, filepath.Join(work, "whole")).StateSHA256, summaryOf(t, filepath.Join(work, "c")).StateSHA256
			if want == "" || got != want || job.InitUpdates != 6 {
				t.Errorf("state %s after %d updates and 3 steps, want %s", got, job.InitUpdates, want)
			}
			// The state of a run cannot become that of another number of updates.
			cmd := launch(t, "resume", "--plain", "c", "--steps", "4", "--init-optimizer", "")
			cmd.Dir = work
			if status, _, errs := result(t, cmd); status != 1 || !strings.Contains(errs, "optimizer: 0 updates before the run, not 6 updates before the run; its state has another shape\n") {
				t.Errorf("without its state: status %d, %q", status, errs)
			}
		})
	}
}

// Machines that lack the files of --init-from and --init-optimizer get them from the one that has them, whether it has a folder or a file,
// and train to the bits of one machine. What no machine has is named.
func TestInitTravels(t *testing.T) {
	built(t)
	t.Parallel()
	work := t.TempDir()
	do := func(args ...string) {
		t.Helper()
		cmd := launch(t, args...)
		cmd.Dir = work
		if status, out, errs := result(t, cmd); status != 0 {
			t.Fatalf("%v: status %d\n%s%s", args, status, out, errs)
		}
	}
	one := []string{"run", "--plain", "--workers", "1", "--threads", "1", "--run-dir"}
	do(append(one, "a", alike, "--steps", "3")...)
	do("export", "--optimizer", "--output", "after-a", "a")
	program := []string{alike, "--steps", "3", "--init-optimizer", filepath.Join("after-a", "optimizer.safetensors"), "--init-from"}
	do(append(append(one, "alone"), append(program, "after-a")...)...)
	want := summaryOf(t, filepath.Join(work, "alone"))
	begin := func(dir, from string) []*machine {
		env := append(os.Environ(), "TMPDIR="+t.TempDir(), "XDG_CACHE_HOME="+t.TempDir())
		args := []string{"run", "--plain", "--threads", "1", "--run-dir", "run", "--workers", "1", "--listen=127.0.0.1:0", "--wait-hosts", "3"}
		return joined(t, 3, startMachineIn(t, dir, env, "", append(append(args, program...), from)...), "join", "--plain", "--run-dir", "run", "-")
	}
	for _, m := range begin(work, "after-a") {
		if status := m.end(t); status != 0 {
			t.Fatalf("%s: status %d\n%s", m.Dir, status, &m.errs)
		}
		if got := summaryOf(t, m.run); got.StateSHA256 != want.StateSHA256 || got.StateSHA256 == "" {
			t.Errorf("%s: state %s, want %s", m.Dir, got.StateSHA256, want.StateSHA256)
		}
	}
	for _, m := range begin(t.TempDir(), "after-b") {
		if status := m.end(t); status == 0 || !strings.Contains(m.errs.String(), "after-b: no such file or directory, nor on ") {
			t.Errorf("%s: status %d\n%s", m.Dir, status, &m.errs)
		}
	}
}
