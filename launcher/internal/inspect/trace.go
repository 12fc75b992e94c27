package inspect

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/charmbracelet/x/ansi"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

// NewTrace returns the command.
func NewTrace() *cobra.Command {
	var asJSON bool
	var perfetto string
	cmd := &cobra.Command{
		Use:   "trace [RUN_DIR]",
		Short: "Show where time went in recoveries and steps",
		Long: `trace reads traces.jsonl of a run directory, by default runs/latest, and prints each
recovery with a bar for every phase, the longest first; what the steps of each worker are made of;
and the slowest worker and link.

With --perfetto, it also writes a file for https://ui.perfetto.dev: a track for each worker. See docs/trace.md.`,
		Example: `  launcher trace
  launcher trace runs/small --perfetto small.json
  launcher trace --json | jq .recoveries[0].phases`,
		Args: cli.AtMost(1, "[RUN_DIR]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := cli.ReadRun(append(args, cli.Latest)[0])
			if err != nil {
				return err
			}
			spans, err := ReadTraces(filepath.Join(r.Path, "traces.jsonl"))
			if err != nil {
				return cli.Fail(err)
			}
			if perfetto != "" {
				if rundir.IsRecord(r.Path, perfetto) {
					return fmt.Errorf("--perfetto %s: the run's own file; give another name", perfetto)
				}
				if err := writePerfetto(perfetto, spans); err != nil {
					return cli.Fail(err)
				}
			}
			report := trace.Summarize(spans)
			return cli.Print(cmd.OutOrStdout(), report, asJSON, func(out io.Writer) error { return PrintTrace(out, report, widthOf(cmd.OutOrStdout())) })
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as JSON")
	cmd.Flags().StringVar(&perfetto, "perfetto", "", "write a trace for Perfetto to `FILE`")
	return cmd
}

// ReadTraces reads the spans of traces.jsonl.
func ReadTraces(path string) (spans []trace.Span, err error) {
	f, err := rundir.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := trace.Read(f, func(s trace.Span) { spans = append(spans, s) }); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return spans, nil
}

func writePerfetto(path string, spans []trace.Span) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := trace.Perfetto(f, spans); err != nil {
		_ = f.Close()
		return err
	}
	return f.Close()
}

// widthOf is the width of a terminal, 80 of anything else.
func widthOf(out io.Writer) int {
	if f, ok := cli.Terminal(out); ok {
		if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 0 {
			return width
		}
	}
	return 80
}

// PrintTrace prints a report in lines of at most width cells.
func PrintTrace(out io.Writer, r trace.Report, width int) error {
	var b strings.Builder
	line := func(format string, args ...any) {
		b.WriteString(ansi.Truncate(fmt.Sprintf(format, args...), max(width, 1), "…"))
		b.WriteByte('\n')
	}
	if len(r.Recoveries) == 0 {
		line("no recoveries")
	}
	for _, x := range r.Recoveries {
		line("recovery in step %d: %.1f ms", x.Step, x.TotalMS)
		line("  %s", x.Cause)
		if x.After != "" {
			line("  it struck during another recovery")
		}
		if x.Superseded {
			line("  another fault struck, whose recovery has the rest")
		}
		if x.Failed != "" {
			line("  the run ended: %s", x.Failed)
		}
		cells := max(width-2-6-1-11-1, 4)
		for _, p := range x.Phases {
			from, n := 0, 1
			if x.TotalMS > 0 {
				from = min(int(p.StartMS/x.TotalMS*float64(cells)), cells-1)
				n = max(1, min(int(p.MS/x.TotalMS*float64(cells)+0.5), cells-from))
			}
			line("  %-6s %8.2f ms %s%s", p.Name, p.MS, strings.Repeat(" ", max(from, 0)), strings.Repeat("█", n))
		}
	}
	if n := len(r.Reliefs); n > 0 {
		line("late workers: others took over work by %s, %.1f ms (median), %.1f at most", plan.Count(n, "plan"), r.Reliefs[n/2].TotalMS, r.Reliefs[0].TotalMS)
	}
	b.WriteByte('\n')
	if len(r.Workers) == 0 {
		line("no steps were traced in full")
	} else {
		line("%d steps were traced in full; the mean, in ms:", r.Steps)
		line("worker     step  compute  wait  transfer  commit")
		for _, w := range r.Workers {
			line("%6d %8.1f %8.1f %5.1f %9.1f %7.1f", w.ID, w.StepMS, w.ComputeMS, w.WaitMS, w.TransferMS, w.CommitMS)
		}
		if r.SlowestWorker != nil {
			line("slowest worker: %d", *r.SlowestWorker)
		}
		if l := r.SlowestLink; l != nil {
			line("slowest link: %d to %d, %.2f ms for %.1f KiB", l.From, l.To, l.MS, float64(l.Bytes)/float64(l.Count)/1024)
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}
