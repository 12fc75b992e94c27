//go:build linux

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// A Python process that is killed before the job is made is started again. Later the run directory is removed, and all Python processes
// are killed: the run makes the directory again, with the first values, which no other process could make.
func TestTorchLosesProcessesAndDirectory(t *testing.T) {
	torchAsked(t)
	t.Parallel()
	const steps = 300
	program := testdata(t, "torch/train.py")
	dir := filepath.Join(t.TempDir(), "run")
	cmd := launch(t, "run", "--plain", "--python", python, "--run-dir", dir, "--workers", "2", program, "--values", "own", "--steps", strconv.Itoa(steps))
	mark := "LAUNCHER_TEST=" + dir
	var out output
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), mark), &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	killed := func() (n int) {
		for _, p := range marked(t, mark) {
			line, _ := os.ReadFile(filepath.Join("/proc", p, "cmdline"))
			if pid, err := strconv.Atoi(p); err == nil && bytes.Contains(line, []byte("\x00soliton._child\x00")) && syscall.Kill(pid, syscall.SIGKILL) == nil {
				n++
			}
		}
		return n
	}
	await(t, "a Python process", func() bool { return killed() > 0 })
	await(t, "three steps", func() bool { return len(metricsSoFar(dir)) >= 3 })
	await(t, "the directory to be removed", func() bool { return os.RemoveAll(dir) == nil }) // files come again meanwhile
	if killed() == 0 {
		t.Error("there is no Python process")
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	run, err := rundir.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, want := trainTorch(t, []string{"--workers", "1"}, program, "--steps", strconv.Itoa(steps), "--init-from", filepath.Join(dir, "first", "values.pt"))
	if run.Summary.StateSHA256 != want.StateSHA256 || len(metricsSoFar(dir)) != steps {
		t.Errorf("state %s, want %s; %d steps are told of\n%s", run.Summary.StateSHA256, want.StateSHA256, len(metricsSoFar(dir)), &out)
	}
	if left := marked(t, mark); len(left) > 0 {
		t.Errorf("left behind: %s", strings.Join(left, " "))
	}
}
