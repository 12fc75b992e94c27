package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// lab runs the launcher's binary, and an injector of faults beside it.
type lab struct {
	dir  string // of the binaries and the runs
	root string // of the module
	runs int
}

func newLab() (*lab, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return nil, fmt.Errorf("go env GOMOD: %w", err)
	}
	l := &lab{root: filepath.Dir(strings.TrimSpace(string(out)))}
	if l.dir, err = os.MkdirTemp("", "soliton-bench"); err != nil {
		return nil, err
	}
	cmd := exec.Command("go", "build", "-o", l.dir+"/", "./launcher", "./examples/gpt", "./bench/injector")
	cmd.Dir = l.root
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, errors.Join(fmt.Errorf("go build: %w\n%s", err, out), os.RemoveAll(l.dir))
	}
	return l, nil
}

// trial is a run to be made.
type trial struct {
	flags     []string // of launcher run
	program   []string // flags of the GPT
	corpus    string   // what it trains on; "" for the corpus of the module
	faults    string   // for the injector; "" for none
	protected bool     // also for it
	tell      bool     // the same
	limit     time.Duration
}

// outcome is what was seen of a run.
type outcome struct {
	dir      string
	output   string // of the launcher
	status   int
	hung     bool // it took longer than its limit, and was made to tell its goroutines
	sum      rundir.Summary
	events   []rundir.Event
	plans    []rundir.Plan
	metrics  []string     // what the job decides of each step
	stepMS   []float64    // time of each committed step, in their order
	roots    []trace.Span // of recoveries, as traces.jsonl has them
	injected []injected
	gone     map[int]int64 // when each worker ended, on the injector's clock
	seen     []seen
	left     []string // processes and files that outlived the launcher
}

// injected and seen are what the injector writes of faults and of recoveries.
type injected struct {
	Fault        string
	PID          int
	AtNS, WallNS int64
	Error        string
}

type seen struct {
	Recovered rundir.Event
	SeenNS    int64
}

// mark is in the environment of all processes of a run.
const mark = "SOLITON_BENCH_RUN="

// run makes a run. Its error is one of the bench; how the run went is in the outcome.
func (l *lab) run(t trial) (outcome, error) {
	l.runs++
	o := outcome{dir: filepath.Join(l.dir, fmt.Sprintf("run-%d", l.runs)), gone: make(map[int]int64)}
	temp := filepath.Join(l.dir, fmt.Sprintf("tmp-%d", l.runs))
	if err := os.Mkdir(temp, 0o700); err != nil {
		return o, err
	}
	defer os.RemoveAll(temp)
	args := append([]string{"run", "--plain", "--run-dir", o.dir}, t.flags...)
	args = append(args, filepath.Join(l.dir, "gpt"), "--data", cmp.Or(t.corpus, filepath.Join(l.root, "internal/testkit/exact/testdata/corpus")))
	cmd := exec.Command(filepath.Join(l.dir, "launcher"), append(args, t.program...)...)
	cmd.Env = append(os.Environ(), mark+o.dir, "TMPDIR="+temp)
	var text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, &text
	if err := cmd.Start(); err != nil {
		return o, err
	}
	var finish func() error
	if t.faults != "" {
		var err error
		if finish, err = l.stand(t, &o, cmd.Process.Pid); err != nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			return o, err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), t.limit)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait() // the state tells
	}()
	select {
	case <-ended:
	case <-ctx.Done():
		o.hung = true
		tell(cmd.Process, o.dir, ended)
	}
	cancel()
	o.status, o.output = cmd.ProcessState.ExitCode(), text.String()
	if finish != nil {
		if err := finish(); err != nil {
			return o, err
		}
	}
	for _, pid := range marked(o.dir) {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		o.left = append(o.left, fmt.Sprintf("process %d %q", pid, line))
	}
	err := filepath.WalkDir(temp, func(path string, _ fs.DirEntry, err error) error {
		if path != temp {
			o.left = append(o.left, path)
		}
		return err
	})
	return o, errors.Join(err, o.read())
}

// stand starts the injector; what is returned ends it and reads what it has written.
func (l *lab) stand(t trial, o *outcome, launcher int) (finish func() error, err error) {
	cmd := exec.Command(filepath.Join(l.dir, "injector"), "-run", o.dir, "-launcher", fmt.Sprint(launcher), "-faults", t.faults,
		fmt.Sprintf("-protected=%v", t.protected), fmt.Sprintf("-tell=%v", t.tell))
	var text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return func() error {
		_ = in.Close()
		if err := cmd.Wait(); err != nil {
			return fmt.Errorf("injector: %w", err)
		}
		for d := json.NewDecoder(&text); ; {
			var line struct {
				Fault        string
				PID          int
				AtNS, WallNS int64
				Error        string
				Gone         *int
				Recovered    rundir.Event
				SeenNS       int64
			}
			if err := d.Decode(&line); errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return fmt.Errorf("injector: %w", err)
			}
			switch {
			case line.Fault != "":
				o.injected = append(o.injected, injected{line.Fault, line.PID, line.AtNS, line.WallNS, line.Error})
			case line.Gone != nil:
				o.gone[*line.Gone] = line.AtNS
			default:
				o.seen = append(o.seen, seen{line.Recovered, line.SeenNS})
			}
		}
	}, nil
}

// marked returns the processes of a run.
func marked(dir string) (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		env, err := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if err == nil && bytes.Contains(append(env, 0), append([]byte(mark+dir), 0)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// tell makes the processes of a run that hangs write what their goroutines do, workers
// into their logs, and ends them. The launcher is stopped while the workers write: as soon
// as it goes, the kernel kills them.
func tell(launcher *os.Process, dir string, ended <-chan struct{}) {
	_ = launcher.Signal(syscall.SIGSTOP)
	for _, pid := range marked(dir) {
		if pid != launcher.Pid {
			_ = syscall.Kill(pid, syscall.SIGQUIT)
			_ = syscall.Kill(pid, syscall.SIGCONT) // it may be frozen
		}
	}
	time.Sleep(2 * time.Second) // nothing tells when they have written
	_ = launcher.Signal(syscall.SIGQUIT)
	_ = launcher.Signal(syscall.SIGCONT)
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		_ = launcher.Kill()
		<-ended
	}
}

// read reads the run directory as far as it is there.
func (o *outcome) read() error {
	raw, err := os.ReadFile(filepath.Join(o.dir, "summary.json"))
	if err == nil {
		err = json.Unmarshal(raw, &o.sum)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if o.events, err = lines[rundir.Event](o.dir, "events.jsonl"); err != nil {
		return err
	}
	if o.plans, err = lines[rundir.Plan](o.dir, "plans.jsonl"); err != nil {
		return err
	}
	spans, err := os.Open(filepath.Join(o.dir, "traces.jsonl"))
	if err == nil {
		err = trace.Read(spans, func(s trace.Span) {
			if s.Name == trace.Recovery && s.Parent == (trace.SpanID{}) {
				o.roots = append(o.roots, s)
			}
		})
		_ = spans.Close()
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// After a rollback a step is there again, and its last line counts.
	steps := make(map[int]rundir.Metrics)
	all, err := lines[rundir.Metrics](o.dir, "metrics.jsonl")
	if err != nil {
		return err
	}
	for _, m := range all {
		o.stepMS = append(o.stepMS, m.MS)
		steps[m.Step] = rundir.Metrics{Step: m.Step, Loss: m.Loss, LR: m.LR, GradNorm: m.GradNorm, Tokens: m.Tokens, ValLoss: m.ValLoss}
	}
	for _, m := range steps {
		line, err := json.Marshal(m)
		if err != nil {
			return err
		}
		o.metrics = append(o.metrics, string(line))
	}
	slices.Sort(o.metrics)
	return nil
}

func lines[T any](dir, name string) (all []T, err error) {
	raw, err := os.ReadFile(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for line := range bytes.Lines(raw) {
		var v T
		if err := json.Unmarshal(line, &v); err != nil {
			return all, fmt.Errorf("%s: %w", name, err)
		}
		all = append(all, v)
	}
	return all, err
}

// differs says in what a run differs from an undisturbed one of the same job; "" if in
// nothing.
func (o *outcome) differs(want *outcome) string {
	switch {
	case o.hung:
		return "it hung"
	case o.status != 0:
		return fmt.Sprintf("exit status %d", o.status)
	case o.sum.ParamsSHA256 != want.sum.ParamsSHA256:
		return fmt.Sprintf("params_sha256 %s, want %s", o.sum.ParamsSHA256, want.sum.ParamsSHA256)
	case o.sum.StateSHA256 != want.sum.StateSHA256:
		return fmt.Sprintf("state_sha256 %s, want %s", o.sum.StateSHA256, want.sum.StateSHA256)
	case !slices.Equal(o.metrics, want.metrics):
		for i, m := range want.metrics {
			if i >= len(o.metrics) || o.metrics[i] != m {
				got := "nothing"
				if i < len(o.metrics) {
					got = o.metrics[i]
				}
				return fmt.Sprintf("metrics: %s, want %s", got, m)
			}
		}
		return fmt.Sprintf("metrics of %d steps, want %d", len(o.metrics), len(want.metrics))
	case o.sum.Steps != want.sum.Steps || o.sum.Loss != want.sum.Loss:
		return "summary.json tells of other steps than metrics.jsonl"
	case len(o.left) > 0:
		return "left behind: " + strings.Join(o.left, ", ")
	}
	return ""
}
