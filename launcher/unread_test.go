package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Samples that no worker can read are skipped, to the same bits on any layout, and when the run is computed again although they can be
// read by then, also from what a target has.
func TestBadSamples(t *testing.T) {
	built(t)
	t.Parallel()
	run := func(t *testing.T, work string, args ...string) (status int, out string) {
		t.Helper()
		cmd := launch(t, args...)
		cmd.Dir = work
		status, stdout, stderr := result(t, cmd)
		return status, stdout + stderr
	}
	type outcome struct {
		sum   rundir.Summary
		skips []rundir.Skip
	}
	outcomeOf := func(t *testing.T, dir string) (o outcome) {
		t.Helper()
		o.sum = summaryOf(t, dir)
		o.skips = lines[rundir.Skip](t, filepath.Join(dir, "skips.jsonl"))
		return o
	}
	train := func(t *testing.T, work, bad, name string, flags ...string) (int, string, string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(work, "bad"), []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(work, name)
		status, out := run(t, work, append(append([]string{"run", "--plain", "--threads", "1", "--run-dir", dir}, flags...), unread)...)
		return status, out, dir
	}
	const bad = "7"
	var want outcome
	t.Run("one worker", func(t *testing.T) {
		work := t.TempDir()
		status, out, dir := train(t, work, bad, "run", "--bad-samples", "skip", "--workers", "1")
		if want = outcomeOf(t, dir); status != 0 || len(want.skips) != 2 || !strings.Contains(out, "bad sector") { // in two epochs
			t.Fatalf("status %d, %+v\n%s", status, want.skips, out)
		}
	})
	t.Run("more", func(t *testing.T) {
		t.Run("other layout", func(t *testing.T) {
			t.Parallel()
			status, out, dir := train(t, t.TempDir(), bad, "run", "--bad-samples", "skip", "--workers", "4", "--stages", "2", "--emulate-hosts", "2")
			if got := outcomeOf(t, dir); status != 0 || got.sum.StateSHA256 != want.sum.StateSHA256 || len(got.skips) != len(want.skips) || got.sum.WorkersLost != 0 {
				t.Errorf("status %d, %+v, want %+v\n%s", status, got, want, out)
			}
		})
		t.Run("replay", func(t *testing.T) {
			t.Parallel()
			work := t.TempDir()
			status, out, dir := train(t, work, bad, "run", "--bad-samples", "skip", "--workers", "1", "--chaos", "kill:0@10")
			if status != 1 {
				t.Fatalf("status %d\n%s", status, out)
			}
			before := lines[rundir.Skip](t, filepath.Join(dir, "skips.jsonl"))
			// All samples can be read again, and the steps since the first checkpoint are computed once more.
			if err := os.RemoveAll(filepath.Join(dir, "checkpoints", "step-00000008")); err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(filepath.Join(work, "bad")); err != nil {
				t.Fatal(err)
			}
			status, out = run(t, work, "resume", "--plain", "--workers", "2", dir)
			if got := outcomeOf(t, dir); status != 0 || got.sum.StateSHA256 != want.sum.StateSHA256 || len(got.skips) != len(before) || len(before) != len(want.skips) {
				t.Errorf("status %d, %+v, want %+v\n%s", status, got, want, out)
			}
		})
		t.Run("committed before", func(t *testing.T) {
			t.Parallel()
			var work string
			// A fast run may be killed before it has a whole checkpoint.
			var dir string
			var saved []string
			for try := 0; len(saved) == 0 && try < 20; try++ {
				work = t.TempDir()
				var status int
				var out string
				status, out, dir = train(t, work, "none", "run", "--bad-samples", "skip", "--workers", "1", "--chaos", "kill:0@10")
				if status != 1 {
					t.Fatalf("status %d\n%s", status, out)
				}
				saved, _ = filepath.Glob(filepath.Join(dir, "checkpoints", "step-*", "manifest.json"))
			}
			if len(saved) == 0 {
				t.Fatal("no run had a checkpoint")
			}
			step, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(filepath.Dir(saved[len(saved)-1])), "step-"))
			if err != nil {
				t.Fatal(err)
			}
			// No sample of the steps after it can be read any more; step 9 and those before were committed, and are computed once more.
			var all []string
			for i := range 40 {
				all = append(all, strconv.Itoa(i))
			}
			bad := filepath.Join(work, "bad")
			if err := os.WriteFile(bad, []byte(strings.Join(all, " ")), 0o600); err != nil {
				t.Fatal(err)
			}
			again := fmt.Sprintf("; step %d was committed with this sample before, so it is not skipped: resume where it can be read", step+1)
			if status, out := run(t, work, "resume", "--plain", "--workers", "2", dir); status != 1 || !strings.Contains(out, "bad sector") || !strings.Contains(out, again) {
				t.Errorf("status %d\n%s", status, out)
			}
			if err := os.Remove(bad); err != nil {
				t.Fatal(err)
			}
			if status, out := run(t, work, "resume", "--plain", dir); status != 0 || len(outcomeOf(t, dir).skips) != 0 {
				t.Errorf("status %d\n%s", status, out)
			}
		})
		t.Run("target", func(t *testing.T) {
			t.Parallel()
			work := t.TempDir()
			target, dir := filepath.Join(work, "target"), filepath.Join(work, "run")
			if err := os.WriteFile(filepath.Join(work, "bad"), []byte(bad), 0o600); err != nil {
				t.Fatal(err)
			}
			cmd := launch(t, "run", "--plain", "--threads", "1", "--run-dir", dir, "--checkpoints", target, "--bad-samples", "skip", "--workers", "1", unread, "--wait")
			cmd.Dir = work
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			for _, step := range []string{"4", "8"} { // both checkpoints are copied
				until(t, func() bool {
					all, _ := filepath.Glob(filepath.Join(target, "manifests", "step-0000000"+step+".*"))
					return len(all) == 1
				})
				if err := os.WriteFile(filepath.Join(work, "go-"+step), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if err := cmd.Wait(); err != nil {
				t.Fatal(err)
			}
			// Only the target is left, with one whole checkpoint, and all samples can be read again.
			damaged, err := filepath.Glob(filepath.Join(target, "shards", "step-0000*[^4]", "*", "*.safetensors"))
			if err != nil || len(damaged) != 2 {
				t.Fatal(damaged, err)
			}
			err = errors.Join(os.RemoveAll(dir), os.Remove(filepath.Join(work, "bad")), os.Truncate(damaged[0], 100), os.Truncate(damaged[1], 100))
			if err != nil {
				t.Fatal(err)
			}
			status, out := run(t, work, "resume", "--plain", "--workers", "2", "--run-dir", dir, target)
			if got := outcomeOf(t, dir); status != 0 || got.sum.StateSHA256 != want.sum.StateSHA256 || !slices.EqualFunc(got.skips, want.skips, func(a, b rundir.Skip) bool { return a.Sample == b.Sample && a.Step == b.Step && a.Index == b.Index }) ||
				!strings.Contains(out, "step 4 of ") {
				t.Errorf("status %d, %+v, want %+v\n%s", status, got, want, out)
			}
		})
		t.Run("fail", func(t *testing.T) {
			t.Parallel()
			if status, out, _ := train(t, t.TempDir(), bad, "run", "--workers", "2"); status != 1 || !strings.Contains(out, "bad sector") {
				t.Errorf("status %d\n%s", status, out)
			}
		})
	})
}

func summaryOf(t *testing.T, dir string) (sum rundir.Summary) {
	t.Helper()
	readJSON(t, filepath.Join(dir, "summary.json"), &sum)
	return sum
}
