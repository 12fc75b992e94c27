package trainer_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/trainer"
)

// envProgram makes the test binary a training program.
const envProgram = "TRAINER_TEST_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(envProgram) != "" {
		trainer.Main(testProgram)
	}
	goleak.VerifyTestMain(m)
}

func testProgram(f *flag.FlagSet) func() (trainer.Job, error) {
	fail := f.String("fail", "", "fail in this `WAY`")
	width := f.Int("width", 3, "some number")
	f.Bool("unused", false, "a flag with no default to speak of")
	return func() (trainer.Job, error) {
		job := smallJob()
		job.Eval = counts{n: 10}
		job.OnEnd = func(e trainer.End) error {
			_, err := fmt.Fprintf(e.Out, "width %d, steps %d\n", *width, e.Steps)
			return err
		}
		switch *fail {
		case "job":
			return job, errors.New("no such way")
		case "panic":
			panic("boom")
		case "step":
			job.OnStep = func(trainer.StepInfo) error { panic("boom") }
		case "endless":
			job.Steps = 1 << 30
		case "environment":
			for _, name := range []string{control.EnvAgent, control.EnvWorker} {
				if v, ok := os.LookupEnv(name); ok {
					return job, fmt.Errorf("the program's children would get %s=%s", name, v)
				}
			}
			job.Steps = 1 << 30
		case "done":
			return job, &trainer.Done{Text: "nothing to train"}
		}
		return job, nil
	}
}

// command returns the test binary as a training program.
func command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, args...)
	cmd.Args[0] = "./prog"
	cmd.Dir = t.TempDir()
	cmd.Env = append(os.Environ(), envProgram+"=1")
	return cmd
}

func status(t *testing.T, cmd *exec.Cmd) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

func TestMainStatus(t *testing.T) {
	blocked := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(blocked, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args   string
		code   int
		stdout string // patterns
		stderr string
	}{
		{"--steps=3 -width 4 --threads 1", 0, `(?s)step 3/3 .*val_loss.*run directory runs/prog-.*\nwidth 4, steps 3\n$`, `^$`},
		{"--help", 0, `(?s)^Usage: prog \[flags\]\n\nFlags of this program:\n  --fail WAY +fail in this WAY\n  --unused +a flag.*\n  --width N +some number \(default 3\)\n\nStandard flags:.*--global-batch N .*\(default 8\).*--lr X .*\(default 0.1\)`, `^$`},
		{"-h", 0, `^Usage`, `^$`},
		{"--fail done", 0, `^nothing to train\n$`, `^$`},
		{"--stepz 3", 2, `^$`, `^prog: unknown flag --stepz; see --help\n$`},
		{"--steps x", 2, `^$`, `^prog: invalid value "x" for --steps: parse error; see --help\n$`},
		{"--steps", 2, `^$`, `^prog: a value is missing for --steps; see --help\n$`},
		{"rest", 2, `^$`, `^prog: unexpected argument "rest"; see --help\n$`},
		{"--reduction slow", 2, `^$`, `^prog: --reduction slow: give exact or fast; see --help\n$`},
		{"--reduction=", 2, `^$`, `^prog: --reduction "": give exact or fast; see --help\n$`},
		{"--fail job", 2, `^$`, `^prog: no such way\n$`},
		{"--threads -1", 2, `^$`, `^prog: --threads \(Job.Threads\) is -1; .*\n$`},
		{"--micro-batch 3 --lr -1", 2, ``, `^prog: --lr .*; --micro-batch \(Job.MicroBatch\) is 3, .*\n$`},
		{"--run-dir " + blocked, 1, `^$`, `^prog: --run-dir .*file.*\n$`},
		{"--fail panic", 1, `^$`, `(?s)^prog: panic before the first step, in the job: boom\n.*testProgram`},
		{"--fail step", 1, ``, `(?s)^prog: panic in step 1, in OnStep: boom\n.*testProgram`},
		{"--lr 1e30", 1, ``, `^prog: step \d: the .* is not finite .*\n$`},
	} {
		t.Run(c.args, func(t *testing.T) {
			code, stdout, stderr := status(t, command(t, strings.Fields(c.args)...))
			if code != c.code {
				t.Errorf("exit status %d, want %d", code, c.code)
			}
			if !regexp.MustCompile(c.stdout).MatchString(stdout) {
				t.Errorf("standard output does not match %q:\n%s", c.stdout, stdout)
			}
			if !regexp.MustCompile(c.stderr).MatchString(stderr) {
				t.Errorf("standard error does not match %q:\n%s", c.stderr, stderr)
			}
			if n := strings.Count(stderr, "[running]"); n > 1 {
				t.Errorf("%d stacks:\n%s", n, stderr)
			}
		})
	}
}

// TestWorkerConversation plays the agent of a worker process.
func TestWorkerConversation(t *testing.T) {
	nc, theirs, err := control.Pair(auth.NewKey())
	if err != nil {
		t.Fatal(err)
	}
	cmd := command(t, "--fail", "environment")
	cmd.ExtraFiles = []*os.File{theirs}
	id := control.Identity{Conn: 3, WorkerID: 2, Incarnation: 5, Links: t.TempDir()}
	cmd.Env = append(cmd.Env, id.Environ()...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = theirs.Close()
	conn := control.New(nc)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	beats := 0
	receive := func() control.Message {
		t.Helper()
		for {
			m, err := conn.Receive(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if _, beat := m.(control.Beat); !beat {
				return m
			}
			beats++
		}
	}
	if h, ok := receive().(control.Hello); !ok || h.WorkerID != 2 || h.Incarnation != 5 || h.PID != cmd.Process.Pid {
		t.Errorf("hello %+v", h)
	}
	var r control.Ready
	for {
		m := receive()
		if _, note := m.(control.Note); note {
			continue
		}
		var ok bool
		if r, ok = m.(control.Ready); !ok || r.Job.Steps != 1<<30 || r.Job.Parameters == 0 || r.Job.Model != "classifier" || r.Job.Program != "prog" {
			t.Fatalf("%T %+v", m, m)
		}
		break
	}
	cmd.Process.Signal(os.Interrupt) // Ctrl-C is the agent's matter
	var prof plan.Profile
	for _, l := range r.Layers {
		prof.Layers = append(prof.Layers, plan.Layer{Tensors: l.Tensors})
	}
	p, _, err := planner.Next(plan.Plan{}, plan.View{Workers: []plan.Worker{{ID: 2, Incarnation: 5}}}, prof, planner.Event{Micros: r.Job.GlobalBatch / r.Job.MicroBatch})
	if err != nil {
		t.Fatal(err)
	}
	order := control.Order{Plan: p, Peers: []control.Peer{{Worker: p.Workers[0], Addr: r.Addr}}}
	if err := errors.Join(conn.Send(control.Start{Threads: 1, Reduction: "exact"}), conn.Send(order)); err != nil {
		t.Fatal(err)
	}
	if a, ok := receive().(control.Applied); !ok || a.Version != p.Version {
		t.Fatalf("%+v", a)
	}
	for i := 1; i <= 3; i++ {
		if s, ok := receive().(control.Step); !ok || s.Step != i {
			t.Fatalf("step %d: %+v", i, s)
		}
	}
	if beats == 0 {
		t.Error("the worker never said that it lives")
	}
	conn.Close()
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 1 || !strings.Contains(stderr.String(), "agent has ended") {
		t.Errorf("a worker without agent: %v, %s", err, &stderr)
	}
}

// TestTooManyThreads is about a mistyped flag of the launcher. Only the worker bounds it.
func TestTooManyThreads(t *testing.T) {
	err := trainer.StartWith(t, smallJob(), control.Start{Threads: 1 << 30, Reduction: "exact"})
	if err.Kind != control.Usage || !strings.HasPrefix(err.Text, "--threads (Job.Threads) is 1073741824; it must be ") {
		t.Errorf("%+v", err)
	}
}

// TestInterrupt presses Ctrl-C on a program without a launcher.
func TestInterrupt(t *testing.T) {
	for _, c := range []struct {
		signal os.Signal
		code   int
		by     string
	}{{os.Interrupt, 130, "interrupt"}, {syscall.SIGTERM, 75, "terminated"}} {
		cmd := command(t, "--fail", "endless", "--run-dir", "run")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		rest := ""
		signalled := false
		for lines.Scan() {
			if !signalled && strings.HasPrefix(lines.Text(), "step ") {
				signalled = true
				if err := cmd.Process.Signal(c.signal); err != nil {
					t.Fatal(err)
				}
			}
			rest = lines.Text()
		}
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != c.code || strings.Count(stderr.String(), "\n") != 1 {
			t.Errorf("%v: exit status %d, standard error:\n%s", c.signal, code, &stderr)
		}
		if !strings.HasPrefix(rest, "width 3, steps ") {
			t.Errorf("%v: OnEnd did not get its say, the last line is %q", c.signal, rest)
		}
		dir := filepath.Join(cmd.Dir, "run")
		var s trainer.Summary
		b, err := os.ReadFile(filepath.Join(dir, "summary.json"))
		if err == nil {
			err = json.Unmarshal(b, &s)
		}
		if err != nil || s.StoppedBy != c.by || s.Steps < 1 || s.ParamsSHA256 == "" {
			t.Errorf("%v: summary %+v: %v", c.signal, s, err)
		}
		net, err := trainer.Open(smallJob().Model, dir)
		if err != nil {
			t.Errorf("%v: %v", c.signal, err)
			continue
		}
		net.Close()
	}
}
