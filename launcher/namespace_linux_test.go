package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/testkit/require"
)

// A process that is none of the run has the number of a worker in another PID namespace: launcher kill leaves it alone.
func TestKillFromAnotherPIDNamespace(t *testing.T) {
	built(t)
	t.Parallel()
	unshare, err := exec.LookPath("unshare")
	require.Tool(t, "netns", err == nil && os.Geteuid() == 0, "PID namespaces take root and the command unshare")
	cmd := launch(t, "run", "--plain", "--workers", "2", "--threads", "1", "--run-dir", "run", mlp, "--steps", "100000")
	cmd.Path, cmd.Args = unshare, append([]string{unshare, "--fork", "--pid", "--mount-proc", "--kill-child"}, cmd.Args...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	dir := filepath.Join(cmd.Dir, "run")
	await(t, "some steps", func() bool { return len(metricsSoFar(dir)) > 5 })
	if status, _, errs := result(t, launch(t, "kill", dir, "1")); status != 1 || !strings.Contains(errs, "another PID namespace") {
		t.Errorf("exit status %d, %q", status, errs)
	}
	if status, out, errs := result(t, launch(t, "stop", dir)); status != 0 {
		t.Errorf("stop: exit status %d, %s%s", status, out, errs)
	}
	cmd.Wait()
}
