package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

const deliverySteps = 120

// deliver is a run of the example that writes a line in each call of OnStep.
func deliver(t *testing.T, flags ...string) *exec.Cmd {
	t.Helper()
	args := append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run"}, flags...)
	return launch(t, append(args, custom, "--csv", "x.csv", "--eval-every", "0", "--checkpoint-every", "20ms", "--steps", strconv.Itoa(deliverySteps))...)
}

// delivered returns the file that the example has written, and checks that it has each step once and in order.
func delivered(t *testing.T, dir string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "x.csv"))
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
	if all[0] != "step,loss" {
		t.Errorf("the file begins with %q", all[0])
	}
	for i, line := range all[1:] {
		if step, _, _ := strings.Cut(line, ","); step != strconv.Itoa(i+1) {
			t.Fatalf("line %d is %q", i+2, line)
		}
	}
	if len(all) != deliverySteps+1 {
		t.Errorf("the file has %d lines of %d", len(all), deliverySteps+1)
	}
	return string(text)
}

// accuracies returns the metric of each step, as its last line in metrics.jsonl has it.
func accuracies(t *testing.T, dir string) string {
	t.Helper()
	of := make(map[int]float64)
	for _, m := range metricsSoFar(filepath.Join(dir, "run")) {
		of[m.Step] = m.TrainMetrics["accuracy"]
	}
	if len(of) != deliverySteps {
		t.Errorf("metrics.jsonl has %d steps of %d", len(of), deliverySteps)
	}
	return fmt.Sprint(of)
}

// OnStep is called for every step in every history, and its file has each line once. Metrics have the same bits in all of them.
func TestDeliveries(t *testing.T) {
	built(t)
	t.Parallel()
	finish := func(t *testing.T, cmd *exec.Cmd) string {
		t.Helper()
		if status, stdout, stderr := result(t, cmd); status != 0 {
			t.Fatalf("status %d\n%s%s", status, stdout, stderr)
		}
		return delivered(t, cmd.Dir) + accuracies(t, cmd.Dir)
	}
	want := finish(t, deliver(t, "--workers", "1"))
	for name, flags := range map[string][]string{
		"kill":          {"--workers", "3", "--chaos", "kill:0@60"},
		"kill all but":  {"--workers", "3", "--chaos", "kill:0@30,kill:1@70"},
		"respawn":       {"--workers", "3", "--respawn", "--chaos", "kill:0@20,kill:1@60"},
		"freeze":        {"--workers", "3", "--detect", "500ms", "--chaos", "freeze:0@60"},
		"leave":         {"--workers", "3", "--chaos", "leave:0@60"},
		"rollback":      {"--workers", "3", "--mirrors", "0", "--chaos", "kill:0@60"},
		"hosts":         {"--workers", "3", "--emulate-hosts", "3", "--chaos", "killhost:0@60"},
		"other host":    {"--workers", "3", "--emulate-hosts", "3", "--chaos", "killhost:2@60"},
		"hosts respawn": {"--workers", "3", "--emulate-hosts", "3", "--respawn", "--chaos", "kill:0@30,killhost:1@60"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := finish(t, deliver(t, flags...)); got != want {
				t.Error("the file or metrics differ from those of an undisturbed run")
			}
		})
	}
	for name, end := range map[string]os.Signal{"interrupt": os.Interrupt, "kill all": syscall.SIGKILL} {
		t.Run("resume after "+name, func(t *testing.T) {
			t.Parallel()
			cmd := deliver(t, "--workers", "2", "--chaos", "slow:0@1:0.1")
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			until(t, func() bool {
				saved, _ := filepath.Glob(filepath.Join(cmd.Dir, "run", "checkpoints", "*"))
				return len(saved) > 1
			})
			if err := cmd.Process.Signal(end); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			again := exec.Command(binary, "resume", "--plain", "--threads", "1", "run")
			again.Dir = cmd.Dir
			if got := finish(t, again); got != want {
				t.Error("the file or metrics differ from those of an undisturbed run")
			}
		})
	}
}

// A call during which the process ends is repeated and says so, and no other is.
func TestRedelivered(t *testing.T) {
	built(t)
	t.Parallel()
	for _, flags := range [][]string{{"--workers", "4"}, {"--workers", "4", "--respawn"}, {"--workers", "4", "--emulate-hosts", "2"}} {
		t.Run(strings.Join(flags, " "), func(t *testing.T) {
			args := append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run"}, flags...)
			cmd := launch(t, append(args, calls, "--die", "20,40,60")...)
			if status, stdout, stderr := result(t, cmd); status != 0 {
				t.Fatalf("status %d\n%s%s", status, stdout, stderr)
			}
			text, err := os.ReadFile(filepath.Join(cmd.Dir, "calls"))
			if err != nil {
				t.Fatal(err)
			}
			var want []string
			for step := 1; step <= 60; step++ {
				want = append(want, fmt.Sprintf("%d %v", step, step%20 == 0))
			}
			if got := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n"); !slices.Equal(got, want) {
				t.Errorf("the calls were %q", got)
			}
		})
	}
}
