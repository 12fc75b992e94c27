//go:build linux

package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/machines"
)

// A run whose directory is lost is resumed from the folder to which its checkpoints went, with the first values of its first process:
// without them the program, which makes another model in each process, makes another job.
func TestTorchFromTarget(t *testing.T) {
	torchAsked(t)
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
	resume := func(dir, workers string) (int, string) {
		status, out, errs := result(t, launchIn(cwd, "resume", "--plain", "--python", python, "--workers", workers, "--stages", "1", "--run-dir", dir, "file://"+place))
		return status, out + errs
	}
	first := filepath.Join(place, "first")
	if err := os.Rename(first, first+"-hidden"); err != nil {
		t.Fatal(err)
	}
	if status, said := resume(filepath.Join(cwd, "without"), "1"); status == 0 || !strings.Contains(said, "the first values of the program are made again") || !strings.Contains(said, "first_sha256") {
		t.Errorf("without first values: status %d\n%s", status, said)
	}
	if err := os.Rename(first+"-hidden", first); err != nil {
		t.Fatal(err)
	}
	if status, said := resume(found, "2"); status != 0 {
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

// A machine that joined resumes the run with its copy of the program, which the machine at which the run began has lost, and gives it that.
func TestTorchJoinersCopy(t *testing.T) {
	torchAsked(t)
	t.Parallel()
	folder, source := t.TempDir(), testdata(t, "torch/train.py")
	text, err := os.ReadFile(source)
	if err == nil {
		err = os.WriteFile(filepath.Join(folder, "main.py"), text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	was := gatheredFor(t, 2, "--workers", "1", "--python", python, filepath.Join(folder, "main.py"), "--steps", "60")
	await(t, "some steps", func() bool { return len(metricsSoFar(was[1].run)) > 5 })
	was[0].Process.Signal(os.Interrupt)
	for i, m := range was {
		if status := m.end(t); status != 130 {
			t.Fatalf("machine %d that was interrupted: status %d", i, status)
		}
	}
	for _, gone := range []string{folder, filepath.Join(was[0].run, "first")} {
		if err := os.RemoveAll(gone); err != nil {
			t.Fatal(err)
		}
	}
	first := startMachine(t, "", "resume", "--plain", "--threads", "1", "--python", python, "--listen=127.0.0.1:0", "--wait-hosts", "2", was[1].run)
	first.run = was[1].run
	all := joined(t, 2, first, "join", "--plain", "--run-dir", was[0].run, "-")
	all[1].run = was[0].run
	want := undisturbed(t, 60)
	for i, m := range all {
		if status := m.end(t); status != 0 {
			t.Fatalf("machine %d: status %d\n%s%s", i, status, &m.out, &m.errs)
		}
		var got rundir.Summary
		if readJSON(t, filepath.Join(m.run, "summary.json"), &got); got.StateSHA256 != want.StateSHA256 {
			t.Errorf("machine %d: state %s, want %s", i, got.StateSHA256, want.StateSHA256)
		}
	}
}

// One line trains a Python program on two machines, of which the second has PyTorch, a shell and sshd only. It gets the data, too.
func TestTorchSSHMachines(t *testing.T) {
	torchAsked(t)
	ms := machines.Up(t, 2)
	machines.ServeSSH(t, ms)
	ms[0].CopyIn(binary)
	// That adds nothing, modulo the 32 tokens.
	if err := errors.Join(os.MkdirAll(ms[0].Path("/root/numbers"), 0o700), os.WriteFile(ms[0].Path("/root/numbers/a"), []byte("96"), 0o600)); err != nil {
		t.Fatal(err)
	}
	cmd := ms[0].Command("/root/launcher", "run", "--plain", "--run-dir", "/tmp/run", "--workers", "1", "--python", python, "--hosts", "m1,m2", ms[0].CopyIn(testdata(t, "torch/train.py")), "--data", "/root/numbers")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := undisturbed(t, 12)
	for _, path := range []string{ms[0].Path("/tmp/run/summary.json"), ms[1].Path("/root/runs/latest/summary.json")} {
		await(t, path, func() bool { _, err := os.Stat(path); return err == nil })
		var got rundir.Summary
		if readJSON(t, path, &got); got.StateSHA256 != want.StateSHA256 || got.WorkersStarted != 2 {
			t.Errorf("%s: %+v; want state %s of 2 workers", path, got, want.StateSHA256)
		}
	}
}
