package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/soliton-train/soliton/internal/chaos"
	"github.com/soliton-train/soliton/internal/observe/dashboard"
	"github.com/soliton-train/soliton/internal/observe/telemetry"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/act"
	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/notice"
)

// pageFlag is the flag --ui, whose address may be left out.
func pageFlag(flags *pflag.FlagSet, f *runFlags) {
	flags.StringVar(&f.notice, "notice", "", "`URL` of the metadata server that says when this machine is taken away, or aws, gcp or azure")
	flags.StringVar(&f.ui, "ui", "", "serve the dashboard, a page that shows the run and acts on it, at `ADDR`")
	flags.Lookup("ui").NoOptDefVal = dashboard.DefaultAddr
}

// openPage begins to serve the dashboard and says where it is; nil without --ui. The link with
// the run's token is for the eyes of whoever sits at a terminal.
func openPage(f runFlags, dir *rundir.Dir, stdout io.Writer) (*dashboard.Server, error) {
	if f.ui == "" {
		return nil, nil
	}
	page, err := dashboard.Listen(dashboard.Config{Addr: f.ui, TokenFile: dir.File(dashboard.TokenName)})
	if err != nil {
		return nil, err
	}
	if _, ok := cli.Terminal(stdout); ok && !f.plain {
		fmt.Fprintf(stdout, "dashboard %s\n", page.Link())
	} else {
		fmt.Fprintf(stdout, "dashboard %s (its token is in %s)\n", page.URL(), filepath.Join(dir.String(), dashboard.TokenName))
	}
	if page.Beyond() {
		fmt.Fprintln(stdout, "the dashboard can be reached from other machines, and what it sends is not encrypted")
	}
	return page, nil
}

// paged is a run as the page acts on it: through what the commands use.
type paged struct {
	agents interface{ Watch(on bool) }
	runDir string
}

func (p paged) Watch(on bool) { p.agents.Watch(on) }

func (p paged) Act(ctx context.Context, a dashboard.Action) (string, error) {
	if a.Do == "add" {
		ids, err := act.Add(ctx, p.runDir, 1)
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("worker %d is started", ids[0]), nil
	}
	if a.Do == "stop" {
		if err := act.Stop(ctx, p.runDir); err != nil {
			return "", err
		}
		return "the run ends at its next commit", nil
	}
	if a.Do == "slow" {
		if _, err := chaos.ParseFactor(strconv.FormatFloat(a.Factor, 'g', -1, 64)); err != nil {
			return "", err
		}
		if err := act.Slow(ctx, p.runDir, a.Worker, a.Factor); err != nil {
			return "", err
		}
		return fmt.Sprintf("slow: worker %d computes at %g of its speed", a.Worker, a.Factor), nil
	}
	in, ok := act.Find(a.Do)
	if !ok {
		return "", fmt.Errorf("this run cannot %s a worker", a.Do)
	}
	if err := in.Inject(ctx, p.runDir, []int{a.Worker}); err != nil {
		return "", err
	}
	return fmt.Sprintf("%s: worker %d", a.Do, a.Worker), nil
}

// measure has the page serve what the agents that lead measure: one leads after the other, and the page's address stays.
func (s *supervisor) measure(ctx context.Context, page *dashboard.Server) (err error) {
	if page == nil || telemetry.Disabled() {
		return nil
	}
	if s.board, err = telemetry.NewBoard(ctx); err == nil {
		page.Metrics(s.board.Handler())
	}
	return err
}

// noticeFault is what is wrong with --notice.
func (f *runFlags) noticeFault(given func(flag string) bool) error {
	if f.notice == "" && !given("notice") {
		return nil
	}
	_, err := notice.Parse(f.notice)
	return err
}

// watchNotices makes a SIGTERM of the notice that this machine is about to be taken away, until the function that it returns is called.
func (f *runFlags) watchNotices(ctx context.Context, v view.View) (end func()) {
	s, err := notice.Parse(f.notice)
	if f.notice == "" || err != nil {
		return func() {}
	}
	say := func(text string) { v.Show(view.Note(text)) }
	return s.Begin(ctx, say, func(text string) {
		say(text + ": this machine leaves the run, or ends it with a checkpoint")
		_ = syscall.Kill(os.Getpid(), syscall.SIGTERM)
	})
}
