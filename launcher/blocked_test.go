package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/inspect"
)

// blockedRun is a run of testdata/blocked.
type blockedRun struct {
	*underWay
	errs bytes.Buffer
}

func beginBlocked(t *testing.T, workers, timeout string, args ...string) *blockedRun {
	t.Helper()
	flags := []string{"run", "--plain", "--threads", "1", "--run-dir", "run", "--workers", workers, "--call-timeout", timeout}
	if timeout != "10m" { // else missed heartbeats and suspension come first
		flags = append(flags, "--detect", "10s")
	}
	flags = append(flags, blocked)
	r := &blockedRun{underWay: &underWay{t: t, cmd: launch(t, append(flags, args...)...)}}
	r.cmd.Stdout, r.cmd.Stderr = &r.out, &r.errs
	r.dir = filepath.Join(r.cmd.Dir, "run")
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.cmd.Process.Kill(); r.cmd.Wait() })
	return r
}

// wait returns the exit status.
func (r *blockedRun) wait() int {
	r.t.Helper()
	var exit *exec.ExitError
	if err := r.cmd.Wait(); err != nil && !errors.As(err, &exit) {
		r.t.Fatal(err)
	}
	return r.cmd.ProcessState.ExitCode()
}

func (r *blockedRun) summary() (s rundir.Summary) {
	r.t.Helper()
	text, err := os.ReadFile(filepath.Join(r.dir, "summary.json"))
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

// status returns what launcher status says.
func (r *blockedRun) status() (s inspect.Status) {
	cmd := exec.Command(binary, "status", "--json", "run")
	cmd.Dir = r.cmd.Dir
	text, err := cmd.Output()
	if err != nil || json.Unmarshal(text, &s) != nil {
		return inspect.Status{} // not yet
	}
	return s
}

// waits waits until launcher status names a call of a worker.
func (r *blockedRun) waits(worker int, call string) {
	r.t.Helper()
	await(r.t, "status to name "+call, func() bool {
		for _, w := range r.status().Workers {
			if w.ID == worker && strings.HasPrefix(w.Call, call) && w.Since != "" {
				return true
			}
		}
		return false
	})
}

// interrupt is Ctrl-C.
func (r *blockedRun) interrupt() {
	r.t.Helper()
	if err := r.cmd.Process.Signal(os.Interrupt); err != nil {
		r.t.Fatal(err)
	}
}

// A worker whose call does not return is named, evicted with its stacks in its log, and the others end with the same bits.
func TestBlockedCall(t *testing.T) {
	built(t)
	t.Parallel()
	undisturbed := beginBlocked(t, "1", "1m")
	if status := undisturbed.wait(); status != 0 {
		t.Fatalf("status %d\n%s", status, &undisturbed.errs)
	}
	want := undisturbed.summary().ParamsSHA256
	for _, c := range []struct{ block, call, function string }{
		{"sample", "Sample(", "main.block("},
		{"forward", `Forward of layer "1"`, "main.block("},
		{"backward", `Backward of layer "1"`, "main.block("},
		{"spin", `Forward of layer "1"`, "main.spin("},
	} {
		t.Run(c.block, func(t *testing.T) {
			t.Parallel()
			r := beginBlocked(t, "3", "4s", "--block", c.block)
			r.waits(1, c.call)
			if status := r.wait(); status != 0 {
				t.Fatalf("status %d\n%s", status, &r.errs)
			}
			if s := r.summary(); s.ParamsSHA256 != want || s.WorkersLost != 1 {
				t.Errorf("params_sha256 %s with %d workers lost, want %s", s.ParamsSHA256, s.WorkersLost, want)
			}
			for _, kind := range []string{"blocked", "evict"} {
				e := r.events(kind)
				if len(e) != 1 || e[0].Worker != 1 || !strings.HasPrefix(e[0].Reason, "worker 1: "+c.call) || !strings.Contains(e[0].Reason, " has not returned for ") {
					t.Errorf("%s: %+v", kind, e)
				}
			}
			log, err := os.ReadFile(filepath.Join(r.dir, "log", "worker-1.0.log"))
			if err != nil || !bytes.Contains(log, []byte("SIGQUIT: "+c.call)) || !bytes.Contains(log, []byte(c.function)) {
				t.Errorf("%v, log:\n%s", err, log)
			}
		})
	}
}

// Where all others wait for a call, the run continues without its worker long before the call counts as failed. When it has returned, the worker
// joins again.
func TestSuspendedCall(t *testing.T) {
	built(t)
	t.Parallel()
	for _, call := range []string{"sample", "forward", "backward"} {
		t.Run(call, func(t *testing.T) {
			t.Parallel()
			returns := filepath.Join(t.TempDir(), "returns")
			r := beginBlocked(t, "3", "10m", "--block", call, "--until", returns, "--steps", "1000000", "--eval-every", "0")
			r.until("evict", 1)
			if e := r.events("evict")[0]; e.Worker != 1 || !strings.Contains(e.Reason, "and all others wait") {
				t.Errorf("%+v", e)
			}
			if err := os.WriteFile(returns, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			r.until("joined", 1)
			r.interrupt()
			if status := r.wait(); status != 130 {
				t.Errorf("status %d\n%s", status, &r.errs)
			}
			if s := r.summary(); s.WorkersLost != 1 || s.WorkersJoined != 1 || s.Rollbacks != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// Where no worker can continue, the run says so and waits, and Ctrl-C ends it.
func TestAllBlocked(t *testing.T) {
	built(t)
	t.Parallel()
	r := beginBlocked(t, "2", "1s", "--block", "sample", "--who", "-1")
	r.until("hold", 1)
	if e := r.events("hold")[0]; !strings.Contains(e.Reason, "has not returned for ") || !strings.Contains(e.Reason, "launcher stop") {
		t.Errorf("%+v", e)
	}
	r.interrupt()
	if status := r.wait(); status != 130 || !strings.Contains(r.errs.String(), "without a checkpoint, since worker ") {
		t.Errorf("status %d\n%s", status, &r.errs)
	}
}

// A run with a blocked call stops: the others commit without its worker.
func TestStopWhileBlocked(t *testing.T) {
	built(t)
	t.Parallel()
	r := beginBlocked(t, "2", "10s", "--block", "forward")
	r.waits(1, "Forward")
	r.interrupt()
	status := r.wait()
	if s := r.summary(); status != 130 || s.StoppedBy != "interrupt" || s.WorkersLost != 1 || len(r.events("checkpoint")) != 1 {
		t.Errorf("status %d, %+v\n%s", status, s, &r.errs)
	}

	r = beginBlocked(t, "1", "0", "--block", "spin", "--who", "0")
	r.until("start", 1)
	r.interrupt()
	await(t, "the run to hear of it", func() bool { return len(r.events("stop")) == 1 })
	r.interrupt()
	if status := r.wait(); status != 130 {
		t.Errorf("status %d\n%s", status, &r.errs)
	}
}

// The same before training: the call is named, and ends the run after ten times as long.
func TestBlockedBeforeTraining(t *testing.T) {
	built(t)
	t.Run("evict", func(t *testing.T) {
		t.Parallel()
		r := beginBlocked(t, "2", "1s", "--block", "job", "--after", "1")
		r.waits(1, "the job")
		if status := r.wait(); status != 1 || !strings.Contains(r.errs.String(), "worker 1: the job has not returned for 1") || !strings.Contains(r.errs.String(), "main.block(") {
			t.Errorf("status %d\n%s", status, &r.errs)
		}
	})
	for _, c := range []struct {
		name string
		stop func(r *blockedRun) error
		exit int
	}{
		{"Ctrl-C", func(r *blockedRun) error { return r.cmd.Process.Signal(os.Interrupt) }, 130},
		{"SIGTERM", func(r *blockedRun) error { return r.cmd.Process.Signal(syscall.SIGTERM) }, 75},
		{"launcher stop", func(r *blockedRun) error {
			cmd := exec.Command(binary, "stop", "run")
			cmd.Dir = r.cmd.Dir
			return cmd.Run()
		}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := beginBlocked(t, "2", "5s", "--block", "check")
			r.waits(1, "Sample(")
			began := time.Now()
			if err := c.stop(r); err != nil {
				t.Fatal(err)
			}
			if status := r.wait(); status != c.exit || time.Since(began) > 30*time.Second {
				t.Errorf("status %d after %v\n%s", status, time.Since(began), &r.errs)
			}
		})
	}
}
