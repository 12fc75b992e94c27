package act

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/chaos"
	"github.com/soliton-train/soliton/internal/host/socket"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

// An Injection is a command that injects a fault into workers of a run. The run learns of the fault by its effects only; the
// command tells it the time, which the records of the recovery need.
type Injection struct {
	Name  string
	short string
	long  string
	do    func(chaos.Process) error
	tell  bool
}

// Injections are the commands that send a signal to workers.
var Injections = []Injection{
	{"kill", "Kill workers of a run", "kill sends SIGKILL to workers; the others continue.", chaos.Kill, true},
	{"freeze", "Freeze workers of a run", `freeze sends SIGSTOP to workers. The run continues without a worker that is stopped for 30 ms;
after thaw it joins again.`, chaos.Freeze, true},
	{"thaw", "Continue frozen workers", "thaw sends SIGCONT to workers that were frozen.", chaos.Thaw, true},
	{"leave", "Ask workers to leave a run", `leave sends SIGTERM to workers: they hand over what they hold and exit.
Nothing is recomputed.`, chaos.Terminate, false},
}

// Find returns the injection of a name.
func Find(name string) (in Injection, ok bool) {
	i := slices.IndexFunc(Injections, func(in Injection) bool { return in.Name == name })
	if i < 0 {
		return in, false
	}
	return Injections[i], true
}

// Command returns the command.
func (in Injection) Command() *cobra.Command {
	return &cobra.Command{
		Use:     in.Name + " RUN_DIR W ...",
		Short:   in.short,
		Long:    in.long + "\nW is the number of a worker; launcher status lists them.",
		Example: fmt.Sprintf("  launcher %s runs/latest 2", in.Name),
		Args:    cli.NeedRun("W is missing: give the number of a worker"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := workerNumbers(args[1:])
			if err != nil {
				if _, _, more := find(args[0], ids); !errors.As(more, new(cli.Failure)) {
					err = errors.Join(err, more)
				}
				return err
			}
			return in.Inject(cmd.Context(), args[0], ids)
		},
	}
}

// workerNumbers reads arguments that are numbers of workers, and returns those that are.
func workerNumbers(args []string) ([]int, error) {
	var ids []int
	var faults []error
	for _, arg := range args {
		w, err := strconv.Atoi(arg)
		if err != nil || w < 0 {
			faults = append(faults, fmt.Errorf("W is %q: give the number of a worker", arg))
			continue
		}
		ids = append(ids, w)
	}
	return ids, errors.Join(faults...)
}

// Inject does it to workers of a run, for the command as for the page.
func (in Injection) Inject(ctx context.Context, runDir string, ids []int) error {
	run, targets, err := find(runDir, ids)
	switch {
	case err != nil:
		return err
	case run.Host != "": // processes may be on another machine
		_, err := Ask(ctx, runDir, control.Inject{Kind: in.Name, Workers: ids, Stamp: in.tell && in.Name != control.Thaw})
		return cli.Fail(err)
	}
	return cli.Fail(in.signal(ctx, run.Agent, targets))
}

// Local injects a fault into a worker of this machine, for the agent of a run over several machines.
func Local(runDir, kind string, w rundir.Process, factor float64) error {
	p, err := chaos.Open(w.PID)
	if err != nil {
		return err
	}
	defer p.Release() //nolint:errcheck // it only frees what the process ends with
	if in, ok := Find(kind); ok {
		return in.do(p)
	}
	if kind != slowName {
		return fmt.Errorf("this machine's launcher cannot %.40q a worker", kind)
	}
	if factor < chaos.MinFactor || factor > 1 {
		return fmt.Errorf("%g is no share of the full speed", factor)
	}
	return chaos.Slow(p, chaos.SlowFile(runDir, w.ID, w.Incarnation), factor)
}

// find returns the processes of a run, and those of workers. A worker that is not in the run is wrong usage.
func find(runDir string, ids []int) (run rundir.Workers, targets []rundir.Process, err error) {
	run, err = rundir.ReadWorkers(runDir)
	if err != nil {
		return run, nil, cli.Fail(err)
	}
	var faults []error
	for _, w := range slices.Compact(slices.Sorted(slices.Values(ids))) {
		i := slices.IndexFunc(run.Workers, func(p rundir.Process) bool { return p.ID == w })
		if i < 0 {
			faults = append(faults, fmt.Errorf("there is no worker %d: launcher status %s lists those of the run", w, runDir))
			continue
		}
		targets = append(targets, run.Workers[i])
	}
	return run, targets, errors.Join(faults...)
}

// agentTime bounds how long a command talks to an agent.
const agentTime = 5 * time.Second

// tellTime bounds how long a fault waits until the agent has heard of it.
const tellTime = 50 * time.Millisecond

// signal does it to all of the workers, as nearly at once as possible. The agent is told first: it may have recovered from a death
// before we run again.
func (in Injection) signal(ctx context.Context, agent string, targets []rundir.Process) error {
	ctx, cancel := context.WithTimeout(ctx, agentTime)
	defer cancel()
	nc, err := reach(ctx, agent)
	if err != nil {
		return err
	}
	conn := control.New(nc)
	defer conn.Close()
	if c, ok := nc.(*net.UnixConn); ok && !platform.SharesPIDs(c) {
		return errors.New("the run's processes have other numbers here: it is in another PID namespace, such as that of a container; give the command there")
	}
	processes := make([]*os.Process, len(targets))
	for i, t := range targets {
		p, err := chaos.Open(t.PID)
		if err != nil {
			return fault(t, err)
		}
		defer p.Release() //nolint:errcheck // it only frees what the process ends with
		processes[i] = p
	}
	told := make(chan struct{})
	go func() {
		defer close(told)
		if in.tell {
			tell(ctx, conn, in.Name, targets)
		}
	}()
	select {
	case <-told:
	case <-time.After(tellTime): // it has much to do, or there are many workers
	}
	for i, p := range processes {
		if err = in.do(p); err != nil {
			err = fault(targets[i], err)
			targets = targets[i:]
			break
		}
	}
	<-told
	if err != nil && in.tell && in.Name != control.Thaw {
		tell(ctx, conn, control.Thaw, targets) // what was told counts only if the worker dies of something else
	}
	return err
}

// fault is the error of a worker that a fault could not be injected into.
func fault(w rundir.Process, err error) error {
	if errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("worker %d has ended", w.ID)
	}
	return fmt.Errorf("worker %d: %w", w.ID, err)
}

// tell tells the agent of a fault of each of the workers. A run that has ended meanwhile has no use for it.
func tell(ctx context.Context, conn *control.Conn, kind string, targets []rundir.Process) {
	const ahead = 64 // both sockets take as many, so neither side waits for the other
	at, heard := chaos.Now(), 0
	for i, t := range targets {
		if conn.Send(control.Fault{Kind: kind, Worker: t.ID, At: at}) != nil {
			return
		}
		if i-heard == ahead {
			if _, err := conn.Receive(ctx); err != nil {
				return
			}
			heard++
		}
	}
	for range len(targets) - heard {
		if _, err := conn.Receive(ctx); err != nil {
			return
		}
	}
}

// dial connects to the agent of a run.
func dial(ctx context.Context, path string) (*control.Conn, error) {
	nc, err := reach(ctx, path)
	if err != nil {
		return nil, err
	}
	return control.New(nc), nil
}

func reach(ctx context.Context, path string) (net.Conn, error) {
	nc, err := socket.Dial(ctx, path)
	if err != nil {
		return nil, fmt.Errorf("the run's launcher does not answer: %w", err)
	}
	return nc, nil
}

// NewStop returns the command.
func NewStop() *cobra.Command {
	return &cobra.Command{
		Use:   "stop RUN_DIR",
		Short: "End a run at its next commit",
		Long: `stop ends a run at its next commit, with all files written, as the first Ctrl-C does. Another
stop ends it at once.`,
		Example: "  launcher stop runs/latest",
		Args:    cobra.MatchAll(cli.NeedRun(), cli.AtMost(1, "RUN_DIR")),
		RunE:    func(cmd *cobra.Command, args []string) error { return cli.Fail(Stop(cmd.Context(), args[0])) },
	}
}

// Stop ends a run at its next commit, for the command as for the page.
func Stop(ctx context.Context, runDir string) error {
	_, err := Ask(ctx, runDir, control.Stop{})
	return err
}

// Ask sends a message to the agent of a run and returns its answer.
func Ask(ctx context.Context, runDir string, m control.Message) (control.Message, error) {
	run, err := rundir.ReadWorkers(runDir)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, agentTime)
	defer cancel()
	conn, err := dial(ctx, run.Agent)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.Send(m); err != nil {
		return nil, err
	}
	answer, err := conn.Receive(ctx)
	if err != nil {
		return nil, fmt.Errorf("the run's launcher does not answer: %w", err)
	}
	if no, refused := answer.(control.Refused); refused {
		return nil, errors.New(no.Text)
	}
	return answer, nil
}
