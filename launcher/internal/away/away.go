// Package away starts a run over ssh on machines of which this one is none, and shows it here.
//
// The first machine that is named begins the run as its user would there, in the background, and the others join with its ticket, which
// this machine carries over standard input. No connection leads back to this machine, and the run does not depend on it.
package away

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/ssh"
)

// Lines that the launcher prints on the other machines, which are read here.
const (
	Ticket     = "  launcher join "                                            // the ticket follows
	Background = "the run continues in the background: launcher attach "       // the run directory follows
	Gone       = "the launcher of this machine has ended: see launcher status" // attach says so, and the run may go on elsewhere
	shows      = " shows it"
)

// Run is a run on other machines.
type Run struct {
	Launcher ssh.Launcher
	Hosts    []ssh.Host
	Workers  int    // on each, unless its own number is given
	Ports    string // on each of those that join, for --ports; "" for those that the system chooses
	Least    int    // machines to begin with, if others cannot be reached

	Program string   // an executable file
	Args    []string // of the program
	Flags   []string // of launcher run there
	RunDir  string   // "" for the default
	Detach  bool     // it is not shown

	Say       func(string)
	Out, Errs io.Writer
}

// place is where the run is on a machine.
type place struct {
	host ssh.Host
	dir  string
}

// Start starts the run, and shows it until it has ended. Each value of interrupts asks it to stop: at the next commit, then at
// once. The end of ctx ends what is here alone, once the run has begun.
func (r *Run) Start(ctx context.Context, interrupts <-chan struct{}) error {
	places, err := r.begin(ctx, interrupts)
	if err != nil {
		return err
	}
	var where []string
	for _, p := range places {
		where = append(where, p.host.Name+":"+p.dir)
	}
	r.Say("run directories: " + strings.Join(where, " "))
	if r.Detach {
		r.Say("on any of these machines, launcher attach shows the run, and launcher stop ends it")
		return nil
	}
	showing, hide := context.WithCancel(ctx)
	defer hide()
	var stopping sync.WaitGroup
	defer stopping.Wait()
	defer hide()
	stopping.Go(func() {
		for {
			select {
			case <-interrupts:
			case <-showing.Done():
				return
			}
			if err := r.stop(showing, places); err != nil && showing.Err() == nil {
				r.Say(err.Error())
			}
		}
	})
	return r.show(showing, places)
}

// begin has all machines take part, or none.
func (r *Run) begin(ctx context.Context, interrupts <-chan struct{}) (places []place, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := make(chan struct{})
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer close(stop)
	waiting.Go(func() {
		select {
		case <-interrupts:
			cancel(cli.Exit(session.ExitInterrupted))
		case <-stop:
		}
	})
	defer func() {
		var exit cli.Exit
		if err != nil && errors.As(context.Cause(ctx), &exit) {
			err = exit
		}
	}()
	hosts, err := r.reach(ctx)
	if err != nil {
		return nil, err
	}
	program, err := r.Launcher.Put(ctx, hosts[0], r.Program)
	if err != nil {
		return nil, err
	}
	first := place{host: hosts[0]}
	ticket := ""
	args := append([]string{"run", "--plain", "--detach", "--wait-hosts", strconv.Itoa(len(hosts)), "--workers", strconv.Itoa(first.host.WorkersOr(r.Workers))}, r.Flags...)
	args = append(append(append(args, r.runDir()...), program), r.Args...)
	if err := r.on(ctx, first.host, args, "", func(line string) {
		if text, found := strings.CutPrefix(line, Ticket); found && ticket == "" {
			ticket = text
		}
		first.dir = cmp.Or(first.dir, dirIn(line))
	}); err != nil {
		return nil, err
	}
	places = append(places, first)
	if ticket == "" || first.dir == "" {
		return nil, fmt.Errorf("%s: its launcher printed no ticket", first.host.Name)
	}
	var joining sync.WaitGroup
	all := make([]place, len(hosts)-1)
	faults := make([]error, len(hosts)-1)
	for i, h := range hosts[1:] {
		joining.Go(func() {
			all[i].host = h
			args := append([]string{"join", "--plain", "--detach", "--workers", strconv.Itoa(h.WorkersOr(r.Workers)), "--ports=" + r.Ports}, r.runDir()...)
			if faults[i] = r.on(ctx, h, append(args, "-"), ticket+"\n", func(line string) { all[i].dir = cmp.Or(all[i].dir, dirIn(line)) }); faults[i] != nil {
				cancel(nil) // the others wait for it
			}
		})
	}
	joining.Wait()
	if ctx.Err() == nil {
		return append(places, all...), nil
	}
	faults = slices.DeleteFunc(faults, func(err error) bool { return errors.Is(err, context.Canceled) }) // that of another machine counts
	return nil, errors.Join(errors.Join(faults...), r.stop(context.WithoutCancel(ctx), places))
}

// reach makes sure that the machines have the launcher.
func (r *Run) reach(ctx context.Context) (hosts []ssh.Host, err error) {
	faults := make([]error, len(r.Hosts))
	var asking sync.WaitGroup
	for i, h := range r.Hosts {
		asking.Go(func() {
			faults[i] = r.Launcher.Run(ctx, h, []string{"version"}, func() io.Reader { return nil }, func(string) {})
		})
	}
	asking.Wait()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	for i, h := range r.Hosts {
		if faults[i] == nil {
			hosts = append(hosts, h)
		}
	}
	if len(hosts) < r.Least {
		return nil, errors.Join(faults...)
	}
	for _, err := range faults {
		if err != nil {
			r.Say(fmt.Sprintf("%v; the run begins without it", err))
		}
	}
	return hosts, nil
}

func (r *Run) runDir() []string {
	if r.RunDir == "" {
		return nil
	}
	return []string{"--run-dir", r.RunDir}
}

func dirIn(line string) string {
	dir, found := strings.CutPrefix(line, Background)
	if !found {
		return ""
	}
	dir, _, _ = strings.Cut(dir, shows)
	return dir
}

// show shows the run on the first machine where that can be done, and on the next one when that one is lost or leaves.
func (r *Run) show(ctx context.Context, places []place) (err error) {
	for i, p := range places {
		var words bytes.Buffer
		l := r.Launcher
		l.Errs = &words
		err = r.with(l).on(ctx, p.host, []string{"attach", "--plain", p.dir}, "", func(line string) { fmt.Fprintln(r.Out, line) })
		if ctx.Err() != nil {
			return ctx.Err()
		}
		over := strings.Contains(words.String(), rundir.ErrNotRunning.Error())
		if over && r.done(ctx, p) {
			r.Say(fmt.Sprintf("all steps are done: the end of the run is in %s:%s/log/launcher.log", p.host.Name, p.dir))
			return nil
		}
		var failed *ssh.Error
		lost := errors.As(err, &failed) && (failed.Status == 0 || failed.Status == ssh.Failed || failed.Status == session.ExitTerminated || over || strings.Contains(words.String(), Gone))
		if !lost || i == len(places)-1 {
			_, _ = r.Errs.Write(words.Bytes())
			if failed != nil && failed.Status > 0 && failed.Status != ssh.Failed {
				return cli.Exit(failed.Status)
			}
			return err
		}
		r.Say(fmt.Sprintf("%v; the run is shown from %s", err, places[i+1].host.Name))
	}
	return err
}

// done reports whether a run has done all its steps.
func (r *Run) done(ctx context.Context, p place) bool {
	var text strings.Builder
	var status struct{ State string }
	err := r.on(ctx, p.host, []string{"status", p.dir, "--json"}, "", func(line string) { text.WriteString(line) })
	return err == nil && json.Unmarshal([]byte(text.String()), &status) == nil && status.State == "done"
}

// stop asks the first machine that answers to stop the run.
func (r *Run) stop(ctx context.Context, places []place) error {
	var faults []error
	for _, p := range places {
		err := r.on(ctx, p.host, []string{"stop", p.dir}, "", func(string) {})
		if err == nil {
			return nil
		}
		faults = append(faults, err)
	}
	return errors.Join(faults...)
}

func (r *Run) with(l ssh.Launcher) *Run {
	other := *r
	other.Launcher = l
	return &other
}

// on runs the launcher on a machine, with arguments of any kind.
func (r *Run) on(ctx context.Context, h ssh.Host, args []string, stdin string, line func(string)) error {
	text, err := json.Marshal(args)
	if err != nil {
		return err
	}
	return r.Launcher.Run(ctx, h, []string{name}, func() io.Reader { return strings.NewReader(string(text) + "\n" + stdin) }, line)
}

// name is the hidden command that takes its arguments from standard input, where no shell reads them.
const name = "given"

// maxArgs bounds them, in bytes.
const maxArgs = 1 << 20

// NewCommand returns that command.
func NewCommand() *cobra.Command {
	return &cobra.Command{
		Use:    name,
		Short:  "Run the command whose arguments come over standard input",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			args, err := read(os.Stdin)
			if err != nil {
				return cli.Fail(fmt.Errorf("arguments: %w", err))
			}
			own, err := os.Executable()
			if err != nil {
				return cli.Fail(err)
			}
			return cli.Fail(syscall.Exec(own, append([]string{own}, args...), os.Environ()))
		},
	}
}

// read reads arguments up to the end of the line: what follows is the command's.
func read(from io.Reader) (args []string, err error) {
	var line []byte
	for b := make([]byte, 1); len(line) == 0 || line[len(line)-1] != '\n'; {
		if _, err := io.ReadFull(from, b); err != nil {
			return nil, err
		}
		if line = append(line, b[0]); len(line) > maxArgs {
			return nil, fmt.Errorf("more than %d bytes", maxArgs)
		}
	}
	return args, json.Unmarshal(line, &args)
}
