package lab

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

// Lab runs the launcher's binary, and an injector of faults beside it.
type Lab struct {
	Dir  string // of the binaries and the runs
	Root string // of the module
	Runs int
}

// NewLab builds the binaries.
func NewLab() (*Lab, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return nil, fmt.Errorf("go env GOMOD: %w", err)
	}
	l := &Lab{Root: filepath.Dir(strings.TrimSpace(string(out)))}
	if l.Dir, err = os.MkdirTemp("", "soliton-bench"); err != nil {
		return nil, err
	}
	cmd := exec.Command("go", "build", "-o", l.Dir+"/", "./launcher", "./examples/gpt", "./bench/injector")
	cmd.Dir = l.Root
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, errors.Join(fmt.Errorf("go build: %w\n%s", err, out), os.RemoveAll(l.Dir))
	}
	return l, nil
}

// Trial is a run to be made.
type Trial struct {
	Flags     []string      // of launcher run
	Program   []string      // flags of the GPT
	Corpus    string        // what it trains on; "" for the corpus of the module
	Faults    string        // for the injector; "" for none
	Protected bool          // also for it
	Tell      bool          // the same
	Stop      time.Duration // after which the run is asked to stop; 0 for never
	Limit     time.Duration
}

// Outcome is what was seen of a run.
type Outcome struct {
	Dir      string
	Output   string // of the launcher
	Status   int
	Hung     bool // it took longer than its limit, and was made to tell its goroutines
	Sum      rundir.Summary
	Events   []rundir.Event
	Plans    []rundir.Plan
	Metrics  []string     // what the job decides of each step
	StepMS   []float64    // time of each committed step, in their order
	Roots    []trace.Span // of recoveries, as traces.jsonl has them
	Injected []Injected
	Gone     map[int]int64 // when each worker ended, on the injector's clock
	Seen     []Seen
	left     []string // processes and files that outlived the launcher
}

// Injected and seen are what the injector writes of faults and of recoveries.
type Injected struct {
	Fault        string
	PID          int
	AtNS, WallNS int64
	Error        string
}

// Seen is when the injector saw a recovery in events.jsonl.
type Seen struct {
	Recovered rundir.Event
	SeenNS    int64
}

// mark is in the environment of all processes of a run.
const mark = "SOLITON_BENCH_RUN="

// Run makes a run. Its error is one of the bench; how the run went is in the outcome.
func (l *Lab) Run(t Trial) (Outcome, error) {
	l.Runs++
	o := Outcome{Dir: filepath.Join(l.Dir, fmt.Sprintf("run-%d", l.Runs)), Gone: make(map[int]int64)}
	temp := filepath.Join(l.Dir, fmt.Sprintf("tmp-%d", l.Runs))
	if err := os.Mkdir(temp, 0o700); err != nil {
		return o, err
	}
	defer os.RemoveAll(temp)
	args := append([]string{"run", "--plain", "--run-dir", o.Dir}, t.Flags...)
	args = append(args, filepath.Join(l.Dir, "gpt"), "--data", cmp.Or(t.Corpus, filepath.Join(l.Root, "internal/testkit/exact/testdata/corpus")))
	cmd := exec.Command(filepath.Join(l.Dir, "launcher"), append(args, t.Program...)...)
	cmd.Env = append(os.Environ(), mark+o.Dir, "TMPDIR="+temp)
	var text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, &text
	if err := cmd.Start(); err != nil {
		return o, err
	}
	var finish func() error
	if t.Faults != "" {
		var err error
		if finish, err = l.stand(t, &o, cmd.Process.Pid); err != nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			return o, err
		}
	}
	if t.Stop > 0 {
		defer time.AfterFunc(t.Stop, func() { _ = cmd.Process.Signal(os.Interrupt) }).Stop()
	}
	ctx, cancel := context.WithTimeout(context.Background(), t.Limit)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait() // the state tells
	}()
	select {
	case <-ended:
	case <-ctx.Done():
		o.Hung = true
		tell(cmd.Process, o.Dir, ended)
	}
	cancel()
	o.Status, o.Output = cmd.ProcessState.ExitCode(), text.String()
	if finish != nil {
		if err := finish(); err != nil {
			return o, err
		}
	}
	for _, pid := range Marked(o.Dir) {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		o.left = append(o.left, fmt.Sprintf("process %d %q", pid, line))
	}
	err := filepath.WalkDir(temp, func(path string, _ fs.DirEntry, err error) error {
		if path != temp {
			o.left = append(o.left, path)
		}
		return err
	})
	return o, errors.Join(err, o.Read())
}

// stand starts the injector; what is returned ends it and reads what it has written.
func (l *Lab) stand(t Trial, o *Outcome, launcher int) (finish func() error, err error) {
	cmd := exec.Command(filepath.Join(l.Dir, "injector"), "-run", o.Dir, "-launcher", fmt.Sprint(launcher), "-faults", t.Faults,
		fmt.Sprintf("-protected=%v", t.Protected), fmt.Sprintf("-tell=%v", t.Tell))
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
				o.Injected = append(o.Injected, Injected{line.Fault, line.PID, line.AtNS, line.WallNS, line.Error})
			case line.Gone != nil:
				o.Gone[*line.Gone] = line.AtNS
			default:
				o.Seen = append(o.Seen, Seen{line.Recovered, line.SeenNS})
			}
		}
	}, nil
}

// Marked returns the processes of a run.
func Marked(dir string) (pids []int) {
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
	for _, pid := range Marked(dir) {
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

// Read reads the run directory as far as it is there.
func (o *Outcome) Read() error {
	raw, err := os.ReadFile(filepath.Join(o.Dir, "summary.json"))
	if err == nil {
		err = json.Unmarshal(raw, &o.Sum)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if o.Events, err = Lines[rundir.Event](o.Dir, "events.jsonl"); err != nil {
		return err
	}
	if o.Plans, err = Lines[rundir.Plan](o.Dir, "plans.jsonl"); err != nil {
		return err
	}
	spans, err := os.Open(filepath.Join(o.Dir, "traces.jsonl"))
	if err == nil {
		err = trace.Read(spans, func(s trace.Span) {
			if s.Name == trace.Recovery && s.Parent == (trace.SpanID{}) {
				o.Roots = append(o.Roots, s)
			}
		})
		_ = spans.Close()
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// After a rollback a step is there again, and its last line counts.
	steps := make(map[int]rundir.Metrics)
	all, err := Lines[rundir.Metrics](o.Dir, "metrics.jsonl")
	if err != nil {
		return err
	}
	for _, m := range all {
		o.StepMS = append(o.StepMS, m.MS)
		steps[m.Step] = rundir.Metrics{Step: m.Step, Loss: m.Loss, LR: m.LR, GradNorm: m.GradNorm, Tokens: m.Tokens, ValLoss: m.ValLoss}
	}
	for _, m := range steps {
		line, err := json.Marshal(m)
		if err != nil {
			return err
		}
		o.Metrics = append(o.Metrics, string(line))
	}
	slices.Sort(o.Metrics)
	return nil
}

// Lines reads a line file of a run.
func Lines[T any](dir, name string) (all []T, err error) {
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

// Differs says in what a run differs from an undisturbed one of the same job; "" if in
// nothing.
func (o *Outcome) Differs(want *Outcome) string {
	switch {
	case o.Hung:
		return "it hung"
	case o.Status != 0:
		return fmt.Sprintf("exit status %d", o.Status)
	case o.Sum.ParamsSHA256 != want.Sum.ParamsSHA256:
		return fmt.Sprintf("params_sha256 %s, want %s", o.Sum.ParamsSHA256, want.Sum.ParamsSHA256)
	case o.Sum.StateSHA256 != want.Sum.StateSHA256:
		return fmt.Sprintf("state_sha256 %s, want %s", o.Sum.StateSHA256, want.Sum.StateSHA256)
	case !slices.Equal(o.Metrics, want.Metrics):
		for i, m := range want.Metrics {
			if i >= len(o.Metrics) || o.Metrics[i] != m {
				got := "nothing"
				if i < len(o.Metrics) {
					got = o.Metrics[i]
				}
				return fmt.Sprintf("metrics: %s, want %s", got, m)
			}
		}
		return fmt.Sprintf("metrics of %d steps, want %d", len(o.Metrics), len(want.Metrics))
	case o.Sum.Steps != want.Sum.Steps || o.Sum.Loss != want.Sum.Loss:
		return "summary.json tells of other steps than metrics.jsonl"
	case len(o.left) > 0:
		return "left behind: " + strings.Join(o.left, ", ")
	}
	return ""
}
