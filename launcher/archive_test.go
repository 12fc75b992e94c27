package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/inspect"
)

// A run whose machine is lost is resumed from the folder to which its checkpoints went, under another layout.
func TestResumeFromTarget(t *testing.T) {
	built(t)
	t.Parallel()
	cwd := t.TempDir()
	_, want := finished(t, cwd, filepath.Join(cwd, "whole"), "run", "--plain", "--workers", "1", "--threads", "1", "--run-dir", "whole", mlp, "--steps", "100")
	place := filepath.Join(cwd, "place")
	cmd := exec.Command(binary, "run", "--plain", "--workers", "2", "--threads", "1", "--run-dir", "lost", "--checkpoints", "place", "--chaos", "kill:1@40", "--min-workers", "2", mlp, "--steps", "100", "--checkpoint-every", "5") // it waits at step 40
	cmd.Dir = cwd
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	await(t, "a checkpoint at the target", func() bool { // of those that come while one is copied, only the newest goes there
		saved, _ := filepath.Glob(filepath.Join(place, "manifests", "*.json"))
		return len(saved) > 0
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	await(t, "the end of all that writes", func() bool { return os.RemoveAll(filepath.Join(cwd, "lost")) == nil })

	if status, _, errs := result(t, launchIn(cwd, "run", "--checkpoints", "place", mlp)); status != 1 || !strings.Contains(errs, "it holds a run; give another place, or continue that run: launcher resume") {
		t.Errorf("another run at the same place: status %d, %q", status, errs)
	}
	said, sum := finished(t, cwd, filepath.Join(cwd, "found"), "resume", "--plain", "--workers", "3", "--stages", "2", "--run-dir", "found", "file://"+place)
	if sum.Steps != 100 || sum.StateSHA256 != want.StateSHA256 {
		t.Errorf("%+v\nwant %+v\n%s", sum, want, said)
	}
	archived := 0
	for _, e := range lines[rundir.Event](t, filepath.Join(cwd, "found", "events.jsonl")) {
		if e.Kind == "archived" {
			archived++
		}
	}
	if len(metricsSoFar(filepath.Join(cwd, "found"))) >= 100 || archived == 0 {
		t.Errorf("it did not go on from a checkpoint, or saved none: %d", archived)
	}

	// What is there can be listed and exported, without a run directory.
	var list, errs strings.Builder
	if status := execute([]string{"checkpoints", "--check", "--json", "file://" + place}, &list, &errs); status != 0 {
		t.Errorf("status %d, %s", status, &errs)
	}
	var all []inspect.Saved
	if err := json.Unmarshal([]byte(list.String()), &all); err != nil || len(all) == 0 || all[0].Step != 100 || all[0].State != "verified" || all[0].Here != all[0].Files || all[0].Loss == nil {
		t.Errorf("%v: %s", err, &list)
	}
	to := filepath.Join(cwd, "exported")
	if status := execute([]string{"export", "--output", to, "file://" + place}, &list, &errs); status != 0 {
		t.Errorf("status %d, %s", status, &errs)
	}
	exported, err := os.ReadFile(filepath.Join(to, "model.safetensors"))
	written, wrong := os.ReadFile(filepath.Join(cwd, "found", "model.safetensors"))
	if err := errors.Join(err, wrong); err != nil || !bytes.Equal(exported, written) {
		t.Errorf("%v: what is exported is not what the run wrote", err)
	}
	for want, args := range map[string][]string{
		`--step 7: no whole checkpoint; launcher checkpoints `: {"export", "--step", "7", "--output", filepath.Join(cwd, "x"), place},
		"holds no run": {"checkpoints", "file://" + filepath.Join(cwd, "nothing")},
	} {
		errs.Reset()
		if status := execute(args, &list, &errs); status != 1 || !strings.Contains(errs.String(), want) {
			t.Errorf("%q: status %d, %s", args, status, &errs)
		}
	}

	// On a machine without the run directory, the same command goes on as well.
	if _, sum := finished(t, cwd, filepath.Join(cwd, "again"), "run", "--plain", "--workers", "1", "--threads", "1", "--resume", "auto", "--run-dir", "again", "--checkpoints", "place", mlp, "--steps", "100", "--checkpoint-every", "5"); sum.StateSHA256 != want.StateSHA256 || sum.Loss != want.Loss {
		t.Errorf("%+v\nwant %+v", sum, want)
	}
}

// Each machine copies its own files to the target, so the one that leads needs no room for those of all others.
func TestEachMachineCopiesItsFiles(t *testing.T) {
	built(t)
	t.Parallel()
	place := filepath.Join(t.TempDir(), "place")
	all := gathered(t, 3, "--checkpoints", place)
	for _, m := range all {
		if status := m.end(t); status != 0 {
			t.Fatalf("status %d\n%s%s", status, &m.out, &m.errs)
		}
	}
	var want rundir.Summary
	var job rundir.Job
	readJSON(t, filepath.Join(all[0].run, "summary.json"), &want)
	readJSON(t, filepath.Join(all[0].run, "job.json"), &job)
	manifests, err := filepath.Glob(filepath.Join(place, "manifests", fmt.Sprintf("step-%08d.*", want.Steps)))
	if err != nil || len(manifests) != 1 {
		t.Errorf("%v, %v: the last step is not at the target\n%s", manifests, err, &all[0].out)
	}
	for i, m := range all {
		r, err := checkpoint.At(m.run, job.Eras(), want.Steps)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Verify(t.Context()); !errors.Is(err, checkpoint.ErrMissing) {
			t.Errorf("machine %d has files that only others should have: %v", i, err)
		}
		r.Close()
	}
	for _, e := range lines[rundir.Event](t, filepath.Join(all[0].run, "events.jsonl")) {
		if e.Kind == "unarchived" || strings.Contains(e.Reason, "does not copy") {
			t.Error(e.Reason)
		}
	}
	cwd := t.TempDir()
	if said, sum := finished(t, cwd, filepath.Join(cwd, "found"), "resume", "--plain", "--workers", "2", "--run-dir", "found", place, "--steps", "160"); sum.Steps != 160 || !strings.Contains(said, fmt.Sprint(want.Steps)) {
		t.Errorf("%+v\n%s", sum, said)
	}
}

// A target that cannot be written is an event with the cause, and the run goes on.
func TestTargetFails(t *testing.T) {
	built(t)
	t.Parallel()
	cwd := t.TempDir()
	for place, want := range map[string]string{"ftp://x/y": "ftp:// is not known", "s3://": "give s3://BUCKET/RUN", "s3://b?x=1": "x is not known", "gs:///y": "give gs://BUCKET/RUN", "gs://b/y?region=x": "takes nothing behind ?", "azblob://c?x=1": "behind ? give account=NAME or endpoint=URL"} {
		if status, _, errs := result(t, launchIn(cwd, "run", "--checkpoints", place, mlp)); status != 2 || !strings.Contains(errs, want) {
			t.Errorf("%s: status %d, %q", place, status, errs)
		}
	}
	dir := filepath.Join(cwd, "run")
	if err := errors.Join(os.Mkdir(filepath.Join(cwd, "place"), 0o700), os.WriteFile(filepath.Join(cwd, "file"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	for place, want := range map[string]string{"file/run": "not a directory\n", "/proc/run": "mkdir /proc/run: no such file or directory\n"} {
		if status, _, errs := result(t, launchIn(cwd, "run", "--plain", "--run-dir", "run", "--checkpoints", place, mlp)); status != 1 || !strings.HasPrefix(errs, "launcher: --checkpoints ") || !strings.HasSuffix(errs, want) {
			t.Errorf("%s: status %d, %q", place, status, errs)
		}
	}
	cmd := launchIn(cwd, "run", "--plain", "--workers", "2", "--threads", "1", "--run-dir", "run", "--checkpoints", "place", "--chaos", "slow:0@1:0.2", mlp, "--steps", "60", "--checkpoint-every", "5")
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	await(t, "a claim", func() bool {
		claims, _ := filepath.Glob(filepath.Join(cwd, "place", "claims", "[0-9]*"))
		return len(claims) > 0
	})
	for { // a file in its place
		if err := os.RemoveAll(filepath.Join(cwd, "place")); err != nil {
			continue
		}
		if os.WriteFile(filepath.Join(cwd, "place"), nil, 0o600) == nil {
			break
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	causes := 0
	for _, e := range lines[rundir.Event](t, filepath.Join(dir, "events.jsonl")) {
		if e.Kind == "unarchived" {
			if strings.Contains(e.Reason, "not a directory") {
				causes++
			} else if !strings.Contains(e.Reason, "no such file") { // before the file was there
				t.Error(e.Reason)
			}
		}
	}
	if causes == 0 || !strings.Contains(out.String(), "the newest checkpoint is in the run directory only: ") {
		t.Errorf("%d events\n%s", causes, &out)
	}
}

// launchIn returns a command of the launcher in a folder.
func launchIn(cwd string, args ...string) *exec.Cmd {
	cmd := exec.Command(binary, args...)
	cmd.Dir = cwd
	return cmd
}

// The run directory of a machine that does not lead is removed while it trains: it has all records again, further checkpoints are
// whole, and no worker is lost.
func TestRemovedRunDirectory(t *testing.T) {
	built(t)
	t.Parallel()
	all := gatheredFor(t, 2, mlp, "--steps", "200", "--micro-batch", "4", "--eval-every", "0", "--checkpoint-every", "40")
	await(t, "20 steps", func() bool {
		text, _ := os.ReadFile(filepath.Join(all[1].run, "metrics.jsonl"))
		return bytes.Count(text, []byte("\n")) > 20
	})
	await(t, "the directory to be removed", func() bool { return os.RemoveAll(all[1].run) == nil }) // files come again meanwhile
	var sum rundir.Summary
	for _, m := range all {
		if status := m.end(t); status != 0 {
			t.Fatalf("status %d\n%s%s", status, &m.out, &m.errs)
		}
	}
	readJSON(t, filepath.Join(all[1].run, "summary.json"), &sum)
	if n := len(lines[rundir.Metrics](t, filepath.Join(all[1].run, "metrics.jsonl"))); n != 200 || sum.WorkersLost != 0 {
		t.Errorf("%d lines of metrics, %+v\n%s%s", n, sum, &all[1].out, &all[1].errs)
	}
	var job rundir.Job
	readJSON(t, filepath.Join(all[0].run, "job.json"), &job)
	if found, err := checkpoint.At(all[0].run, job.Eras(), 200); err != nil {
		t.Error(err)
	} else {
		found.Close()
	}
}
