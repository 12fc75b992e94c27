package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// TestReshapeMeasured slows a worker down in real processes until the run, which only
// measures, has a plan for that, and trains on under it: the numbers of all steps are
// those of one worker that nothing happens to.
func TestReshapeMeasured(t *testing.T) {
	built(t)
	t.Parallel()
	const steps = 300 // that the run never gets to
	program := func(ms string) []string {
		return []string{emulated, "--layers", "4", "--layer-ms", ms, "--global-batch", "8", "--steps", fmt.Sprint(steps)}
	}
	alone := launch(t, append([]string{"run", "--plain", "--workers", "1", "--threads", "1", "--run-dir", "run"}, program("0")...)...)
	if status, stdout, stderr := result(t, alone); status != 0 {
		t.Fatalf("status %d\n%s%s", status, stdout, stderr)
	}
	want := metrics(t, filepath.Join(alone.Dir, "run"))
	for _, reshape := range []string{"full", "dataflow"} {
		t.Run(reshape, func(t *testing.T) {
			t.Parallel()
			cmd := launch(t, append([]string{"run", "--plain", "--workers", "4", "--stages", "2", "--threads", "1", "--run-dir", "run",
				"--detect", "10s", "--reshape", reshape, "--chaos", "slow:3@8:0.2"}, program("1")...)...)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			dir := filepath.Join(cmd.Dir, "run")
			until(t, func() bool {
				r, err := rundir.Read(dir)
				return err == nil && r.Plan != nil && r.Plan.Event == "rebalance" && r.Last != nil && r.Last.Plan >= uint64(planOf(t, *r.Plan).Version.N)
			})
			_ = cmd.Process.Signal(os.Interrupt)
			_ = cmd.Wait() // the state tells
			if status := cmd.ProcessState.ExitCode(); status != 130 {
				t.Fatalf("status %d\n%s", status, out.String())
			}
			plans := lines[rundir.Plan](t, filepath.Join(dir, "plans.jsonl"))
			first, last := planOf(t, plans[0]), planOf(t, plans[len(plans)-1])
			if reshape == "dataflow" && fmt.Sprint(first.Stages) != fmt.Sprint(last.Stages) {
				t.Errorf("stages went from %v to %v", first.Stages, last.Stages)
			}
			for i, m := range metrics(t, dir) {
				w := want[i]
				if m.Step != w.Step || m.Loss != w.Loss || m.GradNorm != w.GradNorm || m.LR != w.LR {
					t.Fatalf("step %d: %+v, want %+v", i+1, m, w)
				}
			}
		})
	}
}

func planOf(t *testing.T, line rundir.Plan) *plan.Plan {
	t.Helper()
	p := new(plan.Plan)
	if err := json.Unmarshal(line.Plan, p); err != nil {
		t.Fatal(err)
	}
	return p
}

func metrics(t *testing.T, dir string) []rundir.Metrics {
	t.Helper()
	return lines[rundir.Metrics](t, filepath.Join(dir, "metrics.jsonl"))
}
