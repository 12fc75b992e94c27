package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/soliton-train/soliton/internal/chaos"
	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/dvfs"
	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/host"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/session/change"
	"github.com/soliton-train/soliton/internal/host/socket"
	"github.com/soliton-train/soliton/internal/host/spawn"
	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/internal/observe/dashboard"
	"github.com/soliton-train/soliton/internal/observe/telemetry"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
	"github.com/soliton-train/soliton/launcher/internal/bucket"
	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/clocks"
	"github.com/soliton-train/soliton/launcher/internal/detach"
	"github.com/soliton-train/soliton/launcher/internal/torch"
)

// runFlags are the flags of launcher run.
type runFlags struct {
	workers   int
	hosts     int
	stages    int
	threads   int
	mirrors   int
	least     int
	respawn   bool
	detect    time.Duration
	calls     time.Duration // --call-timeout
	reduction string

	badSamples string
	notice     string
	zero       int
	digests    bool
	verify     int
	keep       checkpoint.Keep
	target     string // of --checkpoints
	reshape    string
	runDir     string
	resume     string   // auto, or "" for a run that begins
	allow      []string // what may have changed when a run is resumed
	clocks     string
	sysfs      string
	python     string // interpreter of a Python program
	plain      bool
	ui         string // where the page is; "" for none
	chaos      string
	faults     chaos.Schedule // that chaos describes

	listen    string   // where other machines join; "" for a run of this machine alone
	advertise []string // instead of this machine's addresses
	ports     ports.Range
	waitHosts int      // machines before the first step
	tieBreak  string   // the machine that votes where there are two
	meet      *meeting // of machines that a scheduler has started; nil where people start them
	quiet     bool     // nothing is shown
	detach    detach.Flags
	child     *detach.Child // this process, if it was detached
	stage     staged
	page      *dashboard.Server
	over      sshFlags
}

func newRun() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "run [flags] PROGRAM [program flags]",
		Short: "Start a training run",
		Long: `run trains PROGRAM, the path of a Go package or of an executable file that calls
trainer.Main, or of a Python file that calls soliton.main (see docs/torch.md). Flags after PROGRAM belong to the program, which lists them with --help.

Layers are split over --stages pipeline stages, workers over the stages, and the
micro-batches of a step over the ranks of each stage. The result is the same, bit for bit,
for any number of workers and stages, unless --reduction is fast, and whichever workers
die: the others continue within the step. Each shard of parameters and optimizer state has
--mirrors replicas; when all holders of one die together, the run rolls back to its newest
checkpoint by itself, or to its beginning. The program's --checkpoint-every sets the
interval of checkpoints, in steps or as a time, and --keep which of them stay: by default the
newest three; see launcher checkpoints. launcher add starts more workers.

With --respawn a worker that is lost is replaced at any moment, also all at once: the
replacements roll the run back to its newest checkpoint, or to its beginning. The first
replacement starts at once, the next ones after growing pauses of up to 32 seconds until one
commits a step. The run ends all the same when the program panics, when a replacement is
refused because its program or data differ, when no worker is left for two minutes, when the
leading host is lost together with all workers, after 4096 workers, and when a worker was
killed four times in a row before training. Without --respawn a run without workers ends,
and names the checkpoint to resume from.

A terminal shows the run live; elsewhere, or with --plain, run prints lines. The run
directory gets job.json, plans.jsonl, metrics.jsonl, events.jsonl, the trained model as
model.safetensors and config.json, and summary.json.

--detect is the failure-detection timeout, from which all other timeouts follow: a worker
that sends no heartbeats is evicted within it, or three times as long while its process runs
or waits for a processor, unless all are silent: then they were stopped together, and have two
minutes to continue. A killed process is noticed at once, a stopped or frozen one soon.

--call-timeout bounds how long a call of the program's code may take, such as a Sample that
reads from a server that does not answer: at least five times as long as such calls took
before, and ten times as long before training. After a fifth of that, the run says which
call of which worker has not returned; in the end the worker is evicted, with its stacks in
its log, and others do its work. A call for which all others wait in a step costs 1 s, a
Sample 2.6 s, or ten times as long as such calls took before: then the others continue
without its worker, which joins again when the call has returned.

--reshape says what is rebalanced after a change: dataflow (which rank runs which
micro-batch), full (also which stage holds which layer), or off. --clocks says which clocks
to set: off leaves the hardware alone; auto lowers the clocks of devices whose workers wait
for others, and restores them at the end; emulated does so with devices that do not exist.
Over several machines, each sets the clocks of its own devices, as the leading one says.
--verify N has a worker repeat one of N micro-batches on average, and one in the first
step. If a layer makes other bits of it, or a sample has changed, the run ends and names it.
--zero 2 keeps a reduced gradient with the rank that owns its shard, 1 sends it to all
ranks of the stage as well, to the same bits.

--hosts starts the run on several machines over the user's ssh: the launcher, and then the
program, are copied to those that lack them. They continue if the connection or this machine
is lost. If this machine is not in the list, it takes no part: the first one begins the run and
has the model, this terminal shows it, and Ctrl-C stops it.

--chaos injects faults, to show that the result stays the same. SPEC is a list, separated
by commas, of

  kill:W@S  freeze:W@S  leave:W@S   SIGKILL, SIGSTOP or SIGTERM to worker W when it begins step S
    ...@S+MS                        the same, MS milliseconds later
    ...@S/PHASE                     or when it enters this phase of the step: forward, backward,
                                    reduce, commit or gather
  flip:W@S:TARGET                   flip one bit in the memory of worker W: of parameters that it owns
                                    (own), mirrors (mirror) or received (copy), or of optimizer state
                                    (moment); also with +MS or /PHASE
  slow:W@S:FACTOR                   worker W computes at this share of its speed; 1 restores it
  join@S                            start one more worker when step S begins
  slowlink:A-B@S:FACTOR             the link between workers A and B carries this share of 1 GB/s; 1
                                    lifts the limit
  killhost:H@S  freezehost:H@S      with --emulate-hosts: kill or freeze host H, its agent and workers,
                                    when step S begins
  cut:H@S:SECONDS                   for so long, nothing passes between host H and the others
  random:SEED:RATE[:KINDS]          in each step, with probability RATE, draw one of these, or one of
                                    KINDS, such as kill+slow

run prints what random draws, in the form of a SPEC. The run learns nothing of a fault but
its time, for the records of the recovery.

In a Slurm allocation of several nodes, run takes them all: srun launcher run PROGRAM, or launcher
run PROGRAM in a batch script. See docs/cluster.md.

The first Ctrl-C ends the run at the next commit, with all files written and a checkpoint
for launcher resume; the second ends it at once.`,
		Example: `  launcher run ./examples/gpt
  launcher run --workers 4 --stages 2 ./examples/gpt
  launcher run --workers 1 --run-dir runs/small ./examples/gpt --layers 2 --steps 50
  launcher run --stages 2 train.py --steps 50
  launcher run --stages 2 --chaos kill:1@20/backward,freeze:2@30+2.5 ./examples/gpt
  launcher run --chaos random:7:0.05:kill+slow ./examples/gpt --steps 100
  launcher run --hosts localhost,b,user@c:8 --min-hosts 2 ./examples/gpt
  launcher run --resume auto --run-dir runs/a ./examples/gpt     as often as a supervisor likes
  launcher run --hosts b,c --detach ./examples/gpt
  srun --no-kill launcher run ./examples/gpt
  launcher run ./examples/gpt --help`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("PROGRAM is missing: give a Go package path, such as ./examples/gpt, a Python file, or an executable file")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if changed := cmd.Flags().Changed; !changed("workers") && !changed("hosts") && !changed("hosts-file") {
				if n := torch.Workers(args[0]); n > 0 {
					f.workers = max(n, f.stages, f.least)
				}
			}
			if err := f.overSSH(cmd); err != nil {
				return err
			}
			if err := f.scheduled(cmd, args[0], os.Getenv); err != nil {
				return err
			}
			if err := f.validate(cmd); err != nil {
				return err
			}
			if f.meet.joins(cmd.Context()) {
				return f.meet.join(cmd.Context(), f, cmd.OutOrStdout(), cmd.ErrOrStderr())
			}
			p, err := resolve(args[0])
			if err != nil {
				return err
			}
			if f.over.away {
				return runAway(cmd, f, p, args[1:])
			}
			if done, err := f.detach.Hand(cmd); done {
				return err
			}
			return run(cmd.Context(), f, p, args[1:], cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if err = cli.FlagError(cmd, err); errors.As(err, new(*pflag.NotExistError)) {
			err = fmt.Errorf("%w; flags of the program stand behind PROGRAM", err)
		}
		return err
	})
	flags := cmd.Flags()
	flags.SetInterspersed(false) // what follows PROGRAM is the program's
	flags.SortFlags = false
	sharedFlags(flags, &f)
	flags.IntVar(&f.hosts, "emulate-hosts", 1, "emulated hosts: agents in processes of their own, with the workers split over them")
	machineFlags(cmd, &f)
	flags.StringVar(&f.reduction, "reduction", "exact", "order of gradient sums: exact, or fast, whose last bits depend on workers and timing")
	flags.StringVar(&f.chaos, "chaos", "", "faults to inject, as a `SPEC`: see above")
	flags.StringVar(&f.resume, "resume", "", "auto: continue what is in the run directory (default runs/PROGRAM), or begin")
	flags.StringVar(&f.runDir, "run-dir", "", "run `directory` (default runs/PROGRAM-TIME; runs/latest links to the newest)")
	return cmd
}

const portsText = "`ports` at which this machine listens for the others, FROM-TO (default those that the system chooses)"

// machineFlags are the flags for a run over several machines, which resume has as well.
func machineFlags(cmd *cobra.Command, f *runFlags) {
	flags := cmd.Flags()
	flags.StringVar(&f.listen, "listen", "", "let other machines join, at `ADDR`, and print the ticket for launcher join")
	flags.Lookup("listen").NoOptDefVal = ":0"
	flags.StringSliceVar(&f.advertise, "advertise", nil, "`addresses` at which other machines reach this one (default all that it has)")
	flags.Var(&f.ports, "ports", portsText)
	flags.IntVar(&f.waitHosts, "wait-hosts", 1, "machines, with this one, that are there before the first step; others join at any later one")
	flags.StringVar(&f.tieBreak, "tie-break", "", "of two machines, the `HOST` without which the run cannot continue (default the first)")
	f.detach.Add(cmd, "there is a ticket")
	f.over.add(flags)
}

// sharedFlags are the flags that resume has as well.
func sharedFlags(flags *pflag.FlagSet, f *runFlags) {
	flags.IntVar(&f.workers, "workers", 4, "worker processes on this machine; of a new Python run, one per NVIDIA GPU")
	flags.IntVar(&f.stages, "stages", 1, "pipeline stages of the first plan; not more than workers or layers")
	flags.IntVar(&f.threads, "threads", 0, "compute threads per worker (default cores divided by workers, at least 1)")
	flags.IntVar(&f.zero, "zero", 2, "ZeRO stage: 1 shards optimizer state, 2 gradients as well; the bits are the same")
	flags.StringVar(&f.reshape, "reshape", "full", "what is rebalanced after a change: dataflow, full or off")
	flags.IntVar(&f.mirrors, "mirrors", 1, "replicas of each shard besides the owner's; with 0, a lost worker means a rollback")
	flags.IntVar(&f.least, "min-workers", 1, "fewest workers to train with; below that the run waits for more")
	flags.BoolVar(&f.respawn, "respawn", false, "replace every worker that dies")
	flags.DurationVar(&f.detect, "detect", time.Second, "failure-detection timeout")
	flags.DurationVar(&f.calls, "call-timeout", timing.Call, "time after which a call of the program's code counts as blocked; 0: never")
	flags.BoolVar(&f.digests, "digests", true, "digests of parameters and optimizer state, which find and repair flipped bits")
	flags.IntVar(&f.verify, "verify", session.DefaultVerify, "micro-batches that a worker runs for each that it repeats as a check; 0: none")
	flags.StringVar(&f.badSamples, "bad-samples", "fail", "what follows when no worker can read a sample: fail, or skip it")
	cli.KeepFlags(flags, &f.keep)
	flags.StringVar(&f.target, "checkpoints", "", "where checkpoints go beside the run directory: a folder, or `URL` of s3, gs or azblob")
	flags.StringSliceVar(&f.allow, "allow", nil, "`names` of what may have changed when a run is resumed, such as program,lr")
	clockFlags(flags, f)
	pageFlag(flags, f)
	flags.StringVar(&f.python, "python", "", "`interpreter` of a Python PROGRAM (default the first python3 in PATH)")
	flags.BoolVar(&f.plain, "plain", false, "no live terminal view")
}

// clockFlags are --clocks and what goes with it.
func clockFlags(flags *pflag.FlagSet, f *runFlags) {
	flags.StringVar(&f.clocks, "clocks", clocks.Off, "clocks to set, as a `MODE`: off, auto or emulated")
	flags.StringVar(&f.sysfs, "clocks-sysfs", dvfs.SysFS, "`directory` where sysfs is mounted, for the clocks of processors")
	_ = flags.MarkHidden("clocks-sysfs") // it is there
}

// clockFaults are what is wrong with them.
func (f *runFlags) clockFaults() (errs faults.List) {
	switch f.clocks {
	case clocks.Off:
	case clocks.Auto, clocks.Emulated:
	default:
		errs.Add(fmt.Errorf("--clocks %s: give off, auto or emulated", faults.Value(f.clocks)))
	}
	return errs
}

// restoreClocks restores what a launcher has left that was killed, and says so.
func restoreClocks(sysfs string, v view.View) {
	if said, err := clocks.Restore(sysfs, false); err != nil {
		v.Show(view.Note(err.Error()))
	} else if said != "" {
		v.Show(view.Note(said))
	}
}

// addrFaults are what is wrong with the addresses among the flags.
func (f *runFlags) addrFaults(given func(flag string) bool) (errs faults.List) {
	if f.ui != "" {
		errs.Add(cli.Address("ui", f.ui))
	}
	if f.listen != "" || given("listen") {
		errs.Add(cli.Address("listen", f.listen))
	}
	errs.Add(cli.Reachable(f.advertise)...)
	errs.If(given("advertise") && len(f.advertise) == 0, "--advertise: no address is named")
	return errs
}

// maxHosts is the most --emulate-hosts.
const maxHosts = 64

func (f *runFlags) validate(cmd *cobra.Command) error {
	errs := faults.List{
		cli.Within("workers", f.workers, 1, session.MaxWorkers),
		cli.Within("emulate-hosts", f.hosts, 1, maxHosts),
		cli.Within("stages", f.stages, 1, session.MaxWorkers),
	}
	most, machines := f.workers, 1 // workers at the beginning
	if f.listen != "" && f.waitHosts > 1 && f.waitHosts <= maxHosts {
		machines = f.waitHosts
		most *= machines
	}
	errs.If(f.stages > most && f.workers > 0 && f.stages <= session.MaxWorkers, "--stages %d: every stage needs a worker; use --stages %d or fewer, or --workers %d", f.stages, most, (f.stages+machines-1)/machines)
	errs.Add(cli.Within("mirrors", f.mirrors, 0, session.MaxWorkers), cli.Within("min-workers", f.least, 1, session.MaxWorkers))
	errs.If(f.least > most && f.workers > 0 && f.least <= session.MaxWorkers, "--min-workers %d: the run begins with %d; use --min-workers %d or fewer, or --workers %d", f.least, most, most, (f.least+machines-1)/machines)
	errs.Add(cli.Within("detect", f.detect, session.MinDetect, session.MaxDetect, ", three heartbeats"))
	if f.calls != 0 {
		errs.Add(cli.Within("call-timeout", f.calls, session.MinCallTimeout, session.MaxCallTimeout, ", or 0 for never"))
	}
	if cmd.Flags().Changed("threads") {
		errs.Add(cli.Within("threads", f.threads, 1, session.MaxThreads))
	}
	errs.Add(cli.KeepFaults(f.keep, cmd.Flags().Changed)...)
	_, wrong := bucket.OfRun(f.target)
	errs.Add(wrong)
	errs.Add(f.noticeFault(cmd.Flags().Changed))
	errs.If(f.verify < 0, "--verify %d: give at least 1, or 0 for no checks", f.verify)
	errs.If(f.badSamples != "fail" && f.badSamples != "skip", "--bad-samples %s: give fail or skip", faults.Value(f.badSamples))
	errs.If(f.badSamples == "skip" && !f.digests, "--bad-samples skip needs digests, which show whether all of a step is made of the same samples: give --digests=true")
	if _, err := session.ParseReduction(f.reduction); err != nil {
		errs.Add(fmt.Errorf("--reduction %w", err))
	}
	errs.If(f.zero != 1 && f.zero != 2, "--zero %d: give 1 or 2", f.zero)
	errs.Add(f.clockFaults()...)
	errs.If((f.resume != "" || cmd.Flags().Changed("resume")) && f.resume != auto, "--resume %s: give auto; launcher resume continues a run of a given directory", faults.Value(f.resume))
	errs.If(f.resume == auto && f.hosts > 1, "--resume auto with --emulate-hosts: a resumed run has one host; leave one of them out")
	errs.If(cmd.Name() == "run" && f.resume == "" && len(f.allow) > 0, "--allow is for a run that is resumed: give --resume auto as well")
	errs.Add(change.Check(f.allow))
	errs.Add(f.addrFaults(cmd.Flags().Changed)...)
	if f.listen == "" {
		errs.If(cmd.Flags().Changed("wait-hosts") || cmd.Flags().Changed("advertise") || cmd.Flags().Changed("ports") || f.tieBreak != "", "--wait-hosts, --advertise, --ports and --tie-break are for a run that other machines join: give --listen as well")
		errs.If(f.detach.On, "--detach is for a run that other machines join: give --listen as well")
	} else {
		errs.Add(cli.Within("wait-hosts", f.waitHosts, 1, maxHosts))
		errs.If(f.hosts > 1, "--listen and --emulate-hosts: give one of them")
	}
	if _, err := controller.ParseReshape(f.reshape); err != nil {
		errs.Add(fmt.Errorf("--reshape %w", err))
	}
	var err error
	f.faults, err = parseChaos(f.chaos, f.workers, f.hosts)
	errs.Add(err)
	errs.If(cmd.Flags().Changed("run-dir") && f.runDir == "", "--run-dir: give the name of a directory")
	return errs.Err()
}

// run trains the program in worker processes, from the beginning.
func run(ctx context.Context, f runFlags, p program, args []string, stdout, stderr io.Writer) error {
	if f.target != "" && f.resume != auto {
		to, err := bucket.OfRun(f.target)
		if err == nil {
			err = bucket.Free(ctx, to)
		}
		if err != nil {
			return cli.Fail(err)
		}
	}
	if f.resume == auto {
		return runAgain(ctx, f, p, args, stdout, stderr)
	}
	dir, err := rundir.Create(f.runDir, p.name, time.Now())
	if err != nil {
		return cli.Report(session.Outcome{Err: err}, stdout, stderr)
	}
	defer dir.Close() // for the returns before Serve, which closes it
	return trainIn(ctx, f, p, args, dir, nil, stdout, stderr)
}

// trainIn trains the program in worker processes; again says from where.
func trainIn(ctx context.Context, f runFlags, p program, args []string, dir *rundir.Dir, again *session.Resume, stdout, stderr io.Writer) (err error) {
	// With a handler, writing to a reader that has gone is an error like others instead
	// of the end, and the run continues. Ignoring the signal would do
	// that to the workers as well.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)

	cwd, err := os.Getwd()
	if err != nil {
		return cli.Fail(fmt.Errorf("find the working directory: %w; change to one that exists", err))
	}
	if f.page, err = openPage(f, dir, stdout); err != nil {
		return cli.Fail(err)
	}
	page := f.page
	if f.stage, err = openStage(dir); err != nil {
		return cli.Fail(err)
	}
	defer func() { f.stage.end(err) }()
	stderr = f.stage.printed(stderr, reportErrors)
	views := []view.View{view.Open(view.Options{Plain: f.plain || f.detach.On}), f.stage}
	if page != nil {
		views = append(views, page)
	}
	shown := view.Tee(views...)
	// Commands find the run from now on; until it has begun, stop is the only one that it obeys.
	stops := make(chan session.Reason, maxStops)
	defer host.CatchSignals(func(r session.Reason) { offer(stops, r) })()
	if f.child, err = f.detach.Child(func() { offer(stops, session.Terminated) }); err != nil {
		shown.Close()
		return err
	}
	door, err := host.OpenDoor(dir, func() { offer(stops, session.Stopped) })
	if err != nil {
		shown.Close()
		return cli.Fail(err)
	}
	v := view.Tee(untilBegin{door}, openJoins(ctx, &f, dir.Path(), func(text string) { shown.Show(view.Note(text)) }), shown)
	defer v.Close()
	defer f.watchNotices(ctx, v)()

	restoreClocks(f.sysfs, v)
	file, all := p.file, args
	if p.script != "" {
		if file, all, err = p.install(ctx, f.python, args, dir); err != nil {
			v.Close()
			return cli.Fail(fmt.Errorf("PROGRAM %s: %w", p.given, err))
		}
	}
	if file == "" {
		v.Show(view.Note("building " + p.given))
		var reason session.Reason
		reason, err = untilStop(ctx, stops, func(ctx context.Context) (err error) {
			file, err = p.build(ctx, dir)
			return err
		})
		var wrong *buildError
		switch {
		case reason != "":
			v.Close()
			return cli.Report(session.Outcome{Err: &session.StoppedError{Reason: reason}}, stdout, stderr)
		case errors.As(err, &wrong):
			v.Close()
			fmt.Fprintln(stderr, "    "+strings.ReplaceAll(wrong.output, "\n", "\n    "))
			return cli.Fail(fmt.Errorf("PROGRAM %s does not build", p.given))
		case err != nil:
			return cli.Fail(err)
		}
	}

	if f.listen != "" {
		return trainApart(ctx, f, p, file, args, all, dir, again, cwd, v, stops, stdout, stderr)
	}
	if f.hosts > 1 {
		return emulate(ctx, f, p, file, all, dir, cwd, v, page, stops, stdout, stderr)
	}
	links, err := socket.NewFolder()
	if err != nil {
		v.Close()
		return cli.Fail(err)
	}
	defer links.Remove()
	told, err := openTelemetry(ctx)
	if err != nil {
		v.Close()
		return err
	}
	settings := f.settings(p, cwd)
	settings.Resume, settings.Chaos = again, faultsFor(f.faults, f.workers, 1)
	target, err := bucket.OfRun(settings.Checkpoints)
	if err != nil {
		return cli.Fail(err)
	}
	h, err := host.New(host.Config{
		Settings: settings, Target: target,
		Workers: f.workers, Start: spawn.Starter(spawn.Command{Path: file, Args: all, Links: links.Path(), Withhold: bucket.Secrets(settings.Checkpoints)}, dir.LogFile),
		RunDir: dir, Console: host.Console{View: v, Output: f.stage.printed(programOutput(stdout), reportOutput), Telemetry: told}, Clocks: clocks.Open(f.clocks, f.sysfs),
	})
	if err != nil {
		return cli.Fail(err)
	}
	defer host.Forward(stops, h.Stop)()
	if page != nil {
		page.Attach(paged{h, dir.Path()})
		if m, ok := told.(interface{ Handler() http.Handler }); ok {
			page.Metrics(m.Handler())
		}
	}

	out := h.Run(ctx)
	var wrong *host.StartError
	if errors.As(out.Err, &wrong) {
		return cli.Fail(fmt.Errorf("PROGRAM %s %w", p.given, wrong))
	}
	return cli.Report(out, f.stage.printed(stdout, reportOutput), stderr)
}

// openTelemetry begins what the environment wants to know of the run; nil where it wants nothing.
func openTelemetry(ctx context.Context) (host.Telemetry, error) {
	if telemetry.Disabled() {
		return nil, nil
	}
	return telemetry.New(ctx)
}

// settings are the flags as every agent of the run has them.
func (f *runFlags) settings(p program, cwd string) session.Settings {
	s := session.Settings{
		Program: p.given, Command: p.given, Dir: cwd, Python: f.python, Threads: f.threads, Stages: f.stages, Mirrors: f.mirrors, MinWorkers: f.least,
		Detect: f.detect, CallTimeout: f.calls, Zero: f.zero, NoDigests: !f.digests, Respawn: f.respawn,
		Verify: f.verify, Keep: f.keep, SkipBad: f.badSamples == "skip",
	}
	s.Checkpoints, _ = bucket.Absolute(f.target) // there is a working directory
	if s.CallTimeout == 0 {
		s.CallTimeout = -1 // 0 is the default
	}
	s.Reduction, _ = session.ParseReduction(f.reduction) // both are checked
	s.Reshape, _ = controller.ParseReshape(f.reshape)
	if s.Mirrors == 0 {
		s.Mirrors = -1 // 0 is the default
	}
	if s.Verify == 0 {
		s.Verify = -1 // likewise
	}
	return s
}

// untilBegin closes the door of a run that has begun. It is a view of the run.
type untilBegin struct{ *host.Door }

func (d untilBegin) Show(e view.Event) {
	if _, ok := e.(view.Begin); ok {
		d.Close()
	}
}

// maxStops is how many reasons to stop are kept that were not acted on yet: the second one ends a run at once.
const maxStops = 2

// offer adds a reason to stop, unless there are enough.
func offer(stops chan<- session.Reason, r session.Reason) {
	select {
	case stops <- r:
	default:
	}
}

// programOutput is where a program's own output goes: as it is, unless a terminal shows it.
func programOutput(stdout io.Writer) io.Writer {
	if _, ok := cli.Terminal(stdout); ok {
		return stdout
	}
	return cli.Raw(stdout)
}
