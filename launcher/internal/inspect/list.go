package inspect

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

// Listed is a run as launcher ls prints it.
type Listed struct {
	RunDir  string    `json:"run_dir"`
	State   string    `json:"state"` // as of launcher status, or unreadable
	Program string    `json:"program"`
	Step    int       `json:"step"`
	Steps   int       `json:"steps"`
	Loss    *float64  `json:"loss"`
	Workers int       `json:"workers"` // of the newest plan
	Started time.Time `json:"started"`
	AgeS    float64   `json:"age_seconds"`     // since the start
	Error   string    `json:"error,omitempty"` // why it cannot be read
}

// NewList returns the command.
func NewList() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ls [DIR]",
		Short: "List runs",
		Long: `ls lists the runs whose directories are in DIR, by default in runs, the newest first: the
state of each as launcher status says it, its newest step, the workers of its newest plan, and the
time since its start.`,
		Example: `  launcher ls
  launcher ls /data/runs --json | jq '.[] | select(.state == "running")'`,
		Args: cli.AtMost(1, "[DIR]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir := append(args, rundir.Parent)[0]
			runs, err := List(dir, time.Now())
			if errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("%s does not exist: give a directory with runs", dir)
			}
			if err != nil {
				return cli.Fail(err)
			}
			return cli.Print(cmd.OutOrStdout(), runs, asJSON, func(out io.Writer) error { return printList(out, dir, runs) })
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the list as JSON")
	return cmd
}

// List returns the runs in a directory, the newest first.
func List(dir string, now time.Time) ([]Listed, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	runs := []Listed{}
	for _, e := range entries {
		if !e.IsDir() { // runs/latest is a link to another one
			continue
		}
		path := filepath.Join(dir, e.Name())
		r, err := rundir.Read(path)
		if errors.Is(err, rundir.ErrNoRun) {
			continue
		}
		l := Listed{RunDir: path, Program: r.Job.Program, Steps: r.Job.Steps, Started: r.Job.Started}
		if !l.Started.IsZero() {
			l.AgeS = max(0, now.Sub(l.Started).Round(time.Second).Seconds())
		}
		var s Status
		if err == nil {
			s, err = StatusOf(r)
		}
		if err != nil {
			l.State, l.Error = "unreadable", err.Error()
		} else {
			l.State, l.Step, l.Loss = s.State, s.Step, s.Loss
			for _, w := range s.Workers {
				if w.Gone == "" {
					l.Workers++
				}
			}
		}
		runs = append(runs, l)
	}
	slices.SortStableFunc(runs, func(a, b Listed) int {
		return cmp.Or(b.Started.Compare(a.Started), strings.Compare(a.RunDir, b.RunDir))
	})
	return runs, nil
}

// onLine returns a name as a part of one line of a table. Other characters that do something are made visible where it is printed.
func onLine(name string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsSpace(r) && r != ' ' {
			return unicode.ReplacementChar
		}
		return r
	}, strings.ToValidUTF8(name, string(unicode.ReplacementChar)))
}

func printList(out io.Writer, dir string, runs []Listed) error {
	if len(runs) == 0 {
		_, err := fmt.Fprintf(out, "no runs in %s\n", dir)
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "RUN\tPROGRAM\tSTATE\tSTEP\tLOSS\tWORKERS\tAGE")
	for _, l := range runs {
		if l.Error != "" {
			fmt.Fprintf(w, "%s\t%s\t%s: %s\n", onLine(l.RunDir), cmp.Or(onLine(l.Program), "-"), l.State, l.Error)
			continue
		}
		loss := "-"
		if l.Loss != nil {
			loss = fmt.Sprintf("%.4f", *l.Loss)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d/%d\t%s\t%d\t%s\n", onLine(l.RunDir), onLine(l.Program), l.State, l.Step, l.Steps, loss, l.Workers, age(l.AgeS))
	}
	return w.Flush()
}

// age is a time in its greatest unit.
func age(seconds float64) string {
	switch {
	case seconds < 60:
		return fmt.Sprintf("%.0fs", seconds)
	case seconds < 3600:
		return fmt.Sprintf("%dm", int(seconds/60))
	case seconds < 48*3600:
		return fmt.Sprintf("%dh", int(seconds/3600))
	}
	return fmt.Sprintf("%dd", int(seconds/86400))
}
