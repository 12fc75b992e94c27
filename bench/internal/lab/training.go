package lab

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// TrainingBench runs the launcher.
type TrainingBench struct {
	Dir, root string
	Steps     int
	runs      atomic.Int64
}

// Build builds the binaries.
func (b *TrainingBench) Build() error {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return fmt.Errorf("go env GOMOD: %w", err)
	}
	b.root = filepath.Dir(strings.TrimSpace(string(out)))
	cmd := exec.Command("go", "build", "-o", b.Dir+"/", "./launcher", "./examples/gpt")
	cmd.Dir = b.root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
}

// Training is what one run took.
type Training struct {
	Ms    []float64 // of the steps that count
	Bytes int64     // sent by all workers in the run, evaluation and collecting the model included
	Peak  int64     // resident bytes of the largest worker
	CPU   float64   // seconds of processor time of the launcher and its workers
	Hash  string

	Parameters int64 // of the model
}

// Run makes a run, with more variables in its environment. Several may go on at the same time.
func (b *TrainingBench) Run(workers int, flags, program []string, env ...string) (Training, error) {
	dir := filepath.Join(b.Dir, fmt.Sprintf("run-%d", b.runs.Add(1)))
	args := append([]string{"run", "--plain", "--workers", fmt.Sprint(workers), "--threads", "1", "--run-dir", dir}, flags...)
	args = append(args, filepath.Join(b.Dir, "gpt"), "--data", filepath.Join(b.root, "internal/testkit/exact/testdata/corpus"), "--steps", fmt.Sprint(b.Steps))
	args = append(args, program...)
	cmd := exec.Command(filepath.Join(b.Dir, "launcher"), args...)
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return Training{}, fmt.Errorf("launcher %v: %w\n%s", args, err, out)
	}
	// What wait tells of the launcher covers the workers that it waited for.
	used := cmd.ProcessState.SysUsage().(*syscall.Rusage)
	t := Training{Peak: used.Maxrss << 10, CPU: (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()}
	raw, err := os.ReadFile(filepath.Join(dir, "summary.json"))
	if err != nil {
		return t, err
	}
	var sum rundir.Summary
	if err := json.Unmarshal(raw, &sum); err != nil {
		return t, err
	}
	for _, w := range sum.Workers {
		t.Bytes += w.BytesSent
	}
	var job rundir.Job
	if raw, err = os.ReadFile(filepath.Join(dir, "job.json")); err != nil {
		return t, err
	}
	if err := json.Unmarshal(raw, &job); err != nil {
		return t, err
	}
	t.Parameters = job.Parameters
	t.Hash = sum.ParamsSHA256
	lines, err := os.Open(filepath.Join(dir, "metrics.jsonl"))
	if err != nil {
		return t, err
	}
	defer lines.Close()
	for s := bufio.NewScanner(lines); s.Scan(); {
		var m rundir.Metrics
		if err := json.Unmarshal(s.Bytes(), &m); err != nil {
			return t, err
		}
		if m.Step > 2 {
			t.Ms = append(t.Ms, m.MS)
		}
	}
	return t, os.RemoveAll(dir)
}

// compare runs exact and fast in turns; which of them is first changes with
// every pair.
