package trainer

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/host"
	"github.com/soliton-train/soliton/internal/host/session"
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
// job follows from the flags, unless it is a [*Done]. With --help, the text of a
// [*Done] stands above the standard flags, whose defaults are those of the job
// beside it.
//
// Started by the launcher, the program becomes a worker of its agent.
// Otherwise it runs agent and worker in one process.
func Main(define func(f *flag.FlagSet) func() (Job, error)) {
	id, launched, err := control.Launched()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", program(), err)
		os.Exit(session.ExitFailed)
	}
	if launched {
		// A program that this one starts is no worker, even if it calls Main.
		_ = os.Unsetenv(control.EnvAgent) // it fails for impossible names only
		_ = os.Unsetenv(control.EnvWorker)
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
		session.Outcome{Help: done.Text}.Report(stdout, stderr, program())
		return session.ExitDone
	}
	if err != nil {
		return report(stdout, stderr, err)
	}
	if f := threadsFault(job.Threads); f != nil {
		return report(stdout, stderr, &ValidationError{f})
	}
	dir, err := rundir.Create(job.RunDir, program(), time.Now())
	if err != nil {
		out := session.Outcome{Err: err}
		out.Report(stdout, stderr, program())
		return out.ExitStatus()
	}
	executable, _ := os.Executable() // "" if unknown
	wd, _ := os.Getwd()
	v := view.Open(view.Options{Out: stdout, Plain: c.standard.plain})
	out, _ := runInProcess(context.Background(), host.Config{
		Settings: session.Settings{
			Program: program(), Threads: job.Threads, Reduction: c.reduction,
			Command: lasting(executable), Args: c.launched(args), Dir: wd,
		},
		RunDir: dir, Console: host.Console{View: v, Output: stdout}, Executable: executable,
	}, job, (*host.Host).CatchSignals)
	out.Report(stdout, stderr, program())
	return out.ExitStatus()
}

// report prints an error before there is an agent, in the agent's words.
func report(stdout, stderr io.Writer, err error) int {
	f := process.Failure(jobError(err), 0)
	out := session.Outcome{Err: &session.FailedError{Kind: f.Kind, Text: f.Text}, Detail: f.Stack}
	out.Report(stdout, stderr, program())
	return out.ExitStatus()
}

// Done is what the function that makes the job returns, in place of an error,
// when the program has nothing to train: [Main] prints the text and ends the
// process with status 0.
type Done struct{ Text string }

func (d *Done) Error() string { return d.Text }

// command is a program's command line.
type command struct {
	name       string
	standalone bool // without a launcher, whose flags some of the standard ones are
	define     func(*flag.FlagSet) func() (Job, error)

	flags    *flag.FlagSet
	own      map[string]bool // names of the program's flags
	makeJob  func() (Job, error)
	standard *standardFlags

	reduction session.Reduction
}

// standardFlags holds the values of the standard flags: most are fields of a job.
type standardFlags struct {
	job       Job
	rate      Schedule // Peak and Steps
	reduction string
	plain     bool
}

// standardOf defines the standard flags for a job, whose values are their defaults.
func (c *command) standardOf(job Job) (*standardFlags, *flag.FlagSet) {
	o := &standardFlags{job: job, reduction: "exact"}
	j, f := &o.job, flag.NewFlagSet(c.name, flag.ContinueOnError)
	if j.Optimizer != nil {
		o.rate = j.Optimizer.schedule()
	}
	f.IntVar(&j.Steps, "steps", j.Steps, "optimizer updates of the run")
	f.IntVar(&j.GlobalBatch, "global-batch", j.GlobalBatch, "samples of a step")
	f.IntVar(&j.MicroBatch, "micro-batch", j.MicroBatch, "samples of a micro-batch; divides the global batch")
	f.Uint64Var(&j.Seed, "seed", j.Seed, "seed of all random numbers")
	f.Float64Var(&o.rate.Peak, "lr", o.rate.Peak, "peak learning rate")
	f.IntVar(&o.rate.Steps, "lr-steps", o.rate.Steps, "steps of the learning-rate schedule; 0: those of the run")
	f.IntVar(&j.EvalEvery, "eval-every", j.EvalEvery, "steps between evaluations; one follows the last step in any case")
	f.Var(&interval{&j.CheckpointSteps, &j.CheckpointEvery}, "checkpoint-every", "steps or `TIME` between checkpoints, such as 500 or 5m; 0: 1m; below 0: only when the run is stopped")
	f.StringVar(&j.InitFrom, "init-from", j.InitFrom, "first parameters: the `PATH` of a model.safetensors or a run directory")
	f.StringVar(&j.InitOptimizer, "init-optimizer", j.InitOptimizer, "with --init-from: the `PATH` of an optimizer.safetensors of launcher export, or of its directory")
	if c.standalone {
		f.StringVar(&j.RunDir, "run-dir", j.RunDir, "`DIR` for the run's files")
		f.IntVar(&j.Threads, "threads", j.Threads, "compute threads; 0: one for each core")
		f.StringVar(&o.reduction, "reduction", o.reduction, "`MODE` of gradient sums: exact, or fast (in order of arrival)")
		f.BoolVar(&o.plain, "plain", false, "plain lines instead of the live view")
	}
	return o, f
}

func newCommand(name string, standalone bool, define func(*flag.FlagSet) func() (Job, error)) *command {
	f := flag.NewFlagSet(name, flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.Usage = func() {}
	c := &command{name: name, standalone: standalone, define: define, flags: f, own: make(map[string]bool)}
	c.makeJob = define(f)
	f.VisitAll(func(f *flag.Flag) { c.own[f.Name] = true })
	var standard *flag.FlagSet
	c.standard, standard = c.standardOf(Job{})
	standard.VisitAll(func(s *flag.Flag) {
		if c.own[s.Name] {
			panic(fmt.Sprintf("the program defines --%s, which is a standard flag: set the field of Job instead", s.Name))
		}
		f.Var(s.Value, s.Name, s.Usage)
	})
	return c
}

// job parses the command line and makes the job. Errors are *Done, which may be wrapped, and
// *process.JobError.
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
	if c.reduction, err = session.ParseReduction(c.standard.reduction); err != nil {
		return Job{}, c.usage("--reduction %w", err)
	}
	job, err := c.makeJob()
	if err != nil {
		return Job{}, &process.JobError{Kind: control.Usage, Err: err} // the job follows from the flags
	}
	return c.override(job), nil
}

func (c *command) usage(format string, args ...any) error {
	return &process.JobError{Kind: control.Usage, Err: fmt.Errorf(format+"; see --help", args...)}
}

// override sets the fields of the job whose flags were given.
func (c *command) override(j Job) Job {
	o, fields := c.standardOf(j)
	c.flags.Visit(func(f *flag.Flag) {
		if c.own[f.Name] {
			return
		}
		if err := fields.Set(f.Name, f.Value.String()); err != nil {
			panic(fmt.Sprintf("trainer: --%s: %v", f.Name, err)) // the same flag has taken the value
		}
		if (f.Name == "lr" || f.Name == "lr-steps") && j.Optimizer != nil {
			o.job.Optimizer = j.Optimizer.withSchedule(o.rate.since(j.Optimizer.schedule()))
		}
	})
	return o.job
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
	var b bytes.Buffer
	job, err := c.defaultJob()
	if own := (*Done)(nil); errors.As(err, &own) {
		if b.WriteString(own.Text); job.Optimizer != nil {
			err = nil
		}
	} else {
		fmt.Fprintf(&b, "Usage: %s [flags]\n", c.name)
	}
	if len(c.own) > 0 {
		fmt.Fprint(&b, "\nFlags of this program:\n")
	}
	c.flags.VisitAll(func(f *flag.Flag) {
		if c.own[f.Name] {
			printFlag(&b, f, ownDefault(f))
		}
	})
	fmt.Fprint(&b, "\nStandard flags:\n")
	standard, fields := c.standardOf(job.withDefaults())
	fields.VisitAll(func(f *flag.Flag) {
		def := f.DefValue
		switch f.Name {
		case "run-dir":
			def = cmp.Or(def, "runs/"+c.name+"-TIME")
		case "checkpoint-every":
			def = (&interval{&standard.job.CheckpointSteps, &standard.job.CheckpointEvery}).String()
		case "threads", "plain": // their texts say it
			def = ""
		}
		if err != nil && f.Name != "run-dir" && f.Name != "reduction" || f.Name == "lr" && job.Optimizer == nil || f.Name == "lr-steps" && f.DefValue == "0" {
			def = ""
		}
		printFlag(&b, f, def)
	})
	return b.String()
}

// interval is the value of --checkpoint-every: a number of steps, or a time.
type interval struct {
	steps *int
	every *time.Duration
}

// Set takes a whole number above 0 for steps, and any other number without a unit for seconds, of which only the sign counts.
func (v *interval) Set(text string) error {
	n, err := strconv.Atoi(text)
	if err == nil {
		*v.steps, *v.every = max(n, 0), time.Duration(min(n, 0))*time.Second
		return nil
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return errors.New("give a number of steps, such as 500, or a time, such as 5m")
	}
	*v.steps, *v.every = 0, d
	return nil
}

func (v *interval) String() string {
	switch {
	case v.steps == nil: // the flag package asks a zero value
		return ""
	case *v.steps > 0:
		return strconv.Itoa(*v.steps)
	}
	return shortTime(*v.every)
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
	return newCommand(c.name, c.standalone, c.define).makeJob()
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
