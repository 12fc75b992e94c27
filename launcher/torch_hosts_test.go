//go:build linux

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// A run whose directory is lost is resumed from the folder to which its checkpoints went, with the first values of its first process:
// without them the program, which makes another model in each process, makes another job.
func TestTorchFromTarget(t *testing.T) {
	torchBuilt(t)
	t.Parallel()
	program, cwd := testdata(t, "torch/train.py"), t.TempDir()
	place, lost, found := filepath.Join(cwd, "place"), filepath.Join(cwd, "lost"), filepath.Join(cwd, "found")
	cmd := launchIn(cwd, "run", "--plain", "--python", python, "--workers", "2", "--stages", "2", "--run-dir", lost, "--checkpoints", place, program, "--values", "own", "--steps", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	await(t, "some steps", func() bool { return len(metricsSoFar(lost)) > 5 })
	cmd.Process.Signal(os.Interrupt)
	if cmd.Wait(); cmd.ProcessState.ExitCode() != 130 {
		t.Fatalf("the run that was interrupted: %v", cmd.ProcessState)
	}
	values := filepath.Join(cwd, "first.pt")
	if err := os.Rename(filepath.Join(lost, "first", "values.pt"), values); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(lost); err != nil {
		t.Fatal(err)
	}
	resume := func(dir string) (int, string) {
		status, out, errs := result(t, launchIn(cwd, "resume", "--plain", "--python", python, "--workers", "2", "--stages", "1", "--run-dir", dir, "file://"+place))
		return status, out + errs
	}
	first := filepath.Join(place, "first")
	if err := os.Rename(first, first+"-hidden"); err != nil {
		t.Fatal(err)
	}
	if status, said := resume(filepath.Join(cwd, "without")); status == 0 || !strings.Contains(said, "the first values of the program are made again") || !strings.Contains(said, "first_sha256") {
		t.Errorf("without first values: status %d\n%s", status, said)
	}
	if err := os.Rename(first+"-hidden", first); err != nil {
		t.Fatal(err)
	}
	if status, said := resume(found); status != 0 {
		t.Fatalf("status %d\n%s", status, said)
	}
	one, err := os.ReadFile(values)
	other, err2 := os.ReadFile(filepath.Join(found, "first", "values.pt"))
	if err != nil || err2 != nil || !bytes.Equal(one, other) {
		t.Errorf("the file of first values: %d bytes, %v; %d bytes, %v", len(one), err, len(other), err2)
	}
	_, want := trainTorch(t, []string{"--workers", "1"}, program, "--steps", "60", "--init-from", values)
	var got rundir.Summary
	if readJSON(t, filepath.Join(found, "summary.json"), &got); got.StateSHA256 != want.StateSHA256 {
		t.Errorf("state %s, want %s", got.StateSHA256, want.StateSHA256)
	}
}
