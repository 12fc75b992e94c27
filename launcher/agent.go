package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/host"
	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/host/agree/raftlog"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/socket"
	"github.com/soliton-train/soliton/internal/host/spawn"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
	"github.com/soliton-train/soliton/launcher/internal/act"
	"github.com/soliton-train/soliton/launcher/internal/bucket"
	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/clocks"
)

// newAgent is the command of an agent's process.
func newAgent() *cobra.Command {
	return &cobra.Command{
		Use:    agentName + " HOST",
		Short:  "Be the agent of a host; started by run",
		Hidden: true,
		Args:   func(*cobra.Command, []string) error { return nil },
		RunE: func(cmd *cobra.Command, _ []string) error {
			return serveHost(cmd.Context(), os.Stdin, cli.Raw(cmd.OutOrStdout()))
		},
	}
}

func serveHost(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	terms := make(chan os.Signal, 1)
	signal.Notify(terms, syscall.SIGTERM) // from the start: the machine may leave at once
	lines := bufio.NewReader(stdin)
	first, err := lines.ReadBytes('\n')
	var a assignment
	if err == nil {
		err = json.Unmarshal(first, &a)
	}
	if err != nil || len(a.Hosts) == 0 || a.Self < 0 || a.Self >= len(a.Hosts) {
		return errors.New("an agent is started by launcher run, not by people")
	}
	key, err := auth.DeriveKey(a.Secret, "worker links")
	if err != nil {
		return err
	}
	faults, err := parseChaos(a.Chaos, a.Workers, a.emulated())
	if err != nil {
		return err
	}
	defer host.ForgetSockets(os.Getppid()) // of a supervisor that was killed
	signal.Ignore(os.Interrupt, syscall.SIGHUP)
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	out := newReporter(stdout)
	defer out.close()
	var listeners [2]net.Listener
	for i := range listeners {
		f := os.NewFile(uintptr(3+i), "listener")
		l, err := net.FileListener(f)
		_ = f.Close() // workers must not inherit it
		if err != nil {
			return cli.Fail(err)
		}
		listeners[i] = l
	}
	links, err := socket.NewFolder()
	if err != nil {
		out.send(report{Kind: reportFailed, Text: fmt.Sprintf("%s: %v", a.own().Name, err)})
		return cli.Fail(err)
	}
	defer links.Remove()
	settings := a.Settings
	settings.Chaos = faultsFor(faults, a.Workers, a.emulated())
	dir, link := rundir.Attach(a.RunDir, a.Shown, settings.Resume != nil), listeners[1]
	reached, err := netip.ParseAddrPort(a.own().Link)
	if err != nil {
		return cli.Fail(err)
	}
	var at member // once its log is open
	rejected := new(auth.Tally)
	target, err := bucket.OfRun(settings.Checkpoints)
	if err != nil {
		return cli.Fail(err)
	}
	h, err := host.New(host.Config{
		Settings: settings, Target: target,
		Start: spawn.Starter(spawn.Command{
			Path: a.File, Args: a.Args, Links: links.Path(), Addr: reached.Addr().String(), Ports: a.Ports, Key: key,
			Withhold: bucket.Secrets(settings.Checkpoints),
		}, dir.LogFile),
		RunDir: dir, Hosts: a.Hosts, Self: a.Self, Enters: a.Enters, TieBreak: a.TieBreak, Secret: a.Secret, Link: link, Ports: a.Ports, Rejected: rejected,
		Log: func(self host.Addr) (log agree.Log, err error) {
			log, err = openLog(&a, self, listeners[0], rejected)
			at = member{self.Name, log}
			return log, err
		},
		Apart: a.Apart, Clocks: clocks.Open(a.Clocks, a.SysFS),
		Inject: func(kind string, p rundir.Process, factor float64) error {
			return act.Local(dir.Path(), kind, p, factor)
		},
		Lead: func(term uint64, tell func(string, []byte)) (host.Console, error) {
			told, err := hostTelemetry(ctx, &a, out, term)
			return host.Console{View: shown{out, term, tell}, Output: outputOf{out, term, tell}, Telemetry: told}, err
		},
		Shown: func(data []byte) {
			var x report
			if json.Unmarshal(data, &x) == nil {
				out.pass(x)
			}
		},
		Done: func(term uint64, o session.Outcome) { out.send(endOf(&a, at, term, o)) },
		Last: func(term uint64, o session.Outcome) []byte {
			last, _ := json.Marshal(endOf(&a, at, term, o)) // texts and numbers
			return last
		},
		Waits: func(text string) {
			fmt.Fprintln(os.Stderr, text) // its log
			out.show(report{Kind: reportWaits, Text: text})
		},
	})
	if err != nil {
		return cli.Fail(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer host.Forward(terms, func(os.Signal) { h.Leave() })()
	go func() { // it ends with the process, as reading a pipe may not end before
		defer cancel()
		requests := json.NewDecoder(lines)
		for {
			var r request
			if requests.Decode(&r) != nil {
				return
			}
			if r.Stop != "" {
				h.Stop(r.Stop)
			}
			if r.Leave {
				h.Leave()
			}
			if r.Watch != nil {
				h.Watch(*r.Watch)
			}
			for c, n := range r.Rejected[:min(len(r.Rejected), int(auth.Causes))] {
				rejected.Add(auth.Cause(c), n)
			}
		}
	}()
	err = h.Serve(ctx)
	var wrong *host.StartError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, host.ErrLeft):
		out.send(report{Kind: reportLeft})
		return cli.Exit(session.ExitTerminated)
	case errors.As(err, &wrong):
		out.send(report{Kind: reportFailed, Text: fmt.Sprintf("PROGRAM %s %v", settings.Program, err)})
	default:
		out.send(report{Kind: reportFailed, Text: fmt.Sprintf("%s: %v", a.own().Name, err)})
	}
	return cli.Fail(err)
}

// member is this host in its run.
type member struct {
	name string
	log  agree.Log
}

// endOf reports how the run has ended.
func endOf(a *assignment, self member, term uint64, o session.Outcome) report {
	var text, errs strings.Builder
	if a.Apart && o.Resume != "" {
		o.Resume = fmt.Sprintf("--listen --wait-hosts %d %s (on %s)", max(1, len(self.log.State().Servers)), o.Resume, self.name)
	}
	o.Report(&text, &errs, "launcher")
	if a.Apart && o.ModelHost != "" {
		fmt.Fprintf(&text, "the model is in the run directory of %s\n", o.ModelHost)
	}
	return report{Term: term, Kind: reportEnd, Status: o.ExitStatus(), Text: text.String(), Errs: errs.String()}
}

// openLog begins a host's log of what the hosts agree on.
func openLog(a *assignment, self host.Addr, l net.Listener, rejected *auth.Tally) (agree.Log, error) {
	secure, err := transport.TLSFromSecret(a.Secret)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	c := raftlog.Config{
		Dir: a.Store, Host: self.Name, Listener: l, Advertise: self.Agree, TLS: secure, Rejected: rejected, Timeout: timing.Of(a.Settings.Detect).Log, Join: a.Enters != nil,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo})),
	}
	if c.Join {
		return raftlog.Open(c)
	}
	var servers []agree.Server
	for _, h := range a.Hosts {
		servers = append(servers, agree.Server{ID: h.Name, Addr: h.Agree, Voter: h.Voter})
	}
	return raftlog.Create(c, servers)
}

// reporter writes reports, in a goroutine of its own: a supervisor that does not read must not
// keep an agent from its work.
type reporter struct {
	ch   chan report
	done chan struct{}
}

func newReporter(w io.Writer) *reporter {
	r := &reporter{ch: make(chan report, 1<<12), done: make(chan struct{})}
	go func() {
		defer close(r.done)
		enc := json.NewEncoder(w)
		for x := range r.ch {
			_ = enc.Encode(x) // without a supervisor, the agent's standard input has ended as well
		}
	}()
	return r
}

// send queues a report that has to come.
func (r *reporter) send(x report) { r.ch <- x }

// show queues one that may be left out.
func (r *reporter) show(x report) {
	select {
	case r.ch <- x:
	default:
	}
}

func (r *reporter) close() {
	close(r.ch)
	<-r.done
}

// pass queues a report of the leader of another host.
func (r *reporter) pass(x report) {
	if reported[x.Kind] != nil {
		r.show(x)
	} else {
		r.send(x)
	}
}

// shown is the view of a run whose supervisor shows it, on all hosts that have one.
type shown struct {
	out  *reporter
	term uint64
	tell func(keep string, data []byte)
}

func (s shown) Close() {
	x := report{Term: s.term, Kind: reportClose}
	s.out.send(x)
	tellAll(s.tell, "", x)
}

func (s shown) Show(e view.Event) {
	x, err := reportOf(s.term, e)
	if err != nil {
		return // it is only shown
	}
	s.out.show(x)
	keep := ""
	switch e.(type) {
	case view.Begin, view.Plan:
		keep = x.Kind
	}
	tellAll(s.tell, keep, x)
}

func tellAll(tell func(keep string, data []byte), keep string, x report) {
	if data, err := json.Marshal(x); err == nil {
		tell(keep, data)
	}
}

type outputOf struct {
	out  *reporter
	term uint64
	tell func(keep string, data []byte)
}

func (o outputOf) Write(b []byte) (int, error) {
	if len(b) > 0 {
		x := report{Term: o.term, Kind: reportOutput, Text: string(b)}
		o.out.send(x)
		tellAll(o.tell, "", x)
	}
	return len(b), nil
}

// relayed is the telemetry of an agent that leads, with the measures told to its supervisor as well,
// which serves them for the whole run.
type relayed struct {
	host.Telemetry
	out  *reporter
	term uint64
}

func (r relayed) Measure(m trace.Measure) {
	r.Telemetry.Measure(m)
	if x, err := reportOf(r.term, m); err == nil { // loss and times are finite
		r.out.show(x)
	}
}

// hostTelemetry begins the telemetry of an agent that leads in a term.
func hostTelemetry(ctx context.Context, a *assignment, out *reporter, term uint64) (host.Telemetry, error) {
	t, err := openTelemetry(ctx)
	if err != nil || t == nil || !a.Measures {
		return t, err
	}
	return relayed{t, out, term}, nil
}
