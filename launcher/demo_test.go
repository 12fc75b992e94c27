package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

func TestDemo(t *testing.T) {
	built(t)
	t.Parallel()
	cmd := launch(t, "demo", "--steps", "20")
	status, stdout, stderr := result(t, cmd)
	if status != 0 || stderr != "" {
		t.Fatalf("status %d\n%s\n%s", status, stdout, stderr)
	}
	hashes := regexp.MustCompile(`(?m)^  (?:undisturbed|with faults)  ([0-9a-f]{64})$`).FindAllStringSubmatch(stdout, -1)
	if len(hashes) != 2 || hashes[0][1] != hashes[1][1] || !strings.Contains(stdout, "equal: the same parameters") {
		t.Errorf("no two equal hashes in\n%s", stdout)
	}
	dirs, err := filepath.Glob(filepath.Join(cmd.Dir, "runs", "demo-*", "with-faults"))
	if err != nil || len(dirs) != 1 {
		t.Fatal(dirs, err)
	}
	var s rundir.Summary
	b, err := os.ReadFile(filepath.Join(dirs[0], "summary.json"))
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil || s.ParamsSHA256 != hashes[1][1] {
		t.Errorf("summary.json: %v: %+v", err, s)
	}
	// On a slow machine the run may be over before the last fault, and then demo says so.
	if s.WorkersLost == 0 || s.WorkersLost < 3 && !strings.Contains(stdout, "the run was over before") {
		t.Errorf("%d workers lost\n%s", s.WorkersLost, stdout)
	}
}

func TestDemoInterrupted(t *testing.T) {
	built(t)
	t.Parallel()
	cmd := launch(t, "demo", "--run-dir", "d")
	out := new(strings.Builder)
	cmd.Stdout = out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	await(t, "a step of both runs", func() bool {
		for _, run := range []string{"undisturbed", "with-faults"} {
			if b, _ := os.ReadFile(filepath.Join(cmd.Dir, "d", run, "metrics.jsonl")); len(b) == 0 {
				return false
			}
		}
		return true
	})
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if status := cmd.ProcessState.ExitCode(); status != 130 {
		t.Errorf("status %d after Ctrl-C:\n%s", status, out)
	}
	for _, run := range []string{"undisturbed", "with-faults"} {
		if _, err := rundir.ReadWorkers(filepath.Join(cmd.Dir, "d", run)); err == nil {
			t.Errorf("%s goes on", run)
		}
	}
}

func TestDemoUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"x"}, `unexpected argument "x"`},
		{[]string{"--steps", "0"}, "--steps 0: give at least 1"},
		{[]string{"--run-dir", ""}, "--run-dir: give the name of a directory"},
	} {
		status, _, stderr := result(t, launch(t, append([]string{"demo"}, c.args...)...))
		if status != 2 || !strings.Contains(stderr, c.want) {
			t.Errorf("%q: status %d, %s", c.args, status, stderr)
		}
	}
}

func TestDemoKilled(t *testing.T) {
	cmd := launch(t, "demo", "--run-dir", "d")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	started := func(run string) bool {
		w, err := rundir.ReadWorkers(filepath.Join(cmd.Dir, "d", run))
		return err == nil && len(w.Workers) > 0
	}
	await(t, "both runs", func() bool { return started("undisturbed") && started("with-faults") })
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	await(t, "the end of both runs", func() bool { return !started("undisturbed") && !started("with-faults") })
}
