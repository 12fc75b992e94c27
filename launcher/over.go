package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/soliton-train/soliton/internal/host"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/away"
	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/ship"
	"github.com/soliton-train/soliton/launcher/internal/ssh"
	"github.com/soliton-train/soliton/launcher/internal/torch"
)

// With --hosts, the launcher has the other machines join by itself, over ssh.

// sshFlags are the flags for that, and what they mean.
type sshFlags struct {
	list  []string
	file  string
	least int // --min-hosts

	hosts   []ssh.Host // without this machine
	away    bool       // and it takes no part
	workers int        // on each, unless its own number is given
}

func (f *sshFlags) add(flags *pflag.FlagSet) {
	flags.StringSliceVar(&f.list, "hosts", nil, "`machines` that take part, started over ssh: HOST or HOST:WORKERS; localhost is this one")
	flags.StringVar(&f.file, "hosts-file", "", "`file` with one such machine a line")
	flags.IntVar(&f.least, "min-hosts", 0, "fewest machines of --hosts to begin with, if others cannot be reached (default all)")
}

// overSSH finds out which machines --hosts names. It sets the flags that follow from it.
func (f *runFlags) overSSH(cmd *cobra.Command) error {
	all, err := ssh.Of(cmd.Flags().Changed, f.over.list, f.over.file)
	switch {
	case err != nil:
		return err
	case all == nil && cmd.Flags().Changed("min-hosts"):
		return errors.New("--min-hosts is for machines that --hosts or --hosts-file names: give one of them as well")
	case all == nil:
		return nil
	case cmd.Flags().Changed("wait-hosts"):
		return errors.New("--wait-hosts: the run waits for the machines that --hosts names; --min-hosts N begins without some of them")
	case f.hosts > 1:
		return errors.New("--hosts and --emulate-hosts: give one of them")
	}
	own, others, err := ssh.Split(cmd.Context(), all)
	switch {
	case err != nil:
		return fmt.Errorf("--hosts: %w", err)
	case own == nil && cmd.Name() != "run":
		return fmt.Errorf("--hosts: this machine has the run directory and takes part: add it to the list, as localhost, or resume the run on %s", all[0].Name)
	case own != nil && len(all) == 1:
		return fmt.Errorf("--hosts %s: this is the only machine; give at least two, or leave --hosts out", all[0].Name)
	}
	f.over.workers, f.over.away = f.workers, own == nil
	if own != nil {
		f.workers = own.WorkersOr(f.workers)
	}
	f.over.hosts, f.waitHosts = others, len(all)
	if !cmd.Flags().Changed("min-hosts") {
		f.over.least = len(all)
	}
	if f.listen == "" {
		f.listen = ":0"
	}
	return cli.Within("min-hosts", f.over.least, min(2, len(all)), len(all))
}

// others are the machines that join over ssh.
type others struct {
	own     ssh.Launcher
	hosts   []ssh.Host
	workers int
	ports   ports.Range

	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup
}

// others returns nil where machines join by hand.
func (f *sshFlags) others(ctx context.Context, in ports.Range) (*others, error) {
	if f.hosts == nil {
		return nil, nil
	}
	own, err := ssh.Own()
	if err != nil {
		return nil, err
	}
	o := &others{own: own, hosts: f.hosts, workers: f.workers, ports: in}
	o.ctx, o.cancel = context.WithCancel(ctx)
	return o, nil
}

// begin has all of them join, with the ticket from standard input, and continue without the connection.
func (o *others) begin(g *gathering, ticket string) {
	for _, h := range o.hosts {
		o.tasks.Go(func() {
			err := o.own.Run(o.ctx, h, []string{"join", "--detach", "--plain", "-", "--workers", strconv.Itoa(h.WorkersOr(o.workers)), "--ports=" + o.ports.String()},
				func() io.Reader { return strings.NewReader(ticket + "\n") },
				func(line string) {
					if strings.HasPrefix(line, ship.Fetching) { // all else is shown here, too
						g.say(h.Name + ": " + line)
					}
				})
			if err != nil && o.ctx.Err() == nil {
				g.without(err)
			}
		})
	}
}

// end ends what is left of ssh. Machines that take part continue.
func (o *others) end() {
	if o != nil {
		o.cancel()
		o.tasks.Wait()
	}
}

// notAway are the flags of run that mean this machine.
var notAway = []string{"advertise", "ui", "python", "chaos", "resume", "allow"}

// hostFlags are those that say where the run is, which the machines are told in another way.
var hostFlags = []string{"hosts", "hosts-file", "min-hosts", "wait-hosts", "workers", "run-dir", "detach", "plain"}

// runAway has other machines train a program, and shows that here.
func runAway(cmd *cobra.Command, f runFlags, p program, args []string) error {
	for _, name := range notAway {
		if cmd.Flags().Changed(name) && !(name == "python" && p.script != "") { // that one is a path there
			return fmt.Errorf("--%s is of no use on a machine that takes no part: add this one to --hosts, as localhost, or start the run on %s", name, f.over.hosts[0].Name)
		}
	}
	own, err := ssh.Own()
	if err != nil {
		return cli.Fail(err)
	}
	ctx, end := context.WithCancel(cmd.Context())
	defer end()
	stdout := cmd.OutOrStdout()
	var saying sync.Mutex
	r := away.Run{
		Launcher: own, Hosts: f.over.hosts, Workers: f.over.workers, Ports: f.ports.String(), Least: f.over.least, Args: args, RunDir: f.runDir, Detach: f.detach.On,
		Out: stdout, Errs: cmd.ErrOrStderr(),
		Say: func(text string) {
			saying.Lock()
			defer saying.Unlock()
			fmt.Fprintln(stdout, text)
		},
	}
	cmd.Flags().Visit(func(flag *pflag.Flag) {
		if !slices.Contains(hostFlags, flag.Name) {
			r.Flags = append(r.Flags, "--"+flag.Name+"="+flag.Value.String())
		}
	})
	if !cmd.Flags().Changed("listen") {
		r.Flags = append(r.Flags, "--listen")
	}
	interrupts := make(chan struct{}, maxStops)
	var terminated, interrupted atomic.Bool
	defer host.CatchSignals(func(reason session.Reason) {
		if reason != session.Interrupt {
			terminated.Store(true)
			end()
			return
		}
		interrupted.Store(true)
		select {
		case interrupts <- struct{}{}:
		default: // it is being stopped
		}
	})()
	if r.Program = p.file; p.script != "" {
		temp, err := os.MkdirTemp("", "soliton-run-")
		if err != nil {
			return cli.Fail(err)
		}
		defer os.RemoveAll(temp)
		r.Program = filepath.Join(temp, p.name+torch.PackSuffix)
		if err := p.packTo(r.Program); err != nil {
			return cli.Fail(fmt.Errorf("PROGRAM %s: %w", p.given, err))
		}
	} else if p.file == "" {
		temp, err := os.MkdirTemp("", "soliton-run-")
		if err != nil {
			return cli.Fail(err)
		}
		defer os.RemoveAll(temp)
		dir, err := rundir.Create(filepath.Join(temp, "run"), p.name, time.Now())
		if err != nil {
			return cli.Fail(err)
		}
		defer dir.Close()
		r.Say("building " + p.given)
		var wrong *buildError
		if r.Program, err = p.build(ctx, dir); errors.As(err, &wrong) {
			fmt.Fprintln(r.Errs, "    "+strings.ReplaceAll(wrong.output, "\n", "\n    "))
			return cli.Fail(fmt.Errorf("PROGRAM %s does not build", p.given))
		} else if err != nil {
			return cli.Fail(err)
		}
	}
	err = r.Start(ctx, interrupts)
	var exit cli.Exit
	switch {
	case terminated.Load():
		return cli.Exit(session.ExitTerminated) // what has begun continues
	case interrupted.Load() && errors.As(err, &exit) && exit == session.ExitFailed:
		return cli.Exit(session.ExitInterrupted) // it was stopped, as asked
	case err == nil, errors.As(err, &exit):
		return err
	}
	return cli.Fail(err)
}

// settle begins the run if no machine is missing; g.mu is held.
func (g *gathering) settle() {
	switch {
	case g.closing || len(g.joined) < g.want-1:
		return
	case g.want < g.least:
		g.closing = true
		close(g.short)
		return
	}
	g.closing = true
	g.begun = g.assign()
	close(g.whole)
}

// without takes in that a machine cannot be there.
func (g *gathering) without(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closing {
		g.say(err.Error())
		return
	}
	g.failed = append(g.failed, err)
	g.want--
	if g.want >= g.least {
		g.say(fmt.Sprintf("%v; the run begins without it", err))
	}
	g.settle()
}
