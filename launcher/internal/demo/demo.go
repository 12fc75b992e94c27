// Package demo is launcher demo: one job twice, side by side, once with faults.
package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/host"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/inspect"
)

const (
	demoWorkers = 4
	demoStages  = 2
	demoSteps   = 150                    // unless --steps says otherwise
	demoLook    = 100 * time.Millisecond // between looks at the runs' files
	demoGrace   = 5 * time.Second        // for a run to end by itself after Ctrl-C
)

// NewCommand returns the command.
func NewCommand() *cobra.Command {
	var plain bool
	var dir string
	var steps int
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Train one job twice, once with faults, and compare",
		Long: fmt.Sprintf(`demo trains the same small job twice at the same time, each run with %d workers in %d pipeline
stages. The left run is undisturbed. In the right run, demo kills a worker, freezes another, adds
two and kills one more, with the commands that you can use on any run: launcher kill, freeze
and add. At the end it compares the parameters of both runs, bit by bit, and lists the time to each
recovery.

It takes less than a minute and needs nothing but this executable. Its exit status is 0 only
when the parameters are equal.`, demoWorkers, demoStages),
		Example: `  launcher demo
  launcher demo --plain --run-dir /tmp/demo`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("unexpected argument %q: demo takes flags only", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("run-dir") && dir == "" {
				return errors.New("--run-dir: give the name of a directory")
			}
			if err := cli.Within("steps", steps, 1, math.MaxInt32); err != nil {
				return err
			}
			return demo(cmd.Context(), dir, steps, plain, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&dir, "run-dir", "", "`directory` for both run directories (default runs/demo-TIME)")
	cmd.Flags().IntVar(&steps, "steps", demoSteps, "steps of the job")
	cmd.Flags().BoolVar(&plain, "plain", false, "no live terminal view")
	return cmd
}

// demoRun is one of the two runs, seen through its run directory as any other process could.
type demoRun struct {
	dir    string
	steps  int
	show   func(view.Event)
	cmd    *exec.Cmd
	output *os.File
	ended  chan error // gets the result of Wait

	began           bool
	plan            string   // newest that was shown
	metrics, events cli.Tail // line files of the run
	step            int      // newest committed
	seen            []rundir.Event
	summary         *rundir.Summary
}

// news calls take with every value that a line file has got since the last call.
func news[T any](file *cli.Tail, take func(T)) error {
	return file.Lines(false, func(line []byte) error {
		var v T
		if err := json.Unmarshal(line, &v); err != nil {
			return fmt.Errorf("%s: %w", file.Path, err)
		}
		take(v)
		return nil
	})
}

// demo runs the demonstration in a directory, "" for a new one below runs.
func demo(ctx context.Context, dir string, steps int, plain bool, stdout io.Writer) error {
	// Both runs end with the thread that starts them, should this process be killed.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	if dir == "" {
		dir = filepath.Join(rundir.Parent, "demo-"+time.Now().Format("20060102-150405"))
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return cli.Fail(fmt.Errorf("--run-dir %s: %w", dir, err))
	}
	data := filepath.Join(dir, "sums.txt")
	if err := os.WriteFile(data, []byte(sums(4000)), 0o644); err != nil {
		return cli.Fail(fmt.Errorf("--run-dir %s: %w", dir, err))
	}
	signals := make(chan os.Signal, 2)
	platform.NotifyEnd(signals)
	defer signal.Stop(signals)

	names := [2]string{"undisturbed", "with faults"}
	pair := view.OpenPair(view.Options{Plain: plain}, names)
	defer pair.Close()
	var runs [2]*demoRun
	for i := range runs {
		r, err := startDemoRun(filepath.Join(dir, strings.ReplaceAll(names[i], " ", "-")), data, steps, func(e view.Event) { pair.Show(i, e) })
		if err != nil {
			endDemoRuns(runs[:i])
			return cli.Fail(err)
		}
		defer r.metrics.Close()
		defer r.events.Close()
		runs[i] = r
	}
	s := &script{run: runs[1], pair: pair}
	reason, err := watchDemo(ctx, runs, s, signals)
	pair.Close()
	if err == nil && reason == "" {
		err = compareDemo(runs, s, stdout)
	} else {
		endDemoRuns(runs[:])
	}
	switch {
	case reason != "":
		stopped := &session.StoppedError{Reason: reason}
		if r := runs[1]; r.began {
			stopped.Step, stopped.Steps = r.step, r.steps
		}
		return cli.Report(session.Outcome{Err: stopped}, stdout, os.Stderr)
	case err != nil:
		return cli.Fail(fmt.Errorf("%w; %s has the files of both runs", err, dir))
	}
	fmt.Fprintf(stdout, "%s has the files of both runs; launcher trace %s shows each recovery\n", dir, runs[1].dir)
	return nil
}

// startDemoRun starts launcher run with this executable as the program.
func startDemoRun(dir, data string, steps int, show func(view.Event)) (*demoRun, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	output, err := os.Create(dir + ".log")
	if err != nil {
		return nil, err
	}
	r := &demoRun{dir: dir, steps: steps, show: show, output: output, ended: make(chan error, 1)}
	r.metrics.Path, r.events.Path = filepath.Join(dir, "metrics.jsonl"), filepath.Join(dir, "events.jsonl")
	r.cmd = exec.Command(self, "run", "--plain", "--run-dir", dir, "--workers", strconv.Itoa(demoWorkers), "--stages", strconv.Itoa(demoStages),
		"--threads", "1", self, Job, "--data", data, "--steps", strconv.Itoa(steps))
	r.cmd.Stdout, r.cmd.Stderr = output, output
	r.cmd.SysProcAttr = platform.ChildAttr(syscall.SIGTERM)
	if err := r.cmd.Start(); err != nil {
		_ = output.Close()
		return nil, err
	}
	go func() {
		r.ended <- r.cmd.Wait()
		close(r.ended)
	}()
	return r, nil
}

// endDemoRuns ends runs at once and waits for them.
func endDemoRuns(runs []*demoRun) {
	for range 2 { // the first asks, the second insists
		for _, r := range runs {
			_ = r.cmd.Process.Signal(os.Interrupt)
		}
	}
	late := time.After(demoGrace)
	for _, r := range runs {
		select {
		case <-r.ended:
		case <-late:
			_ = r.cmd.Process.Kill()
			<-r.ended
		}
		_ = r.output.Close()
	}
}

// watchDemo shows both runs and plays the script until both have ended.
func watchDemo(ctx context.Context, runs [2]*demoRun, s *script, signals <-chan os.Signal) (stop session.Reason, err error) {
	look := time.NewTicker(demoLook)
	defer look.Stop()
	left, right := runs[0].ended, runs[1].ended
	for left != nil || right != nil {
		var ended *demoRun
		var result error
		select {
		case <-look.C:
		case result = <-left:
			ended, left = runs[0], nil
		case result = <-right:
			ended, right = runs[1], nil
		case sig := <-signals:
			return host.ReasonOf(sig), nil
		case <-ctx.Done():
			return session.Cancelled, nil
		}
		for _, r := range runs {
			if err := r.look(); err != nil {
				return "", err
			}
		}
		if ended != nil {
			_ = ended.output.Close()
			if result != nil || ended.summary == nil {
				text, _ := os.ReadFile(ended.output.Name())
				return "", fmt.Errorf("the run in %s failed: %v\n%s", ended.dir, result, strings.TrimSpace(string(text)))
			}
		}
		if right != nil {
			if err := s.next(ctx); err != nil {
				return "", err
			}
		}
	}
	return "", nil
}

// look shows what is new in the run directory.
func (r *demoRun) look() error {
	if r.summary != nil {
		return nil
	}
	rec, err := rundir.Read(r.dir)
	if errors.Is(err, rundir.ErrNoRun) {
		return nil
	}
	if err != nil {
		return err
	}
	if !r.began {
		r.began = true
		r.show(view.Begin{Job: rec.Job})
	}
	if err := news(&r.events, func(e rundir.Event) {
		r.seen = append(r.seen, e)
		r.show(view.Change(e))
	}); err != nil {
		return err
	}
	if rec.Plan != nil {
		st, err := inspect.StatusOf(rec)
		if err != nil {
			return err
		}
		if st.Plan != r.plan {
			r.plan = st.Plan
			r.show(planOf(st))
		}
	}
	if err := news(&r.metrics, func(m rundir.Metrics) {
		r.step = m.Step
		r.show(view.Step(m))
	}); err != nil {
		return err
	}
	if rec.Summary != nil {
		r.summary = rec.Summary
		r.show(view.End{Summary: *rec.Summary})
	}
	return nil
}

// planOf returns the plan of a status as the views take it.
func planOf(s inspect.Status) view.Plan {
	p := view.Plan{Reason: s.Reason}
	for _, w := range s.Workers {
		if w.Gone == "" {
			p.Workers = append(p.Workers, rundir.Worker{ID: w.ID, Incarnation: w.Life, Stages: w.Stages, Layers: w.Layers})
		}
	}
	return p
}

// compareDemo prints how the two runs ended. Parameters that differ are an error.
func compareDemo(runs [2]*demoRun, s *script, out io.Writer) error {
	a, b := runs[0].summary, runs[1].summary
	equal := a.ParamsSHA256 == b.ParamsSHA256 && a.StateSHA256 == b.StateSHA256
	verdict := "equal: the same parameters and optimizer state, bit for bit"
	if !equal {
		verdict = "DIFFERENT"
	}
	fmt.Fprintf(out, "\nparams_sha256\n  undisturbed  %s\n  with faults  %s\n  %s\n", a.ParamsSHA256, b.ParamsSHA256, verdict)
	fmt.Fprintf(out, "loss %.4f and %.4f after %d steps; workers lost %d, joined %d; rollbacks %d\n",
		a.Loss, b.Loss, b.Steps, b.WorkersLost, b.WorkersJoined, b.Rollbacks)
	fmt.Fprintf(out, "time to recovery: %s\n", strings.Join(s.times, ", "))
	if n := len(demoActs) - s.acts; n > 0 {
		fmt.Fprintf(out, "the run was over before the last %d faults; try --steps %d\n", n, 2*runs[1].steps)
	}
	if !equal {
		return errors.New("the two runs have different parameters")
	}
	return nil
}
