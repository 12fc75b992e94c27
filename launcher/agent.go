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
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
	"github.com/soliton-train/soliton/launcher/internal/cli"
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
	lines := bufio.NewReader(stdin)
	first, err := lines.ReadBytes('\n')
	var a assignment
	if err == nil {
		err = json.Unmarshal(first, &a)
	}
	if err != nil || a.Self < 0 || a.Self >= len(a.Hosts) {
		return errors.New("an agent is started by launcher run, not by people")
	}
	key, err := auth.DeriveKey(a.Secret, "worker links")
	if err != nil {
		return err
	}
	faults, err := parseChaos(a.Chaos, a.Workers, len(a.Hosts))
	if err != nil {
		return err
	}
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
		out.send(report{Kind: reportFailed, Text: fmt.Sprintf("%s: %v", a.Hosts[a.Self].Name, err)})
		return cli.Fail(err)
	}
	defer links.Remove()
	settings := a.Settings
	settings.Chaos = faultsFor(faults, a.Workers, len(a.Hosts))
	dir, link := rundir.Attach(a.RunDir, a.Shown), listeners[1]
	h, err := host.New(host.Config{
		Settings: settings,
		Start: spawn.Starter(spawn.Command{
			Path: a.File, Args: a.Args, Links: links.Path(), Addr: link.Addr().(*net.TCPAddr).IP.String(), Key: key,
		}, dir.LogFile),
		RunDir: dir, Hosts: a.Hosts, Self: a.Self, Secret: a.Secret, Link: link,
		Log: func() (agree.Log, error) { return openLog(&a, listeners[0]) },
		Lead: func(term uint64) (host.Console, error) {
			told, err := hostTelemetry(ctx, &a, out, term)
			return host.Console{View: shown{out, term}, Output: outputOf{out, term}, Telemetry: told}, err
		},
		Done: func(term uint64, o session.Outcome) {
			var text, errs strings.Builder
			o.Report(&text, &errs, "launcher")
			out.send(report{Term: term, Kind: reportEnd, Status: o.ExitStatus(), Text: text.String(), Errs: errs.String()})
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
			if r.Watch != nil {
				h.Watch(*r.Watch)
			}
		}
	}()
	err = h.Serve(ctx)
	var wrong *host.StartError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &wrong):
		out.send(report{Kind: reportFailed, Text: fmt.Sprintf("PROGRAM %s %v", settings.Program, err)})
	default:
		out.send(report{Kind: reportFailed, Text: fmt.Sprintf("%s: %v", a.Hosts[a.Self].Name, err)})
	}
	return cli.Fail(err)
}

// openLog opens a host's log of what the hosts agree on.
func openLog(a *assignment, l net.Listener) (agree.Log, error) {
	addrs := make(map[string]string)
	var servers []agree.Server
	for _, h := range a.Hosts {
		addrs[h.Name] = h.Agree
		servers = append(servers, agree.Server{ID: h.Name, Addr: h.Agree, Voter: h.Voter})
	}
	secure, err := transport.TLSFromSecret(a.Secret)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return raftlog.Open(raftlog.Config{
		Dir: a.Store, ID: a.Hosts[a.Self].Name, Listener: l, TLS: secure, Bootstrap: servers, Timeout: timing.Of(a.Settings.Detect).Log,
		Logger:  slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo})),
		Resolve: func(name string) string { return addrs[name] },
	})
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

// shown is the view of a run whose supervisor shows it.
type shown struct {
	out  *reporter
	term uint64
}

func (s shown) Close() { s.out.send(report{Term: s.term, Kind: reportClose}) }

func (s shown) Show(e view.Event) {
	if x, err := reportOf(s.term, e); err == nil { // it is only shown
		s.out.show(x)
	}
}

type outputOf struct {
	out  *reporter
	term uint64
}

func (o outputOf) Write(b []byte) (int, error) {
	if len(b) > 0 {
		o.out.send(report{Term: o.term, Kind: reportOutput, Text: string(b)})
	}
	return len(b), nil
}
