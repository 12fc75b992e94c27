package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/host"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/attach"
	"github.com/soliton-train/soliton/launcher/internal/away"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

// staged is a view of a run for those that attach; the zero value has none.
type staged struct{ *attach.Stage }

// openStage begins to show a run to those that attach.
func openStage(dir *rundir.Dir) (staged, error) {
	s, err := attach.Open(dir.Path(), func(v any) ([]byte, error) {
		x, ok := v.(report)
		if !ok {
			var err error
			if x, err = reportOf(0, v); err != nil {
				return nil, err
			}
		}
		return json.Marshal(x)
	})
	return staged{s}, err
}

const (
	keptSteps  = 512
	keptOutput = 256
)

// Show implements [view.View].
func (s staged) Show(e view.Event) {
	name, most := fmt.Sprintf("%T", e), 1
	switch v := e.(type) {
	case view.Begin:
		if v.Since.IsZero() {
			v.Since = time.Now()
		}
		e = v
	case view.Worker:
		name = fmt.Sprintf("worker %d", v.ID)
	case view.Step:
		most = keptSteps
	case view.Recovered, view.Change, view.Timeline:
		name = "" // they are news
	}
	s.Tell(name, most, e)
}

// Close implements [view.View]: what follows is printed.
func (s staged) Close() { s.Tell(reportClose, 1, report{Kind: reportClose}) }

// end shows how the launcher ends, and closes the stage.
func (s staged) end(err error) {
	s.Close()
	x := report{Kind: reportEnd}
	var exit cli.Exit
	switch {
	case errors.As(err, &exit):
		x.Status = int(exit)
	case err != nil:
		x.Status, x.Errs = session.ExitFailed, "launcher: "+err.Error()+"\n"
	}
	s.Tell(reportEnd, 1, x)
	s.Stage.Close()
}

// printed returns a writer whose texts are printed by those that attach, too: to their standard output, or to standard error.
func (s staged) printed(w io.Writer, kind string) io.Writer {
	if s.Stage == nil {
		return w
	}
	return io.MultiWriter(printed{s, kind}, w)
}

type printed struct {
	staged
	kind string
}

func (p printed) Write(b []byte) (int, error) {
	p.Tell("printed", keptOutput, report{Kind: p.kind, Text: string(b)})
	return len(b), nil
}

func newAttach() *cobra.Command {
	var plain bool
	cmd := &cobra.Command{
		Use:   "attach [RUN_DIR]",
		Short: "Show a run that is under way",
		Long: `attach shows a run that is under way as the launcher of this machine shows it, and ends as that
one does: with the same text and exit status. RUN_DIR is the run directory on this machine, runs/latest
by default. A run over several machines can be seen on all of them.

Ctrl-C ends attach, and leaves the run alone; launcher stop ends the run.`,
		Example: "  launcher attach\n  launcher attach runs/latest --plain",
		Args:    cli.AtMost(1, "RUN_DIR"),
		RunE: func(cmd *cobra.Command, args []string) error {
			runDir := cli.Latest
			if len(args) > 0 {
				runDir = args[0]
			}
			return attachTo(cmd.Context(), runDir, plain, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.Flags().BoolVar(&plain, "plain", false, "no live terminal view")
	return cmd
}

func attachTo(ctx context.Context, runDir string, plain bool, stdout, stderr io.Writer) error {
	signals := make(chan os.Signal, 1)
	platform.NotifyEnd(signals)
	conn, err := attach.Dial(ctx, runDir)
	if err != nil {
		return cli.Fail(err)
	}
	defer conn.Close()
	reports := make(chan report)
	go func() { // it ends with the process
		defer close(reports)
		lines := bufio.NewScanner(conn)
		lines.Buffer(nil, maxReport)
		for lines.Scan() {
			var x report
			if json.Unmarshal(lines.Bytes(), &x) == nil {
				reports <- x
			}
		}
	}()
	v := view.Open(view.Options{Plain: plain})
	defer v.Close()
	closed, early := false, []report(nil)
	output := programOutput(stdout)
	printReport := func(x report) {
		if x.Kind == reportErrors {
			_, _ = io.WriteString(stderr, x.Text)
		} else {
			_, _ = io.WriteString(output, x.Text)
		}
	}
	for {
		select {
		case s := <-signals:
			v.Close()
			if host.ReasonOf(s) == session.Interrupt {
				return cli.Exit(session.ExitInterrupted)
			}
			return cli.Exit(session.ExitTerminated)
		case x, ok := <-reports:
			switch {
			case !ok:
				v.Close()
				return cli.Fail(fmt.Errorf("%s %s", away.Gone, runDir))
			case x.Kind == reportClose && !closed:
				closed = true
				v.Close()
				for _, x := range early {
					printReport(x)
				}
			case x.Kind == reportOutput, x.Kind == reportErrors:
				if closed {
					printReport(x)
				} else {
					early = append(early, x)
				}
			case x.Kind == reportEnd:
				_, _ = io.WriteString(stderr, x.Errs)
				if x.Status != session.ExitDone {
					return cli.Exit(x.Status)
				}
				return nil
			default:
				if e, ok := x.value().(view.Event); ok {
					v.Show(e)
				}
			}
		}
	}
}
