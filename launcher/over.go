package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/ssh"
)

// With --hosts, the launcher has the other machines join by itself, over ssh.

// sshFlags are the flags for that, and what they mean.
type sshFlags struct {
	list  []string
	file  string
	least int // --min-hosts

	hosts   []ssh.Host // without this machine
	workers int        // on each, unless its own number is given
}

func (f *sshFlags) add(flags *pflag.FlagSet) {
	flags.StringSliceVar(&f.list, "hosts", nil, "`machines`, this one included, that take part, started over ssh: HOST or HOST:WORKERS")
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
	case len(all) == 1:
		return fmt.Errorf("--hosts %s: give at least two machines", all[0].Name)
	}
	own, others, err := ssh.Split(cmd.Context(), all)
	switch {
	case err != nil:
		return fmt.Errorf("--hosts: %w", err)
	case own == nil:
		return fmt.Errorf("--hosts: this machine begins the run and takes part: add it to the list, as localhost, or start the run on %s", all[0].Name)
	}
	f.over.workers = f.workers
	f.workers = own.WorkersOr(f.workers)
	f.over.hosts, f.waitHosts = others, len(all)
	if !cmd.Flags().Changed("min-hosts") {
		f.over.least = len(all)
	}
	if f.listen == "" {
		f.listen = ":0"
	}
	return cli.Within("min-hosts", f.over.least, 2, len(all))
}

// others are the machines that join over ssh.
type others struct {
	own     ssh.Launcher
	hosts   []ssh.Host
	workers int

	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup
}

// others returns nil where machines join by hand.
func (f *sshFlags) others(ctx context.Context) (*others, error) {
	if f.hosts == nil {
		return nil, nil
	}
	own, err := ssh.Own()
	if err != nil {
		return nil, err
	}
	o := &others{own: own, hosts: f.hosts, workers: f.workers}
	o.ctx, o.cancel = context.WithCancel(ctx)
	return o, nil
}

// begin has all of them join, with the ticket from standard input, and continue without the connection.
func (o *others) begin(g *gathering, ticket string) {
	for _, h := range o.hosts {
		o.tasks.Go(func() {
			err := o.own.Run(o.ctx, h, []string{"join", "--detach", "--plain", "-", "--workers", strconv.Itoa(h.WorkersOr(o.workers))},
				func() io.Reader { return strings.NewReader(ticket + "\n") },
				func(line string) {
					if strings.HasPrefix(line, fetching) { // all else is shown here, too
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
