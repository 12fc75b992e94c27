package main

import (
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/require"
)

// With the fallbacks that other systems get, a run survives the death of a worker and of a host with the same bits, doctor reports
// what is missing, and chaos refuses by name what it cannot do.
func TestPortable(t *testing.T) {
	require.Asked(t, "portable") // .ci/run does
	t.Parallel()
	dir := t.TempDir()
	if out, err := exec.Command("go", "build", "-tags", "portable", "-o", dir+"/", ".", "../examples/mlp").CombinedOutput(); err != nil {
		t.Fatalf("%s%v", out, err)
	}
	portable := func(args ...string) (status int, stdout, stderr string) {
		t.Helper()
		cmd := exec.Command(filepath.Join(dir, "launcher"), args...)
		cmd.Dir = dir
		return result(t, cmd)
	}
	for i, flags := range [][]string{{"--workers", "3", "--chaos", "kill:1@4"}, {"--workers", "3", "--emulate-hosts", "3", "--chaos", "killhost:1@4"}} {
		run := "run" + strconv.Itoa(i)
		args := append([]string{"run", "--plain", "--threads", "1", "--run-dir", run}, flags...)
		args = append(args, "./mlp", "--steps", strconv.Itoa(chaosSteps), "--micro-batch", "4", "--eval-every", "0")
		if status, stdout, stderr := portable(args...); status != 0 {
			t.Fatalf("%q: status %d\n%s%s", flags, status, stdout, stderr)
		}
		var sum rundir.Summary
		readJSON(t, filepath.Join(dir, run, "summary.json"), &sum)
		sameBits(t, sum)
		if sum.WorkersLost != 1 {
			t.Errorf("%q: %d workers were lost, want 1", flags, sum.WorkersLost)
		}
	}
	if _, stdout, _ := portable("doctor"); !strings.Contains(stdout, "no canaries") {
		t.Errorf("doctor does not mention canaries:\n%s", stdout)
	}
	if status, _, stderr := portable("run", "--emulate-hosts", "3", "--chaos", "cut:1@4:1", "./mlp"); status != 2 || !strings.Contains(stderr, "--chaos: cut:1@4:1: cut needs Linux") {
		t.Errorf("cut: status %d, %q", status, stderr)
	}
}
