package trainer

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/host"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/process"
)

// Main is the main function of a training program. define registers the
// program's own flags and returns the function that makes the job from their
// values. Main adds the standard flags, which override the job's values where
// they are given on the command line, runs the job, and ends the process:
//
//	0 all steps are done    2 wrong flags or an invalid job    1 any other failure
//	130 stopped by Ctrl-C   75 stopped by SIGTERM
//
// A run that is stopped leaves a checkpoint in its directory, which launcher
// resume continues from, unless go run started the program and removed it.
//
// An error of the function that makes the job counts as wrong usage, since the
// job follows from the flags, unless it is a [*Done].
//
// Started by the launcher, the program becomes a worker of its agent.
// Otherwise it runs agent and worker in one process.
func Main(define func(f *flag.FlagSet) func() (Job, error)) {
	id, launched, err := control.Launched()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", program(), err)
		os.Exit(host.ExitFailed)
	}
	if launched {
		// A program that this one starts is no worker, even if it calls Main.
		for _, name := range control.Environment() {
			_ = os.Unsetenv(name) // it fails for impossible names only
		}
		os.Exit(process.Main(id, maker(func() (Job, error) {
			return newCommand(program(), false, define).job(os.Args[1:])
		})))
	}
	os.Exit(standaloneMain(os.Args[1:], os.Stdout, os.Stderr, define))
}

// standaloneMain is Main without an agent outside.
func standaloneMain(args []string, stdout, stderr *os.File, define func(*flag.FlagSet) func() (Job, error)) int {
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // a reader that goes away does not end the run
	c, job, err := guardedJob(args, define)
	var done *Done
	if errors.As(err, &done) {
		host.Outcome{Help: done.Text}.Report(stdout, stderr, program())
		return host.ExitDone
	}
	if err != nil {
		return report(stdout, stderr, err)
	}
	if f := threadsFault(job.Threads); f != nil {
		return report(stdout, stderr, &ValidationError{f})
	}
	dir, err := rundir.Create(job.RunDir, program(), time.Now())
	if err != nil {
		out := host.Outcome{Err: err}
		out.Report(stdout, stderr, program())
		return out.ExitStatus()
	}
	v := view.Open(view.Options{Out: stdout, Plain: c.plain})
	out, _ := runInProcess(context.Background(), host.Config{
		Settings: host.Settings{
			Program: program(), Threads: job.Threads, Reduction: c.reduction,
			Command: lasting(executable()), Args: c.launched(args), Dir: workingDir(),
		},
		RunDir: dir, Console: host.Console{View: v, Output: stdout}, Executable: executable(),
	}, job, (*host.Host).CatchSignals)
	out.Report(stdout, stderr, program())
	return out.ExitStatus()
}

// report prints an error before there is an agent, in the agent's words.
func report(stdout, stderr io.Writer, err error) int {
	f := process.Failure(jobError(err), 0)
	out := host.Outcome{Err: &host.FailedError{Kind: f.Kind, Text: f.Text}, Detail: f.Stack}
	out.Report(stdout, stderr, program())
	return out.ExitStatus()
}

// usageError is a mistake on the command line.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// Done is what the function that makes the job returns, in place of an error,
// when the program has nothing to train: [Main] prints the text and ends the
// process with status 0.
type Done struct{ Text string }

func (d *Done) Error() string { return d.Text }

// command is a program's command line.
type command struct {
	name    string
	flags   *flag.FlagSet
	own     map[string]bool // names of the program's flags
	makeJob func() (Job, error)
	again   func() *command // makes a new command

	plain     bool
	reduction string
	over      overrides
}

// overrides are the values of the standard flags.
type overrides struct {
	steps, globalBatch, microBatch, evalEvery, threads int
	seed                                               uint64
	lr                                                 float64
	initFrom, runDir                                   string
	checkpointEvery                                    time.Duration
}

func newCommand(name string, standalone bool, define func(*flag.FlagSet) func() (Job, error)) *command {
	f := flag.NewFlagSet(name, flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.Usage = func() {}
	c := &command{name: name, flags: f, own: make(map[string]bool)}
	c.again = func() *command { return newCommand(name, standalone, define) }
	c.makeJob = define(f)
	f.VisitAll(func(f *flag.Flag) { c.own[f.Name] = true })

	standard := flag.NewFlagSet(name, flag.ContinueOnError)
	o := &c.over
	standard.IntVar(&o.steps, "steps", 0, "optimizer updates of the run")
	standard.IntVar(&o.globalBatch, "global-batch", 0, "samples of a step")
	standard.IntVar(&o.microBatch, "micro-batch", 0, "samples of a micro-batch; divides the global batch")
	standard.Uint64Var(&o.seed, "seed", 0, "seed of all random numbers")
	standard.Float64Var(&o.lr, "lr", 0, "peak learning rate")
	standard.IntVar(&o.evalEvery, "eval-every", 0, "steps between evaluations; one follows the last step in any case")
	standard.DurationVar(&o.checkpointEvery, "checkpoint-every", 0, "time between checkpoints, such as 30s or 5m; 0: only when the run is stopped")
	standard.StringVar(&o.initFrom, "init-from", "", "first parameters: the `PATH` of a model.safetensors or a run directory")
	if standalone {
		standard.StringVar(&o.runDir, "run-dir", "", "`DIR` for the run's files")
		standard.IntVar(&o.threads, "threads", 0, "compute threads; 0: one for each core")
		standard.StringVar(&c.reduction, "reduction", "exact", "`MODE` of gradient sums: exact, or fast (in order of arrival)")
		standard.BoolVar(&c.plain, "plain", false, "plain lines instead of the live view")
	}
	standard.VisitAll(func(s *flag.Flag) {
		if c.own[s.Name] {
			panic(fmt.Sprintf("the program defines --%s, which is a standard flag: set the field of Job instead", s.Name))
		}
		f.Var(s.Value, s.Name, s.Usage)
	})
	return c
}

// job parses the command line and makes the job. Errors are *Done
// and *usageError.
func (c *command) job(args []string) (Job, error) {
	err := c.flags.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		return Job{}, &Done{c.help()}
	}
	if err != nil {
		// The flag package names flags with one dash.
		text := strings.NewReplacer("flag provided but not defined: -", "unknown flag --", "for flag -", "for --", "flag needs an argument: -", "a value is missing for --").Replace(err.Error())
		return Job{}, c.usage("%s", text)
	}
	if c.flags.NArg() > 0 {
		return Job{}, c.usage("unexpected argument %q", c.flags.Arg(0))
	}
	if c.reduction != "" && c.reduction != "exact" && c.reduction != "fast" {
		return Job{}, c.usage("--reduction %s: give exact or fast", c.reduction)
	}
	if c.over.checkpointEvery < 0 {
		return Job{}, c.usage("--checkpoint-every %v: give a time, or 0 for none", c.over.checkpointEvery)
	}
	job, err := c.makeJob()
	if err != nil {
		return Job{}, &usageError{err} // it has the flags to go by
	}
	return c.override(job), nil
}

func (c *command) usage(format string, args ...any) error {
	return &usageError{fmt.Errorf(format+"; see --help", args...)}
}

// override sets the fields whose flags were given.
func (c *command) override(j Job) Job {
	c.flags.Visit(func(f *flag.Flag) {
		switch f.Name {
		case "steps":
			j.Steps = c.over.steps
		case "global-batch":
			j.GlobalBatch = c.over.globalBatch
		case "micro-batch":
			j.MicroBatch = c.over.microBatch
		case "seed":
			j.Seed = c.over.seed
		case "lr":
			if j.Optimizer != nil {
				j.Optimizer = j.Optimizer.withPeak(c.over.lr)
			}
		case "eval-every":
			j.EvalEvery = c.over.evalEvery
		case "checkpoint-every":
			if j.CheckpointEvery = c.over.checkpointEvery; j.CheckpointEvery == 0 {
				j.CheckpointEvery = -1 // 0 is the job's default
			}
		case "init-from":
			j.InitFrom = c.over.initFrom
		case "run-dir":
			j.RunDir = c.over.runDir
		case "threads":
			j.Threads = c.over.threads
		}
	})
	return j
}

// launched returns the arguments without the flags that only a program without launcher has, so
// that the launcher can resume the run.
func (c *command) launched(args []string) []string {
	left := []string{}
	for i := 0; i < len(args) && args[i] != "--"; i++ {
		name, _, whole := strings.Cut(strings.TrimLeft(args[i], "-"), "=")
		n := 1
		if b, ok := c.flags.Lookup(name).Value.(interface{ IsBoolFlag() bool }); !whole && !(ok && b.IsBoolFlag()) {
			n = 2 // its value follows
		}
		if !slices.Contains(standaloneFlags, name) {
			left = append(left, args[i:i+n]...)
		}
		i += n - 1
	}
	return left
}

var standaloneFlags = []string{"run-dir", "threads", "reduction", "plain"}

// guardedJob makes the job and turns a panic into an error.
func guardedJob(args []string, define func(*flag.FlagSet) func() (Job, error)) (c *command, job Job, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = process.Panicked(0, "the job", v)
		}
	}()
	c = newCommand(program(), true, define)
	job, err = c.job(args)
	return c, job, err
}

// help returns the text for --help. Defaults of standard flags are the job's,
// where one can be made without flags.
func (c *command) help() string {
	defaults := map[string]string{"run-dir": "runs/" + c.name + "-TIME", "reduction": "exact"}
	if j, err := c.defaultJob(); err == nil {
		j = j.withDefaults()
		for name, n := range map[string]int{
			"steps": j.Steps, "global-batch": j.GlobalBatch, "micro-batch": j.MicroBatch, "eval-every": j.EvalEvery,
		} {
			defaults[name] = fmt.Sprint(n)
		}
		defaults["seed"] = fmt.Sprint(j.Seed)
		if j.Optimizer != nil {
			defaults["lr"] = fmt.Sprint(j.Optimizer.schedule().Peak)
		}
		defaults["checkpoint-every"] = shortTime(max(j.CheckpointEvery, 0))
		if j.InitFrom != "" {
			defaults["init-from"] = j.InitFrom
		}
		if j.RunDir != "" {
			defaults["run-dir"] = j.RunDir
		}
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "Usage: %s [flags]\n", c.name)
	if len(c.own) > 0 {
		fmt.Fprint(&b, "\nFlags of this program:\n")
	}
	c.flags.VisitAll(func(f *flag.Flag) {
		if c.own[f.Name] {
			printFlag(&b, f, ownDefault(f))
		}
	})
	fmt.Fprint(&b, "\nStandard flags:\n")
	c.flags.VisitAll(func(f *flag.Flag) {
		if !c.own[f.Name] {
			printFlag(&b, f, defaults[f.Name])
		}
	})
	return b.String()
}

// shortTime prints a time without zero units: 1m instead of 1m0s.
func shortTime(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// defaultJob makes the job of a command line without flags, to see its values.
func (c *command) defaultJob() (job Job, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
	}()
	return c.again().makeJob()
}

// ownDefault leaves out empty defaults.
func ownDefault(f *flag.Flag) string {
	if f.DefValue == "" || f.DefValue == "false" {
		return ""
	}
	return f.DefValue
}

func printFlag(w io.Writer, f *flag.Flag, def string) {
	arg, usage := flag.UnquoteUsage(f)
	if arg != "" && !strings.Contains(f.Usage, "`") {
		arg = map[string]string{"int": "N", "uint": "N", "float": "X", "string": "TEXT", "duration": "TIME", "value": "VALUE"}[arg]
	}
	if def != "" {
		usage += " (default " + def + ")"
	}
	fmt.Fprintf(w, "  %-24s %s\n", strings.TrimSpace("--"+f.Name+" "+arg), usage)
}
