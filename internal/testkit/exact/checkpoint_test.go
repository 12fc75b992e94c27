package exact

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/trainer"
)

// broken is a run under way that a test does harm to.
type broken struct {
	t    *testing.T
	dir  string
	cmd  *exec.Cmd
	out  bytes.Buffer
	exit chan error
}

// begin starts a command of the launcher on a run directory.
func begin(t *testing.T, dir string, args ...string) *broken {
	t.Helper()
	b := &broken{t: t, dir: dir, cmd: exec.Command(args[0], args[1:]...), exit: make(chan error, 1)}
	b.cmd.Stdout, b.cmd.Stderr = &b.out, &b.out
	if err := b.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { b.exit <- b.cmd.Wait() }()
	t.Cleanup(func() { _ = b.cmd.Process.Kill() })
	return b
}

// until waits until ok, which looks at the files of the run.
func (b *broken) until(what string, ok func() bool) {
	b.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case err := <-b.exit:
			b.t.Fatalf("ended before %s: %v\n%s", what, err, b.out.String())
		case <-tick.C:
		}
	}
}

// end waits for the end of the command.
func (b *broken) end(status int) string {
	b.t.Helper()
	var exit *exec.ExitError
	if err := <-b.exit; err != nil && !errors.As(err, &exit) || b.cmd.ProcessState.ExitCode() != status {
		b.t.Fatalf("%v, want status %d\n%s", err, status, b.out.String())
	}
	return b.out.String()
}

// saved returns the steps of the checkpoints that can be used, newest first.
func saved(t *testing.T, dir string) (steps []int) {
	t.Helper()
	entries, err := checkpoint.List(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Err == nil {
			steps = append(steps, e.Step)
		}
	}
	return steps
}

// lines reads a line file.
func lines[T any](t *testing.T, dir, name string) (all []T) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	whole := raw[:bytes.LastIndexByte(raw, '\n')+1]
	for line := range bytes.Lines(whole) {
		var v T
		if err := json.Unmarshal(line, &v); err != nil {
			t.Fatalf("%s: %v in %q", name, err, line)
		}
		all = append(all, v)
	}
	return all
}

// sameRun holds a run directory against that of an undisturbed run: the last line of every step, the
// hashes, and versions of plans that grow.
func sameRun(t *testing.T, dir, undisturbed string) trainer.Summary {
	t.Helper()
	var s, want trainer.Summary
	for d, v := range map[string]*trainer.Summary{dir: &s, undisturbed: &want} {
		raw, err := os.ReadFile(filepath.Join(d, "summary.json"))
		if err == nil {
			err = json.Unmarshal(raw, v)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if s.ParamsSHA256 != want.ParamsSHA256 || s.StateSHA256 != want.StateSHA256 || s.Steps != want.Steps || s.StoppedBy != "" {
		t.Errorf("params_sha256 %s, state_sha256 %s after %d steps, stopped by %q, want %s and %s after %d",
			s.ParamsSHA256, s.StateSHA256, s.Steps, s.StoppedBy, want.ParamsSHA256, want.StateSHA256, want.Steps)
	}
	last := func(dir string) map[int]string {
		steps := make(map[int]string)
		plans := make(map[int]uint64)
		for _, m := range lines[rundir.Metrics](t, dir, "metrics.jsonl") {
			if at, ok := plans[m.Step]; ok && m.Plan <= at {
				t.Errorf("step %d appears again under plan %d after plan %d", m.Step, m.Plan, at)
			}
			plans[m.Step] = m.Plan
			val := 0.0
			if m.ValLoss != nil {
				val = *m.ValLoss
			}
			steps[m.Step] = fmt.Sprint(m.Loss, m.LR, m.GradNorm, m.Tokens, val)
		}
		return steps
	}
	if got, want := last(dir), last(undisturbed); !maps.Equal(got, want) {
		t.Errorf("metrics\n%v\nwant\n%v", got, want)
	}
	var newest id.Version
	for _, line := range lines[rundir.Plan](t, dir, "plans.jsonl") {
		p, err := plan.Parse(line.Plan)
		if err != nil {
			t.Fatal(err)
		}
		if p.Version.Compare(newest) <= 0 {
			t.Errorf("plan %v follows plan %v", p.Version, newest)
		}
		newest = p.Version
	}
	return s
}

// TestCheckpoints ends runs in the middle, and sees them go on from checkpoints with the bits of
// an undisturbed one.
func TestCheckpoints(t *testing.T) {
	launcher, gpt := programs(t)
	args := strings.Fields("--layers 3 --width 48 --heads 4 --context 32 --global-batch 12 --micro-batch 1 --steps 60 --eval-every 15 --data " + corpus)
	undisturbed := filepath.Join(t.TempDir(), "run")
	launchIn(t, undisturbed, launcher, append([]string{"--workers", "2", gpt}, args...)...)

	start := func(t *testing.T, every, program string, flags ...string) *broken {
		dir := filepath.Join(t.TempDir(), "run")
		all := append([]string{launcher, "run", "--plain", "--threads", "1", "--run-dir", dir}, flags...)
		return begin(t, dir, append(append(all, program, "--checkpoint-every", every), args...)...)
	}
	goOn := func(t *testing.T, dir string, flags ...string) string {
		t.Helper()
		return begin(t, dir, append([]string{launcher, "resume", "--plain", "--threads", "1", dir}, flags...)...).end(0)
	}
	steps := func(b *broken, n int) func() bool {
		return func() bool { return len(lines[rundir.Metrics](b.t, b.dir, "metrics.jsonl")) >= n }
	}

	t.Run("stopped", func(t *testing.T) {
		for i, c := range [][2][]string{
			{{"--workers", "4", "--stages", "2"}, {"--workers", "3", "--stages", "1"}},
			{{"--workers", "1"}, {"--workers", "3", "--stages", "3", "--mirrors", "2"}},
		} {
			// One from a package, which is built again.
			program := []string{"../../../examples/gpt", gpt}[i]
			b := start(t, "-1s", program, c[0]...)
			b.until("step 3", steps(b, 3))
			if err := b.cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			out := b.end(130)
			at := saved(t, b.dir)
			if len(at) != 1 || at[0] < 3 {
				t.Fatalf("checkpoints of steps %v\n%s", at, out)
			}
			if want := fmt.Sprintf("launcher: interrupted after step %d of 60; to go on: launcher resume %s\n", at[0], b.dir); !strings.Contains(out, want) {
				t.Errorf("%s\nwant %s", out, want)
			}
			goOn(t, b.dir, c[1]...)
			sameRun(t, b.dir, undisturbed)
			if n := len(lines[rundir.Metrics](t, b.dir, "metrics.jsonl")); n != 60 {
				t.Errorf("%d lines in metrics.jsonl, and no step was lost", n)
			}
			if out := begin(t, b.dir, launcher, "resume", b.dir).end(1); !strings.Contains(out, "all 60 steps are done") {
				t.Error(out)
			}
		}
	})

	t.Run("without the launcher", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "run")
		b := begin(t, dir, append([]string{gpt, "--plain", "--run-dir", dir, "--threads=1"}, args...)...)
		b.until("step 3", steps(b, 3))
		if err := b.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		b.end(75)
		goOn(t, dir, "--workers", "2")
		sameRun(t, dir, undisturbed)
	})

	t.Run("killed", func(t *testing.T) {
		b := start(t, "20ms", gpt, "--workers", "3", "--stages", "2")
		b.until("three checkpoints", func() bool { return len(saved(t, b.dir)) >= 3 })
		_ = b.cmd.Process.Kill()
		b.end(-1)
		at := saved(t, b.dir)
		// The newest is altered, the one before cut off.
		harm := func(step int, f func(*os.File) error) string {
			files, err := filepath.Glob(filepath.Join(b.dir, fmt.Sprintf("checkpoints/step-%08d/*.safetensors", step)))
			if err != nil || len(files) == 0 {
				t.Fatal(files, err)
			}
			f1, err := os.OpenFile(files[0], os.O_RDWR, 0)
			if err == nil {
				err = errors.Join(f(f1), f1.Close())
			}
			if err != nil {
				t.Fatal(err)
			}
			name, err := filepath.Rel(b.dir, files[0])
			if err != nil {
				t.Fatal(err)
			}
			return name
		}
		altered := harm(at[0], func(f *os.File) error { _, err := f.WriteAt([]byte("x"), 3000); return err })
		cut := harm(at[1], func(f *os.File) error { return f.Truncate(2000) })
		// And a line was being written.
		f, err := os.OpenFile(filepath.Join(b.dir, "metrics.jsonl"), os.O_WRONLY|os.O_APPEND, 0)
		if err == nil {
			_, err = f.WriteString(`{"step":6`)
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
		out := goOn(t, b.dir, "--workers", "2")
		for _, want := range []string{"launcher: " + altered + ": altered: ", "launcher: " + cut + ": truncated: "} {
			if !strings.Contains(out, want) {
				t.Errorf("%s\nwant %s", out, want)
			}
		}
		sameRun(t, b.dir, undisturbed)
		resumed := slices.ContainsFunc(lines[rundir.Event](t, b.dir, "events.jsonl"), func(e rundir.Event) bool {
			return e.Kind == "resume" && strings.HasPrefix(e.Reason, fmt.Sprintf("step %d of 60", at[2]+1))
		})
		if !resumed {
			t.Errorf("it did not go on from step %d", at[2])
		}
	})

	t.Run("owner and mirror killed", func(t *testing.T) {
		b := start(t, "20ms", gpt, "--workers", "4", "--stages", "2")
		b.until("a checkpoint", func() bool {
			return slices.ContainsFunc(lines[rundir.Event](t, b.dir, "events.jsonl"), func(e rundir.Event) bool { return e.Kind == "checkpoint" })
		})
		p, err := plan.Parse(lines[rundir.Plan](t, b.dir, "plans.jsonl")[0].Plan)
		if err != nil {
			t.Fatal(err)
		}
		ws, err := rundir.ReadWorkers(b.dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range ws.Workers {
			if sh := p.Shards[0]; w.ID == int(sh.Owner) || w.ID == int(sh.Mirrors[0]) {
				_ = syscall.Kill(w.PID, syscall.SIGKILL)
			}
		}
		out := b.end(0)
		if s := sameRun(t, b.dir, undisturbed); s.Rollbacks != 1 || s.WorkersLost != 2 {
			t.Errorf("%d rollbacks, %d workers lost\n%s", s.Rollbacks, s.WorkersLost, out)
		}
		back := slices.ContainsFunc(lines[rundir.Event](t, b.dir, "events.jsonl"), func(e rundir.Event) bool {
			return e.Kind == "rollback" && e.Reason != "the run goes back to step 0"
		})
		if !back {
			t.Error("it did not go back to a checkpoint")
		}
	})

	t.Run("refused", func(t *testing.T) {
		mine := filepath.Join(t.TempDir(), "gpt")
		code, err := os.ReadFile(gpt)
		if err == nil {
			err = os.WriteFile(mine, code, 0o700)
		}
		if err != nil {
			t.Fatal(err)
		}
		b := start(t, "0", mine, "--workers", "2")
		b.until("step 1", steps(b, 1))
		if out := begin(t, b.dir, launcher, "resume", b.dir).end(2); !strings.Contains(out, "is in use by another run") {
			t.Error(out)
		}
		_ = b.cmd.Process.Kill()
		b.end(-1)
		if out := begin(t, b.dir, launcher, "resume", b.dir).end(1); !strings.Contains(out, "nothing to resume from: there is no whole checkpoint") {
			t.Error(out)
		}
		b = start(t, "20ms", mine, "--workers", "2")
		b.until("a checkpoint", func() bool { return len(saved(t, b.dir)) >= 1 })
		_ = b.cmd.Process.Kill()
		b.end(-1)
		if err := os.WriteFile(mine+".new", append(code, 'x'), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(mine+".new", mine); err != nil {
			t.Fatal(err)
		}
		if out := begin(t, b.dir, launcher, "resume", b.dir).end(1); !strings.Contains(out, "if that is meant, give --allow program") {
			t.Error(out)
		}
	})
}
