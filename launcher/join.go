package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/host"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/admit"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/ship"
	"github.com/soliton-train/soliton/launcher/internal/slurm"
)

func newJoin() *cobra.Command {
	var f runFlags
	var job string
	cmd := &cobra.Command{
		Use:   "join [flags] TICKET|-",
		Short: "Take part in a run that another machine has begun",
		Long: `join brings the workers of this machine into the run that printed TICKET, before its first step
or at any later one; with - it reads the ticket from standard input. Every machine of the run
has a ticket in its run directory. The launcher must be of the same version, and the system and the
processor architecture must be the same. The program comes from the first machine and is kept
in the user's cache folder, and so do data files that are not at the same paths here.

This machine gets a run directory of its own, with copies of all records. Any machine may
fail, the first one included, as long as a majority is left: two of three, three of five. Of two
machines, the first one, or the one that launcher run --tie-break names, has to be there: if it
fails, the run ends, and if the other one fails, the run continues. The trained model is written on one of them, which the end of the run names.

If the run is resumed, join offers what this machine has of its checkpoints: in --run-dir, or in
the directory below runs that is of this run.

With --detach, join returns once this machine takes part, and continues in the background, in
a session of its own, until the run has ended; what it prints goes to log/launcher.log of the
run directory.

In a step of a Slurm job, join needs no TICKET: it finds the run that another job of the same
user has begun with srun launcher run, and each task of this step is a machine of it.

SIGTERM has this machine leave the run, and the others continue; Ctrl-C stops the whole run.

Whoever has a ticket can take part for an hour: treat it as a password.`,
		Example: `  launcher run --listen --wait-hosts 3 ./train       on the first machine
  launcher join TICKET                               on each of the others
  ssh b launcher join - < DIR/ticket                 with --run-dir DIR on the first machine
  ssh b launcher join --detach - < DIR/ticket        returns when training begins
  srun -N2 launcher join                             in a Slurm job, with the run of another one`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return fmt.Errorf("%d arguments: give one TICKET, or - to read it from standard input", len(args))
			}
			if _, step := slurm.InStep(os.Getenv); len(args) == 0 && !step {
				return errors.New("TICKET is missing: give what launcher run --listen printed, or - to read it from standard input")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			errs := f.addrFaults(cmd.Flags().Changed)
			errs.Add(f.noticeFault(cmd.Flags().Changed))
			errs.If(cmd.Flags().Changed("run-dir") && f.runDir == "", "--run-dir: give the name of a directory")
			if cmd.Flags().Changed("workers") {
				errs.Add(cli.Within("workers", f.workers, 1, session.MaxWorkers))
			}
			if err := errs.Err(); err != nil {
				return err
			}
			if done, err := f.detach.Hand(cmd); done {
				return err
			}
			if len(args) == 0 {
				return joinJob(cmd.Context(), f, job, os.Getenv, cmd.OutOrStdout(), cmd.ErrOrStderr())
			}
			if job != "" {
				return errors.New("--job and TICKET: give one of them")
			}
			text := args[0]
			if text == "-" {
				b, err := io.ReadAll(io.LimitReader(cmd.InOrStdin(), maxTicket))
				if err != nil {
					return cli.Fail(fmt.Errorf("the ticket: %w", err))
				}
				text = strings.TrimSpace(string(b))
			}
			ticket, err := admit.ParseTicket(text)
			if err != nil {
				return fmt.Errorf("TICKET: %w", err)
			}
			return join(cmd.Context(), f, ticket, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.IntVar(&f.workers, "workers", 0, "worker processes on this machine (default as many as on the first one)")
	flags.StringSliceVar(&f.advertise, "advertise", nil, "`address` at which other machines reach this one (default the one from which it reaches the first)")
	flags.Var(&f.ports, "ports", portsText)
	flags.StringVar(&f.runDir, "run-dir", "", "run `directory` (default runs/PROGRAM-TIME; runs/latest links to the newest)")
	flags.BoolVar(&f.plain, "plain", false, "no live terminal view")
	flags.StringVar(&f.python, "python", "", "`interpreter` of a Python program (default as on the first machine, else the first python3 in PATH)")
	flags.StringVar(&job, "job", "", "`ID` of the Slurm job whose run to join (default the only one that has a run)")
	pageFlag(flags, &f)
	f.detach.Add(cmd, "this machine takes part")
	return cmd
}

// maxTicket bounds what is read of a ticket, in bytes.
const maxTicket = 1 << 16

func join(ctx context.Context, f runFlags, t admit.Ticket, stdout, stderr io.Writer) (err error) {
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	stops := make(chan session.Reason, maxStops)
	defer host.CatchSignals(func(r session.Reason) { offer(stops, r) })()
	if f.child, err = f.detach.Child(func() { offer(stops, session.Terminated) }); err != nil {
		return err
	}
	shown := view.Options{Plain: f.plain || f.detach.On}
	if f.quiet {
		if shown.Out, err = os.OpenFile(os.DevNull, os.O_WRONLY, 0); err != nil {
			return cli.Fail(err)
		}
		defer shown.Out.Close()
	}
	v := view.Open(shown)
	defer f.watchNotices(ctx, v)()
	defer v.Close()
	say := func(text string) { v.Show(view.Note(text)) }
	fail := func(err error) error {
		v.Close()
		return cli.Fail(err)
	}

	asking, cancel := context.WithCancel(ctx)
	defer cancel()
	type answer struct {
		a   assignment
		p   ship.Program
		err error
	}
	name, _ := os.Hostname()
	self := host.Addr{Name: name}
	files, err := listenFor(&self, "", f.ports)
	defer closeAll(files)
	if err == nil {
		err = advertised(&self, f.advertise)
	}
	if err != nil {
		return fail(err)
	}
	answers := make(chan answer, 1)
	go func() {
		p, err := ship.Fetch(asking, fetcher(t), say)
		x := answer{p: p}
		if err == nil {
			say("waiting until all machines are there")
			var reply []byte
			reply, err = ask(asking, t, call{Name: name, Workers: f.workers, Agree: self.Agree, Link: self.Link, Ports: f.ports})
			if err == nil {
				err = json.Unmarshal(reply, &x.a)
			}
			if err == nil && (!p.Is(x.a.Program) || !x.a.sound()) {
				err = errors.New("the run's answer makes no sense")
			}
		}
		x.err = err
		answers <- x
	}()
	var x answer
	select {
	case x = <-answers:
	case reason := <-stops:
		cancel()
		<-answers
		v.Close()
		return cli.Report(session.Outcome{Err: &session.StoppedError{Reason: reason}}, stdout, stderr)
	}
	if x.err != nil {
		return fail(x.err)
	}
	restoreClocks(x.a.SysFS, v)
	dir, err := openRunDir(ctx, &f, t, &x.a)
	if err != nil {
		v.Close()
		return cli.Report(session.Outcome{Err: err}, stdout, stderr)
	}
	defer dir.Close()
	if f.stage, err = openStage(dir); err != nil {
		return fail(err)
	}
	defer func() { f.stage.end(err) }()
	stderr = f.stage.printed(stderr, reportErrors)
	v = view.Tee(f.stage, v)
	if f.page, err = openPage(f, dir, stdout); err != nil {
		say(fmt.Sprintf("there is no dashboard: %v", err)) // others count on this machine
	} else if f.page != nil {
		v = view.Tee(f.page, v)
	}
	defer v.Close()
	file, all := x.p.File(), x.a.Args
	if x.p.Values != "" {
		folder, err := dir.MakeFirst()
		if err != nil {
			return fail(err)
		}
		python, err := x.p.Install(ctx, f.python, folder)
		if err == nil {
			file, all, err = python.Command(all)
		}
		if err != nil {
			return fail(err)
		}
	}
	own := x.a.own()
	whole := make(chan struct{})
	close(whole)
	g := &gathering{first: x.a, begun: x.a, closing: true, whole: whole}
	g.first.Program = x.p
	if x.a.Enters != nil { // others know it as soon as it takes part
		g.begun.Hosts = append(slices.Clone(x.a.Hosts), own)
		g.begun.Enters = nil
	}
	g.begun.Self = 0
	d, err := g.open(":0", f, dir)
	if err != nil {
		return fail(err)
	}
	defer d.Close()
	defer f.meet.end()
	if err := f.meet.serve(dir, func(string) {}); err != nil {
		return fail(err)
	}
	f.hosts, f.workers = 1, len(own.Workers)+own.Starts
	x.a.Args = all
	return trainHere(ctx, f, x.a, file, dir, files, d, v, stops, stdout, stderr)
}
