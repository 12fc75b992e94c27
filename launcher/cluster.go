package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/host"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/admit"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/door"
	"github.com/soliton-train/soliton/launcher/internal/kube"
	"github.com/soliton-train/soliton/launcher/internal/meet"
	"github.com/soliton-train/soliton/launcher/internal/slurm"
)

// Under a scheduler, launcher run is started on all machines. One of them begins the run, as with --listen, and the others get its
// ticket by what the scheduler gave them, and join.

// meeting is the part of this machine in that.
type meeting struct {
	prover meet.Prover
	rank   int // 0: it begins the run
	listen func() (net.Listener, error)
	addrs  []string // of the first machine
	shared bool     // machines may share folders and the output
	note   string   // for the user, "" for nothing
	server *meet.Server
	ticket string // "" until it is known
}

// scheduled finds out whether a scheduler has started this process, and sets the flags that follow. From a batch script, it does not
// return. Where the user says how machines come together, that counts.
func (f *runFlags) scheduled(cmd *cobra.Command, program string, getenv func(string) string) error {
	for _, own := range []string{"listen", "hosts", "hosts-file", "emulate-hosts", "detach", "wait-hosts"} {
		if cmd.Flags().Changed(own) {
			return nil
		}
	}
	task, err := slurm.Of(getenv)
	if err != nil {
		return err
	}
	pod, err := kube.Of(getenv)
	if err != nil {
		return err
	}
	hosts := 0
	switch {
	case task != nil:
		hosts = task.Tasks
		f.inJob(program, task.Rank, getenv)
		f.meet = &meeting{prover: task.Prover(), rank: task.Rank, listen: task.Listen, addrs: task.Addrs(), shared: true, note: slurm.NodeLoss(getenv)}
	case pod != nil:
		hosts = pod.Hosts
		f.meet = &meeting{prover: pod.Key, rank: pod.Index, listen: pod.Listen, addrs: pod.Addrs()}
	default:
		if nodes, ok := slurm.Batch(getenv); ok {
			own, err := os.Executable()
			if err != nil {
				return cli.Fail(err)
			}
			return cli.Fail(slurm.Srun(nodes, own, os.Args[1:]))
		}
		f.inJob(program, 0, getenv)
		return nil
	}
	f.listen, f.waitHosts = ":0", hosts
	takeNotices()
	return nil
}

// inJob has a run in a Slurm job continue when the job is started again: its run directory follows from the job, unless it has a name. A
// job that trains the same program twice in one step has another directory for the second one, which begins again.
func (f *runFlags) inJob(program string, rank int, getenv func(string) string) {
	name := slurm.RunName(getenv, program)
	if name == "" || f.resume != "" {
		return
	}
	if slurm.Requeued(getenv) {
		f.resume = auto
	}
	if f.runDir == "" {
		dir := filepath.Join(rundir.Parent, name)
		if _, err := os.Lstat(ofTask(dir, rank)); f.resume == "" && err == nil {
			return
		}
		f.runDir = dir
	}
}

// ofTask returns the run directory of a task: tasks may share folders.
func ofTask(dir string, rank int) string {
	if rank == 0 {
		return dir
	}
	return dir + "-" + strconv.Itoa(rank)
}

// takeNotices makes leaves of the notices that a job is about to end (sbatch --signal).
func takeNotices() {
	notices := make(chan os.Signal, 1)
	signal.Notify(notices, syscall.SIGUSR1, syscall.SIGUSR2)
	go func() { // it ends with the process
		for range notices {
			_ = syscall.Kill(os.Getpid(), syscall.SIGTERM)
		}
	}()
}

// joinJob has this task of a Slurm job take part in the run of another one; job is its number, "" for the only one that has a run.
func joinJob(ctx context.Context, f runFlags, job string, getenv func(string) string, stdout, stderr io.Writer) error {
	tasks, err := slurm.Begun(ctx, getenv, job)
	if err != nil {
		return cli.Fail(err)
	}
	text, found := "", ""
	var causes []error
	for _, t := range tasks {
		ticket, err := meet.AskOnce(ctx, t.Addrs(), t.Prover())
		switch {
		case err != nil:
			causes = append(causes, fmt.Errorf("step %s.%s: %w", t.Job, t.Step, err))
		case text != "":
			return cli.Fail(fmt.Errorf("Slurm jobs %s and %s have runs: give --job with one of them", found, t.Job))
		default:
			text, found = ticket, t.Job
		}
	}
	if text == "" {
		return cli.Fail(errors.Join(append([]error{errors.New("no other Slurm job of this user has a run that machines can join; give TICKET, or --job")}, causes...)...))
	}
	takeNotices()
	rank, _ := slurm.InStep(getenv)
	m := &meeting{shared: true, ticket: text}
	if m.rank, err = strconv.Atoi(rank); err != nil {
		return fmt.Errorf("SLURM_PROCID is %.80q: a number is missing", rank)
	}
	return m.join(ctx, f, stdout, stderr)
}

// serve gives this machine's ticket to others of the same job until end is called. The first machine does, and any where they look for it.
func (m *meeting) serve(dir *rundir.Dir, say func(string)) error {
	if m == nil || m.rank > 0 && m.shared {
		return nil
	}
	l, err := m.listen()
	if err != nil {
		return err
	}
	ticket := func() (string, error) {
		text, err := os.ReadFile(dir.File(door.File))
		return string(text), err
	}
	m.server, err = meet.Serve(l, m.prover, ticket, func(from net.Addr, err error) {
		say(fmt.Sprintf("a caller from %v got no ticket: %v", from, err))
	})
	if err != nil {
		return errors.Join(err, l.Close())
	}
	if m.note != "" {
		say(m.note)
	}
	return nil
}

// end ends what serve has begun.
func (m *meeting) end() {
	if m != nil && m.server != nil {
		m.server.Close()
	}
}

// joins reports whether this machine joins a run: all do but the first, and that one if its run goes on without it.
func (m *meeting) joins(ctx context.Context) bool {
	if m == nil || m.rank > 0 {
		return m != nil
	}
	if !m.shared {
		m.ticket, _ = meet.AskOnce(ctx, m.addrs, m.prover)
	}
	return m.ticket != ""
}

// ask returns the ticket of the run.
func (m *meeting) ask(ctx context.Context) (string, error) {
	if m.ticket != "" {
		return m.ticket, nil
	}
	return meet.Ask(ctx, m.addrs, m.prover)
}

// join gets the ticket from the first machine and has this one take part.
func (m *meeting) join(ctx context.Context, f runFlags, stdout, stderr io.Writer) error {
	asking, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	restore := host.CatchSignals(func(r session.Reason) { cancel(&session.StoppedError{Reason: r}) })
	text, err := m.ask(asking)
	restore()
	var stopped *session.StoppedError
	switch {
	case errors.As(err, &stopped):
		return cli.Report(session.Outcome{Err: stopped}, stdout, stderr)
	case err != nil:
		return cli.Fail(err)
	}
	ticket, err := admit.ParseTicket(text)
	if err != nil {
		return cli.Fail(err)
	}
	if m.shared && m.rank > 0 {
		// The first one shows the run, and a folder that all see has room for all.
		stdout, f.quiet = io.Discard, true
		if f.runDir != "" {
			f.runDir = ofTask(f.runDir, m.rank)
		}
	}
	return join(ctx, f, ticket, stdout, stderr)
}

// gone says that the process of a host has ended.
type gone struct {
	left bool   // the run, as it was asked to; else it has failed
	last string // that it has printed
}

// leave has the hosts here leave the run.
func (s *supervisor) leave() {
	s.v.Show(view.Note("this machine leaves the run: its workers hand over what they hold"))
	s.ask(request{Leave: true})
}

// goneAlone is the end of this machine's part of a run that others may continue.
func (s *supervisor) goneAlone(g gone) report {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g.left {
		of := ""
		if s.last > 0 { // of a machine that was there at the beginning
			of = fmt.Sprintf(" of %d", s.last)
		}
		return report{Kind: reportEnd, Status: session.ExitTerminated, Errs: fmt.Sprintf("launcher: this machine has left the run after step %d%s; the others continue\n", s.step, of)}
	}
	if g.last != "" {
		g.last += "\n"
	}
	return report{Kind: reportEnd, Status: session.ExitFailed, Errs: g.last + "launcher: the agent of this machine has ended; the others continue if they can\n"}
}

// tellRejected has the run note what the door of this machine rejects.
func (s *supervisor) tellRejected(t *auth.Tally) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	told := make([]int64, auth.Causes)
	for {
		select {
		case <-tick.C:
		case <-s.ended:
			return
		}
		now, more := t.Counts(), false
		since := make([]int64, len(now))
		for c := range now {
			since[c] = now[c] - told[c]
			more = more || since[c] > 0
		}
		if more {
			s.ask(request{Rejected: since})
			copy(told, now)
		}
	}
}
