package inspect

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

// NewLogs returns the command.
func NewLogs() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "logs [RUN_DIR] [W]",
		Short: "Print the output of workers",
		Long: `logs prints what the workers of a run, by default of runs/latest, wrote to their
standard output and error. With W, it is worker W's alone; otherwise each line
begins with its worker's number. The logs of all machines of a run are printed on any of
them; once the run has ended, the ends of those of other machines, 1 MiB in all, as far as
these machines took part until then.`,
		Example: `  launcher logs
  launcher logs 2 -f
  launcher logs runs/small 0`,
		Args: cli.AtMost(2, "[RUN_DIR] [W]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, worker, err := logArgs(args)
			if err != nil {
				return err
			}
			if _, err := cli.ReadRun(dir); err != nil {
				return err
			}
			r, err := rundir.Read(dir)
			if err != nil {
				return cli.Fail(err)
			}
			found, err := printLogs(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), dir, worker, follow)
			if err == nil && worker >= 0 && !found && !(follow && r.Running) {
				return fmt.Errorf("worker %d has no log in %s", worker, dir)
			}
			return cli.Fail(err)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "follow the logs until the run has ended")
	return cmd
}

// logArgs tells the arguments apart; worker is -1 for all.
func logArgs(args []string) (dir string, worker int, err error) {
	dir, worker = cli.Latest, -1
	if len(args) == 1 {
		if _, err := os.Stat(args[0]); err != nil {
			if n, err := strconv.Atoi(args[0]); err == nil && n >= 0 {
				return dir, n, nil
			}
		}
	}
	if len(args) > 0 {
		dir = args[0]
	}
	if len(args) > 1 {
		if worker, err = strconv.Atoi(args[1]); err != nil || worker < 0 {
			return "", 0, fmt.Errorf("W is %q: give the number of a worker", args[1])
		}
	}
	return dir, worker, nil
}

func logsOf(dir string, worker int) ([]rundir.Log, error) {
	logs, err := rundir.Logs(dir)
	return slices.DeleteFunc(logs, func(l rundir.Log) bool { return worker >= 0 && l.Worker != worker }), err
}

// lookAgain is the time between two looks at logs that are followed.
const lookAgain = 100 * time.Millisecond

// printLogs prints logs to their end, and where they are followed, to the run's. It reports whether there are any.
func printLogs(ctx context.Context, out, errs io.Writer, dir string, worker int, follow bool) (found bool, err error) {
	far := newFarLogs(dir, worker)
	show := func(of int, line []byte) error {
		prefix := ""
		if worker < 0 {
			prefix = fmt.Sprintf("%d| ", of)
		}
		_, err := fmt.Fprintf(out, "%s%s", prefix, line)
		return err
	}
	tails := make(map[string]*cli.Tail)
	defer func() {
		for _, t := range tails {
			t.Close()
		}
	}()
	again := time.NewTicker(lookAgain)
	defer again.Stop()
	for {
		// A run that has ended writes nothing more, so what is read now is the rest.
		r, err := rundir.Read(dir)
		if err != nil {
			return far.found, err
		}
		last := !follow || !r.Running
		logs, err := logsOf(dir, worker)
		if err != nil {
			return far.found, err
		}
		far.found = far.found || len(logs) > 0
		for _, l := range logs {
			t := tails[l.Path]
			if t == nil {
				t = &cli.Tail{Path: l.Path}
				tails[l.Path] = t
			}
			if err := t.Lines(last, func(line []byte) error { return show(l.Worker, line) }); err != nil {
				return far.found, err
			}
		}
		var missing []string
		if r.Running {
			missing, err = far.read(ctx, last, show)
		} else {
			missing, err = far.rest(show)
		}
		if err != nil {
			return far.found, err
		}
		for _, text := range missing {
			fmt.Fprintf(errs, "launcher: %s\n", text)
		}
		if last {
			return far.found, nil
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return far.found, nil
		}
	}
}
